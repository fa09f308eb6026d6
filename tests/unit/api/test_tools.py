from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from edge_rt.api.answers import ChatShape
from edge_rt.api.openai import chat_request
from edge_rt.api.schemas import ChatRequest, decode, encode
from edge_rt.api.tools import is_object
from edge_rt.errors import EdgeRtError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import GenerateRequest, Message, Tool, ToolCall, ToolCallDelta

PARAMETERS = {"type": "object", "properties": {"é": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"é": "x"}'}}
DELTAS = (
    ToolCallDelta(index=0, id="c1", name="f"),
    ToolCallDelta(index=0, arguments="{"),
    ToolCallDelta(index=0, arguments="}"),
    ToolCallDelta(index=1, id="c2", name="g", arguments="{}"),
)


def asked(*messages: Any, **fields: Any) -> GenerateRequest:
    body = json.dumps({"messages": messages or [{"role": "user", "content": "x"}], **fields}).encode()
    return chat_request(decode(body, ChatRequest), request_id="r", model="m", tenant="")


def test_tools_are_read() -> None:
    request = asked(tools=[TOOL, {"type": "function", "function": {"name": "g"}}], parallel_tool_calls=False)
    assert request.tools == (Tool(name="f", description="d", parameters=json.dumps(PARAMETERS)), Tool(name="g"))
    assert (request.tool_choice, request.tool_name, request.parallel_tool_calls) == ("auto", "", False)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ("auto", "")),
        ("none", ("none", "")),
        ("required", ("required", "")),
        ({"type": "function", "function": {"name": "f"}}, ("required", "f")),
    ],
)
def test_a_choice_is_read(choice: Any, wanted: tuple[str, str]) -> None:
    request = asked(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == wanted


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None, "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_no_tools_are_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


@pytest.mark.parametrize(
    ("fields", "kind", "place"),
    [
        ({"tool_choice": "required"}, InvalidRequestError, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, InvalidRequestError, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, UnsupportedFeatureError, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": ""}}},
            InvalidRequestError,
            "tool_choice.function.name",
        ),
        ({"tools": [{"type": "custom"}]}, UnsupportedFeatureError, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, InvalidRequestError, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, InvalidRequestError, "function.x"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(fields: dict[str, Any], kind: type[EdgeRtError], place: str) -> None:
    with pytest.raises(kind) as caught:
        asked(**fields)
    assert place in str(caught.value)


def test_calls_and_results_come_back() -> None:
    request = asked(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "y"}]},
    )
    assert request.messages is not None
    assert request.messages[1:] == (
        Message(role="assistant", content="", tool_calls=(ToolCall(id="c1", name="f", arguments='{"é": "x"}'),)),
        Message(role="tool", content="y", tool_call_id="c1", name="f"),
    )


def test_a_result_answers_a_call_before_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.tool_call_id: 'c2' is no call"):
        asked(
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c2", "content": "y"},
        )


def written(choice: Any) -> Any:
    return json.loads(encode(choice))


def test_pieces_of_a_call_have_openais_shape() -> None:
    assert written(ChatShape().piece("", (), (), DELTAS[:2]))["delta"] == {
        "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}]
    }
    later = written(ChatShape().piece("so", (), (), DELTAS[2:]))["delta"]
    assert later["content"] == "so"
    assert later["tool_calls"] == [
        {"index": 0, "function": {"arguments": "}"}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_a_whole_answer_has_its_calls() -> None:
    message = written(ChatShape().whole("", (), "tool_calls", (), DELTAS))["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    plain = msgspec.to_builtins(ChatShape().whole("", (), "stop"))["message"]
    assert plain == {"role": "assistant", "content": "", "refusal": None}


@pytest.mark.parametrize(
    ("arguments", "is_readable"),
    [('{"a": 1}', True), ('{"a": ', False), ("[1]", False), ('{"a":' * 100_000 + "1" + "}" * 100_000, False)],
    ids=["whole", "cut-off", "no-object", "too-deep"],
)
def test_arguments_that_cannot_be_read_are_told_from_those_that_can(arguments: str, is_readable: bool) -> None:
    assert is_object(arguments) is is_readable
