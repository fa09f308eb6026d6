from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from msgspec import UNSET

from edge_rt.api.answers import ChatShape, CompletionShape, wire_timings, wire_usage
from edge_rt.api.schemas import ChatLogprobs, CompletionLogprobs, encode
from edge_rt.types import Energy, Timings, TokenLogprob, Usage

TIMINGS = Timings(queue_s=0.0, prefill_s=0.5, prefill_tokens=10, decode_s=0.2, decode_tokens=4, ttft_s=0.5)

HALF = TokenLogprob(token_id=1, raw=b"\xf0\x9f", logprob=-0.5, top=((1, b"\xf0\x9f", -0.5), (2, b"a", -1.5)))
LETTER = TokenLogprob(token_id=2, raw=b"ab", logprob=-1.0)


def test_timings_have_llama_servers_names() -> None:
    usage = Usage(prompt_tokens=12, completion_tokens=5, cached_tokens=2)
    timings = Timings(queue_s=1.0, prefill_s=0.5, prefill_tokens=10, decode_s=0.2, decode_tokens=4, ttft_s=1.5)
    wire = wire_timings(usage, timings)
    assert {name: getattr(wire, name) for name in wire.__struct_fields__} == {
        "cache_n": 2,
        "prompt_n": 10,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 50.0,
        "prompt_per_second": 20.0,
        "predicted_n": 5,
        "predicted_ms": 200.0,
        "predicted_per_token_ms": 50.0,
        "predicted_per_second": 20.0,
        "draft_n": UNSET,
        "draft_n_accepted": UNSET,
    }


def test_guesses_are_counted_where_there_were_any() -> None:
    timings = Timings(
        queue_s=0.0,
        prefill_s=0.1,
        prefill_tokens=1,
        decode_s=0.1,
        decode_tokens=1,
        ttft_s=0.1,
        drafted_tokens=7,
        accepted_tokens=0,
    )
    wire = wire_timings(Usage(prompt_tokens=1, completion_tokens=2), timings)
    assert (wire.draft_n, wire.draft_n_accepted) == (7, 0)


def test_rates_of_nothing_are_null() -> None:
    timings = Timings(queue_s=0.0, prefill_s=0.0, prefill_tokens=0, decode_s=0.0, decode_tokens=0, ttft_s=0.0)
    wire = wire_timings(Usage(prompt_tokens=1, completion_tokens=0), timings)
    assert wire.prompt_per_token_ms is None
    assert wire.prompt_per_second is None
    assert wire.predicted_per_token_ms is None
    assert wire.predicted_per_second is None


def test_usage() -> None:
    wire = wire_usage(Usage(prompt_tokens=12, completion_tokens=5, cached_tokens=2), TIMINGS)
    assert (wire.prompt_tokens, wire.completion_tokens, wire.total_tokens) == (12, 5, 17)
    assert wire.prompt_tokens_details.cached_tokens == 2
    assert b"energy" not in encode(wire)


def test_energy_by_token() -> None:
    energy = Energy(
        total_j=3.0,
        above_idle_j=2.0,
        prefill_j=1.0,
        prefill_above_idle_j=0.5,
        decode_j=2.0,
        decode_above_idle_j=1.5,
        boundary="soc",
        quality="derived",
        source="rapl package-0",
        coverage=0.9,
    )
    usage = Usage(prompt_tokens=12, completion_tokens=5, cached_tokens=2, energy=energy)
    timings = replace(TIMINGS, prefill_tokens=10, decode_tokens=4)
    assert msgspec.to_builtins(wire_usage(usage, timings))["energy"] == {
        "total_j": 3.0,
        "above_idle_j": 2.0,
        "prefill_j_per_token": 0.1,
        "prefill_above_idle_j_per_token": 0.05,
        "decode_j_per_token": 0.5,
        "decode_above_idle_j_per_token": 0.375,
        "boundary": "soc",
        "quality": "derived",
        "source": "rapl package-0",
        "coverage": 0.9,
    }


def test_energy_that_is_not_known_is_absent_and_not_zero() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1, energy=Energy(total_j=3.0, prefill_j=3.0, decode_j=0.0))
    timings = replace(TIMINGS, prefill_tokens=0, decode_tokens=0)
    wire = msgspec.to_builtins(wire_usage(usage, timings))["energy"]
    assert set(wire) == {"total_j", "boundary", "quality", "source", "coverage"}


def test_chat_logprobs_carry_the_exact_bytes() -> None:
    logprobs = ChatShape().piece("x", [HALF]).logprobs
    assert isinstance(logprobs, ChatLogprobs)
    token = logprobs.content[0]
    assert (token.token, token.bytes, token.logprob) == ("\ufffd", [0xF0, 0x9F], -0.5)
    assert [(rival.token, rival.logprob) for rival in token.top_logprobs] == [("\ufffd", -0.5), ("a", -1.5)]


def test_completion_logprobs_count_offsets_over_the_whole_stream() -> None:
    shape = CompletionShape()
    first, second = shape.piece("", [HALF, LETTER]).logprobs, shape.piece("", [LETTER]).logprobs
    assert isinstance(first, CompletionLogprobs)
    assert isinstance(second, CompletionLogprobs)
    assert first.text_offset == [0, 1]
    assert second.text_offset == [3]
    assert first.top_logprobs == [{"\ufffd": -0.5, "a": -1.5}, {"ab": -1.0}]


@pytest.mark.parametrize("shape", [ChatShape(), CompletionShape()])
def test_only_the_closing_has_a_finish_reason(shape: ChatShape | CompletionShape) -> None:
    assert b'"finish_reason":null' in encode(shape.piece("x", []))
    assert b'"logprobs":null' in encode(shape.piece("x", []))
    assert b'"finish_reason":"length"' in encode(shape.closing("length"))
