"""The API in process: every endpoint, every way an answer can end."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from edge_rt import errors
from edge_rt.api.callers import ApiKeys
from edge_rt.telemetry import Telemetry
from edge_rt.types import CacheWishes, Chunk, Origin, TokenLogprob
from tests.api.asgi import INFO, TIMINGS, USAGE, Call, FakeRuntime, app_of, ask, chat_body, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def answering(*texts: str, **kw: Any) -> FakeRuntime:
    return FakeRuntime(whole(*texts, **kw))


# Whole answers


def test_a_chat_answer() -> None:
    reply = ask(answering("Hello", " you", ""), "POST", CHAT, chat_body())
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    answer = reply.json
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert isinstance(answer["created"], int)
    assert answer["model"] == "default"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello you", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["timings"]["prompt_n"] == 5


def test_a_completion_answer() -> None:
    answer = ask(answering("abc", finish_reason="length"), "POST", COMPLETIONS, {"prompt": "x"}).json
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]


def test_feedback_is_taken_for_an_answer_that_is_known() -> None:
    runtime = answering("x")
    assert ask(runtime, "POST", "/v1/feedback", {"id": "known", "good": False}).status == 204
    assert runtime.opinions == [("uid:1000", False)]
    assert ask(runtime, "POST", "/v1/feedback", {"id": "other", "good": True}).status == 400
    assert ask(runtime, "POST", "/v1/feedback", {"id": "known"}).status == 400


FROM_CLOUD = Origin(endpoint="big", reason="hard", cache="miss", cost=0.25)


def from_cloud() -> FakeRuntime:
    chunks = whole("Hel", "lo")
    first = replace(chunks[0], origin=replace(FROM_CLOUD, cost=None))
    return FakeRuntime((first, *chunks[1:-1], replace(chunks[-1], origin=FROM_CLOUD)))


def test_an_answer_says_where_it_comes_from() -> None:
    reply = ask(from_cloud(), "POST", CHAT, chat_body())
    said = {name: value for name, value in reply.headers.items() if name.startswith("x-edge-")}
    assert said == {
        "x-edge-route": "cloud",
        "x-edge-route-reason": "hard",
        "x-edge-endpoint": "big",
        "x-edge-cache": "miss",
        "x-edge-cost": "0.250000",
    }
    assert reply.json["origin"] == {
        "route": "cloud",
        "reason": "hard",
        "endpoint": "big",
        "cost": 0.25,
        "cache": "miss",
    }


def test_a_stream_says_so_in_its_headers_and_tells_the_cost_at_its_end() -> None:
    reply = ask(from_cloud(), "POST", CHAT, chat_body(stream=True))
    assert (reply.headers["x-edge-route"], reply.headers["x-edge-cache"]) == ("cloud", "miss")
    assert "x-edge-cost" not in reply.headers
    assert reply.events[-2]["origin"]["cost"] == 0.25


def test_a_stored_answer_has_an_age() -> None:
    origin = Origin(reason="cached", cache="hit-semantic", age_s=61.4, similarity=0.98)
    chunks = whole("yes")
    reply = ask(FakeRuntime((replace(chunks[0], origin=origin), *chunks[1:])), "POST", CHAT, chat_body())
    headers = reply.headers
    assert (headers["age"], headers["x-edge-similarity"], headers["x-edge-route"]) == ("61", "0.980", "local")


def test_wishes_for_route_and_cache_come_by_header_or_field() -> None:
    runtime = answering("x")
    control = {"Cache-Control": "no-store, max-age=60", "X-Edge-Route": "local"}
    ask(runtime, "POST", CHAT, chat_body(), headers=control)
    ask(runtime, "POST", COMPLETIONS, {"prompt": "x", "route": "cloud", "cache": {"sampled": True, "tags": ["a"]}})
    ask(runtime, "POST", CHAT, chat_body())
    by_header, by_field, plain = runtime.requests
    assert (by_header.route, by_header.cache) == ("local", CacheWishes(no_store=True, max_age_s=60.0))
    assert (by_field.route, by_field.cache) == ("cloud", CacheWishes(sampled=True, tags=("a",)))
    assert (plain.route, plain.cache) == ("auto", CacheWishes())


def test_a_priority_comes_by_header_or_field() -> None:
    runtime = answering("x")
    ask(runtime, "POST", CHAT, chat_body(), headers={"X-Edge-Priority": "Interactive"})
    ask(runtime, "POST", COMPLETIONS, {"prompt": "x", "priority": "background"})
    ask(runtime, "POST", CHAT, chat_body())
    assert [request.priority for request in runtime.requests] == ["interactive", "background", "normal"]


def test_headers_that_come_twice_all_count() -> None:
    runtime = answering("x")
    headers = {"Cache-Control": "max-age=100", "cache-control": "no-store", "X-Edge-Route": " LOCAL "}
    ask(runtime, "POST", CHAT, chat_body(), headers=headers)
    assert runtime.requests[0].cache == CacheWishes(no_store=True, max_age_s=100.0)
    assert runtime.requests[0].route == "local"


@pytest.mark.parametrize(
    ("headers", "extra", "param"),
    [
        ({"X-Edge-Route": "moon"}, {}, "x-edge-route"),
        ({"X-Edge-Route": "cloud", "x-edge-route": "local"}, {}, "x-edge-route"),
        ({"X-Edge-Route": "local"}, {"route": "cloud"}, "route"),
        ({}, {"route": "moon"}, "route"),
        ({"X-Edge-Priority": "now"}, {}, "x-edge-priority"),
        ({"X-Edge-Priority": "normal"}, {"priority": "background"}, "priority"),
        ({}, {"priority": "now"}, "priority"),
        ({}, {"cache": {"tags": [""]}}, "cache.tags[0]"),
    ],
)
def test_a_wish_that_cannot_be_is_refused(headers: dict[str, str], extra: dict[str, Any], param: str) -> None:
    reply = ask(answering("x"), "POST", CHAT, chat_body(**extra), headers=headers)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_ids_are_never_the_callers() -> None:
    runtime = answering("x")
    for _ in range(2):
        ask(runtime, "POST", CHAT, chat_body(), headers={"X-Request-Id": "same"})
    first, second = runtime.requests
    assert first.id != second.id


def test_the_request_carries_its_tenant_and_model() -> None:
    runtime = answering("x")
    ask(runtime, "POST", CHAT, chat_body(model="loaded"))
    assert (runtime.requests[0].tenant, runtime.requests[0].model) == ("uid:1000", "loaded")


def test_logprobs() -> None:
    token = TokenLogprob(token_id=1, raw=b"a", logprob=-0.5, top=((1, b"a", -0.5),))
    chunks = [
        Chunk(text="a", logprobs=(token,)),
        Chunk(text="", logprobs=(token,), finish_reason="stop", usage=USAGE, timings=TIMINGS),
    ]
    content = ask(FakeRuntime(chunks), "POST", CHAT, chat_body(logprobs=True)).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "a"]
    events = ask(FakeRuntime(chunks), "POST", CHAT, chat_body(logprobs=True, stream=True)).events
    n_logprobs = [len(e["choices"][0]["logprobs"]["content"]) for e in events[:-1] if e["choices"][0]["logprobs"]]
    assert n_logprobs == [1, 1]


# Streams


def check_stream(events: list[Any], kind: str, *, usage: bool) -> str:
    """Check a stream's form and give its text."""
    assert events[-1] == "DONE"
    chunks = events[:-1]
    assert {(e["id"], e["created"], e["model"], e["object"]) for e in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "default", kind)
    }
    if usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 10
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["timings"]["predicted_n"] == 3
    else:
        assert all("usage" not in chunk for chunk in chunks)
        assert chunks[-1]["timings"]["predicted_n"] == 3
    assert sum("timings" in e for e in events[:-1]) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    choices = [chunk["choices"][0] for chunk in chunks]
    if kind == "text_completion":
        return "".join(choice["text"] for choice in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("texts", [("Hel", "", "lo\n\ndata: x", "!"), ("all at once",), ("",), ("ends", "")])
def test_a_stream_holds_what_a_whole_answer_holds(texts: tuple[str, ...], usage: bool) -> None:
    options: dict[str, Any] = {"stream": True}
    if usage:
        options["stream_options"] = {"include_usage": True}
    reply = ask(answering(*texts), "POST", CHAT, chat_body(**options))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.whole
    assert check_stream(reply.events, "chat.completion.chunk", usage=usage) == "".join(texts)
    reply = ask(answering(*texts), "POST", COMPLETIONS, {"prompt": "x", **options})
    assert check_stream(reply.events, "text_completion", usage=usage) == "".join(texts)


def test_events_leave_as_they_come() -> None:
    async def scenario() -> None:
        runtime = answering("a", "b", "")
        runtime.hold = asyncio.Event()
        call = Call(app_of(runtime), "POST", CHAT, json.dumps(chat_body(stream=True)).encode()).start()
        await call.answered.wait()
        assert b'"content":"a"' in call.sent[1]["body"]
        runtime.hold.set()
        reply = await call.reply()
        assert len(reply.parts) == 3  # role with a, b, and the end in one write

    asyncio.run(scenario())


# Errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.ContextLengthError(prompt_tokens=99, n_ctx=64), 400, "context_length_exceeded"),
        (errors.QueueFullError(waiting=1, limit=1, retry_after_s=3.0), 429, "queue_full"),
        (errors.ShuttingDownError(), 503, "shutting_down"),
        (errors.WorkerLostError(model="m", reason="signal 9"), 503, "worker_lost"),
        (errors.ModelTooLargeError(model="m", need_bytes=2, have_bytes=1), 503, "model_too_large"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_an_error_before_the_first_chunk_is_a_real_status(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    reply = ask(FakeRuntime([error]), "POST", CHAT, chat_body(stream=stream))
    assert (reply.status, reply.error["code"]) == (status, code)
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert "secret" not in reply.error["message"]


@pytest.mark.parametrize("error", [errors.WorkerLostError(model="m", reason="signal 9"), ZeroDivisionError("secret")])
def test_an_error_in_mid_stream_is_the_last_event(error: Exception) -> None:
    telemetry = Telemetry()
    runtime = FakeRuntime([Chunk(text="a"), error])
    reply = ask(runtime, "POST", CHAT, chat_body(stream=True), app=app_of(runtime, telemetry=telemetry))
    assert reply.status == 200
    assert reply.whole
    *events, last = reply.events
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None]
    code = "worker_lost" if isinstance(error, errors.WorkerLostError) else "internal_error"
    assert last["error"]["code"] == code
    assert "secret" not in json.dumps(last)
    assert f'outcome="{code}",route="{CHAT}",status="200"'.encode() in telemetry.exposition()


def test_an_error_in_the_middle_of_a_whole_answer_is_a_real_status() -> None:
    runtime = FakeRuntime([Chunk(text="a"), errors.BackendStepError(reason="x")])
    assert ask(runtime, "POST", CHAT, chat_body()).status == 500


@pytest.mark.parametrize("chunks", [[], [Chunk(text="a")], [Chunk(text="a", finish_reason="stop")]])
def test_an_answer_that_breaks_off_is_an_error(chunks: list[Chunk]) -> None:
    reply = ask(FakeRuntime(chunks), "POST", CHAT, chat_body())
    assert (reply.status, reply.error["code"]) == (500, "backend_step")
    reply = ask(FakeRuntime(chunks), "POST", CHAT, chat_body(stream=True))
    assert b"backend_step" in reply.body
    assert b"[DONE]" not in reply.body


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "invalid_request"),
        (chat_body(zzz=1), "zzz", "invalid_request"),
        (chat_body(n=0), "n", "invalid_request"),
        (chat_body(n=33), "n", "invalid_request"),
        (chat_body(tools=[{"type": "web_search"}]), "tools[0].type", "unsupported"),
        (chat_body(temperature=-1), "temperature", "invalid_request"),
        (chat_body(model="nope"), "model", "model_not_found"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "invalid_request"),
    ],
)
def test_bad_requests_name_the_field(body: dict[str, Any], param: str | None, code: str) -> None:
    reply = ask(answering("x"), "POST", CHAT, body)
    assert reply.status == (404 if code == "model_not_found" else 400)
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", ["\x00", "", "😀" * 2000, [{"type": "text", "text": "x"}]])
def test_strange_content_is_answered(content: Any) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}, ensure_ascii=False).encode()
    assert ask(answering("x"), "POST", CHAT, body).status == 200


