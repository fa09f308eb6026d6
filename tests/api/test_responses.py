"""OpenAI's Responses API: requests, answers, events and errors, on a fake runtime."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from edge_rt.api.outcome import Outcome
from edge_rt.api.responses_answers import ResponseWriter
from edge_rt.api.responses_wire import DECODER, ResponsesRequest, generate_request
from edge_rt.errors import BackendStepError, InvalidRequestError, ModelTooLargeError, UnsupportedFeatureError
from edge_rt.types import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Message,
    ResponseFormat,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from tests.api.asgi import TIMINGS, USAGE, Call, FakeRuntime, Reply, app_of, ask, whole

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": True,
}
CALLS = (
    Chunk(text="Let me look. "),
    Chunk(text="", tool_calls=(ToolCallDelta(index=0, id="call_a", name="weather"),)),
    Chunk(text="", tool_calls=(ToolCallDelta(index=0, arguments='{"town":'), ToolCallDelta(index=0, arguments='"x"}'))),
    Chunk(text="", tool_calls=(ToolCallDelta(index=1, id="call_b", name="weather", arguments="{}"),)),
)


def events(raw: bytes) -> list[dict[str, Any]]:
    """Decode a stream; each event's name is its type, and they are numbered."""
    *parts, rest = raw.decode().split("\n\n")
    assert rest == ""
    found = []
    for number, part in enumerate(parts):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def stream(*chunks: Any, **fields: Any) -> list[dict[str, Any]]:
    reply = ask(FakeRuntime(chunks), "POST", PATH, {"model": "default", "input": "hi", "stream": True, **fields})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.body)


def asked(**fields: Any) -> tuple[ResponsesRequest, GenerateRequest]:
    wire = DECODER.decode(msgspec.json.encode({"input": "hi", **fields}))
    return wire, generate_request(wire, request_id="resp_1", model="m", tenant="t")


def refused(reply: Reply) -> tuple[str, str]:
    assert reply.status == 400
    return reply.error["code"], reply.error["param"]


def ended(reason: FinishReason) -> Chunk:
    return Chunk(text="", finish_reason=reason, usage=USAGE, timings=TIMINGS)


def test_a_whole_response() -> None:
    body = {"model": "default", "input": "hi", "instructions": "be kind", "metadata": {"k": "v"}, "user": "me"}
    answer = ask(FakeRuntime(whole("a", "b")), "POST", PATH, body).json
    assert answer["status"] == "completed"
    assert answer["output"] == [
        {
            "type": "message",
            "id": answer["output"][0]["id"],
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}],
        }
    ]
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"], answer["usage"]["total_tokens"]) == (
        7,
        3,
        10,
    )
    assert (answer["instructions"], answer["metadata"], answer["user"]) == ("be kind", {"k": "v"}, "me")
    assert (answer["store"], answer["error"], answer["incomplete_details"]) == (False, None, None)
    assert answer["id"].startswith("resp_")


def test_an_answer_that_was_cut_is_incomplete() -> None:
    chunks = whole("a", finish_reason="length")
    answer = ask(FakeRuntime(chunks), "POST", PATH, {"model": "default", "input": "hi", "max_output_tokens": 1}).json
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert stream(*chunks)[-1]["type"] == "response.incomplete"


def test_a_stream_of_text() -> None:
    found = stream(*whole("a", "b"))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == found[2]["item"]["content"] == []
    assert "".join(event["delta"] for event in found[4:6]) == found[6]["text"] == "ab"
    item = found[8]["item"]
    assert found[-1]["response"]["output"] == [item]
    assert {event["item_id"] for event in found[3:8]} == {item["id"]}


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    chunks = [ended("stop")]
    found = stream(*chunks)
    assert "response.output_text.delta" not in [event["type"] for event in found]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""
    answer = ask(FakeRuntime(chunks), "POST", PATH, {"model": "default", "input": "hi"}).json
    assert answer["output"][0]["content"][0]["text"] == ""


def test_calls_are_items_of_their_own() -> None:
    writer, outcome = ResponseWriter(*asked(stream=True)), Outcome()
    raw = writer.opening(None)
    for chunk in (*CALLS, ended("tool_calls")):
        outcome.add(chunk)
        raw += writer.piece(chunk)
    found = events(raw + writer.closing(outcome))
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    assert [(item["type"], item.get("call_id"), item.get("arguments")) for item in done] == [
        ("message", None, None),
        ("function_call", "call_a", '{"town":"x"}'),
        ("function_call", "call_b", "{}"),
    ]
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    assert added[1]["item"]["arguments"] == ""
    deltas = [event for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas if event["output_index"] == 1) == '{"town":"x"}'
    assert len({item["id"] for item in done}) == 3


def test_calls_in_a_whole_response() -> None:
    outcome = Outcome()
    for chunk in (*CALLS, ended("tool_calls")):
        outcome.add(chunk)
    answer = json.loads(ResponseWriter(*asked(tools=[WEATHER])).whole(outcome))
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    assert answer["tools"] == [WEATHER]
    assert answer["status"] == "completed"


