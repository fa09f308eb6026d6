"""Tools on the wire, in OpenAI's shape: what a chat request says of them, and how calls stand in an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from edge_rt.api.fields import ABSENT, raw_text
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import Tool, ToolCall, ToolCallDelta

ToolChoice = Literal["auto", "none", "required"]


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request body."""


class WireFunction(_Part, kw_only=True):
    """strict changes nothing: arguments always meet the schema."""

    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: bool | None = None


class WireTool(_Part, kw_only=True):
    type: str
    function: WireFunction | None = None


class WireNamed(_Part, kw_only=True):
    name: str


class WireToolChoice(_Part, kw_only=True):
    type: str
    function: WireNamed | None = None
    allowed_tools: Raw = ABSENT
    custom: Raw = ABSENT


class CalledFunction(_Part, kw_only=True):
    name: str
    arguments: str


class WireCall(_Part, kw_only=True):
    """A call in an assistant's message; clients that keep a stream's deltas send their index back."""

    id: str
    type: str = "function"
    function: CalledFunction
    index: int | None = None


def tools(wire: Sequence[WireTool] | None) -> tuple[Tool, ...]:
    """Translate tools. Raises UnsupportedFeatureError for those that are no functions."""
    found = []
    for i, tool in enumerate(wire or ()):
        if tool.type != "function" or tool.function is None:
            remedy = f"send tools of type function, not {tool.type[:40]!r}"
            raise UnsupportedFeatureError(feature=f"tools[{i}].type", remedy=remedy)
        function = tool.function
        parameters = raw_text(function.parameters, f"tools[{i}].function.parameters")
        schema = {"parameters": parameters} if parameters else {}
        found.append(Tool(name=function.name, description=function.description or "", **schema))
    return tuple(found)


def tool_choice(wire: str | WireToolChoice | None, *, has_tools: bool) -> tuple[ToolChoice, str]:
    """Give the choice, and the name of the tool that must be called."""
    if isinstance(wire, WireToolChoice):
        if wire.type != "function" or wire.function is None:
            remedy = "send auto, none, required or a function's name"
            raise UnsupportedFeatureError(feature=f"tool_choice of type {wire.type[:40]!r}", remedy=remedy)
        choice, name = "required", wire.function.name
        if not name:
            raise InvalidRequestError(param="tool_choice.function.name", problem="must not be empty")
    else:
        choice, name = wire or "auto", ""
    if choice not in ("auto", "none", "required"):
        problem = f"must be auto, none, required or a function, got {choice[:40]!r}"
        raise InvalidRequestError(param="tool_choice", problem=problem)
    if choice == "required" and not has_tools:
        raise InvalidRequestError(param="tool_choice", problem="asks for a call, but there are no tools")
    return cast("ToolChoice", choice), name


def calls(wire: Sequence[WireCall] | None, place: str) -> tuple[ToolCall, ...]:
    """Translate the calls of an assistant's message."""
    for i, call in enumerate(wire or ()):
        if call.type != "function":
            raise UnsupportedFeatureError(feature=f"{place}[{i}].type", remedy="send calls of type function")
        if not call.id:
            raise InvalidRequestError(param=f"{place}[{i}].id", problem="must not be empty")
    return tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in wire or ()
    )


class AnsweredFunction(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True):
    """A piece of a call in a stream: the first has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: AnsweredFunction


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


def joined(deltas: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the pieces of each call."""
    found: list[ToolCallDelta] = []
    for delta in deltas:
        if found and found[-1].index == delta.index:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + delta.arguments)
        else:
            found.append(delta)
    return found


def is_object(arguments: str) -> bool:
    """Say whether a call's arguments can be read: an answer's end may cut them off, or a model nest them too deeply."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def call_deltas(deltas: Iterable[ToolCallDelta]) -> list[CallDelta]:
    """Write the pieces of calls that came together; several of one call are one."""
    return [
        CallDelta(
            index=delta.index,
            id=delta.id or UNSET,
            type="function" if delta.id else UNSET,
            function=AnsweredFunction(name=delta.name or UNSET, arguments=delta.arguments),
        )
        for delta in joined(deltas)
    ]


def answered_calls(deltas: Iterable[ToolCallDelta]) -> list[AnsweredCall]:
    """Write an answer's calls whole."""
    return [
        AnsweredCall(id=delta.id, function=AnsweredFunction(name=delta.name, arguments=delta.arguments))
        for delta in joined(deltas)
    ]
