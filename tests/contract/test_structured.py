"""Answers of a form and tool calls on every back end that is here, with the default model's 49 thousand tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile
from edge_rt.engine.threads import ThreadChoice
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import InvalidRequestError
from edge_rt.types import GenerateRequest, Message, ResponseFormat, Sampling, Tool
from tests.unit.engine.null_engine import Answer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "born": {"type": "integer", "minimum": 1500, "maximum": 2020},
        "fields": {"type": "array", "items": {"enum": ["mathematics", "physics", "poetry"]}, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 12, "pattern": "^[A-Zé ]+$"}]},
    },
    "required": ["name", "born", "fields", "note"],
    "additionalProperties": False,
}
LOOK_UP = Tool(
    name="look_up",
    description="Finds a person.",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 24}, "exact": {"type": "boolean"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(
    scope="module",
    params=["null", *(pytest.param(n, marks=pytest.mark.model) for n in ("llama_cpu", "native"))],
)
def engine(request: pytest.FixtureRequest) -> Iterator[TokenEngine]:
    backend = registry.get(request.param)
    if isinstance(absent := backend.probe(), Absent):
        pytest.skip(f"{request.param}: {absent.reason}")
    path = request.getfixturevalue("model_store") if request.param != "null" else Path("none")
    file = ModelFile(model="m", variant="", path=path, quant="")
    session = backend.load(file, LoadOptions(n_ctx=4096, n_seq_max=4, n_threads=1))
    loop = TokenEngine(session, EngineSettings(max_prefix_bytes=0), ThreadChoice((1,)))
    yield loop
    session.close()


def ask(engine: TokenEngine, *asked: dict[str, Any]) -> list[Answer]:
    """Ask several at a time."""
    answers = [Answer() for _ in asked]
    message = Message(role="user", content="Who was Ada Lovelace?")
    for i, (fields, answer) in enumerate(zip(asked, answers, strict=True)):
        options = {"max_tokens": 150, "sampling": Sampling(temperature=1.5, seed=i), **fields}
        engine.submit(GenerateRequest(id=f"r{i}", model="m", messages=(message,), **options), answer)
    for _ in range(3000):
        if all(answer.is_over for answer in answers):
            break
        engine.step()
    assert [answer.error for answer in answers] == [None] * len(answers)
    return answers


def test_hot_answers_validate(engine: TokenEngine) -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    answers = ask(engine, *({"response_format": form} for _ in range(8)))
    whole = [answer for answer in answers if answer.last.finish_reason == "stop"]
    assert whole
    for answer in whole:
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_every_kind_of_form_is_kept(engine: TokenEngine) -> None:
    kinds = {
        ResponseFormat(kind="choice", text='["yes", "no", "müde"]'): "yes|no|müde",
        ResponseFormat(kind="regex", text=r"[A-Z][a-z]{2,8} \d{4}"): r"[A-Z][a-z]{2,8} [0-9]{4}",
        ResponseFormat(
            kind="grammar", text='root ::= line{2}\nline ::= "- " [a-z ]{3,20} "\\n"'
        ): r"(- [a-z ]{3,20}\n){2}",
    }
    answers = ask(engine, *({"response_format": form} for form in kinds))
    for answer, pattern in zip(answers, kinds.values(), strict=True):
        assert answer.last.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_forced_tokens_are_the_models_own(engine: TokenEngine) -> None:
    """A text that has no choice comes in the tokens that the model would read it in."""
    form = ResponseFormat(kind="choice", text='["The pressure in line 3 rose at 14:05."]')
    (answer,) = ask(engine, {"response_format": form})
    ids = [i for chunk in answer.chunks for i in chunk.token_ids]
    assert ids == engine.tokenize("The pressure in line 3 rose at 14:05.", special=False, add_bos=False)
    steps = engine.stats().steps_total
    (again,) = ask(engine, {"response_format": form, "top_logprobs": 0})
    assert again.text == answer.text
    assert engine.stats().steps_total - steps > 5  # one by one: each has its logprob


def test_calls_meet_their_schemas(engine: TokenEngine) -> None:
    must = {"tools": (LOOK_UP,), "tool_choice": "required", "parallel_tool_calls": False}
    answers = ask(engine, *(must for _ in range(4)), {"tools": (LOOK_UP,), "tool_choice": "auto"})
    for answer in answers[:4]:
        deltas = [delta for chunk in answer.chunks for delta in chunk.tool_calls]
        assert (deltas[0].name, answer.text) == ("look_up", "")
        if answer.last.finish_reason == "tool_calls":
            jsonschema.validate(json.loads("".join(d.arguments for d in deltas)), json.loads(LOOK_UP.parameters))
    assert any(answer.last.finish_reason == "tool_calls" for answer in answers[:4])


def test_greedy_answers_are_the_same_alone_and_together(engine: TokenEngine) -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    asked = {"response_format": form, "sampling": Sampling(), "max_tokens": 60}
    (alone,) = ask(engine, asked)
    together = ask(engine, asked, asked)
    if engine._session.caps.is_batch_invariant:  # elsewhere a near tie may turn
        assert {answer.text for answer in together} == {alone.text}
    for answer in together:
        assert answer.text.startswith('{"name": "')


def test_a_stream_is_the_whole_answer_and_a_seed_gives_it_again(engine: TokenEngine) -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    hot = {"response_format": form, "sampling": Sampling(temperature=1.0, seed=41)}
    (streamed,), (whole,) = (ask(engine, {**hot, "stream": stream}) for stream in (True, False))
    assert len(whole.chunks) == 1
    assert streamed.text == whole.text
    ids = [i for chunk in streamed.chunks for i in chunk.token_ids]
    assert engine.detokenize(ids) == whole.text
    assert streamed.last.usage == whole.last.usage
    (other,) = ask(engine, {**hot, "sampling": Sampling(temperature=1.0, seed=42)})
    assert other.text != whole.text


def test_each_of_several_answers_is_the_one_that_its_seed_gives_alone(engine: TokenEngine) -> None:
    """What n answers are to the engine: requests that differ in their seed."""
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    asked = [{"response_format": form, "sampling": Sampling(temperature=1.0, seed=i)} for i in range(4)]
    together = ask(engine, *asked)
    assert len({answer.text for answer in together}) == 4
    for answer in together:
        if answer.last.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMA)
    if engine._session.caps.is_batch_invariant:
        assert [answer.text for answer in together] == [ask(engine, each)[0].text for each in asked]


def test_log_probabilities_come_with_every_token_of_a_form(engine: TokenEngine) -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    (answer,) = ask(engine, {"response_format": form, "top_logprobs": 3, "max_tokens": 60})
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
    assert answer.last.usage is not None
    assert len(entries) == answer.last.usage.completion_tokens
    assert b"".join(entry.raw for entry in entries).decode() == answer.text
    assert all(entry.logprob <= 0.0 and len(entry.top) == 3 for entry in entries)
    assert any(entry.logprob < entry.top[0][2] for entry in entries)  # of the model's wishes, which the form overrides


def test_a_stop_string_beside_a_form_is_refused(engine: TokenEngine) -> None:
    answer = Answer()
    form = ResponseFormat(kind="json_object")
    message = Message(role="user", content="x")
    request = GenerateRequest(id="r", model="m", messages=(message,), response_format=form, stop=("}",))
    engine.submit(request, answer)
    assert isinstance(answer.error, InvalidRequestError)
    assert answer.error.param == "stop"


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_stop_string_ends_text_and_no_call(engine: TokenEngine, tool_choice: Any) -> None:
    asked = {"tools": (LOOK_UP,), "tool_choice": tool_choice, "parallel_tool_calls": False, "stop": ('"', "name", "e")}
    (answer,) = ask(engine, asked)
    deltas = [delta for chunk in answer.chunks for delta in chunk.tool_calls]
    if tool_choice == "auto":
        assert not any(stop in answer.text for stop in asked["stop"])
    elif answer.last.finish_reason == "tool_calls":
        jsonschema.validate(json.loads("".join(d.arguments for d in deltas)), json.loads(LOOK_UP.parameters))


def test_a_forced_step_is_counted_and_saves_one(engine: TokenEngine) -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))
    before = engine.stats()
    (answer,) = ask(engine, {"response_format": form})
    after = engine.stats()
    n_forced = after.forced_tokens_total - before.forced_tokens_total
    n_tokens = after.completion_tokens_total - before.completion_tokens_total
    assert answer.last.usage is not None
    assert n_tokens == answer.last.usage.completion_tokens
    assert n_forced >= 6
    n_steps = after.steps_total - before.steps_total
    assert n_steps <= n_tokens - n_forced + 2  # and the prompt's
