"""OpenAI's Responses API: what a request may hold, and what of it a GenerateRequest takes.

Nothing is kept between requests, so what refers to an earlier response is refused; a conversation is sent whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from edge_rt.api.fields import ABSENT, Neutral, given, raw_text, refuse_unsupported
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Message, ResponseFormat, Sampling, Tool, ToolCall

_LOGPROBS: Final = "message.output_text.logprobs"
_ANY_PARAMETERS: Final = Tool(name="").parameters

# The values of Raw fields that ask for nothing; null always does.
NEUTRAL: Final[Neutral] = {
    "allowed_callers": (["direct"],),
    "annotations": ([],),
    "async": (False,),
    "background": (False,),
    "context_management": ([],),
    "defer_loading": (False,),
    "include_obfuscation": (False,),
    "logprobs": ([],),
    "moderation": ({},),
    "phase": ("final_answer", "commentary"),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


class Wire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body or a part of one."""


class Part(Wire, kw_only=True):
    type: str
    text: str | None = None
    annotations: Raw = ABSENT
    logprobs: Raw = ABSENT  # of an answer that comes back; they change nothing
    detail: Raw = ABSENT
    image_url: Raw = ABSENT
    file_id: Raw = ABSENT
    file_data: Raw = ABSENT
    file_url: Raw = ABSENT
    filename: Raw = ABSENT
    refusal: Raw = ABSENT
    prompt_cache_breakpoint: Raw = ABSENT


class Item(Wire, kw_only=True):
    """A message, a function_call or a function_call_output; id and status of earlier answers change nothing."""

    type: str | None = None  # a message
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: Raw = ABSENT
    namespace: Raw = ABSENT
    caller: Raw = ABSENT
    asynchronous: Raw = msgspec.field(default=ABSENT, name="async")
    summary: Raw = ABSENT
    encrypted_content: Raw = ABSENT


class TextFormat(Wire, kw_only=True):
    """strict changes nothing: an answer is held to its schema with it and without."""

    type: str
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: Raw = ABSENT


class Text(Wire, kw_only=True):
    format: TextFormat | None = None
    verbosity: Raw = ABSENT


class FunctionTool(Wire, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None
    allowed_callers: Raw = ABSENT
    defer_loading: Raw = ABSENT
    output_schema: Raw = ABSENT
    asynchronous: Raw = msgspec.field(default=ABSENT, name="async")


class NamedTool(Wire, kw_only=True):
    type: str
    name: str = ""
    mode: Raw = ABSENT
    tools: Raw = ABSENT


class StreamOptions(Wire, kw_only=True):
    include_obfuscation: Raw = ABSENT


class Reasoning(Wire, kw_only=True):
    """How much a model shall think before it answers: ours do not, so that any summary of it says nothing."""

    effort: Raw = ABSENT
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Wire, kw_only=True):
    input: str | list[Item]
    model: str | None = None  # None: catalog.default_model
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: Text | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None  # labels of the caller's own, as the three below; they change no answer
    client_metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None  # of tools that run here, of which there are none
    access_programs: Raw = ABSENT
    background: Raw = ABSENT
    background_options: Raw = ABSENT
    context_management: Raw = ABSENT
    conversation: Raw = ABSENT
    image: Raw = ABSENT
    moderation: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    prompt: Raw = ABSENT
    prompt_cache_options: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    reasoning: Reasoning | None = None
    service_tier: Raw = ABSENT
    store: Raw = ABSENT
    truncation: Raw = ABSENT


DECODER: Final = msgspec.json.Decoder(ResponsesRequest)


def generate_request(wire: ResponsesRequest, *, request_id: str, model: str, tenant: str) -> GenerateRequest:
    """Translate a request. Raises InvalidRequestError or UnsupportedFeatureError naming the field."""
    refuse_unsupported(wire, NEUTRAL)
    if wire.stream_options is not None:
        refuse_unsupported(wire.stream_options, NEUTRAL, "stream_options.")
    if wire.reasoning is not None:
        refuse_unsupported(wire.reasoning, NEUTRAL, "reasoning.")
    choice, tool_name = _tool_choice(wire.tool_choice)
    if choice == "required" and not wire.tools:
        raise InvalidRequestError(param="tool_choice", problem="asks for a call, but there are no tools")
    instructions = () if not wire.instructions else (Message(role="system", content=wire.instructions),)
    return GenerateRequest(
        id=request_id,
        model=model,
        messages=(*instructions, *_messages(wire.input)),
        max_tokens=wire.max_output_tokens,
        sampling=_sampling(wire),
        stream=bool(wire.stream),
        top_logprobs=_top_logprobs(wire),
        tenant=tenant,
        response_format=_format(wire.text),
        tools=_tools(wire.tools or ()),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
    )


def _sampling(wire: ResponsesRequest) -> Sampling:
    given: dict[str, Any] = {"temperature": wire.temperature, "top_p": wire.top_p}
    return replace(CHAT_SAMPLING, **{name: value for name, value in given.items() if value is not None})


