"""The openai package's Responses API on a real daemon, over the Unix socket."""

from __future__ import annotations

import asyncio
import enum
import json
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


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Graz"}}\n</tool_call>'
WORD: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP: Any = {"type": "function", "name": "look_up", "parameters": WORD, "strict": True}


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel):
    colour: Colour
    glossy: bool


def test_a_response(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.responses.create(model="null", input=TEXT, instructions="be kind", temperature=0)
    Response.model_validate(answer.model_dump())
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(TEXT.encode()) + 1
    # What came back goes into the next request as it is.
    conversation: Any = [{"role": "user", "content": "first"}, *answer.output, {"role": "user", "content": "second"}]
    assert openai_sdk.responses.create(model="null", input=conversation).output_text == "second"
    cut = openai_sdk.responses.create(model="null", input=TEXT, max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream(openai_sdk: openai.OpenAI) -> None:
    with openai_sdk.responses.stream(
        model="null", input=TEXT, include=["message.output_text.logprobs"], top_logprobs=2
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == final.output_text == TEXT
    assert deltas[-1].snapshot == TEXT
    assert sum(len(event.logprobs) for event in deltas) == len(TEXT.encode())


def test_answers_of_a_form(openai_sdk: openai.OpenAI) -> None:
    for _ in range(3):
        assert isinstance(openai_sdk.responses.parse(model="null", input="x", text_format=Paint).output_parsed, Paint)
    with openai_sdk.responses.stream(model="null", input="x", text_format=Paint) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Paint)
    schema: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        openai_sdk.responses.create(model="null", input="x", text=schema)
    assert refused.value.param == "text.format.schema#/not"


def test_a_call_goes_out_and_its_result_comes_back(openai_sdk: openai.OpenAI) -> None:
    conversation: Any = [{"role": "user", "content": f"So: {CALL}"}]
    answer = openai_sdk.responses.create(model="null", input=conversation, tools=[LOOK_UP], temperature=0)
    Response.model_validate(answer.model_dump())
    said, call = answer.output
    assert said.type == "message"
    assert answer.output_text == "So: "
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"word": "Graz"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a town"}
    conversation += [*answer.output, result]
    then = openai_sdk.responses.create(model="null", input=conversation, tools=[LOOK_UP], temperature=0)
    assert "a town" in then.output_text


def test_a_stream_of_calls_is_put_together_by_the_client(openai_sdk: openai.OpenAI) -> None:
    with openai_sdk.responses.stream(model="null", input=f"{CALL}\n{CALL}", tools=[LOOK_UP], temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.parsed_arguments for call in calls] == [{"word": "Graz"}] * 2
    assert len({call.call_id for call in calls}) == 2
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_a_call_that_must_come_comes(openai_sdk: openai.OpenAI, choice: Any) -> None:
    answer = openai_sdk.responses.create(
        model="null", input="Hi", tools=[LOOK_UP], tool_choice=choice, parallel_tool_calls=False, temperature=1.5
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"word"}


def test_what_is_wrong_with_a_tool_is_named(openai_sdk: openai.OpenAI) -> None:
    for tool, choice, param in (
        ({**LOOK_UP, "parameters": {"type": "object", "not": {}}}, "auto", "tools[0].parameters#/not"),
        ({**LOOK_UP, "name": "two words"}, "auto", "tools[0].name"),
        (LOOK_UP, {"type": "function", "name": "nope"}, "tool_choice.name"),
    ):
        asked: Any = {"tools": [tool], "tool_choice": choice}
        with pytest.raises(openai.BadRequestError) as refused:
            openai_sdk.responses.create(model="null", input="x", **asked)
        assert refused.value.param == param


def test_a_model_may_name_an_adapter(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.responses.create(model="null-lora:poems", input="x", temperature=0)
    assert (answer.model, answer.status) == ("null-lora", "completed")
    with pytest.raises(openai.NotFoundError):
        openai_sdk.responses.create(model="null-lora:prose", input="x")


def test_input_tokens(openai_sdk: openai.OpenAI) -> None:
    counted = openai_sdk.responses.input_tokens.count(model="null", input=TEXT, instructions="be kind")
    answer = openai_sdk.responses.create(model="null", input=TEXT, instructions="be kind", max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_errors(openai_sdk: openai.OpenAI) -> None:
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        asked: Any = {"model": "null", "input": "x", **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            openai_sdk.responses.create(**asked)
        assert (refused.value.code, refused.value.param) == ("unsupported", param)
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_sdk.responses.create(model="null", input="x" * 5000, stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no response is kept"):
        openai_sdk.responses.retrieve("resp_1")


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
