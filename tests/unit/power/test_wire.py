from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.power.state import Advice, Hint
from edge_rt.power.wire import (
    MAX_BYTES,
    Ask,
    BadMessageError,
    Cap,
    TakesAdvice,
    advice_of,
    decode,
    encode,
    encode_advice,
    encode_hint,
    encode_takes_advice,
    parse,
)

HINTS = st.builds(
    Hint,
    work=st.sampled_from(("idle", "prefill", "decode")),
    n_waiting=st.integers(0, 1_000_000),
    n_running=st.integers(0, 1_000_000),
    n_prompt_tokens=st.integers(0, 1_000_000),
    ttft_left_s=st.none() | st.floats(-1e6, 1e6),
    tpot_s=st.none() | st.floats(0, 1e6),
    n_threads=st.integers(0, 1000),
    sent_s=st.floats(0, 1e9),
)


@given(HINTS)
def test_a_hint_arrives_as_it_was_sent(hint: Hint) -> None:
    assert decode(encode_hint(hint)) == hint


def test_what_is_out_of_range_is_sent_as_the_nearest() -> None:
    hint = Hint(work="prefill", n_prompt_tokens=10**9, ttft_left_s=-1e12, sent_s=1.0)
    assert decode(encode_hint(hint)) == Hint(work="prefill", n_prompt_tokens=10**6, ttft_left_s=-1e6, sent_s=1.0)


def test_the_other_messages() -> None:
    assert decode(encode("status")) == Ask()
    assert decode(encode("cap", max_w=12)) == Cap(12.0)
    assert parse(encode("error", code="denied", problem="no")) == {"type": "error", "code": "denied", "problem": "no"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "3",
        "{}",
        '{"type": 3}',
        '{"type": "reboot"}',
        '{"type": ["hint"]}',
        '{"type": "status", "more": 1}',
        '{"type": "cap"}',
        '{"type": "cap", "max_w": -1}',
        '{"type": "cap", "max_w": 1e9}',
        '{"type": "cap", "max_w": NaN}',
        '{"type": "cap", "max_w": Infinity}',
        '{"type": "cap", "max_w": 1e999}',
        '{"type": "cap", "max_w": true}',
        '{"type": "cap", "max_w": "1"}',
        '{"type": "cap", "max_w": null}',
        '{"type": "cap", "max_w": 1, "max_w": 2}',
        '{"type": "cap", "max_w": ' + "9" * 3900 + "}",
        '{"type": "hint", "sent_s": 1}',
        '{"type": "hint", "work": "sleep", "sent_s": 1}',
        '{"type": "hint", "work": "idle"}',
        '{"type": "hint", "work": "idle", "sent_s": -1}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "n_waiting": -1}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "n_waiting": 1.0}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "n_waiting": true}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "n_waiting": null}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "tpot_s": -0.1}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "ttft_left_s": 1e7}',
        '{"type": "hint", "work": "idle", "sent_s": 1, "more": 1}',
        "[" * 4000,
        '{"a":' * 800,
        '{"type": "status"}' + " " * 5000,
        '{"type": "status"',
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadMessageError):
        decode(text.encode())


@given(st.binary(max_size=5000))
def test_no_bytes_bring_the_reader_down(raw: bytes) -> None:
    with pytest.raises(BadMessageError):
        decode(raw)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("type", "work", "sent_s", "n_waiting", "n_running", "n_prompt_tokens", "ttft_left_s", "tpot_s", "max_w")


@given(
    st.dictionaries(
        st.sampled_from(FIELDS), VALUES | st.sampled_from(("hint", "cap", "status", "idle", 1.0)), max_size=9
    )
)
def test_what_is_taken_is_in_range(values: dict[str, Any]) -> None:
    try:
        found = decode(json.dumps(values).encode())
    except BadMessageError:
        return
    if isinstance(found, Hint):
        assert 0 <= found.n_waiting <= 10**6
        assert 0 <= found.sent_s < math.inf
        assert found.tpot_s is None or 0 <= found.tpot_s <= 1e6
    elif isinstance(found, Cap):
        assert 0 <= found.max_w <= 1e4


def test_an_answer_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode("status", text="x" * MAX_BYTES)


COUNTS = st.none() | st.integers(1, 1_000_000)


@given(st.builds(Advice, n_prefill_threads=COUNTS, n_decode_threads=COUNTS, max_batch=COUNTS), st.booleans())
def test_advice_arrives_as_it_was_given(advice: Advice, is_dry: bool) -> None:
    assert advice_of(parse(encode_advice(advice, is_dry=is_dry))) == (advice, is_dry)


def test_limits_of_who_takes_advice_arrive() -> None:
    assert decode(encode_takes_advice(TakesAdvice(4, 8))) == TakesAdvice(4, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"max_threads": 0},
        {"max_batch": None},
        {"max_batch": 1.0},
        {"n_cores": 4},
    ],
)
def test_limits_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadMessageError):
        decode(json.dumps(json.loads(encode_takes_advice(TakesAdvice(4, 8))) | change).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"type": "status"},
        {"version": 2},
        {"is_dry": None},
        {"is_dry": 1},
        {"n_decode_threads": 0},
        {"n_decode_threads": -1},
        {"n_prefill_threads": True},
        {"max_batch": 10**9},
        {"max_batch": "8"},
        {"n_cores": 4},
    ],
)
def test_advice_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    values = parse(encode_advice(Advice(n_decode_threads=2, max_batch=8), is_dry=False)) | change
    with pytest.raises(BadMessageError):
        advice_of(values)
    assert "type" in values  # and nothing was taken out of it


def test_counts_that_are_left_out_are_no_advice() -> None:
    assert advice_of({"type": "advice", "version": 1, "is_dry": False, "max_batch": 3}) == (Advice(max_batch=3), False)
