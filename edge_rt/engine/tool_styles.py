"""How families of models write tool calls, found out by their chat templates, and one way for models that know none.

A style says what stands around a call's name and arguments. Calls are held to it token by token, so an answer's calls
are read back by the same few texts, and not by guessing.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

from edge_rt.engine import grammar_schema, grammar_text
from edge_rt.errors import EdgeRtError, InvalidRequestError
from edge_rt.types import Message, ResponseFormat, Tool, ToolCall

MAX_TOOLS: Final = 128
_MAX_NAME: Final = 64
_ID_CHARS: Final = string.ascii_letters + string.digits
_NAME_CHARS: Final = frozenset(_ID_CHARS + "_-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What begins an answer's calls: a text by which it is known, and what follows that up to the first call."""

    mark: str
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle:
    """How calls are written: opening, then head, arguments and tail of each call with between between them, then end.

    head       %s is the tool's name
    at_start   calls are known at the beginning of an answer only
    parallel   one answer may hold several calls
    id_chars   letters and digits that a call's id must have; 0 leaves it free
    in_prompt  the chat template shows tools, calls and results; otherwise messages tell of them
    has_system the chat template takes a system message
    """

    name: str
    openings: tuple[Opening, ...]
    head: str
    tail: str = "}"
    between: str = ""
    end: str = ""
    at_start: bool = False
    parallel: bool = True
    id_chars: int = 0
    in_prompt: bool = True
    has_system: bool = True


_JSON_HEAD: Final = '{"name": "%s", "arguments": '
_HERMES: Final = ToolStyle(
    name="hermes",
    openings=(Opening(mark="<tool_call>", rest="\n"),),
    head=_JSON_HEAD,
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
# For templates without tools: the form that most models of all families have seen.
GENERIC: Final = replace(_HERMES, name="generic", in_prompt=False)
_LLAMA_3: Final = ToolStyle(
    name="llama-3",
    openings=(
        Opening(mark='{"name"', rest=': "'),
        Opening(mark='{"type"', rest=': "function", "name": "'),
    ),
    head='%s", "parameters": ',
    at_start=True,
    parallel=False,
)


_MISTRAL: Final = ToolStyle(
    name="mistral",
    openings=(Opening(mark="[TOOL_CALLS]", rest="["),),
    head=_JSON_HEAD,
    between=", ",
    end="]",
    id_chars=9,
)
_MISTRAL_ARGS: Final = ToolStyle(
    name="mistral-args",
    openings=(Opening(mark="[TOOL_CALLS]"),),
    head="%s[ARGS]",
    tail="",
    between="[TOOL_CALLS]",
    id_chars=9,
)
_FUNCTION_TAG: Final = ToolStyle(
    name="function-tag",
    openings=(Opening(mark="<function="),),
    head="%s>",
    tail="</function>",
    between="<function=",
)
_FAMILIES: Final = (_HERMES, _LLAMA_3, _MISTRAL_ARGS, _MISTRAL, _FUNCTION_TAG)

_PROBE_TOOL: Final = Tool(
    name="look_up", description="Finds a word.", parameters='{"type": "object", "properties": {}}'
)
_PROBE_CALL: Final = ToolCall(id="abcdef123", name=_PROBE_TOOL.name, arguments='{"word": "Graz"}')
_PROBE: Final = (
    Message(role="user", content="Hi"),
    Message(role="assistant", content="", tool_calls=(_PROBE_CALL,)),
    Message(role="tool", content="a town", tool_call_id=_PROBE_CALL.id, name=_PROBE_TOOL.name),
)


def detect(render: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]) -> ToolStyle:
    """Find out how a chat template writes a call that was made, by letting it write one.

    render  writes messages and tools by the template

    A template that shows no tools, or writes calls in a way not known here, gets GENERIC, whose tools stand in the
    first user message where the template takes no system message.
    """
    try:
        prompt = render(_PROBE, shown_tools((_PROBE_TOOL,)))
    except EdgeRtError:
        prompt = ""
    prompt = prompt.replace('{"word":"Graz"}', _PROBE_CALL.arguments)
    if _PROBE_TOOL.description in prompt:
        for style in _FAMILIES:
            if any(_written(style, opening) in prompt for opening in style.openings):
                return style
    try:
        render((Message(role="system", content="Hi"), _PROBE[0]), ())
    except EdgeRtError:
        return replace(GENERIC, has_system=False)
    return GENERIC