def test_a_conversation_is_translated() -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": [{"token": "ok"}]}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}", "async": None},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    _, request = asked(instructions="first", input=items)
    calls = tuple(ToolCall(id=i, name="f", arguments="{}") for i in ("c1", "c2"))
    assert request.messages == (
        Message(role="system", content="first"),
        Message(role="system", content="be kind"),
        Message(role="user", content="a\nb"),
        Message(role="assistant", content="ok", tool_calls=calls),
        Message(role="tool", content="1", tool_call_id="c1"),
        Message(role="tool", content="2", tool_call_id="c2"),
    )


def test_what_a_request_asks_for_reaches_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    _, request = asked(
        temperature=0,
        top_p=0.5,
        max_output_tokens=9,
        stream=True,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "medium"},
        tools=[WEATHER, {"type": "function", "name": "bare", "parameters": None, "strict": None}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=3,
        store=False,
        reasoning={"effort": None, "summary": "auto"},
        client_metadata={"session": "5"},
        truncation="disabled",
    )
    assert (request.max_tokens, request.stream, request.top_logprobs, request.tenant) == (9, True, 3, "t")
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert request.response_format is not None
    assert request.response_format.kind == "json_schema"
    assert json.loads(request.response_format.text) == schema
    weather, bare = request.tools
    assert (weather.name, weather.description, json.loads(weather.parameters)) == (
        "weather",
        "of a town",
        WEATHER["parameters"],
    )
    assert bare == Tool(name="bare")
    assert (request.tool_choice, request.tool_name, request.parallel_tool_calls) == ("required", "weather", False)
    assert asked(text={"format": {"type": "json_object"}})[1].response_format == ResponseFormat(kind="json_object")
    assert asked(text={"format": {"type": "text"}})[1].response_format is None
    assert asked(tools=[WEATHER], tool_choice="required")[1].tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    reply = ask(FakeRuntime(whole("a")), "POST", PATH, {"model": "default", "input": "hi", **fields})
    assert refused(reply) == ("unsupported", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nope": 1}, "nope"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "nope": 1}]}, "input[0].nope"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    reply = ask(FakeRuntime(whole("a")), "POST", PATH, {"model": "default", "input": "hi", **fields})
    assert refused(reply) == ("invalid_request", param)


def test_logprobs() -> None:
    token = TokenLogprob(token_id=1, raw=b"a", logprob=-0.5, top=((1, b"a", -0.5),))
    chunks = [Chunk(text="a", logprobs=(token,)), ended("stop")]
    found = stream(*chunks, include=["message.output_text.logprobs"], top_logprobs=1)
    (delta,) = (event for event in found if event["type"] == "response.output_text.delta")
    assert delta["logprobs"][0]["top_logprobs"] == [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == delta["logprobs"]


def test_an_error_before_the_answer_is_an_http_error_and_one_in_its_middle_an_event() -> None:
    too_large = ModelTooLargeError(model="default", need_bytes=2, have_bytes=1)
    reply = ask(FakeRuntime([too_large]), "POST", PATH, {"model": "default", "input": "hi", "stream": True})
    assert (reply.status, reply.error["code"]) == (503, "model_too_large")
    *_, error, failed = stream(Chunk(text="a"), BackendStepError(reason="out of order"))
    assert (error["type"], error["code"]) == ("error", "backend_step")
    assert "out of order" in error["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"


def test_a_hang_up_closes_the_generator() -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(whole("a", "b"), hold=asyncio.Event())
        body = json.dumps({"model": "default", "input": "hi", "stream": True}).encode()
        call = Call(app_of(runtime), "POST", PATH, body).start()
        await call.answered.wait()
        call.hang_up()
        assert not (await call.reply()).whole
        assert runtime.n_closed == 1

    asyncio.run(scenario())


def test_nothing_is_kept() -> None:
    for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/items")):
        reply = ask(FakeRuntime(), method, f"{PATH}/{path}")
        assert reply.status == 404
        assert "no response is kept" in reply.error["message"]


def test_input_tokens() -> None:
    runtime = FakeRuntime()
    reply = ask(runtime, "POST", f"{PATH}/input_tokens", {"model": "default", "input": "hello"})
    assert reply.json == {"object": "response.input_tokens", "input_tokens": 5}
    assert ask(runtime, "POST", f"{PATH}/input_tokens", {"model": "nope", "input": "hello"}).status == 404


def test_wishes_come_in_headers() -> None:
    runtime = FakeRuntime(whole("a"))
    headers = {"x-edge-route": "local", "cache-control": "no-store"}
    assert ask(runtime, "POST", PATH, {"model": "default", "input": "hi"}, headers=headers).status == 200
    assert (runtime.requests[0].route, runtime.requests[0].cache.no_store) == ("local", True)


def test_items_of_other_kinds_are_named_by_translation_too() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"input\[0\]\.type"):
        asked(input=[{"type": "computer_call_output"}])
    with pytest.raises(InvalidRequestError, match=r"input\[0\]\.arguments"):
        asked(input=[{"type": "function_call", "call_id": "c", "name": "f"}])
