"""What an endpoint may answer, and what comes of it. Waiting takes no time: the loop's clock jumps."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from edge_rt.cloud.client import Upstream
from edge_rt.config import CloudEndpoint
from edge_rt.errors import (
    CloudAnswerError,
    CloudDeclinedError,
    CloudError,
    CloudRejectedError,
    CloudTimeoutError,
    CloudUnreachableError,
    ConfigError,
    DeadlineError,
    UnsupportedFeatureError,
)
from edge_rt.types import Chunk, GenerateRequest, Message, Sampling, Usage
from tests import recorded_cloud as recorded
from tests import virtual_time
from tests.recorded_cloud import HEAD, RecordedCloud, Reply, Script, says


def chat(text: str = "Hello?", **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="small", messages=(Message(role="user", content=text),), **fields)


def ask(
    script: Script, request: GenerateRequest | None = None, due_in_s: float | None = None, **settings: Any
) -> tuple[list[Chunk], RecordedCloud]:
    """Ask an endpoint of one script once."""

    async def main() -> tuple[list[Chunk], RecordedCloud]:
        async with RecordedCloud(script) as cloud:
            upstream = Upstream("big", cloud.endpoint(**settings))
            try:
                due_at_s = None if due_in_s is None else asyncio.get_running_loop().time() + due_in_s
                return [chunk async for chunk in upstream.stream(request or chat(), due_at_s=due_at_s)], cloud
            finally:
                await upstream.close()

    return virtual_time.run(main())


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def collect(answer: AsyncIterator[Chunk], seen: list[Chunk]) -> None:
    """Keep what came before an error."""
    async for chunk in answer:
        seen.append(chunk)  # noqa: PERF401 - extend would lose it all


def failure(script: Script, **kwargs: Any) -> CloudError:
    with pytest.raises(CloudError) as caught:
        ask(script, **kwargs)
    return caught.value


def test_an_answer_streams_with_usage_and_times() -> None:
    async def script(reply: Reply) -> None:
        await asyncio.sleep(2.0)
        await reply.head()
        for piece in ("Good ", "morn", "ing"):
            await reply.text(piece)
            await asyncio.sleep(0.5)
        await reply.finish("length")
        await reply.usage(11, 3)
        await reply.done()

    chunks, _ = ask(script)
    assert [chunk.text for chunk in chunks] == ["Good ", "morn", "ing", ""]
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].usage == Usage(prompt_tokens=11, completion_tokens=3)
    timings = chunks[-1].timings
    assert timings is not None
    assert (timings.ttft_s, timings.decode_s, timings.decode_tokens) == pytest.approx((2.0, 1.0, 2), abs=0.01)


def test_a_piece_of_text_is_passed_on_before_the_next_one_comes() -> None:
    seen: list[str] = []

    async def main() -> None:
        passed_on = asyncio.Event()

        async def script(reply: Reply) -> None:
            await reply.head()
            await reply.text("first")
            await passed_on.wait()
            await reply.text("second")
            await reply.finish()
            await reply.done()

        async with RecordedCloud(script) as cloud:
            upstream = Upstream("big", cloud.endpoint())
            async for chunk in upstream.stream(chat()):
                seen.append(chunk.text)
                passed_on.set()
            await upstream.close()

    virtual_time.run(main())
    assert seen == ["first", "second", ""]


def test_the_request_has_what_was_asked_and_nothing_of_who_asked() -> None:
    request = chat(
        max_tokens=9,
        stop=("\n",),
        tenant="uid:1000",
        sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=3, presence_penalty=0.5),
    )
    _, cloud = ask(says("x"), request)
    assert cloud.requests[0].path == "/v1/chat/completions"
    assert cloud.requests[0].body == {
        "model": "big",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Hello?"}],
        "max_tokens": 9,
        "stop": ["\n"],
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "seed": 3,
    }
    assert "1000" not in json.dumps(cloud.requests[0].headers)


def test_an_endpoint_that_knows_more_is_sent_more() -> None:
    request = chat(max_tokens=9, sampling=Sampling(top_k=40, min_p=0.05, repeat_penalty=1.1))
    _, cloud = ask(says("x"), request, full_sampling=True, max_tokens_field="max_completion_tokens")
    body = cloud.requests[0].body
    assert (body["top_k"], body["min_p"], body["repeat_penalty"]) == (40, 0.05, 1.1)
    assert body["max_completion_tokens"] == 9
    assert "max_tokens" not in body


def test_a_plain_prompt_is_a_text_completion() -> None:
    chunks, cloud = ask(says("so ", "on"), GenerateRequest(id="1", model="m", prompt="and"))
    assert cloud.requests[0].path == "/v1/completions"
    assert cloud.requests[0].body["prompt"] == "and"
    assert text(chunks) == "so on"


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(id="1", model="m", prompt_token_ids=(1, 2)),
        chat(sampling=Sampling(logit_bias={1: 2.0})),
        chat(top_logprobs=0),
        chat(ignore_eos=True),
    ],
)
def test_what_only_the_device_can_do_is_not_sent(request_: GenerateRequest) -> None:
    with pytest.raises(UnsupportedFeatureError):
        ask(says("x"), request_)


def test_an_endpoint_that_counts_nothing_is_counted() -> None:
    chunks, _ = ask(says("a", "b", "c", usage=None), chat("x" * 400))
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.is_estimate
    assert usage.completion_tokens == 3
    assert 80 <= usage.prompt_tokens <= 120


def test_the_connection_is_used_again() -> None:
    async def main() -> tuple[int, int]:
        async with RecordedCloud(says("x")) as cloud:
            upstream = Upstream("big", cloud.endpoint())
            for _ in range(5):
                assert text([chunk async for chunk in upstream.stream(chat())]) == "x"
            await upstream.close()
            return len(cloud.requests), cloud.n_connections

    assert virtual_time.run(main()) == (5, 1)


def test_closing_the_iterator_hangs_up() -> None:
    async def main() -> None:
        async with RecordedCloud(recorded.never_ends(pause_s=0.1)) as cloud:
            upstream = Upstream("big", cloud.endpoint())
            answer = upstream.stream(chat())
            await anext(answer)
            await answer.aclose()
            await asyncio.sleep(1.0)
            assert cloud.n_hung_up == 1
            await upstream.close()

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("data", "says_"),
    [
        ("data: {garbage\n\n", "no completion"),
        ("data: " + "[" * 5000 + "\n\n", "no completion"),
        ("data: 3\n\n", "no completion"),
        ('data: {"choices": [{"index": 0, "delta": {"content": 3}}]}\n\n', "no completion"),
        ('data: {"choices": [], "usage": {"prompt_tokens": -5, "completion_tokens": 1}}\n\n', "no completion"),
        ('data: {"choices": [], "usage": {"prompt_tokens": 1e99, "completion_tokens": 1}}\n\n', "no completion"),
        ('data: {"error": {"message": "out of credit"}}\n\n', "out of credit"),
        ('data: {"error": "out of credit"}\n\n', "out of credit"),
        ('data: {"error": {"message": {"deep": []}}}\n\n', "without a message"),
        ('data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}\n\n', "filter"),
        ('data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}\n\n', "tool_calls"),
        (b"data: \xff\xfe\n\n", "no completion"),
        ("data: " + "x" * (2**20 + 1), "a line of more than"),
        ("data: x" * 10 + "\n" + ("data: " + "x" * 1000 + "\n") * 1100, "an event of more than"),
        (": comment\n\nevent: ping\n\n", "cut off"),
        ("", "cut off"),
    ],
)
def test_what_is_no_answer_is_an_error(data: str | bytes, says_: str) -> None:
    error = failure(recorded.pieces(data))
    assert isinstance(error, CloudAnswerError | CloudDeclinedError)
    assert says_ in error.problem


def test_a_stream_cut_in_the_middle_fails_after_its_text() -> None:
    async def main() -> list[str]:
        async with RecordedCloud(recorded.cut_after("half ", "an ans")) as cloud:
            upstream = Upstream("big", cloud.endpoint())
            seen: list[Chunk] = []
            with pytest.raises(CloudAnswerError, match="broke off in the middle"):
                await collect(upstream.stream(chat()), seen)
            await upstream.close()
            return [chunk.text for chunk in seen]

    assert "".join(virtual_time.run(main())) == "half an ans"


def test_the_first_of_two_finish_reasons_counts() -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        await reply.text("done")
        await reply.finish("length")
        await reply.text(" and more")
        await reply.finish("stop")
        await reply.usage(1, 1)
        await reply.done()

    chunks, _ = ask(script)
    assert text(chunks) == "done"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_an_end_without_done_is_an_end() -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        await reply.text("x")
        await reply.finish()
        await asyncio.sleep(1e6)  # neither usage nor [DONE], and the connection stays open

    chunks, _ = ask(script)
    assert (text(chunks), chunks[-1].finish_reason) == ("x", "stop")


@pytest.mark.parametrize("texts", [(), ("a part",)])
def test_done_without_a_finish_reason_is_no_whole_answer(texts: tuple[str, ...]) -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        for one in texts:
            await reply.text(one)
        await reply.done()

    error = failure(script)
    assert isinstance(error, CloudAnswerError)
    assert "without an end" in error.problem


@pytest.mark.parametrize(
    ("max_tokens", "told", "believed"),
    [
        (5, (10, 10**9), (10, 5)),
        (None, (10**9, 10), (1500, 10)),
        (None, (10, 10**9), (10, 32_770)),
        (5, (10, 5), (10, 5)),
    ],
)
def test_an_endpoint_is_believed_no_more_tokens_than_can_be(
    max_tokens: int | None, told: tuple[int, int], believed: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        await reply.text("hi")
        await reply.finish()
        await reply.usage(*told)
        await reply.done()

    usage = ask(script, chat(max_tokens=max_tokens))[0][-1].usage
    assert usage is not None
    assert usage.completion_tokens == believed[1]
    assert usage.prompt_tokens <= believed[0]
    assert usage.is_estimate is (told != believed)
    assert ("can be" in caplog.text) is (told != believed)


def test_comments_do_not_keep_a_dead_answer_alive() -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        await reply.text("hello ")
        while True:
            await asyncio.sleep(1.0)
            await reply.piece(": keep\n\n")

    error = failure(script, next_byte_timeout_s=3.0, timeout_s=60.0)
    assert isinstance(error, CloudTimeoutError)
    assert error.phase == "next byte"


def test_other_choices_and_thoughts_are_no_text() -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        await reply.event(choices=[{"index": 0, "delta": {"role": "assistant", "reasoning_content": "hmm"}}])
        await reply.event(choices=[{"index": 1, "delta": {"content": "other"}}])
        await reply.event(choices=[{"index": 0, "delta": {"content": None}}], unknown={"a": [1]})
        await reply.text("x")
        await reply.finish()
        await reply.done()

    assert text(ask(script)[0]) == "x"


@pytest.mark.parametrize(
    ("script", "settings", "phase"),
    [
        (recorded.hangs, {}, "first byte"),
        (recorded.late(30.0, says("x")), {}, "first byte"),
        (recorded.slowly(30.0, "a", "b"), {}, "next byte"),
        (recorded.never_ends(pause_s=5.0), {"timeout_s": 60.0}, "whole answer"),
    ],
)
def test_each_phase_has_its_timeout(script: Script, settings: dict[str, Any], phase: str) -> None:
    error = failure(script, **settings)
    assert isinstance(error, CloudTimeoutError)
    assert error.phase == phase


def test_comments_do_not_count_as_a_first_byte() -> None:
    async def script(reply: Reply) -> None:
        await reply.head()
        while True:
            await reply.piece(": processing\n\n")
            await asyncio.sleep(1.0)

    error = failure(script)
    assert isinstance(error, CloudTimeoutError)
    assert error.phase == "first byte"


def test_a_deadline_holds_until_the_first_text_only() -> None:
    with pytest.raises(DeadlineError):
        ask(recorded.late(5.0, says("x")), due_in_s=3.0)
    assert text(ask(recorded.slowly(5.0, "a", "b"), due_in_s=3.0)[0]) == "ab"


def test_an_endless_stream_is_ended() -> None:
    error = failure(recorded.pieces(*["data: " + "x" * 2**19 + "\n\n"] * 200))
    assert isinstance(error, CloudAnswerError)
    error = failure(recorded.pieces(*[": " + "x" * (2**20 - 8) + "\n"] * 65))
    assert isinstance(error, CloudAnswerError)
    assert "more than 67108864 bytes" in error.problem


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        (recorded.status(429, headers={"retry-after": "7"}), 429, "no"),
        (recorded.status(500, "<html>oops\n\x1b[31m</html>"), 500, "<html>oops ?[31m</html>"),
        (recorded.status(400, '{"error": "bad"}'), 400, "bad"),
        (recorded.status(401, '{"error": {"code": 7}}'), 401, "without a message"),
        (recorded.status(503, "x" * 10**6), 503, "x" * 200 + "…"),
        (recorded.status(302, "", headers={"location": "http://169.254.169.254/"}), 302, "redirects are not followed"),
        (recorded.status(307, "", headers={"location": "/elsewhere"}), 307, "redirects are not followed"),
        (recorded.status(201), 201, "no"),
    ],
)
def test_http_errors_are_told(script: Script, status: int, message: str) -> None:
    error = failure(script)
    assert isinstance(error, CloudRejectedError)
    assert error.status == status
    assert message in error.message
    assert error.retry_after_s == (7.0 if status == 429 else 0.0)


def test_a_redirect_is_not_followed() -> None:
    async def main() -> None:
        async with RecordedCloud(says("x")) as other:
            redirect = recorded.status(307, "", headers={"location": f"{other.url}/chat/completions"})
            async with RecordedCloud(redirect) as cloud:
                upstream = Upstream("big", cloud.endpoint())
                with pytest.raises(CloudRejectedError):
                    await anext(upstream.stream(chat()))
                await upstream.close()
            assert other.requests == []

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("script", "says_"),
    [
        (recorded.bomb(10**7), "packed (gzip)"),
        (recorded.bytes_only("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi"), "text/html"),
        (recorded.bytes_only("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"), "nothing"),
        (
            recorded.bytes_only(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 25\r\n\r\n"
                '{"error":{"message":"x"}}'
            ),
            "application/json",
        ),
        (recorded.bytes_only("SSH-2.0-OpenSSH_9.6\r\n"), "broke off before it answered"),
        (recorded.bytes_only("HTTP/1.1 200 OK\r\n" + "x: " + "y" * 200_000 + "\r\n\r\n"), "broke off before"),
        (recorded.bytes_only(""), "broke off before it answered"),
        (recorded.bytes_only(HEAD + "zz\r\n"), "broke off in the middle"),
    ],
)
def test_what_is_no_stream_is_refused(script: Script, says_: str) -> None:
    error = failure(script)
    assert isinstance(error, CloudAnswerError)
    assert says_ in error.problem


def test_nobody_there_is_unreachable() -> None:
    async def main() -> CloudError:
        async with RecordedCloud(says("x")) as cloud:
            settings = cloud.endpoint()
        upstream = Upstream("big", settings)
        with pytest.raises(CloudError) as caught:
            await anext(upstream.stream(chat()))
        await upstream.close()
        return caught.value

    error = virtual_time.run(main())
    assert isinstance(error, CloudUnreachableError)
    assert "refused" in error.reason.lower() or "connect" in error.reason.lower()


# Addresses and names.


async def no_names(host: str, port: int) -> tuple[str, ...]:
    raise AssertionError(f"{host}:{port} was looked up")


def names(*addresses: str) -> Callable[[str, int], Awaitable[tuple[str, ...]]]:
    async def resolve(host: str, port: int) -> tuple[str, ...]:
        return addresses

    return resolve


def test_a_private_address_is_refused_however_it_is_named() -> None:
    async def main() -> None:
        async with RecordedCloud(says("x")) as cloud:
            for host, resolve in (("127.0.0.1", no_names), ("cloud.example", names("127.0.0.1", "::1"))):
                settings = cloud.endpoint(base_url=f"http://{host}:{cloud.port}/v1", allow_private=False)
                upstream = Upstream("big", settings, resolve=resolve)
                with pytest.raises(CloudUnreachableError, match=r"itself, which cloud\.big.allow_private"):
                    await anext(upstream.stream(chat()))
                await upstream.close()
            assert cloud.n_connections == 0

    virtual_time.run(main())


def test_the_judged_address_is_the_one_connected_to() -> None:
    """A name server that answers the check with one address and the connection with another gains nothing."""
    answers = iter([("127.0.0.1",), ("192.0.2.1",)])

    async def resolve(host: str, port: int) -> tuple[str, ...]:
        return next(answers)

    async def main() -> None:
        async with RecordedCloud(says("x")) as cloud:
            upstream = Upstream("big", cloud.endpoint(base_url=f"http://c.example:{cloud.port}/v1"), resolve=resolve)
            assert text([chunk async for chunk in upstream.stream(chat())]) == "x"
            await upstream.close()
            assert cloud.requests[0].headers["host"] == f"c.example:{cloud.port}"

    virtual_time.run(main())
    assert next(answers) == ("192.0.2.1",)  # it was asked once


@pytest.mark.parametrize(
    ("settings", "key", "says_"),
    [
        ({"base_url": "http://api.example/v1"}, "base_url", "is not encrypted"),
        ({"base_url": "ftp://api.example/v1"}, "base_url", "must be https://HOST/v1"),
        ({"base_url": "https://user:pw@api.example/v1"}, "base_url", "must not hold a user or password"),
        ({"base_url": "https://api.example:x/v1"}, "base_url", "is no URL"),
        ({"base_url": "https://api.example/v1?a=b"}, "base_url", "must be https://HOST/v1"),
        ({"base_url": ""}, "base_url", "must be https://HOST/v1"),
        ({"base_url": "unix:relative"}, "base_url", "absolute path"),
        ({"base_url": "https://api.example/v1", "model": ""}, "model", "must name the model"),
        ({"base_url": "https://api.example/v1", "ca_file": "/nonexistent.pem"}, "ca_file", "cannot be read"),
        ({"base_url": "https://api.example/v1", "api_key_file": "/nonexistent"}, "api_key_file", "cannot be read"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], key: str, says_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Upstream("big", CloudEndpoint(**{"model": "m", **settings}))
    assert caught.value.key == f"cloud.big.{key}"
    assert says_ in caught.value.problem
    assert "pw" not in str(caught.value)


# TLS.


def certificate(directory: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for a host; give it as a file to trust, and the server's context."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


def test_the_server_s_certificate_and_name_are_verified(tmp_path: Path) -> None:
    cert, context = certificate(tmp_path, "cloud.example")
    other, _ = certificate(tmp_path, "other.example")

    async def main() -> None:
        async with RecordedCloud(says("x"), tls=context) as cloud:

            async def asked(host: str, ca_file: str) -> str:
                settings = cloud.endpoint(base_url=f"https://{host}:{cloud.port}/v1", allow_http=False, ca_file=ca_file)
                upstream = Upstream("big", settings, resolve=names("127.0.0.1"))
                try:
                    return text([chunk async for chunk in upstream.stream(chat())])
                finally:
                    await upstream.close()

            assert await asked("cloud.example", str(cert)) == "x"
            for host, ca_file in (("cloud.example", ""), ("cloud.example", str(other)), ("evil.example", str(cert))):
                with pytest.raises(CloudUnreachableError, match="certificate is not trusted"):
                    await asked(host, ca_file)
            assert len(cloud.requests) == 1

    asyncio.run(main())


# The key.

KEY = "sk-proj-S3cretS3cretS3cretS3cret"


def test_the_key_is_sent_and_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)

    async def echo_in_stream(reply: Reply) -> None:
        await reply.head()
        await reply.text("so ")
        await reply.event(error={"message": f"Incorrect key: {KEY}"})

    async def echo_as_end(reply: Reply) -> None:
        await reply.head()
        await reply.event(choices=[{"index": 0, "delta": {}, "finish_reason": KEY}])

    streamed = [failure(script, api_key_file=str(file)) for script in (echo_in_stream, echo_as_end)]
    no_http = [
        f"{KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nno colon {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ncontent-length: {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ntransfer-encoding: {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{KEY}\r\n",
    ]
    broken = [failure(recorded.bytes_only(answer), api_key_file=str(file)) for answer in no_http]
    echo = recorded.status(401, json.dumps({"error": {"message": f"Incorrect key: {KEY} (begins {KEY[:12]})"}}))
    error = failure(echo, api_key_file=str(file))
    _, cloud = ask(says("x"), api_key_file=str(file))
    assert cloud.requests[0].headers["authorization"] == f"Bearer {KEY}"
    tracebacks = [line for one in (error, *streamed, *broken) for line in traceback.format_exception(one)]
    shown = f"{error} {error!r} {error.to_wire()} {streamed!r} {broken!r} {tracebacks} {caplog.text}"
    assert all(isinstance(one, CloudAnswerError) for one in broken)
    assert "Incorrect key: *** (begins ***)" in shown
    assert KEY[:12] not in shown
