"""A real llama-server as the cloud: of the endpoints alone, and of a whole daemon.

It is compiled by `make test-peer` and `make test`; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edge_rt.cloud.endpoints import CloudModels
from edge_rt.config import CloudEndpoint
from edge_rt.errors import (
    CircuitOpenError,
    CloudAnswerError,
    CloudRejectedError,
    CloudUnreachableError,
    ContextLengthError,
    UnsupportedFeatureError,
)
from edge_rt.telemetry import Telemetry
from edge_rt.types import Chunk, GenerateRequest, Message, Sampling, Tool
from tests import patience
from tests.api.daemon import Daemon
from tests.api.llama_server import N_CTX, LlamaServer
from tests.patience import PATIENCE_S

QUESTION = "Name three colours of the rainbow."
LONG = "Count from one to a thousand, in words."
GREEDY = Sampling(temperature=0.0)
CHAT = "/v1/chat/completions"
EDGE = """
[cloud.llama]
base_url = "unix:{socket}"
model = "small"
price_in = 1.0
price_out = 2.0
max_failures = 1
retry_s = 0.1
retry_share = 0.0
full_sampling = true

[router]
scorer = false
hold_back_tokens = 0

[cache]
enabled = false
"""


@pytest.fixture(scope="module")
def server(model_store: Path) -> Iterator[LlamaServer]:
    directory = Path(tempfile.mkdtemp(prefix="ert-"))
    with LlamaServer(directory, model_store) as running:
        yield running
    shutil.rmtree(directory)


def chat(content: str = QUESTION, **fields: Any) -> GenerateRequest:
    given = {"max_tokens": 24, "sampling": GREEDY, **fields}
    return GenerateRequest(id="1", model="small", messages=(Message(role="user", content=content),), **given)


@asynccontextmanager
async def asking(server: LlamaServer, **settings: Any) -> AsyncIterator[CloudModels]:
    given = {"base_url": f"unix:{server.socket}", "model": "small", "full_sampling": True, **settings}
    models = CloudModels({"llama": CloudEndpoint(**given)}, Telemetry(), protect=lambda: None)
    try:
        yield models
    finally:
        await models.close()


async def collect(models: CloudModels, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in models.generate(request, reason="asked")]


def answer(server: LlamaServer, request: GenerateRequest, **settings: Any) -> list[Chunk]:
    async def main() -> list[Chunk]:
        async with asking(server, **settings) as models:
            return await collect(models, request)

    return asyncio.run(main())


def text(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_it_streams_an_answer_with_an_end_and_what_it_counted(server: LlamaServer) -> None:
    chunks = answer(server, chat())
    assert len([chunk for chunk in chunks if chunk.text]) > 5
    assert chunks[0].origin is not None
    assert (chunks[0].origin.endpoint, chunks[0].origin.reason) == ("llama", "asked")
    last = chunks[-1]
    assert (last.finish_reason, last.usage is not None) == ("length", True)
    assert last.usage is not None
    assert (last.usage.is_estimate, last.usage.completion_tokens) == (False, 24)
    assert 10 < last.usage.prompt_tokens < 60
    again = answer(server, chat())
    assert text(again) == text(chunks)
    assert again[-1].usage is not None
    assert 0 < again[-1].usage.cached_tokens < again[-1].usage.prompt_tokens


def test_it_stops_where_it_shall(server: LlamaServer) -> None:
    whole = text(answer(server, chat()))
    word = next(word for word in whole.split()[3:] if word.isalpha() and len(word) > 2)
    chunks = answer(server, chat(stop=(word,)))
    assert text(chunks) == whole[: whole.index(word)]
    assert chunks[-1].finish_reason == "stop"


def test_it_goes_on_with_a_prompt_and_obeys_every_sampling_field(server: LlamaServer) -> None:
    sampling = Sampling(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repeat_penalty=1.1, presence_penalty=0.1, seed=7
    )
    request = GenerateRequest(id="1", model="small", prompt="One, two, three,", max_tokens=12, sampling=sampling)
    drawn = {text(answer(server, request)) for _ in range(2)}
    assert len(drawn) == 1
    greedy = GenerateRequest(id="1", model="small", prompt="One, two, three,", max_tokens=12, sampling=GREEDY)
    assert text(answer(server, greedy)).strip().startswith("four")


def test_what_only_the_device_can_do_is_not_asked(server: LlamaServer) -> None:
    for fields in ({"top_logprobs": 2}, {"ignore_eos": True}):
        with pytest.raises(UnsupportedFeatureError, match="ask with route local"):
            answer(server, chat(**fields))


def test_a_prompt_beyond_its_context_is_told_and_speaks_not_against_it(server: LlamaServer) -> None:
    long = chat("word " * 2 * N_CTX)

    async def main() -> None:
        async with asking(server, max_failures=1) as models:
            with pytest.raises(CloudRejectedError, match="exceeds the available context size") as caught:
                await collect(models, long)
            assert caught.value.status == 400
            assert models.health().best is not None
            assert text(await collect(models, chat()))

    asyncio.run(main())
    with pytest.raises(ContextLengthError, match=str(N_CTX)):
        answer(server, long, n_ctx=N_CTX)


def test_a_place_that_it_does_not_know_is_told_and_speaks_against_it(model_store: Path, socket_dir: Path) -> None:
    with LlamaServer(socket_dir, model_store, prefix="/elsewhere") as server:

        async def main() -> None:
            async with asking(server, max_failures=1) as models:
                with pytest.raises(CloudRejectedError) as caught:
                    await collect(models, chat())
                assert caught.value.status == 404
                assert models.health().best is None

        asyncio.run(main())


def test_leaving_stops_its_work(server: LlamaServer) -> None:
    async def main() -> None:
        async with asking(server) as models, aclosing(models.generate(chat(LONG, max_tokens=400))) as begun:
            await anext(begun)

    before = server.n_predicted()
    asyncio.run(main())
    after = server.n_predicted()
    assert before < after < before + 300
    answer(server, chat(LONG, max_tokens=30))
    assert server.n_predicted() == after + 30


def test_it_dies_in_mid_answer_and_is_found_again(model_store: Path, socket_dir: Path) -> None:
    async def main() -> None:
        with LlamaServer(socket_dir, model_store) as server:
            async with asking(server, retry_s=0.1, max_failures=1, retry_share=0.0) as models:
                begun = models.generate(chat(LONG, max_tokens=400))
                await anext(begun)
                server.stop(signal.SIGKILL)
                with pytest.raises(CloudAnswerError, match="in the middle of its answer"):
                    async for _ in begun:
                        pass
                assert models.health().best is None
                with pytest.raises(CircuitOpenError):
                    await collect(models, chat())
                with LlamaServer(socket_dir, model_store):
                    async with asyncio.timeout(PATIENCE_S):
                        while models.health().best is None:  # noqa: ASYNC110 - another process' work
                            await asyncio.sleep(0.05)
                    assert text(await collect(models, chat()))

    asyncio.run(main())


def test_its_key_is_replaced_while_we_run(model_store: Path, socket_dir: Path) -> None:
    key = socket_dir / "key"
    key.write_text("the-key-of-yesterday")
    key.chmod(0o600)
    with LlamaServer(socket_dir, model_store, "--api-key", "the-key-of-today") as server:

        async def main() -> None:
            async with asking(server, api_key_file=str(key), max_failures=2) as models:
                with pytest.raises(CloudRejectedError, match="401") as caught:
                    await collect(models, chat())
                assert "the-key" not in str(caught.value)
                key.write_text("the-key-of-today")
                assert text(await collect(models, chat()))

        asyncio.run(main())


def test_over_tcp_it_is_asked_only_where_that_is_allowed(model_store: Path, socket_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = {"base_url": f"http://127.0.0.1:{port}/v1", "allow_http": True}
    with LlamaServer(socket_dir, model_store, port=port) as server:
        with pytest.raises(CloudUnreachableError, match=r"this machine itself, which cloud\.llama\.allow_private"):
            answer(server, chat(), **url)
        assert server.n_predicted() == 0
        assert text(answer(server, chat(max_tokens=4), **url, allow_private=True))
        assert server.n_predicted() == 4


# A whole daemon, asked over its own Unix socket.


@pytest.fixture(scope="module")
def edge(server: LlamaServer) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="ert-"))
    with Daemon(directory, extra=EDGE.format(socket=server.socket)) as daemon:
        yield daemon
    shutil.rmtree(directory)


def body(content: str = QUESTION, **fields: Any) -> dict[str, Any]:
    given = {"route": "cloud", "temperature": 0, "max_tokens": 24, **fields}
    return {"messages": [{"role": "user", "content": content}], **given}


def route(reply: httpx2.Response) -> tuple[str | None, str | None, str | None]:
    headers = reply.headers
    return headers.get("x-edge-route"), headers.get("x-edge-route-reason"), headers.get("x-edge-endpoint")


def events(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def test_the_daemon_gives_its_answer_whole(edge: Daemon, server: LlamaServer) -> None:
    with edge.client() as client:
        reply = client.post(CHAT, json=body())
        here = client.post(CHAT, json=body(route="local"))
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == text(answer(server, chat()))
    assert choice["finish_reason"] == "length"
    assert route(reply) == ("cloud", "asked-cloud", "llama")
    usage = reply.json()["usage"]
    assert usage["completion_tokens"] == 24
    cost = (usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6
    assert float(reply.headers["x-edge-cost"]) == pytest.approx(cost, abs=1e-6)
    assert route(here)[0] == "local"
    assert here.json()["choices"][0]["message"]["content"] == QUESTION[:24], "the null model repeats, a letter a token"


def test_the_daemon_streams_it_on(edge: Daemon, server: LlamaServer) -> None:
    asked = body(stream=True, stream_options={"include_usage": True})
    with edge.client() as client, client.stream("POST", CHAT, json=asked) as reply:
        found = events(reply.iter_lines())
    assert route(reply)[0] == "cloud"
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in found if event["choices"]]
    assert len([piece for piece in pieces if piece]) > 5
    assert "".join(pieces) == text(answer(server, chat()))
    assert found[-1]["usage"]["completion_tokens"] == 24


def test_tools_go_to_it_in_a_form_that_it_takes(edge: Daemon, server: LlamaServer) -> None:
    """This model's template knows no tools, and llama-server lets it answer in words; recorded clouds call them."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": parameters}}
    with edge.client() as client:
        reply = client.post(CHAT, json=body(tools=[tool], tool_choice="required"))
    assert (reply.status_code, route(reply)[0]) == (200, "cloud")
    asked = chat(tools=(Tool(name="weather", description="now", parameters=json.dumps(parameters)),))
    assert reply.json()["choices"][0]["message"]["content"] == text(
        answer(server, replace(asked, tool_choice="required"))
    )


