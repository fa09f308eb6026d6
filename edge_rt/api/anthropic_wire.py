"""Anthropic's Messages API: what a request may hold, and what of it a GenerateRequest takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw

from edge_rt.api.fields import ABSENT, Neutral, given, raw_text, refuse_unsupported
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Message, ResponseFormat, Sampling, Tool, ToolCall, goes_on

# The second removes the sampling fields, which a small model still wants: they are taken with both.
VERSIONS: Final = ("2023-06-01", "2026-10-21")
_DIRECT: Final = {"type": "direct"}

# The values of Raw fields that ask for nothing; null always does.
NEUTRAL: Final[Neutral] = {
    "allowed_callers": (["direct"],),
    "caller": (_DIRECT,),
    "citations": ([],),
    "defer_loading": (False,),
    "effort": ("high",),  # what leaving it out means
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


class Wire(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body or a part of one."""


class CacheControl(Wire, kw_only=True):
    """Where Anthropic begins to keep a prompt. Here what begins alike is always kept."""

    type: str = "ephemeral"
    ttl: str | None = None


class Block(Wire, kw_only=True):
    """A text, tool_use or tool_result; what belongs to other types is there to be refused by name."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Raw] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    caller: Raw = ABSENT
    citations: Raw = ABSENT
    context: Raw = ABSENT
    data: Raw = ABSENT
    signature: Raw = ABSENT
    source: Raw = ABSENT
    thinking: Raw = ABSENT
    title: Raw = ABSENT
    toolset_name: Raw = ABSENT


class WireMessage(Wire, kw_only=True):
    role: str
    content: str | list[Block]


class WireTool(Wire, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: bool | None = None  # calls always keep to their schema
    eager_input_streaming: bool | None = None  # they always stream
    cache_control: CacheControl | None = None
    allowed_callers: Raw = ABSENT
    defer_loading: Raw = ABSENT
    input_examples: Raw = ABSENT


class ToolChoice(Wire, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Wire, kw_only=True):
    type: str
    schema: Raw = ABSENT


class OutputConfig(Wire, kw_only=True):
    format: OutputFormat | None = None
    effort: Raw = ABSENT


class Thinking(Wire, kw_only=True):
    """disabled, or adaptive, which leaves it to the model: ours do not."""

    type: str
    display: str | None = None
    budget_tokens: int | None = None


class Edit(Wire, kw_only=True):
    type: str
    keep: Raw = ABSENT
    trigger: Raw = ABSENT
    clear_at_least: Raw = ABSENT
    clear_tool_inputs: Raw = ABSENT
    exclude_tools: Raw = ABSENT
    instructions: Raw = ABSENT
    pause_after_compaction: Raw = ABSENT


class ContextManagement(Wire, kw_only=True):
    """What shall be left out of a long conversation. Of thinking there is none to leave out."""

    edits: list[Edit] | None = None


class Metadata(Wire, kw_only=True):
    """Labels of the caller's own; they change no answer."""

    user_id: str | None = None


