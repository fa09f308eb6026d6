"""Another edge_rt on this machine as the cloud."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_rt.cloud.endpoints import CloudModels
from edge_rt.config import CloudEndpoint
from edge_rt.errors import CircuitOpenError, CloudAnswerError, CloudRejectedError
from edge_rt.telemetry import Telemetry
from edge_rt.types import CHAT_SAMPLING, Chunk, GenerateRequest, Message, Usage
from tests import patience
from tests.api.daemon import Daemon
from tests.patience import PATIENCE_S


def chat(content: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="small", messages=(Message(role="user", content=content),), **fields)


@asynccontextmanager
async def asking(daemon: Daemon, **settings: Any) -> AsyncIterator[CloudModels]:
    given = {"base_url": f"unix:{daemon.socket}", "model": "null", **settings}
    models = CloudModels({"peer": CloudEndpoint(**given)}, Telemetry())
    try:
        yield models
    finally:
        await models.close()


async def collect(models: CloudModels, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in models.generate(request, reason="hard")]


@pytest.fixture(scope="module")
def peer() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="ert-") as directory, Daemon(Path(directory)) as daemon:
        yield daemon


def test_a_peer_answers_with_text_usage_and_origin(peer: Daemon) -> None:
    async def main() -> None:
        async with asking(peer, full_sampling=True, max_tokens_field="max_completion_tokens") as models:
            for _ in range(2):
                chunks = await collect(models, chat("Grüße, 世界!", max_tokens=100, sampling=CHAT_SAMPLING))
                assert "".join(chunk.text for chunk in chunks) == "Grüße, 世界!"
                assert chunks[0].origin is not None
                assert chunks[0].origin.endpoint == "peer"
                assert chunks[-1].finish_reason == "stop"
                assert isinstance(chunks[-1].usage, Usage)
                assert not chunks[-1].usage.is_estimate
                assert chunks[-1].usage.completion_tokens > 10
            chunks = await collect(models, GenerateRequest(id="1", model="m", prompt="and so on", max_tokens=5))
            assert chunks[-1].finish_reason == "length"

    asyncio.run(main())


def test_a_peer_s_refusal_is_told(peer: Daemon) -> None:
    async def main() -> None:
        async with asking(peer, model="nobody") as models:
            with pytest.raises(CloudRejectedError, match="'nobody' is not in the catalog") as caught:
                await collect(models, chat("x"))
            assert caught.value.status == 404

    asyncio.run(main())


def test_leaving_stops_the_work_of_a_peer(peer: Daemon) -> None:
    async def main() -> None:
        async with asking(peer, model="null-slow") as models, aclosing(models.generate(chat("x" * 3000))) as answer:
            await anext(answer)

    asyncio.run(main())
    patience.until(lambda: peer.metric('edge_rt_cancelled_total{model="null-slow"}') == 1)


def test_a_peer_that_dies_is_found_again(socket_dir: Path) -> None:
    async def main() -> None:
        with Daemon(socket_dir) as daemon:
            async with asking(daemon, model="null-slow", retry_s=0.1, max_failures=1, retry_share=0.0) as models:
                answer = models.generate(chat("x" * 3000))
                await anext(answer)
                daemon.stop(signal.SIGKILL)
                with pytest.raises(CloudAnswerError):
                    await asyncio.wait_for(_exhaust(answer), PATIENCE_S)
                assert models.health().best is None
                with pytest.raises(CircuitOpenError):
                    await collect(models, chat("hello"))
                daemon.socket.unlink(missing_ok=True)
                with Daemon(socket_dir):
                    await _until_closed(models)
                    assert "".join(chunk.text for chunk in await collect(models, chat("hello"))) == "hello"

    asyncio.run(main())


async def _exhaust(answer: AsyncIterator[Chunk]) -> None:
    async for _ in answer:
        pass


async def _until_closed(models: CloudModels) -> None:
    """Wait until a probe beside the requests has found the peer to work."""
    async with asyncio.timeout(PATIENCE_S):
        while models.health().best is None:  # noqa: ASYNC110 - another process' work
            await asyncio.sleep(0.05)
