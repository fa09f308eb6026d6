from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from edge_rt.api.context import Api
from edge_rt.api.endpoint import read_body
from edge_rt.api.sse import HungUpError
from edge_rt.api.status import HttpError
from edge_rt.config import Config, Server
from edge_rt.errors import OverloadedError
from edge_rt.telemetry import Telemetry
from tests.api.asgi import FakeRuntime


def test_a_body_that_never_ends_is_given_up() -> None:
    api = Api(runtime=FakeRuntime(), config=Config(), telemetry=Telemetry(), body_timeout_s=0.01)

    async def drips() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def scenario() -> None:
        request = Request({"type": "http", "headers": []}, drips)
        with pytest.raises(HttpError, match=r"did not arrive within 0\.01 s") as caught:
            await read_body(request, api)
        assert caught.value.status == 408

    asyncio.run(scenario())


def test_a_body_that_breaks_off_is_no_error_of_ours() -> None:
    api = Api(runtime=FakeRuntime(), config=Config(), telemetry=Telemetry())

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(HungUpError):
        asyncio.run(read_body(Request({"type": "http", "headers": []}, gone), api))


def test_the_bodies_of_all_requests_together_are_bounded_until_they_are_answered() -> None:
    config = Config(server=Server(max_body_bytes=10, max_bodies_bytes=15))
    api = Api(runtime=FakeRuntime(), config=config, telemetry=Telemetry())

    async def receive() -> Message:
        return {"type": "http.request", "body": b"0123456789", "more_body": False}

    async def ask(answered: asyncio.Event) -> bytes:
        body = await read_body(Request({"type": "http", "headers": []}, receive), api)
        await answered.wait()
        return body

    async def scenario() -> None:
        answered = asyncio.Event()
        first, second = (asyncio.create_task(ask(answered)) for _ in range(2))
        with pytest.raises(OverloadedError, match=r"limit of 15 bytes.*server\.max_bodies_bytes"):
            await second
        answered.set()
        assert await first == b"0123456789"
        assert await asyncio.create_task(ask(answered)) == b"0123456789"
        await asyncio.sleep(0)
        assert api.bodies.n_bytes == 0

    asyncio.run(scenario())