class CountRequest(Wire, kw_only=True):
    """What messages and count_tokens share."""

    model: str
    messages: list[WireMessage]
    system: str | list[Block] | None = None
    tools: list[WireTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Raw = ABSENT
    speed: Raw = ABSENT
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    container: Raw = ABSENT
    diagnostics: Raw = ABSENT
    inference_geo: Raw = ABSENT
    service_tier: Raw = ABSENT
    user_profile_id: Raw = ABSENT


MESSAGES: Final = msgspec.json.Decoder(MessagesRequest)
COUNT: Final = msgspec.json.Decoder(CountRequest)


def count_request(wire: CountRequest, *, request_id: str, tenant: str) -> GenerateRequest:
    """Translate what decides of the prompt. Raises InvalidRequestError or UnsupportedFeatureError naming the field."""
    refuse_unsupported(wire, NEUTRAL)
    _refuse_thinking(wire)
    choice, tool_name = _tool_choice(wire.tool_choice)
    if choice == "required" and not wire.tools:
        raise InvalidRequestError(param="tool_choice", problem="asks for a call, but there are no tools")
    messages = (*_system(wire.system), *_messages(wire.messages))
    return GenerateRequest(
        id=request_id,
        model=wire.model,
        messages=messages,
        continues=goes_on(messages),
        tenant=tenant,
        response_format=_format(wire),
        tools=_tools(wire.tools or ()),
        tool_choice=choice,
        tool_name=tool_name,
        parallel_tool_calls=wire.tool_choice is None or not wire.tool_choice.disable_parallel_tool_use,
    )


def messages_request(wire: MessagesRequest, *, request_id: str, tenant: str) -> GenerateRequest:
    """Translate a request for an answer; raises as count_request."""
    return replace(
        count_request(wire, request_id=request_id, tenant=tenant),
        max_tokens=wire.max_tokens,
        stop=tuple(wire.stop_sequences or ()),
        sampling=_sampling(wire),
        stream=bool(wire.stream),
    )


def _refuse_thinking(wire: CountRequest) -> None:
    if wire.thinking is not None and wire.thinking.type not in ("disabled", "adaptive"):
        raise UnsupportedFeatureError(feature="thinking", remedy='leave it out or send {"type":"disabled"}')
    for i, edit in enumerate((wire.context_management or ContextManagement()).edits or ()):
        if not edit.type.startswith("clear_thinking_"):
            remedy = "leave it out: a conversation is answered as it is"
            raise UnsupportedFeatureError(feature=f"context_management.edits[{i}].type", remedy=remedy)


def _sampling(wire: MessagesRequest) -> Sampling:
    given: dict[str, Any] = {"temperature": wire.temperature, "top_k": wire.top_k, "top_p": wire.top_p}
    return replace(CHAT_SAMPLING, **{name: value for name, value in given.items() if value is not None})


def _format(wire: CountRequest) -> ResponseFormat | None:
    config = wire.output_config or OutputConfig()
    refuse_unsupported(config, NEUTRAL, "output_config.")
    if config.format is not None and wire.output_format is not None:
        raise InvalidRequestError(param="output_format", problem="is there beside output_config.format; give one")
    asked = config.format or wire.output_format
    if asked is None:
        return None
    place = "output_format" if config.format is None else "output_config.format"
    if asked.type != "json_schema":
        raise UnsupportedFeatureError(feature=f"{place}.type", remedy=f"send json_schema, not {asked.type[:40]!r}")
    if not (schema := raw_text(asked.schema, f"{place}.schema")):
        raise InvalidRequestError(param=f"{place}.schema", problem="is required")
    return ResponseFormat(kind="json_schema", text=schema)


def _tools(wire: Sequence[WireTool]) -> tuple[Tool, ...]:
    found = []
    for i, tool in enumerate(wire):
        place = f"tools[{i}]"
        if tool.type not in (None, "custom"):
            remedy = f"send tools of type custom, which your program runs, not {(tool.type or '')[:40]!r}"
            raise UnsupportedFeatureError(feature=f"{place}.type", remedy=remedy)
        refuse_unsupported(msgspec.structs.replace(tool, input_schema=ABSENT), NEUTRAL, f"{place}.")
        if not (schema := raw_text(tool.input_schema, f"{place}.input_schema")):
            raise InvalidRequestError(param=f"{place}.input_schema", problem="is required")
        found.append(Tool(name=tool.name, description=tool.description or "", parameters=schema))
    return tuple(found)


def _tool_choice(wire: ToolChoice | None) -> tuple[Literal["auto", "none", "required"], str]:
    """Give the choice, and the only tool that may be called, "" for any."""
    if wire is None or wire.type == "auto":
        return "auto", ""
    if wire.type == "none":
        return "none", ""
    if wire.type == "any":
        return "required", ""
    if not wire.name:
        raise InvalidRequestError(param="tool_choice.name", problem="is required")
    return "required", wire.name


def _system(wire: str | list[Block] | None) -> tuple[Message, ...]:
    text = _text(wire or "", "system")
    return (Message(role="system", content=text),) if text else ()


def _messages(wire: Sequence[WireMessage]) -> list[Message]:
    """Translate a conversation. A user's message with tool_result blocks is one message a result, then its text."""
    found: list[Message] = []
    for i, message in enumerate(wire):
        place = f"messages[{i}].content"
        if message.role == "system":
            found += _system(message.content)
        elif message.role == "assistant":
            found.append(_assistant(message.content, place))
        elif message.role == "user":
            found += _user(message.content, place)
        else:
            problem = f"must be user, assistant or system, got {message.role[:40]!r}"
            raise InvalidRequestError(param=f"messages[{i}].role", problem=problem)
    return found


def _assistant(content: str | list[Block], place: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    calls, texts = [], []
    for i, block in enumerate(content):
        _check(block, f"{place}[{i}]", ("text", "tool_use"))
        if block.type == "text":
            texts.append(given(block.text, f"{place}[{i}].text"))
        else:
            calls.append(
                ToolCall(
                    id=given(block.id, f"{place}[{i}].id"),
                    name=given(block.name, f"{place}[{i}].name"),
                    arguments=msgspec.json.encode(block.input or {}).decode(),
                )
            )
    return Message(role="assistant", content="\n".join(texts), tool_calls=tuple(calls))


def _user(content: str | list[Block], place: str) -> list[Message]:
    if isinstance(content, str):
        return [Message(role="user", content=content)]
    results, texts = [], []
    for i, block in enumerate(content):
        _check(block, f"{place}[{i}]", ("text", "tool_result"))
        if block.type == "text":
            texts.append(given(block.text, f"{place}[{i}].text"))
        else:
            said = _text(block.content or "", f"{place}[{i}].content")
            call_id = given(block.tool_use_id, f"{place}[{i}].tool_use_id")
            # No template has a place for the flag, and the model must know.
            text = f"Error: {said}" if block.is_error else said
            results.append(Message(role="tool", content=text, tool_call_id=call_id))
    if texts or not results:
        results.append(Message(role="user", content="\n".join(texts)))
    return results


def _text(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        _check(block, f"{place}[{i}]", ("text",))
    return "\n".join(given(block.text, f"{place}[{i}].text") for i, block in enumerate(content))


def _check(block: Block, place: str, types: tuple[str, ...]) -> None:
    if block.type not in types:
        remedy = f"send {' or '.join(types)} here, not {block.type[:40]!r}"
        raise UnsupportedFeatureError(feature=f"{place}.type", remedy=remedy)
    refuse_unsupported(block, NEUTRAL, f"{place}.")
