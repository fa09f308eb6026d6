"""Anthropic's own client on a real daemon, over the Unix socket and over TCP with a key."""

from __future__ import annotations

import asyncio
import enum
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest

from tests import patience
from tests.api.daemon import Daemon

TEXT = "grüße, 😀 and a line\nbreak"
SLOW = 'edge_rt_requests_running{model="null-slow"}'


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Graz"}}\n</tool_call>'
WORD: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP: Any = {"name": "look_up", "description": "Finds a word.", "input_schema": WORD}


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel):
    colour: Colour
    glossy: bool


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message(anthropic_sdk: anthropic.Anthropic) -> None:
    message = anthropic_sdk.messages.create(model="null", max_tokens=100, messages=user(TEXT), system="be kind")
    assert said(message) == TEXT
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.output_tokens == len(TEXT.encode()) + 1
    again = anthropic_sdk.messages.create(
        model="null", max_tokens=100, messages=user(TEXT), stop_sequences=["nothing", " and"], extra_body={"top_k": 1}
    )
    assert (said(again), again.stop_reason, again.stop_sequence) == ("grüße, 😀", "stop_sequence", " and")


def test_a_stream(anthropic_sdk: anthropic.Anthropic) -> None:
    with anthropic_sdk.messages.stream(model="null", max_tokens=100, messages=user(TEXT)) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert (said(final), final.stop_reason) == (TEXT, "end_turn")
    assert final.usage.output_tokens == len(TEXT.encode()) + 1
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) > len(TEXT.encode())


def test_answers_of_a_form(anthropic_sdk: anthropic.Anthropic) -> None:
    for _ in range(3):
        message = anthropic_sdk.messages.parse(model="null", max_tokens=100, messages=user("x"), output_format=Paint)
        assert isinstance(message.parsed_output, Paint)
    with anthropic_sdk.messages.stream(model="null", max_tokens=100, messages=user("x"), output_format=Paint) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Paint)
    schema: Any = {"format": {"type": "json_schema", "schema": {"type": "object", "not": {}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema#/not is not supported"):
        anthropic_sdk.messages.create(model="null", max_tokens=9, messages=user("x"), output_config=schema)


def test_a_call_goes_out_and_its_result_comes_back(anthropic_sdk: anthropic.Anthropic) -> None:
    messages = user(f"So: {CALL}\n{CALL}")
    asked: Any = {"model": "null", "max_tokens": 300, "tools": [LOOK_UP], "extra_body": {"temperature": 0}}
    answer = anthropic_sdk.messages.create(**asked, messages=messages)
    assert (said(answer), answer.stop_reason) == ("So: ", "tool_use")
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("look_up", {"word": "Graz"})] * 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "a town"} for call in calls]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    then = anthropic_sdk.messages.create(**asked, messages=messages)
    assert "a town" in said(then)
    assert then.stop_reason == "end_turn"


def test_a_stream_of_calls_is_put_together_by_the_client(anthropic_sdk: anthropic.Anthropic) -> None:
    with anthropic_sdk.messages.stream(
        model="null", max_tokens=300, messages=user(f"So: {CALL}"), tools=[LOOK_UP], extra_body={"temperature": 0}
    ) as stream:
        final = stream.get_final_message()
    assert said(final) == "So: "
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"word": "Graz"}]
    choice: Any = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    with anthropic_sdk.messages.stream(
        model="null", max_tokens=300, messages=user("Hi"), tools=[LOOK_UP], tool_choice=choice
    ) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    assert set(block.input) == {"word"}


def test_what_is_wrong_with_a_tool_is_named(anthropic_sdk: anthropic.Anthropic) -> None:
    for tool, words in (
        ({**LOOK_UP, "input_schema": {"type": "object", "not": {}}}, r"tools\[0\]\.input_schema#/not is not supported"),
        ({**LOOK_UP, "name": "two words"}, r"tools\[0\]\.name: "),
    ):
        asked: Any = {"tools": [tool]}
        with pytest.raises(anthropic.BadRequestError, match=words):
            anthropic_sdk.messages.create(model="null", max_tokens=9, messages=user("x"), **asked)