# Bodies


@pytest.mark.parametrize(
    "call",
    [
        {"body": b"x" * 10_001},
        {"body": [b"x" * 6000, b"x" * 6000]},
        {"body": b"", "headers": {"Content-Length": "10001"}, "body_ends": False},
        {"body": b"x" * 10_001, "headers": {"Content-Length": "5"}},
        {"body": b"", "headers": {"Content-Length": "9" * 5000}, "body_ends": False},
    ],
)
def test_a_body_over_the_limit_is_refused_and_the_rest_not_read(call: dict[str, Any]) -> None:
    reply = ask(answering("x"), "POST", CHAT, **call)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert reply.headers["connection"] == "close"
    assert "10000" in reply.error["message"]


def test_an_announced_body_over_the_limit_is_not_read_at_all() -> None:
    async def scenario() -> None:
        call = Call(app_of(answering("x")), "POST", CHAT, b"x", headers={"Content-Length": "10001"})
        assert (await call.reply()).status == 413
        assert call.n_received == 0

    asyncio.run(scenario())


def test_a_body_in_many_parts() -> None:
    raw = json.dumps(chat_body()).encode()
    assert ask(answering("x"), "POST", CHAT, [raw[i : i + 1] for i in range(len(raw))]).status == 200


def test_a_compressed_body_is_refused() -> None:
    reply = ask(answering("x"), "POST", CHAT, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert reply.status == 415


def test_a_client_that_leaves_in_its_body_is_forgotten() -> None:
    async def scenario() -> None:
        runtime = answering("x")
        call = Call(app_of(runtime), "POST", CHAT, b'{"mess', body_ends=False).start()
        call.hang_up()
        assert (await call.reply()).status == 0
        assert runtime.requests == []

    asyncio.run(scenario())


# Hang-ups


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_first", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_hang_up_closes_the_generators(stream: bool, hold_first: bool, n: int) -> None:
    async def scenario() -> None:
        telemetry = Telemetry()
        runtime = FakeRuntime(whole("a", "b"), hold=asyncio.Event(), hold_first=hold_first)
        body = json.dumps(chat_body(stream=stream, n=n)).encode()
        call = Call(app_of(runtime, telemetry=telemetry), "POST", CHAT, body).start()
        await runtime.arrived.wait()
        for _ in range(5):  # the other answers' tasks begin too
            await asyncio.sleep(0)
        assert len(runtime.requests) == n
        if stream and not hold_first:
            await call.answered.wait()
        assert runtime.n_closed == 0
        call.hang_up()
        reply = await call.reply()
        assert runtime.n_closed == n
        assert not reply.whole
        assert b'outcome="hung_up"' in telemetry.exposition()

    asyncio.run(scenario())


def test_a_client_that_leaves_after_its_answer_changes_nothing() -> None:
    async def scenario() -> None:
        call = Call(app_of(answering("a")), "POST", CHAT, json.dumps(chat_body(stream=True)).encode())
        call.hang_up()  # seen only when the generator first waits, which this one never does
        reply = await call.reply()
        assert reply.whole
        assert reply.events[-1] == "DONE"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_server_cancels_is_told_so(stream: bool) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(whole("a", "b"), hold=asyncio.Event(), hold_first=not stream)
        call = Call(app_of(runtime), "POST", CHAT, json.dumps(chat_body(stream=stream)).encode()).start()
        await runtime.arrived.wait()
        if stream:
            await call.answered.wait()
        assert call.task is not None
        call.task.cancel()
        reply = await call.reply()
        assert reply.whole
        assert b"shutting_down" in reply.body
        assert reply.status == (200 if stream else 503)
        assert runtime.n_closed == 1

    asyncio.run(scenario())


# The other endpoints


def test_models() -> None:
    listed = ask(answering("x"), "GET", "/v1/models").json
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["status"]) for card in listed["data"]] == [
        ("default", "model", "unloaded"),
        ("loaded", "model", "loaded"),
    ]
    card = ask(answering("x"), "GET", "/v1/models/loaded").json
    assert card == listed["data"][1]
    assert card["meta"]["n_ctx"] == 64
    assert (card["meta"]["backend"], card["meta"]["backend_reason"]) == ("fake", "the first cannot")


