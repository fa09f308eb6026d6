"""The openai package's Responses API on a real daemon, over the Unix socket."""

from __future__ import annotations

import asyncio
import enum
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests import patience
from tests.api.daemon import Daemon

TEXT = "grüße, 😀 and a line\nbreak"
SLOW = 'edge_rt_requests_running{model="null-slow"}'


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel):
    colour: Colour
    glossy: bool


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="ert-") as directory, Daemon(Path(directory)) as running:
        yield running


@pytest.fixture
def sdk(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with (
        daemon.client() as http,
        openai.OpenAI(base_url="http://edge_rt/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


def test_a_response(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="null", input=TEXT, instructions="be kind", temperature=0)
    Response.model_validate(answer.model_dump())
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(TEXT.encode()) + 1
    # What came back goes into the next request as it is.
    conversation: Any = [{"role": "user", "content": "first"}, *answer.output, {"role": "user", "content": "second"}]
    assert sdk.responses.create(model="null", input=conversation).output_text == "second"
    cut = sdk.responses.create(model="null", input=TEXT, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(
        model="null", input=TEXT, include=["message.output_text.logprobs"], top_logprobs=2
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == final.output_text == TEXT
    assert deltas[-1].snapshot == TEXT
    assert sum(len(event.logprobs) for event in deltas) == len(TEXT.encode())


def test_answers_of_a_form(sdk: openai.OpenAI) -> None:
    for _ in range(3):
        assert isinstance(sdk.responses.parse(model="null", input="x", text_format=Paint).output_parsed, Paint)
    with sdk.responses.stream(model="null", input="x", text_format=Paint) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Paint)
    schema: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model="null", input="x", text=schema)
    assert refused.value.param == "text.format.schema#/not"


def test_input_tokens(sdk: openai.OpenAI) -> None:
    counted = sdk.responses.input_tokens.count(model="null", input=TEXT, instructions="be kind")
    answer = sdk.responses.create(model="null", input=TEXT, instructions="be kind", max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_errors(sdk: openai.OpenAI) -> None:
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        asked: Any = {"model": "null", "input": "x", **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            sdk.responses.create(**asked)
        assert (refused.value.code, refused.value.param) == ("unsupported", param)
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.responses.create(model="null", input="x" * 5000, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no response is kept"):
        sdk.responses.retrieve("resp_1")


def test_a_worker_killed_in_mid_stream_is_told_of(socket_dir: Path) -> None:
    with (
        Daemon(socket_dir, extra="[engine]\nstream_interval_s = 0.0\n") as own,
        own.client() as http,
        openai.OpenAI(base_url="http://edge_rt/v1", api_key="none", http_client=http, max_retries=0) as sdk,
    ):
        stream = sdk.responses.create(model="null-slow", input="x" * 2000, stream=True)
        begun = [next(stream) for _ in range(8)]
        own.worker.kill()
        *_, error, failed = [*begun, *stream]
        assert error.type == "error"
        assert error.code == "worker_lost"
        assert failed.type == "response.failed"
        assert failed.response.error is not None
        assert set(failed.response.output_text) == {"x"}


def test_async_clients_and_those_that_give_up(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with (
            daemon.async_client() as http,
            openai.AsyncOpenAI(base_url="http://edge_rt/v1", api_key="none", http_client=http, max_retries=0) as sdk,
        ):
            texts = [f"text {i}" for i in range(16)]
            answers = await asyncio.gather(*(sdk.responses.create(model="null", input=text) for text in texts))
            assert [answer.output_text for answer in answers] == texts
            async with await sdk.responses.create(model="null-slow", input="y" * 3000, stream=True) as stream:
                await anext(aiter(stream))
            with pytest.raises(openai.APITimeoutError):
                await sdk.responses.create(model="null-slow", input="z" * 3000, timeout=0.2)

    asyncio.run(scenario())
    patience.until(lambda: daemon.metric(SLOW) == 0)


def test_nothing_unexpected_was_logged(daemon: Daemon) -> None:
    assert "failed unexpectedly" not in daemon.log
    assert "Traceback" not in daemon.log
