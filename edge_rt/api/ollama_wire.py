"""Ollama's requests: what they may hold, and what of it a GenerateRequest takes.

Every struct forbids unknown fields. What cannot be honoured is declared Raw and refused by name unless its value asks
for nothing; settings of Ollama's own engine, which change no answer, are read and left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import Raw

from edge_rt.api.fields import ABSENT, Neutral, refuse_unsupported
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import CHAT_SAMPLING, Message, ResponseFormat, Sampling, Tool, ToolCall

_MAX_DURATION: Final = 100  # characters
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION: Final = re.compile(r"-?(\d{1,12}(\.\d{0,9})?(ns|us|µs|ms|s|m|h))+|-?\d{1,12}(\.\d{0,9})?")
_PART: Final = re.compile(r"(\d+\.?\d*)(ns|us|µs|ms|s|m|h|)")

# The values of Raw fields that ask for nothing; null always does.
_NEUTRAL: Final[Neutral] = {
    "context": ([],),
    "embedding_only": (False,),
    "images": ([],),
    "logits_all": (False,),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "shift": (False,),
    "suffix": ("",),
    "template": ("",),
    "tfs_z": (1, 1.0),
    "think": (False,),
    "thinking": ("",),
    "truncate": (False,),
    "typical_p": (1, 1.0),
    "vocab_only": (False,),
}


class Wire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body or a part of one."""


class Options(Wire, kw_only=True):
    num_predict: int | None = None  # -1 and -2: until the model stops or the context is full
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # negative: another one each time
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # -1: the whole context
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    draft_num_predict: int | None = None
    # How Ollama's engine computes; edge_rt has settings for that, and clients send them with each request.
    num_keep: int | None = None  # of a context that is shifted, which this one never is
    num_batch: int | None = None
    num_thread: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    mirostat_tau: float | None = None  # of a mirostat that is refused
    mirostat_eta: float | None = None
    mirostat: Raw = ABSENT
    tfs_z: Raw = ABSENT
    typical_p: Raw = ABSENT
    penalize_newline: Raw = ABSENT
    embedding_only: Raw = ABSENT
    logits_all: Raw = ABSENT
    vocab_only: Raw = ABSENT


class CalledFunction(Wire, kw_only=True):
    name: str
    arguments: dict[str, Raw] = {}
    description: str | None = None
    index: int | None = None


class WireToolCall(Wire, kw_only=True):
    function: CalledFunction
    id: str = ""
    type: str = "function"


class WireMessage(Wire, kw_only=True):
    role: str
    content: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    images: Raw = ABSENT
    thinking: Raw = ABSENT


class Function(Wire, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    strict: bool | None = None  # calls always keep to their schema


class WireTool(Wire, kw_only=True):
    function: Function
    type: str = "function"


class Named(Wire, kw_only=True):
    """A request that names a model; name is the older field for it."""

    model: str = ""
    name: str = ""

    def wanted(self) -> str:
        """Give the model. Raises InvalidRequestError where none is named, or two."""
        if self.model and self.name and self.model != self.name:
            raise InvalidRequestError(param="name", problem="differs from model; give one")
        if not (wanted := self.model or self.name):
            raise InvalidRequestError(param="model", problem="is required")
        return wanted


class Asked(Named, kw_only=True):
    """What generate, chat and embed share."""

    options: Options | None = None
    keep_alive: float | str | None = None

    def given_options(self) -> Options:
        """Give the options. Raises UnsupportedFeatureError naming one that cannot be honoured."""
        options = self.options or Options()
        refuse_unsupported(options, _NEUTRAL, "options.")
        refuse_unsupported(self, _NEUTRAL)
        return options


class Generation(Asked, kw_only=True):
    """What generate and chat share."""

    stream: bool | None = None  # None streams
    format: str | dict[str, Raw] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    think: Raw = ABSENT
    truncate: Raw = ABSENT
    shift: Raw = ABSENT


class GenerateRequest(Generation, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Raw = ABSENT
    template: Raw = ABSENT
    context: Raw = ABSENT
    images: Raw = ABSENT
    width: Raw = ABSENT
    height: Raw = ABSENT
    steps: Raw = ABSENT


class ChatRequest(Generation, kw_only=True):
    messages: list[WireMessage] | None = None
    tools: list[WireTool] | None = None


class EmbedRequest(Asked, kw_only=True):
    input: str | list[str] | None = None
    truncate: bool | None = None  # only where it is asked for: without it what is too long is refused
    dimensions: int | None = None


class EmbeddingsRequest(Asked, kw_only=True):
    prompt: str | None = None


class ShowRequest(Named, kw_only=True):
    verbose: bool | None = None
    system: Raw = ABSENT
    template: Raw = ABSENT
    options: Raw = ABSENT


DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    cls: msgspec.json.Decoder(cls)
    for cls in (GenerateRequest, ChatRequest, EmbedRequest, EmbeddingsRequest, ShowRequest)
}


def keep_alive_s(value: float | str | None) -> float | None:
    """Give for how many seconds a model shall stay in memory; -1.0 for ever, None leaves it.

    A number is seconds, a text one of Go's durations ("5m", "1h30m"). Raises InvalidRequestError.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        if len(value) > _MAX_DURATION or not _DURATION.fullmatch(value):
            problem = f"must be a number of seconds or a duration such as 5m, got {value[:40]!r}"
            raise InvalidRequestError(param="keep_alive", problem=problem)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))
        return -1.0 if value.startswith("-") else seconds
    if not math.isfinite(value):
        raise InvalidRequestError(param="keep_alive", problem="must be finite; -1 keeps the model for ever")
    return float(value) if value >= 0 else -1.0


def sampling(options: Options, *, n_ctx: int) -> Sampling:
    """Translate the sampling options; those that are missing are edge_rt's own."""
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(options, name)) is not None
    }
    if options.top_k is not None:
        given["top_k"] = max(options.top_k, 0)
    if options.repeat_last_n is not None:
        given["repeat_last_n"] = n_ctx if options.repeat_last_n == -1 else options.repeat_last_n
    if options.seed is not None and options.seed >= 0:
        given["seed"] = options.seed
    return replace(CHAT_SAMPLING, **given)