def _written(style: ToolStyle, opening: Opening) -> str:
    """Write the probe's call up to its arguments: some templates put its id behind them, which models leave out."""
    return f"{opening.mark}{opening.rest}{style.head % _PROBE_CALL.name}{_PROBE_CALL.arguments}"


def check_tools(tools: Sequence[Tool], tool_name: str = "") -> None:
    """Refuse names that no tool may have, too many tools, and a name that is none of theirs."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(param="tools", problem=f"holds {len(tools)} tools, the limit is {MAX_TOOLS}")
    names = set()
    for i, tool in enumerate(tools):
        param = f"tools[{i}].function.name"
        if not 0 < len(tool.name) <= _MAX_NAME or not _NAME_CHARS.issuperset(tool.name):
            problem = f"must have 1 to {_MAX_NAME} letters, digits, _ and -, got {tool.name[:80]!r}"
            raise InvalidRequestError(param=param, problem=problem)
        if tool.name in names:
            raise InvalidRequestError(param=param, problem=f"{tool.name!r} is there twice")
        names.add(tool.name)
    if tool_name and tool_name not in names:
        problem = f"names {tool_name[:80]!r}, which is none of the tools"
        raise InvalidRequestError(param="tool_choice.function.name", problem=problem)


def param_of(number: int) -> str:
    """Name a tool's schema, for errors."""
    return f"tools[{number}].function.parameters"


def parameters(tool: Tool, number: int) -> dict[str, Any]:
    """Read a tool's schema, whose instances are objects. Raises as grammar_schema.check does."""
    param = param_of(number)
    schema = grammar_schema.parse(tool.parameters, param)
    if schema is True or schema == {}:
        schema = {"type": "object"}
    grammar_schema.check(schema, param)
    if not isinstance(schema, dict):
        raise InvalidRequestError(param=param, problem="allows no arguments at all")
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequestError(param=f"{param}#/type", problem="must be object: arguments are named")
    return schema


def grammar(
    style: ToolStyle,
    tools: Sequence[Tool],
    token_of: Callable[[str], int | None],
    *,
    parallel: bool,
    tool_name: str = "",
    otherwise: ResponseFormat | None = None,
) -> str:
    """Write the grammar of an answer that is calls, from their opening on.

    token_of   the control token that is written so; None where a text is no control token
    tool_name  the only tool that may be called; "" allows all
    otherwise  what an answer that is no call must look like; None: it must be calls
    """
    schemas = [parameters(tool, i) for i, tool in enumerate(tools)]  # one that is broken is said, asked for or not
    allowed = [(i, tool) for i, tool in enumerate(tools) if tool_name in ("", tool.name)]

    def literal(*texts: str) -> str:
        return " ".join(_pieces("".join(texts), style, token_of))

    rules = [
        f"start: calls{'' if otherwise is None else ' | answer'}",
        "calls: " + " | ".join(f"opening_{i} some" for i in range(len(style.openings))),
        *(f"opening_{i}: {literal(opening.mark, opening.rest)}" for i, opening in enumerate(style.openings)),
        f"some: call{_more(style, parallel, literal)} {literal(style.end)}",
        "call: " + " | ".join(f"call_{i}" for i, _ in allowed),
    ]
    for i, tool in allowed:
        rules.append(f"call_{i}: {literal(style.head % tool.name)} arguments_{i} {literal(style.tail)}")
        rules.append(f"arguments_{i}: {grammar_text.json_rule(schemas[i])}")
    if otherwise is not None:
        rules.append(f"answer: {grammar_text.rule_of_format(otherwise)}")
    return "\n".join(rules) + "\n"


