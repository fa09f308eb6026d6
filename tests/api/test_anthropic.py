"""Anthropic's Messages API: requests, answers, events and errors, on a fake runtime."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from edge_rt.api.anthropic_answers import MessageWriter
from edge_rt.api.anthropic_wire import MESSAGES, messages_request
from edge_rt.api.app import build_app
from edge_rt.api.callers import ApiKeys
from edge_rt.api.outcome import Outcome
from edge_rt.config import Config, ModelSettings
from edge_rt.config.tables import AdapterSettings
from edge_rt.errors import BackendStepError, ModelTooLargeError
from edge_rt.telemetry import Telemetry
from edge_rt.types import Adapter, Chunk, FinishReason, GenerateRequest, Message, ToolCall, ToolCallDelta, Usage
from tests.api.asgi import TIMINGS, USAGE, Call, FakeRuntime, Reply, app_of, ask, whole

PATH = "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"town": {"type": "string"}}}
CALLS = (
    Chunk(text="Let me look. "),
    Chunk(text="", tool_calls=(ToolCallDelta(index=0, id="call_a", name="weather"),)),
    Chunk(text="", tool_calls=(ToolCallDelta(index=0, arguments='{"town":'), ToolCallDelta(index=0, arguments='"x"}'))),
    Chunk(text="", tool_calls=(ToolCallDelta(index=1, id="call_b", name="weather", arguments="{}"),)),
)


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 9, "messages": messages or [{"role": "user", "content": "hi"}], **fields}


def asked(*messages: Any, **fields: Any) -> GenerateRequest:
    wire = MESSAGES.decode(msgspec.json.encode(body(*messages, **fields)))
    return messages_request(wire, request_id="msg_1", tenant="t")


def events(raw: bytes) -> list[dict[str, Any]]:
    *parts, rest = raw.decode().split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def stream(*chunks: Any, **fields: Any) -> list[dict[str, Any]]:
    reply = ask(FakeRuntime(chunks), "POST", PATH, body(stream=True, **fields))
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.body)


def error_of(reply: Reply) -> tuple[str, str]:
    assert set(reply.json) == {"type", "error", "request_id"}
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["x-request-id"]
    return reply.json["error"]["type"], reply.json["error"]["message"]


def ended(reason: FinishReason, **fields: Any) -> Chunk:
    return Chunk(text="", finish_reason=reason, **{"usage": USAGE, "timings": TIMINGS, **fields})


def test_a_whole_message() -> None:
    answer = ask(FakeRuntime(whole("a", "b")), "POST", PATH, body()).json
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "default")
    assert answer["content"] == [{"type": "text", "text": "ab", "citations": None}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {
        "input_tokens": 5,  # without those that were kept
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 3,
    }


def test_a_stream_of_text() -> None:
    found = stream(*whole("a", "b"))
    assert [event["type"] for event in found] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert [event["delta"] for event in found[3:5]] == [{"type": "text_delta", "text": text} for text in "ab"]
    assert found[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (found[6]["usage"]["output_tokens"], found[6]["usage"]["input_tokens"]) == (3, 5)


def test_a_stream_tells_first_how_long_the_prompt_is() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=0, cached_tokens=3)
    begun = stream(Chunk(text="a", token_ids=(1,), usage=usage), *whole("b"))[0]["message"]["usage"]
    assert (begun["input_tokens"], begun["cache_read_input_tokens"], begun["output_tokens"]) == (4, 3, 0)
    stored = stream(*whole("ab"))[0]["message"]["usage"]  # in one piece, which has the whole account
    assert (stored["input_tokens"], stored["cache_read_input_tokens"], stored["output_tokens"]) == (5, 2, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"context_management": {"edits": []}},
    ],
)
def test_what_changes_nothing_without_thinking_is_taken(fields: dict[str, Any]) -> None:
    reply = ask(FakeRuntime(whole("a")), "POST", PATH, body(**fields))
    assert reply.status == 200
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_an_answer_goes_on_with_the_assistants_own_words() -> None:
    runtime = FakeRuntime(whole("a"))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I"}]
    assert ask(runtime, "POST", PATH, body(messages=messages)).json["content"][0]["text"] == "a"
    assert ask(runtime, "POST", PATH, body()).status == 200
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    assert ask(runtime, "POST", PATH, body(messages=[messages[0], called])).status == 200
    assert [request.continues for request in runtime.requests] == [True, False, False]
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for extra, words in (
        ({"messages": messages, "output_config": {"format": schema}}, "an answer of a given form"),
        ({"messages": messages[1:]}, "there is no question"),
    ):
        assert words in error_of(ask(runtime, "POST", PATH, body(**extra)))[1]


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    found = stream(ended("stop"))
    assert [event["type"] for event in found[2:4]] == ["content_block_start", "content_block_stop"]
    answer = ask(FakeRuntime([ended("stop")]), "POST", PATH, body()).json
    assert answer["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("chunk", "reason", "sequence"),
    [
        (ended("stop"), "end_turn", None),
        (ended("stop", stopped_by="END"), "stop_sequence", "END"),
        (ended("length", usage=Usage(prompt_tokens=7, completion_tokens=9)), "max_tokens", None),
        (ended("length", usage=Usage(prompt_tokens=7, completion_tokens=8)), "model_context_window_exceeded", None),
        (ended("tool_calls"), "tool_use", None),
    ],
)
def test_why_an_answer_ended(chunk: Chunk, reason: str, sequence: str | None) -> None:
    answer = ask(FakeRuntime([Chunk(text="a"), chunk]), "POST", PATH, body(stop_sequences=["END"])).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert stream(Chunk(text="a"), chunk)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_calls_are_blocks_of_their_own() -> None:
    writer, outcome = MessageWriter(asked(stream=True)), Outcome()
    raw = writer.opening(None)
    for chunk in (*CALLS, ended("tool_calls")):
        outcome.add(chunk)
        raw += writer.piece(chunk)
    found = events(raw + writer.closing(outcome))
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use", "tool_use"]
    assert starts[1]["content_block"] == {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta" and event["index"] == 1]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"town":"x"}'
    assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1, 2]
    answer = json.loads(MessageWriter(asked()).whole(outcome))
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert answer["content"][1]["input"] == {"town": "x"}
    assert answer["stop_reason"] == "tool_use"


def test_a_call_that_was_cut_is_left_out_of_a_whole_message() -> None:
    outcome = Outcome()
    for chunk in (*CALLS[:2], Chunk(text="", tool_calls=(ToolCallDelta(index=0, arguments='{"to'),)), ended("length")):
        outcome.add(chunk)
    answer = json.loads(MessageWriter(asked(max_tokens=3)).whole(outcome))
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["stop_reason"] == "max_tokens"


def test_a_conversation_is_translated() -> None:
    request = asked(
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "ok", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": [1]}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
    )
    calls = (ToolCall(id="c1", name="f", arguments='{"x":[1]}'), ToolCall(id="c2", name="g", arguments="{}"))
    assert request.messages == (
        Message(role="system", content="be\nkind"),
        Message(role="user", content="a"),
        Message(role="assistant", content="ok", tool_calls=calls),
        Message(role="tool", content="1", tool_call_id="c1"),
        Message(role="tool", content="Error: no", tool_call_id="c2"),
        Message(role="user", content="and?"),
    )


def test_what_a_request_asks_for_reaches_the_engine() -> None:
    request = asked(
        temperature=0,
        top_k=3,
        top_p=0.5,
        stop_sequences=["x"],
        stream=True,
        tools=[{"name": "weather", "description": "of a town", "input_schema": SCHEMA, "type": "custom"}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "me"},
        thinking={"type": "disabled"},
        service_tier="auto",
    )
    assert (request.max_tokens, request.stop, request.stream, request.tenant) == (9, ("x",), True, "t")
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0, 3, 0.5)
    (tool,) = request.tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("weather", "of a town", SCHEMA)
    assert (request.tool_choice, request.tool_name, request.parallel_tool_calls) == ("required", "weather", False)
    assert request.response_format is not None
    assert json.loads(request.response_format.text) == SCHEMA
    tools = [{"name": "f", "input_schema": {}}]
    assert asked(tools=tools, tool_choice={"type": "any"}).tool_choice == "required"
    assert asked(tool_choice={"type": "none"}).tool_choice == "none"
    assert asked(output_format={"type": "json_schema", "schema": {}}).response_format is not None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nope": 1}, "nope: unknown field"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "nope": 1}]}]}, "nope"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        sent = {**body(), **fields}
        if path != PATH:
            del sent["max_tokens"]
            if set(fields) & {"max_tokens", "container", "stop_sequences"}:
                continue
        reply = ask(FakeRuntime(whole("a")), "POST", path, sent)
        kind, message = error_of(reply)
        assert (reply.status, kind) == (400, "invalid_request_error")
        assert named in message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ModelTooLargeError(model="default", need_bytes=2, have_bytes=1), 503, "overloaded_error"),
        (BackendStepError(reason="out of order"), 500, "api_error"),
    ],
)
def test_an_error_before_the_answer_and_one_in_its_middle(error: Exception, status: int, kind: str) -> None:
    reply = ask(FakeRuntime([error]), "POST", PATH, body(stream=True))
    assert reply.status == status
    assert error_of(reply) == (kind, str(error))
    *_, last = stream(Chunk(text="a"), error)
    assert last["type"] == "error"
    assert last["error"] == {"type": kind, "message": str(error)}


def test_statuses_have_anthropics_kinds() -> None:
    assert error_of(ask(FakeRuntime(), "POST", PATH, body(model="nope")))[0] == "not_found_error"
    too_large = ask(FakeRuntime(), "POST", PATH, b" " * 20_000)
    assert (too_large.status, error_of(too_large)[0]) == (413, "request_too_large")
    assert error_of(ask(FakeRuntime(), "GET", f"{PATH}/batches"))[0] == "not_found_error"
    app = app_of(FakeRuntime(whole("a")), api_keys=ApiKeys(("secret",)))
    refused = ask(FakeRuntime(), "POST", PATH, body(), app=app, peer=None)
    assert (refused.status, error_of(refused)[0]) == (401, "authentication_error")
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert ask(FakeRuntime(), "POST", PATH, body(), app=app, peer=None, headers=headers).status == 200


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
def test_the_versions_of_the_api(version: str) -> None:
    reply = ask(FakeRuntime(whole("a")), "POST", PATH, body(), headers={"anthropic-version": version})
    assert reply.status == 200


def test_another_version_is_refused() -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        reply = ask(FakeRuntime(whole("a")), "POST", path, body(), headers={"anthropic-version": "2023-01-01"})
        assert "anthropic-version" in error_of(reply)[1]


def test_models_are_listed_as_openais_unless_a_version_of_this_api_is_named() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = ask(FakeRuntime(), "GET", "/v1/models", headers=headers).json
    assert [model["id"] for model in listed["data"]] == ["default", "loaded"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("default", "loaded", False)
    assert ask(FakeRuntime(), "GET", "/v1/models/loaded", headers=headers).json["type"] == "model"
    for model in ("absent", "nope"):
        assert error_of(ask(FakeRuntime(), "GET", f"/v1/models/{model}", headers=headers))[0] == "not_found_error"
    assert ask(FakeRuntime(), "GET", "/v1/models").json["object"] == "list"
    assert ask(FakeRuntime(), "GET", "/v1/models/loaded").json["object"] == "model"


def test_a_model_may_name_an_adapter() -> None:
    runtime = FakeRuntime(whole("a"))
    adapters = {"poems": AdapterSettings(file="poems.gguf")}
    config = Config(models={"loaded": ModelSettings(adapters=adapters)})
    app = build_app(runtime, config, Telemetry())
    assert ask(runtime, "POST", PATH, body(model="loaded:poems"), app=app).status == 200
    (asked_for,) = runtime.requests
    assert (asked_for.model, asked_for.adapters) == ("loaded", (Adapter(name="poems"),))


def test_count_tokens() -> None:
    sent = body(system="12345")
    del sent["max_tokens"]
    runtime = FakeRuntime()
    assert ask(runtime, "POST", f"{PATH}/count_tokens", sent).json == {"input_tokens": 7}
    assert runtime.requests[0].messages == (
        Message(role="system", content="12345"),
        Message(role="user", content="hi"),
    )


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_hang_up_closes_the_generator(is_stream: bool) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(whole("a", "b"), hold=asyncio.Event(), hold_first=not is_stream)
        call = Call(app_of(runtime), "POST", PATH, json.dumps(body(stream=is_stream)).encode()).start()
        await runtime.arrived.wait()
        if is_stream:
            await call.answered.wait()
        call.hang_up()
        assert not (await call.reply()).whole
        assert runtime.n_closed == 1

    asyncio.run(scenario())