def max_tokens(options: Options) -> int | None:
    if options.num_predict in (None, -1, -2):
        return None
    assert options.num_predict is not None
    if options.num_predict < 1:
        problem = f"must be at least 1, or -1 for no limit, got {options.num_predict}"
        raise InvalidRequestError(param="options.num_predict", problem=problem)
    return options.num_predict


def response_format(value: str | dict[str, Raw] | None) -> ResponseFormat | None:
    """Translate format: "json", or a JSON Schema. Raises InvalidRequestError."""
    if not value:
        if value == {}:
            raise InvalidRequestError(param="format", problem="is an empty schema; leave it out, or send 'json'")
        return None
    if isinstance(value, dict):
        return ResponseFormat(kind="json_schema", text=msgspec.json.encode(value).decode())
    if value != "json":
        problem = f"must be 'json' or a JSON Schema, got {value[:40]!r}"
        raise InvalidRequestError(param="format", problem=problem)
    return ResponseFormat(kind="json_object")


def tools(wire: Sequence[WireTool] | None) -> tuple[Tool, ...]:
    found = []
    for i, tool in enumerate(wire or ()):
        if tool.type != "function":
            raise UnsupportedFeatureError(feature=f"tools[{i}].type", remedy="send tools of type function")
        parameters = tool.function.parameters
        found.append(
            Tool(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters='{"type":"object"}' if not parameters else msgspec.json.encode(parameters).decode(),
            )
        )
    return tuple(found)


def messages(wire: Sequence[WireMessage]) -> tuple[Message, ...]:
    """Translate a conversation. Ollama's tool calls have no ids: results belong to the calls before them, in order."""
    found: list[Message] = []
    open_calls: list[ToolCall] = []
    for i, message in enumerate(wire):
        place = f"messages[{i}]"
        refuse_unsupported(message, _NEUTRAL, f"{place}.")
        calls: tuple[ToolCall, ...] = ()
        call_id, name = "", ""
        if message.role == "assistant":
            calls = tuple(_call(call, f"call_{i}_{n}") for n, call in enumerate(message.tool_calls or ()))
            open_calls = list(calls)
        elif message.tool_calls:
            raise InvalidRequestError(param=f"{place}.tool_calls", problem="are an assistant's only")
        if message.role == "tool":
            call = _answered(message, open_calls, place)
            call_id, name = call.id, call.name
        elif message.role not in ("system", "user", "assistant"):
            problem = f"must be one of system, user, assistant, tool, got {message.role[:40]!r}"
            raise InvalidRequestError(param=f"{place}.role", problem=problem)
        found.append(
            Message(
                role=message.role,  # type: ignore[arg-type]  # one of the four, by what was checked
                content=message.content or "",
                tool_calls=calls,
                tool_call_id=call_id,
                name=name,
            )
        )
    return tuple(found)


def _call(wire: WireToolCall, default_id: str) -> ToolCall:
    arguments = msgspec.json.encode(wire.function.arguments).decode()
    return ToolCall(id=wire.id or default_id, name=wire.function.name, arguments=arguments)


def _answered(message: WireMessage, open_calls: list[ToolCall], place: str) -> ToolCall:
    """Find the call that a tool's message answers: by its id, its tool's name, else the first that has no answer."""
    for n, call in enumerate(open_calls):
        if message.tool_call_id in (None, "", call.id) and message.tool_name in (None, "", call.name):
            return open_calls.pop(n)
    raise InvalidRequestError(param=place, problem="answers no tool call of the assistant's message before it")