@pytest.mark.parametrize("model_id", ["nope", "absent", "a/b"])
def test_a_model_that_cannot_be_asked_is_not_found(model_id: str) -> None:
    reply = ask(answering("x"), "GET", f"/v1/models/{model_id}")
    assert reply.status == 404
    assert reply.error["param"] == "model"


def test_tokenize_and_back() -> None:
    runtime = answering("x")
    assert ask(runtime, "POST", "/tokenize", {"content": "hé"}).json == {"tokens": [104, 195, 169, 2]}
    body = {"content": "h", "add_special": True, "parse_special": False, "model": "loaded"}
    assert ask(runtime, "POST", "/tokenize", body).json == {"tokens": [1, 104]}
    assert ask(runtime, "POST", "/detokenize", {"tokens": [104, 195, 169]}).json == {"content": "hé", "prompt": "hé"}
    vllms = {"prompt": "h", "add_special_tokens": False, "parse_special": False}
    assert ask(runtime, "POST", "/tokenize", vllms).json == {"tokens": [104], "count": 1, "max_model_len": 64}
    del vllms["add_special_tokens"]
    assert ask(runtime, "POST", "/tokenize", vllms).json["tokens"] == [1, 104]  # its default
    info = ask(runtime, "GET", "/tokenizer_info?model=loaded").json
    assert info == {"bos_token": "<s>", "eos_token": None, "model_max_length": INFO.caps.n_ctx}
    assert ask(runtime, "GET", "/tokenizer_info?model=nope").status == 404
    for path, bad in [
        ("/tokenize", {"content": "x", "with_pieces": True}),
        ("/tokenize", {"content": "x", "model": "nope"}),
        ("/tokenize", {}),
        ("/tokenize", {"content": "x", "prompt": "x"}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/detokenize", {"tokens": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**30]}),
    ]:
        assert ask(runtime, "POST", path, bad).status in (400, 404)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"content": "x", "add_special_tokens": False}, "add_special_tokens"),
        ({"content": "x", "add_special": True, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "add_special": False}, "add_special"),
        ({"content": "x", "prompt": "x"}, "prompt"),
        ({"add_special": True}, "content"),
    ],
)
def test_a_text_is_tokenised_in_one_dialect(given: dict[str, Any], named: str) -> None:
    reply = ask(answering("x"), "POST", "/tokenize", given)
    assert (reply.status, reply.error["param"]) == (400, named)


