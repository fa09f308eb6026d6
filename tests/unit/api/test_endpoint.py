from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from edge_rt.api.context import Api
from edge_rt.api.endpoint import read_body
from edge_rt.api.sse import HungUpError
from edge_rt.api.status import HttpError
from edge_rt.config import Config
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