def test_logprobs_are_refused_before_it_is_asked(edge: Daemon) -> None:
    before = edge.metric('edge_rt_cloud_answers_total{endpoint="llama"}')
    with edge.client() as client:
        logprobs = client.post(CHAT, json=body(logprobs=True, top_logprobs=2))
    assert (logprobs.status_code, logprobs.json()["error"]["code"]) == (403, "must_stay")
    assert edge.metric('edge_rt_cloud_answers_total{endpoint="llama"}') == before


def test_a_client_that_leaves_the_daemon_stops_it(edge: Daemon, server: LlamaServer) -> None:
    before = server.n_predicted()
    with edge.client() as client, client.stream("POST", CHAT, json=body(LONG, max_tokens=400, stream=True)) as reply:
        assert next(reply.iter_lines())
    assert before < server.n_predicted() < before + 300


def test_what_it_refuses_the_device_answers_and_says_so(edge: Daemon) -> None:
    with edge.client() as client:
        reply = client.post(CHAT, json=body("a " * N_CTX, max_tokens=4))
        too_long = client.post(CHAT, json=body("a " * 10 * N_CTX, max_tokens=4))
    assert route(reply) == ("local", "cloud-failed", None)
    assert "exceeds the available context size" in edge.log
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_daemon_lives_through_its_death(model_store: Path, socket_dir: Path) -> None:
    far = socket_dir / "far"
    far.mkdir()
    with (
        LlamaServer(far, model_store) as server,
        Daemon(socket_dir, extra=EDGE.format(socket=server.socket)) as edge,
        edge.client() as client,
    ):
        asked = body(LONG, max_tokens=400, stream=True)
        with client.stream("POST", CHAT, json=asked) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.stop(signal.SIGKILL)
            *_, last = events(lines)
        assert last["error"]["code"] == "cloud_answer"
        assert "in the middle of its answer" in last["error"]["message"]
        closed = client.post(CHAT, json=body())
        assert route(closed)[0] == "local"
        with LlamaServer(far, model_store):
            patience.until(lambda: route(client.post(CHAT, json=body()))[0] == "cloud", told=lambda: edge.log)