def test_count_tokens(anthropic_sdk: anthropic.Anthropic) -> None:
    counted = anthropic_sdk.messages.count_tokens(model="null", messages=user(TEXT), system="be kind")
    message = anthropic_sdk.messages.create(model="null", max_tokens=1, messages=user(TEXT), system="be kind")
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    too_long = anthropic_sdk.messages.count_tokens(model="null", messages=user("x" * 9000))
    assert too_long.input_tokens > 9000


def test_models(anthropic_sdk: anthropic.Anthropic) -> None:
    listed = list(anthropic_sdk.models.list())
    assert {"null", "null-slow"} <= {model.id for model in listed}
    assert {model.type for model in listed} == {"model"}
    assert anthropic_sdk.models.retrieve("null").max_input_tokens == 4096
    with pytest.raises(anthropic.NotFoundError):
        anthropic_sdk.models.retrieve("nope")


def test_errors(anthropic_sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        anthropic_sdk.messages.create(model="nope", max_tokens=1, messages=user("x"))
    with pytest.raises(anthropic.BadRequestError, match="thinking is not supported"):
        anthropic_sdk.messages.create(
            model="null", max_tokens=2000, messages=user("x"), thinking={"type": "enabled", "budget_tokens": 1024}
        )
    with pytest.raises(anthropic.BadRequestError, match="context is 4096"):
        anthropic_sdk.messages.create(model="null", max_tokens=1, messages=user("x" * 5000))


def test_a_worker_killed_in_mid_stream_is_told_of(socket_dir: Path) -> None:
    with (
        Daemon(socket_dir, extra="[engine]\nstream_interval_s = 0.0\n") as own,
        own.client() as http,
        anthropic.Anthropic(base_url="http://edge_rt", api_key="none", http_client=http, max_retries=0) as sdk,
    ):
        stream = sdk.messages.create(model="null-slow", max_tokens=4000, messages=user("x" * 2000), stream=True)
        events = [next(stream) for _ in range(8)]
        own.worker.kill()
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            events.extend(stream)
        assert {event.delta.text for event in events[2:] if event.type == "content_block_delta"} == {"x"}  # type: ignore[union-attr]


def test_async_clients_and_those_that_give_up(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with (
            daemon.async_client() as http,
            anthropic.AsyncAnthropic(base_url="http://edge_rt", api_key="none", http_client=http, max_retries=0) as sdk,
        ):
            texts = [f"text {i}" for i in range(16)]
            asked = (sdk.messages.create(model="null", max_tokens=100, messages=user(text)) for text in texts)
            assert [said(message) for message in await asyncio.gather(*asked)] == texts
            async with sdk.messages.stream(model="null-slow", max_tokens=4000, messages=user("y" * 3000)) as stream:
                await anext(aiter(stream.text_stream))
            hasty = sdk.with_options(timeout=0.2)
            with pytest.raises(anthropic.APITimeoutError):
                await hasty.messages.create(model="null-slow", max_tokens=4000, messages=user("z" * 3000))

    asyncio.run(scenario())
    patience.until(lambda: daemon.metric(SLOW) == 0)


def test_over_tcp_with_a_key(socket_dir: Path) -> None:
    keys = socket_dir / "keys"
    keys.write_text("the-key\n")
    with Daemon(socket_dir, args=("--tcp", "127.0.0.1:0", "--api-keys-file", str(keys))) as daemon:
        url = next(line for line in daemon.lines if "listens" in line).rpartition(" ")[2]
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(anthropic.AuthenticationError),
        ):
            stranger.messages.create(model="null", max_tokens=9, messages=user("hi"))
        with anthropic.Anthropic(base_url=url, api_key="the-key", max_retries=0) as sdk:
            assert said(sdk.messages.create(model="null", max_tokens=9, messages=user("hi"))) == "hi"


def test_nothing_unexpected_was_logged(daemon: Daemon) -> None:
    assert "failed unexpectedly" not in daemon.log
    assert "Traceback" not in daemon.log