def test_health() -> None:
    runtime = answering("x")
    for path in ("/health", "/health/live", "/health/ready"):
        assert ask(runtime, "GET", path).json == {"status": "ok"}
    runtime.is_ready = False
    assert ask(runtime, "GET", "/health/live").status == 200
    for path in ("/health", "/health/ready"):
        reply = ask(runtime, "GET", path)
        assert reply.status == 503
        assert reply.error == {"code": 503, "message": "Loading model", "type": "unavailable_error"}


def test_metrics() -> None:
    reply = ask(answering("x"), "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert b"# TYPE edge_rt_requests_total counter" in reply.body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("HEAD", "/health", 200),
    ],
)
def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    reply = ask(answering("x"), method, path)
    assert reply.status == status
    if status >= 400:
        assert set(reply.error) >= {"message", "type", "param", "code"}
        assert ("allow" in reply.headers) == (status == 405)


# Callers, ids and logs


def test_over_tcp_only_a_right_key_passes_and_health_needs_none() -> None:
    runtime = answering("x")
    app = app_of(runtime, api_keys=ApiKeys(("secret-key",)))
    right, wrong = {"Authorization": "Bearer secret-key"}, {"Authorization": "Bearer secret-kez"}
    for path in ("/v1/models", "/metrics", "/nope", CHAT):
        for headers in ({}, wrong):
            reply = ask(runtime, "GET", path, app=app, peer=None, headers=headers)
            assert reply.status == 401
            assert reply.headers["www-authenticate"] == "Bearer"
    assert ask(runtime, "GET", "/v1/models", app=app, peer=None, headers=right).status == 200
    for path in ("/health", "/health/live", "/health/ready"):
        assert ask(runtime, "GET", path, app=app, peer=None).status == 200
    ask(runtime, "POST", CHAT, chat_body(), app=app, peer=None, headers=right)
    assert runtime.requests[-1].tenant.startswith("key:")
    assert "secret" not in runtime.requests[-1].tenant


