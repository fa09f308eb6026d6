"""Other protocols' clients on the default model, whose template, tokeniser and stop tokens are real."""

from __future__ import annotations

import enum
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pydantic
import pytest

from tests import patience
from tests.api.daemon import Daemon

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
QUESTION: Any = [{"role": "user", "content": "Name a planet."}]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what its template says without one


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Paint(pydantic.BaseModel, extra="forbid"):  # or a small model goes on with other names
    colour: Colour
    glossy: bool


@pytest.fixture(scope="module")
def daemon(model_store: Path) -> Iterator[Daemon]:
    environ = {"EDGE_RT__CATALOG__STORE_DIR": str(model_store.parents[2])}
    extra = "[engine]\nn_ctx = 1024\n[cache]\nenabled = false\n"
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as directory,
        Daemon(Path(directory), extra=extra, environ=environ) as running,
    ):
        yield running


def test_all_protocols_give_the_same_answer(
    openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic, ollama_sdk: ollama.Client
) -> None:
    """Greedy, and one after the other: the same prompt in each protocol's words is the same to the model."""
    chat = openai_sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=30, temperature=0)
    expected = chat.choices[0].message.content or ""
    assert len(expected) > 20
    response = openai_sdk.responses.create(model=MODEL, input=QUESTION, max_output_tokens=30, temperature=0)
    assert response.output_text == expected
    with openai_sdk.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=30, temperature=0) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "extra_body": {"temperature": 0}}
    message = anthropic_sdk.messages.create(**asked)
    assert message.content[0].type == "text"
    assert message.content[0].text == expected
    options = {"num_predict": 30, "temperature": 0}
    assert ollama_sdk.chat(model=MODEL, messages=QUESTION, options=options).message.content == expected
    pieces = ollama_sdk.generate(model=MODEL, prompt=QUESTION[0]["content"], options=options, stream=True)
    assert "".join(piece.response or "" for piece in pieces) == expected
    assert chat.usage is not None
    assert response.usage is not None
    counted = anthropic_sdk.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted


def test_a_system_prompt_is_read_in_each_protocols_place(
    openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic, ollama_sdk: ollama.Client
) -> None:
    bare = openai_sdk.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens
    said = openai_sdk.responses.input_tokens.count(model=MODEL, input=QUESTION, instructions=SYSTEM).input_tokens
    assert bare == said
    longer = SYSTEM + " " + SYSTEM
    counted = openai_sdk.responses.input_tokens.count(model=MODEL, input=QUESTION, instructions=longer).input_tokens
    assert counted > said
    assert anthropic_sdk.messages.count_tokens(model=MODEL, messages=QUESTION, system=longer).input_tokens == counted
    answer = ollama_sdk.generate(
        model=MODEL, prompt=QUESTION[0]["content"], system=longer, options={"num_predict": 1, "temperature": 0}
    )
    assert answer.prompt_eval_count == counted


def test_answers_of_a_form(
    openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic, ollama_sdk: ollama.Client
) -> None:
    parsed = openai_sdk.responses.parse(model=MODEL, input="A car, glossy and red.", text_format=Paint)
    assert isinstance(parsed.output_parsed, Paint)
    message = anthropic_sdk.messages.parse(model=MODEL, max_tokens=100, messages=QUESTION, output_format=Paint)
    assert isinstance(message.parsed_output, Paint)
    answer = ollama_sdk.chat(model=MODEL, messages=QUESTION, format=Paint.model_json_schema())
    Paint.model_validate_json(answer.message.content or "")


def test_calls(openai_sdk: openai.OpenAI, anthropic_sdk: anthropic.Anthropic) -> None:
    """One after the other, and back; the model is too small to call anything that it need not."""
    town = {"enum": ["Graz", "Linz", "Wien"]}
    schema = {"type": "object", "properties": {"town": town}, "required": ["town"], "additionalProperties": False}
    question: Any = [{"role": "user", "content": "Is it warm in Linz?"}]
    function: Any = {"type": "function", "name": "weather", "parameters": schema, "strict": True}
    answer = openai_sdk.responses.create(
        model=MODEL, input=question, tools=[function], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["town"] in town["enum"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Warm, 24 degrees."}
    asked: Any = [*question, *answer.output, result]
    then = openai_sdk.responses.create(
        model=MODEL, input=asked, tools=[function], tool_choice="none", max_output_tokens=40
    )
    assert then.output_text
    custom: Any = {"name": "weather", "input_schema": schema}
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = anthropic_sdk.messages.create(
        model=MODEL, max_tokens=200, messages=question, tools=[custom], tool_choice=choice
    )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input["town"] in town["enum"]


def test_ollama_lists_what_is_known_of_the_model(ollama_sdk: ollama.Client) -> None:
    (listed,) = (model for model in ollama_sdk.list().models if model.model == f"{MODEL}:latest")
    assert listed.size is not None
    assert listed.size > 50_000_000
    assert listed.digest is not None
    assert len(listed.digest) == 64
    assert listed.details is not None
    assert listed.details.family == "llama"
    shown = ollama_sdk.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 1024
    form = (listed.details.quantization_level or "").lower()
    assert ollama_sdk.show(f"{MODEL}:{form}").details == listed.details


def test_ollama_continues_a_raw_prompt(ollama_sdk: ollama.Client) -> None:
    options = {"num_predict": 3, "temperature": 0}
    answer = ollama_sdk.generate(model=MODEL, prompt="The capital of France is", raw=True, options=options)
    assert answer.response.strip().startswith("Paris")


def test_ollama_embeds(ollama_sdk: ollama.Client) -> None:
    if "minilm-l6:latest" not in [model.model for model in ollama_sdk.list().models]:
        pytest.skip("minilm-l6 is not in this machine's store")
    cat, kitten, motor = ollama_sdk.embed(
        model="minilm-l6", input=["a cat sleeps", "a kitten is asleep", "an electric motor"], keep_alive=0
    ).embeddings

    patience.until(lambda: "minilm-l6:latest" not in [model.model for model in ollama_sdk.ps().models])

    def alike(a: Any, b: Any) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert alike(cat, kitten) > alike(cat, motor)
    assert alike(cat, cat) == pytest.approx(1.0, abs=1e-3)
