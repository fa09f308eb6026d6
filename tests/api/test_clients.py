"""Real clients on a real daemon: the openai package, curl, and edge_rt's own, over the Unix socket."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from edge_rt.api.client import Client, unreachable
from edge_rt.errors import (
    ContextLengthError,
    DaemonLostError,
    DaemonUnreachableError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from edge_rt.types import Message
from tests import patience
from tests.api.daemon import Daemon
from tests.patience import PATIENCE_S

TEXT = "grüße, 😀 and a line\nbreak"


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# The openai package


def test_openai_chat(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.chat.completions.create(model="null", messages=user(TEXT), temperature=0)
    ChatCompletion.model_validate(answer.model_dump())
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["predicted_n"] == answer.usage.completion_tokens


def test_openai_chat_stream(openai_sdk: openai.OpenAI) -> None:
    stream = openai_sdk.chat.completions.create(
        model="null", messages=user(TEXT), temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [ChatCompletionChunk.model_validate(chunk.model_dump()) for chunk in stream]
    *answer, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(TEXT.encode()) + 1
    assert [chunk.choices[0].finish_reason for chunk in answer] == [None] * (len(answer) - 1) + ["stop"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == TEXT
    assert answer[0].choices[0].delta.role == "assistant"


def test_openai_completions(openai_sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "null", "prompt": "once", "max_tokens": 12, "temperature": 0}
    answer = openai_sdk.completions.create(**asked, logprobs=2)
    Completion.model_validate(answer.model_dump())
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    *pieces, last = list(openai_sdk.completions.create(**asked, stream=True))
    Completion.model_validate(last.model_dump())
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * len(pieces)
    assert "".join(piece.choices[0].text for piece in (*pieces, last)) == answer.choices[0].text
    by_ids = openai_sdk.completions.create(**{**asked, "prompt": list(b"once")})
    assert by_ids.choices[0].text == answer.choices[0].text


def test_openai_several_answers(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.chat.completions.create(model="null", messages=user("abc"), n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "abc") for i in range(3)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    texts, ends = ["", ""], ["", ""]
    for event in openai_sdk.chat.completions.create(model="null", messages=user("abc"), n=2, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    assert (texts, ends) == (["abc", "abc"], ["stop", "stop"])


def test_openai_scores_a_prompt_as_evaluation_harnesses_do(openai_sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "null", "temperature": 0, "logprobs": 2, "echo": True}
    plain = openai_sdk.completions.create(model="null", prompt="once", max_tokens=1, temperature=0)
    for max_tokens in (0, 1):
        answer = openai_sdk.completions.create(**asked, prompt=[list(b"once"), list(b"two")], max_tokens=max_tokens)
        once = answer.choices[0]
        assert once.text == "once" + max_tokens * plain.choices[0].text
        assert once.logprobs is not None
        assert once.logprobs.token_logprobs is not None
        assert once.logprobs.token_logprobs[0] is None
        assert len(once.logprobs.token_logprobs) == 4 + max_tokens
        assert all(logprob is not None and logprob < 0 for logprob in once.logprobs.token_logprobs[1:])
        assert "".join(once.logprobs.tokens or ()) == once.text
        assert once.logprobs.text_offset == list(range(4 + max_tokens))
        assert answer.choices[1].text.startswith("two")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 2 * max_tokens)
    events = list(openai_sdk.completions.create(**asked, prompt="once", max_tokens=1, stream=True))
    pieces = [choice for event in events for choice in event.choices]
    assert "".join(piece.text for piece in pieces) == "once" + plain.choices[0].text
    streamed = [p for piece in pieces if piece.logprobs is not None for p in piece.logprobs.token_logprobs or ()]
    assert (
        streamed
        == openai_sdk.completions.create(**asked, prompt="once", max_tokens=1).choices[0].logprobs.token_logprobs
    )  # type: ignore[union-attr]


def test_openai_best_of(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.completions.create(model="null", prompt="once", max_tokens=3, best_of=3, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 9)
    with pytest.raises(openai.BadRequestError) as streamed:
        openai_sdk.completions.create(model="null", prompt="once", best_of=2, stream=True)
    assert (streamed.value.code, streamed.value.param) == ("invalid_request", "best_of")


def test_openai_beam_search(openai_sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "null", "prompt": "once", "max_tokens": 4}
    answer = openai_sdk.completions.create(**asked, n=2, logprobs=1, extra_body={"num_beams": 3, "length_penalty": 0.5})
    Completion.model_validate(answer.model_dump(exclude={"choices": {"__all__": {"cumulative_logprob", "score"}}}))
    best, second = answer.choices
    assert best.text == openai_sdk.completions.create(**asked, temperature=0).choices[0].text
    assert [(c.index, c.finish_reason) for c in answer.choices] == [(0, "length"), (1, "length")]
    assert best.logprobs is not None
    assert second.text != best.text
    extra = [choice.model_extra or {} for choice in answer.choices]
    assert extra[0]["cumulative_logprob"] == pytest.approx(sum(best.logprobs.token_logprobs or ()))  # type: ignore[arg-type]
    assert extra[0]["score"] == pytest.approx(extra[0]["cumulative_logprob"] / 2)
    assert extra[1]["score"] < extra[0]["score"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)
    chat = openai_sdk.chat.completions.create(
        model="null", messages=user("abc"), extra_body={"use_beam_search": True}, n=2
    )
    assert chat.choices[0].message.content == "abc"
    with pytest.raises(openai.BadRequestError) as many:
        openai_sdk.completions.create(**asked, extra_body={"num_beams": 9})
    assert many.value.param == "num_beams"


def test_openai_adapters(openai_sdk: openai.OpenAI) -> None:
    asked: Any = {"prompt": "once", "max_tokens": 8, "temperature": 0}
    plain = openai_sdk.completions.create(**asked, model="null-lora").choices[0].text
    named = openai_sdk.completions.create(**asked, model="null-lora:poems").choices[0].text
    assert named != plain == openai_sdk.completions.create(**asked, model="null").choices[0].text
    for entry in ({"id": "poems"}, {"id": 0, "scale": 1.0}):
        answer = openai_sdk.completions.create(**asked, model="null-lora", extra_body={"lora": [entry]})
        assert (answer.choices[0].text, answer.model) == (named, "null-lora")
    assert (openai_sdk.models.retrieve("null-lora").model_extra or {})["meta"]["adapters"] == ["poems"]
    other = openai_sdk.completions.create(**asked, model="null-lora", extra_body={"lora": [{"id": 0, "scale": 0.5}]})
    assert other.choices[0].text not in (plain, named)
    for model, entry in (("null-lora", {"id": "prose"}), ("null-lora", {"id": 1}), ("null", {"id": "poems"})):
        with pytest.raises(openai.BadRequestError) as refused:
            openai_sdk.completions.create(**asked, model=model, extra_body={"lora": [entry]})
        assert str(refused.value.param).startswith("lora")


def test_openai_models(openai_sdk: openai.OpenAI) -> None:
    assert {"null", "null-slow"} <= {model.id for model in openai_sdk.models.list()}
    assert openai_sdk.models.retrieve("null").object == "model"


def test_openai_errors(openai_sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_sdk.chat.completions.create(model="nope", messages=user("x"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        openai_sdk.completions.create(model="null", prompt="x", suffix="y")
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported", "suffix")
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_sdk.chat.completions.create(model="null", messages=user("x" * 5000), stream=True)
    assert too_long.value.code == "context_length_exceeded"
    body: Any = too_long.value.body
    assert body["details"]["n_ctx"] == 4096
    assert body["details"]["prompt_tokens"] > 5000


def test_openai_hears_of_a_worker_killed_in_mid_stream_and_is_served_by_the_next(socket_dir: Path) -> None:
    with (
        Daemon(socket_dir, extra="[engine]\nstream_interval_s = 0.0\n") as own,
        own.client() as http,
        openai.OpenAI(base_url="http://edge_rt/v1", api_key="none", http_client=http, max_retries=0) as sdk,
    ):
        stream = sdk.chat.completions.create(model="null-slow", messages=user("x" * 2000), temperature=0, stream=True)
        chunks = [next(stream) for _ in range(5)]
        killed = own.worker
        killed.kill()
        with pytest.raises(openai.APIError) as lost:
            chunks.extend(stream)
        assert lost.value.code == "worker_lost"
        assert {chunk.choices[0].delta.content for chunk in chunks[1:]} == {"x"}
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
        again = sdk.chat.completions.create(model="null-slow", messages=user("again"), temperature=0)
        assert again.choices[0].message.content == "again"
        assert own.worker.pid != killed.pid
        assert own.metric('edge_rt_worker_restarts_total{model="null-slow"}') == 1


# curl


def curl(daemon: Daemon, path: str, *args: str) -> str:
    command = ["curl", "-sS", "--max-time", "60", "--unix-socket", str(daemon.socket), f"http://edge_rt{path}", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout


def test_curl(daemon: Daemon) -> None:
    body = json.dumps({"messages": user(TEXT), "temperature": 0})
    assert json.loads(curl(daemon, "/v1/chat/completions", "-d", body))["choices"][0]["message"]["content"] == TEXT
    assert json.loads(curl(daemon, "/health")) == {"status": "ok"}
    headers = curl(daemon, "/v1/models", "-D", "-", "-o", "/dev/null", "-H", "X-Request-Id: mine")
    assert "x-request-id: mine" in headers
    assert "date: " in headers


def test_curl_stream(daemon: Daemon) -> None:
    body = json.dumps({"messages": user(TEXT), "temperature": 0, "stream": True})
    *events, done, rest = curl(daemon, "/v1/chat/completions", "-N", "-d", body).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT


def test_a_client_that_wants_http2_is_told_to_do_without(daemon: Daemon) -> None:
    upgrade = ("-H", "Connection: Upgrade, HTTP2-Settings", "-H", "Upgrade: h2c", "-H", "HTTP2-Settings: x")
    assert json.loads(curl(daemon, "/health", *upgrade)) == {"status": "ok"}
    answer = json.loads(curl(daemon, "/v1/chat/completions", *upgrade, "-d", json.dumps({"messages": user("x")})))
    assert "Upgrade is not supported" in answer["error"]["message"]


def test_curl_sends_large_bodies_after_asking(daemon: Daemon) -> None:
    """curl sends Expect: 100-continue before a body of more than a megabyte."""
    body = json.dumps({"messages": user("😀" * 250_000)}, ensure_ascii=False)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(body)
        file.flush()
        error = json.loads(curl(daemon, "/v1/chat/completions", "-d", f"@{file.name}"))["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["details"]["prompt_tokens"] > 1_000_000


def test_a_body_that_is_too_large_is_answered_before_it_is_sent(daemon: Daemon) -> None:
    with tempfile.NamedTemporaryFile("wb") as file:
        file.truncate(5 * 2**20)
        written = curl(daemon, "/tokenize", "--data-binary", f"@{file.name}", "-w", "\n%{http_code} %{size_upload}")
    assert written.splitlines()[-1] == "413 0"


# edge_rt's own client


def test_client(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        pieces = list(client.chat([Message(role="user", content=TEXT)], temperature=0))
        assert "".join(piece.text for piece in pieces) == TEXT
        last = pieces[-1]
        assert last.finish_reason == "stop"
        assert last.usage is not None
        assert last.usage.completion_tokens == len(TEXT.encode()) + 1
        assert last.timings is not None
        assert last.timings["predicted_n"] == last.usage.completion_tokens
        token_ids = client.tokenize(TEXT)
        assert client.detokenize(token_ids) == TEXT
        assert "".join(piece.text for piece in client.complete(token_ids, max_tokens=3, temperature=0))
        assert "null" in [card["id"] for card in client.models()]
        assert client.is_ready()
        assert "edge_rt_requests_total" in client.metrics_text()


def test_client_raises_what_the_daemon_raised(daemon: Daemon) -> None:
    message = Message(role="user", content="x")
    with Client(daemon.socket) as client:
        with pytest.raises(ModelNotFoundError) as missing:
            list(client.chat([message], model="nope"))
        assert missing.value.model == "nope"
        with pytest.raises(UnsupportedFeatureError):
            list(client.complete("x", suffix="y"))
        with pytest.raises(ContextLengthError) as too_long:
            list(client.complete("x" * 9000))
        assert too_long.value.n_ctx == 4096
        with pytest.raises(InvalidRequestError):
            client.detokenize([10**6])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_client_without_a_daemon(socket_dir: Path) -> None:
    words = "nobody: No such file or directory; start one with `edge_rt serve`"
    with Client(socket_dir / "nobody") as client, pytest.raises(DaemonUnreachableError, match=words):
        client.models()
    gc.collect()  # httpcore2 leaves a socket that could not connect to the collector, which warns


def test_a_client_without_the_right_to_connect_is_told_whom_to_ask() -> None:
    refused = httpx2.ConnectError("[Errno 13] Permission denied")
    refused.__cause__ = PermissionError(13, "Permission denied")
    error = unreachable("/run/s", refused)
    assert "no right" in str(error)
    assert "server.socket_group" in str(error)
    assert "edge_rt serve" not in str(error)


def test_a_daemon_that_is_killed_in_the_middle_of_an_answer(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon, Client(daemon.socket) as client:
        answer = client.chat([Message(role="user", content="x" * 2000)], model="null-slow")
        next(answer)
        daemon.process.kill()
        with pytest.raises(DaemonLostError, match="see its log"):
            list(answer)


# Many at once


async def stream_chat(
    client: httpx2.AsyncClient, text: str, *, model: str = "null", cut_after: int | None = None
) -> str:
    """Stream one answer and give its text; hang up after cut_after events."""
    body = {"model": model, "messages": user(text), "temperature": 0, "stream": True}
    texts: list[str] = []
    headers = {"cache-control": "no-store"}  # every one is computed, and by itself
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "".join(texts)
            if line:
                event = json.loads(line.removeprefix("data: "))
                texts.append(event["choices"][0]["delta"].get("content", ""))
            if cut_after is not None and len(texts) > cut_after:
                return "".join(texts)
    raise AssertionError(f"the stream broke off after {texts}")


def test_32_streams_each_get_their_own_answer(daemon: Daemon) -> None:
    async def scenario() -> None:
        nonces = [f"nonce-{i:02}-{random.randbytes(12).hex()}" for i in range(32)]
        async with daemon.async_client() as client:
            answers = await asyncio.gather(*(stream_chat(client, f"my {nonce} end") for nonce in nonces))
        assert answers == [f"my {nonce} end" for nonce in nonces]

    asyncio.run(scenario())


def test_hang_ups_at_random_disturb_nobody_and_leave_nothing(daemon: Daemon) -> None:
    async def scenario() -> None:
        choices = random.Random(4)
        texts = [f"{i} {choices.randbytes(20).hex()}" for i in range(40)]
        cuts = [choices.choice([None, 0, 1, 3, 8]) for _ in texts]
        async with daemon.async_client() as client:
            answers = await asyncio.gather(
                *(
                    stream_chat(client, text, model="null-slow", cut_after=cut)
                    for text, cut in zip(texts, cuts, strict=True)
                )
            )
        for text, cut, answer in zip(texts, cuts, answers, strict=True):
            assert answer == text if cut is None else text.startswith(answer)

    asyncio.run(scenario())
    patience.until(lambda: daemon.metric('edge_rt_requests_running{model="null-slow"}') == 0)
    assert daemon.metric('edge_rt_requests_waiting{model="null-slow"}') == 0
    assert daemon.metric('edge_rt_requests_total{outcome="hung_up"') > 0


def test_health_answers_while_all_places_are_taken(daemon: Daemon) -> None:
    four_wait = 'edge_rt_requests_waiting{model="null-slow"} 4.0'

    async def scenario() -> None:
        async with daemon.async_client() as client:
            await stream_chat(client, "loads it", model="null-slow")
            with daemon.held():
                streams = [asyncio.create_task(stream_chat(client, "x", model="null-slow")) for _ in range(12)]
                async with asyncio.timeout(PATIENCE_S):
                    while four_wait not in (await client.get("/metrics")).text:
                        pass
                for path in ("/health", "/health/live", "/health/ready", "/v1/models"):
                    assert (await client.get(path)).status_code == 200
                assert not any(stream.done() for stream in streams)
            await asyncio.gather(*streams)

    asyncio.run(scenario())


def test_500_requests_leave_the_daemon_and_its_worker_as_small_as_they_were(socket_dir: Path) -> None:
    async def some(client: httpx2.AsyncClient, n_requests: int) -> None:
        for _ in range(n_requests // 10):
            await asyncio.gather(*(stream_chat(client, "hello") for _ in range(10)))

    with Daemon(socket_dir) as daemon:

        async def scenario() -> None:
            async with daemon.async_client() as client:
                await some(client, 200)
                (worker,) = psutil.Process(daemon.process.pid).children()
                before_bytes = daemon.rss_bytes, worker.memory_info().rss
                await some(client, 500)
                assert daemon.rss_bytes - before_bytes[0] < 2 * 2**20
                assert worker.memory_info().rss - before_bytes[1] < 2 * 2**20

        asyncio.run(scenario())
        assert daemon.rss_bytes < 60 * 2**20


def test_nothing_unexpected_was_logged(daemon: Daemon) -> None:
    assert "failed unexpectedly" not in daemon.log
    assert "Traceback" not in daemon.log
    assert "nonce-" not in daemon.log
