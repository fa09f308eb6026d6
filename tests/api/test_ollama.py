"""The Ollama API's requests, answers and errors, on a fake runtime."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest

from edge_rt.api.callers import ApiKeys
from edge_rt.errors import BackendStepError, ModelTooLargeError
from edge_rt.tensor_types import MediaAnswer
from edge_rt.types import CHAT_SAMPLING, Chunk, Energy, Message, TokenLogprob, Usage
from tests.api.asgi import TIMINGS, Call, FakeRuntime, Reply, app_of, ask, whole

CHAT, GENERATE = "/api/chat", "/api/generate"


class EmbeddingRuntime(FakeRuntime):
    def tasks(self) -> dict[str, str]:
        return {"loaded": "embed"}


def user(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def lines(reply: Reply) -> list[dict[str, Any]]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    *found, rest = reply.body.decode().split("\n")
    assert rest == ""
    return [json.loads(line) for line in found]


def error_of(reply: Reply) -> str:
    assert set(reply.json) == {"error"}
    error: str = reply.json["error"]
    return error


def test_chat_streams_by_default_and_ends_with_durations() -> None:
    *pieces, last = lines(ask(FakeRuntime(whole("a", "b")), "POST", CHAT, {"model": "default", "messages": user()}))
    assert [piece["message"] for piece in pieces] == [{"role": "assistant", "content": text} for text in "ab"]
    assert {piece["done"] for piece in pieces} == {False}
    assert all(set(piece) == {"model", "created_at", "message", "done"} for piece in pieces)
    assert last["done"] is True
    assert last["done_reason"] == "stop"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (7, 500_000_000)
    assert (last["eval_count"], last["eval_duration"], last["load_duration"]) == (3, 200_000_000, 0)
    assert last["total_duration"] >= 0
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None


def test_a_whole_answer_is_one_object() -> None:
    reply = ask(
        FakeRuntime(whole("a", "b", finish_reason="length")),
        "POST",
        GENERATE,
        {"model": "default:latest", "prompt": "x", "stream": False},
    )
    assert reply.headers["content-type"] == "application/json"
    answer = reply.json
    assert (answer["model"], answer["response"]) == ("default:latest", "ab")
    assert (answer["done"], answer["done_reason"]) == (True, "length")
    assert "message" not in answer


def test_what_a_request_asks_for_reaches_the_engine() -> None:
    runtime = FakeRuntime(whole("a"))
    options = {
        "num_predict": 5,
        "num_ctx": 64,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 7,
        "stop": ["x", "y"],
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "draft_num_predict": 3,
        "num_thread": 8,
        "num_gpu": 99,
        "use_mmap": True,
        "mirostat": 0,
        "tfs_z": 1.0,
    }
    body = {"model": "default", "prompt": "p", "system": "s", "options": options, "logprobs": True, "top_logprobs": 2}
    assert ask(runtime, "POST", GENERATE, body).status == 200
    (asked,) = runtime.requests
    assert asked.messages == (Message(role="system", content="s"), Message(role="user", content="p"))
    assert (asked.max_tokens, asked.stop, asked.max_draft, asked.top_logprobs) == (5, ("x", "y"), 3, 2)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 0.5, 0.25)
    assert (sampling.seed, sampling.repeat_penalty, sampling.repeat_last_n) == (7, 1.5, 64)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert asked.tenant == "uid:1000"
    assert asked.stream


@pytest.mark.parametrize("n", [-1, -2])
def test_options_that_set_no_limit(n: int) -> None:
    runtime = FakeRuntime(whole("a"))
    options = {"num_predict": n, "seed": -1, "stop": "one"}
    ask(runtime, "POST", GENERATE, {"model": "default", "prompt": "p", "raw": True, "options": options})
    (asked,) = runtime.requests
    assert (asked.prompt, asked.messages, asked.max_tokens, asked.stop) == ("p", None, None, ("one",))
    assert asked.sampling == CHAT_SAMPLING


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"num_ctx": 65}}, "options.num_ctx: is 65"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"nope": 1}}, "options.nope: unknown field"),
        ({"options": {"temperature": -1}}, "options.temperature: "),
        ({"options": {"stop": [""]}}, "options.stop[0]: "),
        ({"nope": 1}, "nope: unknown field"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "end"}, "suffix"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "images"),
        ({"think": True}, "think"),
        ({"think": "high"}, "think"),
        ({"width": 64}, "width"),
        ({"format": "yaml"}, "format"),
        ({"format": {}}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "5 m"}, "keep_alive"),
        ({"keep_alive": "1m" * 50 + "soon"}, "keep_alive"),
        ({"raw": True, "system": "s"}, "system"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"name": "loaded"}, "name"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * 9_000_000}, "body"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    runtime = FakeRuntime(whole("a"))
    reply = ask(runtime, "POST", GENERATE, {"model": "default", "prompt": "p", **fields})
    assert reply.status in (400, 413)
    assert named in error_of(reply)
    assert not runtime.requests


def test_an_answer_goes_on_with_the_assistants_own_words() -> None:
    runtime = FakeRuntime(whole("a"))
    ask(runtime, "POST", CHAT, {"model": "default", "messages": [*user(), {"role": "assistant", "content": "I"}]})
    ask(runtime, "POST", CHAT, {"model": "default", "messages": user()})
    called = {"role": "assistant", "content": "I", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    ask(runtime, "POST", CHAT, {"model": "default", "messages": [*user(), called]})
    assert [request.continues for request in runtime.requests] == [True, False, False]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": "x", "images": ["aGk="]}, "messages[1].images"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user", "tool_calls": [{"function": {"name": "f"}}]}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "5"}, "messages[1]"),
        ({"role": "assistant", "content": "x", "thinking": "hm"}, "messages[1].thinking"),
        ({"role": "user", "content": ["x"]}, "messages[1].content"),
    ],
)
def test_messages_that_cannot_be_taken(message: dict[str, Any], named: str) -> None:
    reply = ask(FakeRuntime(), "POST", CHAT, {"model": "default", "messages": [*user(), message]})
    assert reply.status == 400
    assert named in error_of(reply)


def test_models_by_name_and_tag() -> None:
    for name, status in (("loaded", 200), ("loaded:latest", 200), ("nope", 404), ("loaded:q8_0", 404), ("", 400)):
        reply = ask(FakeRuntime(whole("a")), "POST", CHAT, {"model": name, "messages": user()})
        assert reply.status == status, name
    assert "loaded:latest" in error_of(ask(FakeRuntime(), "POST", "/api/show", {"model": "loaded:q8_0"}))


def test_an_error_before_the_answer_is_an_http_error_and_one_in_its_middle_a_last_line() -> None:
    too_large = ModelTooLargeError(model="default", need_bytes=2, have_bytes=1)
    reply = ask(FakeRuntime([too_large]), "POST", CHAT, {"model": "default", "messages": user()})
    assert reply.status == 503
    assert "retry-after" in reply.headers
    assert error_of(reply) == str(too_large)
    broken = FakeRuntime([Chunk(text="a"), BackendStepError(reason="out of order")])
    first, last = lines(ask(broken, "POST", CHAT, {"model": "default", "messages": user()}))
    assert first["message"]["content"] == "a"
    assert set(last) == {"error"}
    assert "out of order" in last["error"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_just_stops_is_an_error(stream: bool) -> None:
    body = {"model": "default", "messages": user(), "stream": stream}
    reply = ask(FakeRuntime([Chunk(text="a")]), "POST", CHAT, body)
    assert "broke off" in (lines(reply)[-1]["error"] if stream else error_of(reply))


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_closes_the_generator(stream: bool) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(whole("a", "b"), hold=asyncio.Event(), hold_first=not stream)
        body = json.dumps({"model": "default", "messages": user(), "stream": stream}).encode()
        call = Call(app_of(runtime), "POST", CHAT, body).start()
        await runtime.arrived.wait()
        if stream:
            await call.answered.wait()
        call.hang_up()
        reply = await call.reply()
        assert runtime.n_closed == 1
        assert not reply.whole

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300.0), (0, 0.0), ("0", 0.0), (-1, -1.0), ("-1", -1.0), ("-5m", -1.0), (90, 90.0), ("1h30m5.5s", 5405.5)],
)
def test_keep_alive_says_how_long_a_model_stays(value: Any, seconds: float) -> None:
    runtime = FakeRuntime(whole("a"))
    ask(runtime, "POST", CHAT, {"model": "default", "messages": user(), "keep_alive": value})
    assert runtime.kept == [("default", seconds)]


def test_without_keep_alive_a_model_stays_as_long_as_it_would() -> None:
    runtime = FakeRuntime(whole("a"))
    ask(runtime, "POST", CHAT, {"model": "default", "messages": user()})
    assert runtime.kept == []


@pytest.mark.parametrize(
    ("path", "body", "said"), [(CHAT, {"messages": []}, "message"), (GENERATE, {"prompt": ""}, "response")]
)
def test_a_request_without_a_prompt_loads_the_model_or_unloads_it(path: str, body: dict[str, Any], said: str) -> None:
    runtime = FakeRuntime()
    (line,) = lines(ask(runtime, "POST", path, {"model": "default", **body, "keep_alive": "10m"}))
    assert (line["done"], line["done_reason"]) == (True, "load")
    assert line[said] in ("", {"role": "assistant", "content": ""})
    assert (runtime.loads, runtime.kept) == (["default"], [("default", 600.0)])
    reply = ask(runtime, "POST", path, {"model": "default", **body, "keep_alive": 0, "stream": False})
    assert reply.json["done_reason"] == "unload"
    assert runtime.loads == ["default", "-default"]


def test_logprobs_and_energy() -> None:
    token = TokenLogprob(token_id=1, raw=b"a", logprob=-0.5, top=((1, b"a", -0.5), (2, b"\xff", -1.0)))
    usage = Usage(prompt_tokens=1, completion_tokens=1, energy=Energy(total_j=2.0))
    chunk = Chunk(text="a", logprobs=(token,), finish_reason="stop", usage=usage, timings=TIMINGS)
    body = {"model": "default", "messages": user(), "logprobs": True, "top_logprobs": 2, "stream": False}
    answer = ask(FakeRuntime([chunk]), "POST", CHAT, body).json
    (said,) = answer["logprobs"]
    assert (said["token"], said["logprob"], said["bytes"]) == ("a", -0.5, [97])
    assert [best["bytes"] for best in said["top_logprobs"]] == [[97], [255]]
    assert answer["energy"]["total_j"] == 2.0


def test_listing_showing_and_what_is_in_memory() -> None:
    runtime = FakeRuntime()
    listed = ask(runtime, "GET", "/api/tags").json["models"]
    assert [model["name"] for model in listed] == ["default:latest", "loaded:latest"]  # absent is not pulled
    (running,) = ask(runtime, "GET", "/api/ps").json["models"]
    assert (running["name"], running["size"], running["size_vram"], running["context_length"]) == (
        "loaded:latest",
        20,
        0,
        64,
    )
    assert datetime.fromisoformat(running["expires_at"]) > datetime.fromisoformat(listed[0]["modified_at"])
    shown = ask(runtime, "POST", "/api/show", {"name": "loaded"}).json
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 64
    assert ask(runtime, "POST", "/api/show", {}).status == 400
    assert ask(runtime, "GET", "/api/version").json["version"].count(".") == 2


def test_embeddings() -> None:
    runtime = EmbeddingRuntime(findings={"loaded": MediaAnswer(task="embed", embedding=(0.5, 1.0), n_tokens=3)})
    body = {"model": "loaded", "input": ["a", "b"], "truncate": True, "keep_alive": 60}
    answer = ask(runtime, "POST", "/api/embed", body).json
    assert answer["embeddings"] == [[0.5, 1.0]] * 2
    assert answer["prompt_eval_count"] == 6
    assert runtime.kept == [("loaded", 60.0)]
    assert [(look.truncate, look.dimensions) for look in runtime.looks] == [(True, None)] * 2
    assert ask(runtime, "POST", "/api/embed", {"model": "loaded", "input": "a"}).json["embeddings"] == [[0.5, 1.0]]
    assert ask(runtime, "POST", "/api/embeddings", {"model": "loaded", "prompt": "a"}).json == {"embedding": [0.5, 1.0]}
    assert ask(runtime, "POST", "/api/embed", {"model": "loaded", "input": []}).json["embeddings"] == []
    for wrong, named in (
        ({"model": "default", "input": "a"}, "embed"),
        ({"model": "loaded", "input": "a", "dimensions": 0}, "dimensions"),
        ({"model": "loaded", "input": ["a", ""]}, "input[1]"),
        ({"model": "loaded", "input": ["a"] * 3000}, "input"),
    ):
        reply = ask(runtime, "POST", "/api/embed", wrong, app=app_of(runtime, max_body_bytes=100_000))
        assert reply.status == 400
        assert named in error_of(reply)


@pytest.mark.parametrize("path", ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/x"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_what_edge_rt_does_elsewhere_is_refused_with_where(method: str, path: str) -> None:
    reply = ask(FakeRuntime(), method, path, {"model": "x"})
    assert reply.status == 501
    assert "is not served: " in error_of(reply)


def test_probes_and_unknown_paths() -> None:
    assert ask(FakeRuntime(), "GET", "/").body == b"Ollama is running"
    assert ask(FakeRuntime(), "HEAD", "/").status == 200
    assert "not found" in error_of(ask(FakeRuntime(), "GET", "/api/nope"))
    assert ask(FakeRuntime(), "GET", "/api/nope").status == 404
    wrong = ask(FakeRuntime(), "GET", CHAT)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert "method not allowed" in error_of(wrong)


def test_a_key_is_asked_for_over_tcp_and_the_error_is_ollamas() -> None:
    app = app_of(FakeRuntime(), api_keys=ApiKeys(("secret",)))
    reply = ask(FakeRuntime(), "GET", "/api/tags", app=app, peer=None)
    assert reply.status == 401
    assert error_of(reply)
    assert ask(FakeRuntime(), "GET", "/", app=app, peer=None).status == 200
    headers = {"authorization": "Bearer secret"}
    assert ask(FakeRuntime(), "GET", "/api/tags", app=app, peer=None, headers=headers).status == 200