def _top_logprobs(wire: ResponsesRequest) -> int | None:
    for i, name in enumerate(wire.include or ()):
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):  # of the latter there is none, whoever asks
            raise UnsupportedFeatureError(feature=f"include[{i}]", remedy=f"only {_LOGPROBS} can be had")
    if _LOGPROBS in (wire.include or ()):
        return wire.top_logprobs or 0
    if wire.top_logprobs:
        raise InvalidRequestError(param="top_logprobs", problem=f"needs {_LOGPROBS} in include")
    return None


def _format(wire: Text | None) -> ResponseFormat | None:
    if wire is None:
        return None
    refuse_unsupported(wire, NEUTRAL, "text.")
    if wire.format is None or wire.format.type == "text":
        return None
    if wire.format.type == "json_object":
        return ResponseFormat(kind="json_object")
    if wire.format.type != "json_schema":
        remedy = f"send text, json_object or json_schema, not {wire.format.type[:40]!r}"
        raise UnsupportedFeatureError(feature="text.format.type", remedy=remedy)
    if not (schema := raw_text(wire.format.schema, "text.format.schema")):
        raise InvalidRequestError(param="text.format.schema", problem="is required")
    return ResponseFormat(kind="json_schema", text=schema)


def _tools(wire: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    found = []
    for i, tool in enumerate(wire):
        place = f"tools[{i}]"
        if tool.type != "function":
            remedy = f"send tools of type function, which your program runs, not {tool.type[:40]!r}"
            raise UnsupportedFeatureError(feature=f"{place}.type", remedy=remedy)
        refuse_unsupported(msgspec.structs.replace(tool, parameters=ABSENT), NEUTRAL, f"{place}.")
        parameters = raw_text(tool.parameters, f"{place}.parameters")
        found.append(Tool(name=tool.name, description=tool.description or "", parameters=parameters or _ANY_PARAMETERS))
    return tuple(found)


def _tool_choice(wire: str | NamedTool | None) -> tuple[Literal["auto", "none", "required"], str]:
    """Give the choice, and the only tool that may be called, "" for any."""
    if isinstance(wire, NamedTool):
        if wire.type != "function":
            remedy = f"send none, auto, required or a function, not {wire.type[:40]!r}"
            raise UnsupportedFeatureError(feature="tool_choice.type", remedy=remedy)
        refuse_unsupported(wire, NEUTRAL, "tool_choice.")
        if not wire.name:
            raise InvalidRequestError(param="tool_choice.name", problem="is required")
        return "required", wire.name
    for known in ("auto", "none", "required"):
        if (wire or "auto") == known:
            return known, ""
    raise InvalidRequestError(param="tool_choice", problem="must be none, auto, required or a function")


def _messages(wire: str | list[Item]) -> list[Message]:
    """Translate a conversation: calls that follow each other, or an assistant's text, are one message."""
    if isinstance(wire, str):
        return [Message(role="user", content=wire)]
    if not wire:
        raise InvalidRequestError(param="input", problem="must hold at least one item")
    found: list[Message] = []
    for i, item in enumerate(wire):
        place = f"input[{i}]"
        kind = item.type or "message"
        if kind not in ("message", "function_call", "function_call_output"):
            remedy = f"send message, function_call or function_call_output, not {kind[:40]!r}"
            raise UnsupportedFeatureError(feature=f"{place}.type", remedy=remedy)
        refuse_unsupported(item, NEUTRAL, f"{place}.")
        if kind == "function_call":
            call = ToolCall(
                id=given(item.call_id, f"{place}.call_id"),
                name=given(item.name, f"{place}.name"),
                arguments=given(item.arguments, f"{place}.arguments"),
            )
            if not found or found[-1].role != "assistant":
                found.append(Message(role="assistant", content=""))
            found[-1] = replace(found[-1], tool_calls=(*found[-1].tool_calls, call))
        elif kind == "function_call_output":
            content = _content(item.output, f"{place}.output")
            call_id = given(item.call_id, f"{place}.call_id")
            found.append(Message(role="tool", content=content, tool_call_id=call_id))
        else:
            found.append(_message(item, place))
    return found


def _message(item: Item, place: str) -> Message:
    content = _content(item.content, f"{place}.content")
    match item.role:
        case "system" | "developer":
            return Message(role="system", content=content)
        case "user":
            return Message(role="user", content=content)
        case "assistant":
            return Message(role="assistant", content=content)
        case _:
            problem = f"must be one of system, developer, user, assistant, got {(item.role or '')[:40]!r}"
            raise InvalidRequestError(param=f"{place}.role", problem=problem)


def _content(wire: str | list[Part] | None, place: str) -> str:
    if isinstance(wire, str):
        return wire
    if wire is None:
        raise InvalidRequestError(param=place, problem="is required")
    texts = []
    for i, part in enumerate(wire):
        if part.type not in ("input_text", "output_text"):
            remedy = f"send parts of type input_text, not {part.type[:40]!r}"
            raise UnsupportedFeatureError(feature=f"{place}[{i}].type", remedy=remedy)
        refuse_unsupported(msgspec.structs.replace(part, logprobs=ABSENT), NEUTRAL, f"{place}[{i}].")
        texts.append(given(part.text, f"{place}[{i}].text"))
    return "\n".join(texts)
