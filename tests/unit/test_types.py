from __future__ import annotations

import dataclasses

import msgspec
import pytest

from edge_rt import types
from edge_rt.types import (
    Chunk,
    GenerateRequest,
    Message,
    Sampling,
    Timings,
    TokenLogprob,
    ToolCall,
    Usage,
    goes_on,
)

TIMINGS = Timings(queue_s=0.5, prefill_s=2.0, prefill_tokens=100, decode_s=4.0, decode_tokens=20, ttft_s=2.5)


def test_rates_come_from_tokens_and_seconds() -> None:
    assert TIMINGS.prefill_tps == 50.0
    assert TIMINGS.decode_tps == 5.0
    assert TIMINGS.tpot_s == 0.2


@pytest.mark.parametrize("decode_s", [0.0, 0.0001], ids=["none", "sending-it"])
def test_an_answer_of_one_token_has_no_decode_rate(decode_s: float) -> None:
    timings = dataclasses.replace(TIMINGS, decode_s=decode_s, decode_tokens=0)
    assert timings.decode_tps is None
    assert timings.tpot_s is None


def test_a_prompt_that_was_kept_whole_has_no_prefill_rate() -> None:
    assert dataclasses.replace(TIMINGS, prefill_s=0.0, prefill_tokens=0).prefill_tps is None


def test_total_tokens_count_cached_ones_once() -> None:
    assert Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=8).total_tokens == 15


def test_the_default_sampling_is_greedy_and_changes_nothing() -> None:
    sampling = Sampling()
    assert (sampling.temperature, sampling.repeat_penalty) == (0.0, 1.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (0.0, 0.0, {})


def test_the_question_is_what_the_user_said_last() -> None:
    said = (Message(role="user", content="one"), Message(role="assistant", content="x"))
    assert GenerateRequest(id="1", model="m", messages=said).question == "one"
    assert GenerateRequest(id="1", model="m", prompt="two").question == "two"
    assert GenerateRequest(id="1", model="m", prompt_token_ids=(1,)).question == ""


def test_every_value_type_is_frozen_slotted_and_keyword_only() -> None:
    values = [cls for cls in vars(types).values() if isinstance(cls, type) and dataclasses.is_dataclass(cls)]
    assert values
    for cls in values:
        params = cls.__dataclass_params__  # type: ignore[attr-defined]
        assert params.frozen, cls
        assert "__slots__" in vars(cls), cls
        assert all(field.kw_only for field in dataclasses.fields(cls)), cls


@pytest.mark.parametrize(
    "value",
    [
        GenerateRequest(
            id="1",
            model="m",
            messages=(Message(role="user", content="Grüße 🌍"),),
            stop=("\n",),
            sampling=Sampling(seed=2**64 - 1, logit_bias={5: -100.0}),
        ),
        GenerateRequest(id="2", model="m", prompt_token_ids=(1, 2), deadline_s=0.5, top_logprobs=0),
        Chunk(
            text="é",
            token_ids=(1, 2),
            logprobs=(TokenLogprob(token_id=1, raw=b"\xc3", logprob=-0.5, top=((1, b"\xc3", -0.5),)),),
            finish_reason="stop",
            usage=Usage(prompt_tokens=1, completion_tokens=2),
            timings=TIMINGS,
        ),
    ],
    ids=["chat", "ids", "chunk"],
)
def test_a_value_crosses_the_channel_whole(value: GenerateRequest | Chunk) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_an_answer_goes_on_with_a_text_of_the_assistants_and_with_nothing_else() -> None:
    asked, begun = Message(role="user", content="a"), Message(role="assistant", content="b")
    called = dataclasses.replace(begun, tool_calls=(ToolCall(id="1", name="f", arguments="{}"),))
    assert goes_on((asked, begun))
    for messages in ((), (asked,), (begun, asked), (asked, called)):
        assert not goes_on(messages)
