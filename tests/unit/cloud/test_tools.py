"""Tools and formats on their way to a cloud model, and calls on their way back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_rt.cloud import wire
from edge_rt.cloud.answer import Answer
from edge_rt.config import CloudEndpoint
from edge_rt.errors import CloudAnswerError, CloudDeclinedError, UnsupportedFeatureError
from edge_rt.router.rules import texts
from edge_rt.types import GenerateRequest, Message, ResponseFormat, Tool, ToolCall, ToolCallDelta

ENDPOINT = CloudEndpoint(base_url="https://example.org/v1", model="big")
TOOL = Tool(name="f", description="tells", parameters='{"type":"object"}')
MESSAGES = (
    Message(role="user", content="q"),
    Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments='{"secret": 1}'),)),
    Message(role="tool", content="r", tool_call_id="c"),
)


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="m", messages=MESSAGES, **fields)


def body(**fields: Any) -> Any:
    return json.loads(wire.body(asked(**fields), ENDPOINT))


def test_tools_calls_and_results_go_out() -> None:
    sent = body(tools=(TOOL,), tool_choice="required", parallel_tool_calls=False)
    assert sent["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"secret": 1}'}}],
    }
    assert sent["messages"][2] == {"role": "tool", "content": "r", "tool_call_id": "c"}
    assert sent["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "tells", "parameters": {"type": "object"}}}
    ]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    assert body(tools=(TOOL,), tool_name="f")["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert "tools" not in body()


def test_formats_that_a_cloud_knows_go_out() -> None:
    assert body(response_format=ResponseFormat(kind="json_object"))["response_format"] == {"type": "json_object"}
    sent = body(response_format=ResponseFormat(kind="json_schema", text='{"a":1}'))["response_format"]
    assert sent == {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}}
    with pytest.raises(UnsupportedFeatureError, match="regex"):
        body(response_format=ResponseFormat(kind="regex", text="a"))


def test_all_that_would_leave_is_looked_at() -> None:
    found = texts(asked(tools=(TOOL,), response_format=ResponseFormat(kind="json_schema", text='{"a":1}')))
    assert {"q", '{"secret": 1}', "r", "tells", '{"type":"object"}', '{"a":1}'} <= set(found)


def event(*calls: Any, reason: str | None = None, content: str | None = None) -> bytes:
    delta = {"content": content, "tool_calls": calls} if calls else {"content": content}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode()


def call(index: int | None, arguments: str | None, **fields: Any) -> Any:
    name = fields.pop("name", None)
    return {"index": index, "function": {"name": name, "arguments": arguments}, "type": "function", **fields}


def test_calls_come_back_in_pieces() -> None:
    answer = Answer("big", 0.0)
    first = [event(content="So"), event(call(0, "", id="a", name="f"))]
    assert answer.take(first, 1.0) == ("So", (ToolCallDelta(index=0, id="a", name="f"),))
    then = [event(call(0, '{"x"')), event(call(0, ":1}"), call(1, "{}", id="b", name="g"))]
    assert answer.take(then, 2.0) == (
        "",
        (
            ToolCallDelta(index=0, arguments='{"x"'),
            ToolCallDelta(index=0, arguments=":1}"),
            ToolCallDelta(index=1, id="b", name="g", arguments="{}"),
        ),
    )
    answer.take([event(reason="tool_calls")], 3.0)
    last = answer.last(asked(), 100)
    assert last.finish_reason == "tool_calls"
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_whole_calls_without_an_index_are_taken() -> None:
    _, calls = Answer("big", 0.0).take(
        [event(call(None, "{}", id="a", name="f"), call(None, "{}", id="b", name="g"))], 1.0
    )
    assert [(c.index, c.name) for c in calls] == [(0, "f"), (1, "g")]


@pytest.mark.parametrize(
    "calls", [[call(1, "{}", id="a", name="f")], [call(0, "{}", name="f")], [call(0, "{}", id="a")], [call(500, "{}")]]
)
def test_calls_that_nobody_could_put_together_are_refused(calls: list[Any]) -> None:
    with pytest.raises(CloudAnswerError):
        Answer("big", 0.0).take([event(*calls)], 1.0)


def test_an_end_by_calls_without_calls_is_no_end() -> None:
    with pytest.raises(CloudDeclinedError):
        Answer("big", 0.0).take([event(reason="tool_calls")], 1.0)