def _more(style: ToolStyle, parallel: bool, literal: Callable[..., str]) -> str:
    return f" ({literal(style.between)} call)*" if parallel and style.parallel else ""


def _pieces(text: str, style: ToolStyle, token_of: Callable[[str], int | None]) -> Iterator[str]:
    """Write a text as a rule's terms: control tokens by their number, all else as it is."""
    for mark in marks(style):
        if mark in text and (token_id := token_of(mark)) is not None:
            before, _, after = text.partition(mark)
            yield from _pieces(before, style, token_of)
            yield f"<[{token_id}]>"
            yield from _pieces(after, style, token_of)
            return
    if text:
        yield grammar_text.literal(text)


def marks(style: ToolStyle) -> tuple[str, ...]:
    """Give the texts of a style that may be control tokens."""
    return (*(opening.mark for opening in style.openings), "[ARGS]", "</tool_call>")


def new_id(style: ToolStyle) -> str:
    """Make a call's id."""
    n_chars = style.id_chars or 24
    text = "".join(secrets.choice(_ID_CHARS) for _ in range(n_chars))
    return text if style.id_chars else f"call_{text}"


# -- what the prompt says --------------------------------------------------------------------------------------------


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Give tools as chat templates expect them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": grammar_schema.parse(tool.parameters, param_of(i)),
            },
        }
        for i, tool in enumerate(tools)
    ]


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """Read a call's arguments as a client sends them back: a JSON object. Raises InvalidRequestError."""
    value = grammar_schema.parse(text or "{}", param)
    if not isinstance(value, dict):
        raise InvalidRequestError(param=param, problem="must be a JSON object's text")
    return value


def fitted_id(call_id: str, style: ToolStyle) -> str:
    """Give the id under which the prompt tells of a call. Templates that want so many letters refuse all others."""
    if not style.id_chars or (len(call_id) == style.id_chars and call_id.isalnum() and call_id.isascii()):
        return call_id
    return blake2b(call_id.encode("utf-8", "replace"), digest_size=16).hexdigest()[: style.id_chars]


def in_messages(messages: Sequence[Message], tools: Sequence[Tool], style: ToolStyle = GENERIC) -> tuple[Message, ...]:
    """Tell of tools, calls and results in plain messages, for templates that do not know them.

    The first system message, or one of its own, says what tools there are; calls stand in the assistant's text as it
    would write them; results come as the user's, in one message with each other and with what the user says then.
    """
    told: list[Message] = []
    is_results = False
    for i, message in enumerate(messages):
        role, text = message.role, message.content
        if message.tool_calls:
            calls = [_told(call, f"messages[{i}].tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
            text = "\n".join(filter(None, (text, *calls)))
        elif role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        if is_results and role == "user":
            text = f"{told.pop().content}\n{text}"
        is_results = message.role == "tool"
        told.append(Message(role=role, content=text))
    if not tools:
        return tuple(told)
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in shown_tools(tools))
    text = _INTRODUCTION.format(tools=listed)
    if told and told[0].role == "system":
        told[0] = replace(told[0], content=f"{told[0].content}\n\n{text}")
    elif style.has_system or not told or told[0].role != "user":
        told.insert(0, Message(role="system", content=text))
    else:
        told[0] = replace(told[0], content=f"{text}\n\n{told[0].content}")
    return tuple(told)


def _told(call: ToolCall, place: str) -> str:
    called = {"name": call.name, "arguments": arguments_of(call.arguments, f"{place}.function.arguments")}
    return f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"


_INTRODUCTION: Final = """\
You may call one or more of these functions, given by their JSON Schemas:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The results come back in <tool_response>."""