def test_without_keys_nothing_but_health_is_answered_over_tcp() -> None:
    assert ask(answering("x"), "POST", CHAT, chat_body(), peer=None).status == 401


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3_4", True), ("a b", False), ("x" * 129, False), ("é", False), ("", False)]
)
def test_request_ids(sent: str, kept: bool) -> None:
    reply = ask(answering("x"), "GET", "/health", headers={"X-Request-Id": sent})
    assert (reply.headers["x-request-id"] == sent) == kept
    assert len(reply.headers["x-request-id"]) >= 11


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
def test_probes_that_find_all_well_fill_no_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(answering("x"), "GET", path)
        ask(answering("x"), "POST", path)
    access = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "edge_rt.access"]
    assert access == [("DEBUG", f"GET {path} 200"), ("INFO", f"POST {path} 405")]


def test_the_access_log_names_the_caller_but_not_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    runtime = answering("the answer")
    with caplog.at_level(logging.INFO):
        ask(runtime, "POST", CHAT, {"messages": [{"role": "user", "content": "the question"}]})
        ask(FakeRuntime([ValueError("broken")]), "POST", CHAT, chat_body())
    access = [record for record in caplog.records if record.name == "edge_rt.access"]
    assert [record.getMessage() for record in access] == [f"POST {CHAT} 200", f"POST {CHAT} 500"]
    assert vars(access[0]) | {"uid": 1000, "gid": 100, "pid": 4, "outcome": "ok"} == vars(access[0])
    assert "the question" not in caplog.text
    assert "the answer" not in caplog.text
    assert "broken" in caplog.text


def test_metrics_count_by_route_pattern() -> None:
    telemetry = Telemetry()
    app = app_of(answering("x"), telemetry=telemetry)
    ask(answering("x"), "GET", "/v1/models/nope", app=app)
    ask(answering("x"), "GET", "/secret-path", app=app)
    text = telemetry.exposition().decode()
    assert 'outcome="model_not_found",route="/v1/models/{model_id:path}",status="404"' in text
    assert 'outcome="not_found",route="unmatched",status="404"' in text
    assert "secret-path" not in text


def test_a_tensor_models_placement() -> None:
    reply = ask(FakeRuntime(), "GET", "/v1/placement/eyes")
    assert reply.json == {
        "policy": "balanced",
        "places": [],
        "refused": [{"what": "int8 on npu", "reason": "no driver"}],
    }
    assert ask(FakeRuntime(), "GET", "/v1/placement/nope").status == 404
