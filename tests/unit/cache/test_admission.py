"""What is stored, for how long, and what a client may wish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.cache import admission
from edge_rt.cache.admission import Repeats, decide, is_fresh, is_refusal, is_volatile, regenerates, wishes
from edge_rt.config import Cache
from edge_rt.types import CacheWishes, GenerateRequest, Sampling
from tests.fakes import FakeClock

ON = Cache()
GREEDY, SEEDED, DRAWN = Sampling(), Sampling(temperature=0.8, seed=7), Sampling(temperature=0.8)


def _asked(sampling: Sampling = GREEDY, **wish: Any) -> GenerateRequest:
    return GenerateRequest(id="1", model="m", prompt="x", sampling=sampling, cache=CacheWishes(**wish))


def _decide(request: GenerateRequest, settings: Cache = ON, **answer: Any) -> str:
    whole: dict[str, Any] = {"text": "Paris.", "finish_reason": "stop", "size_bytes": 6}
    return decide(request, settings, **{**whole, **answer})


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("", CacheWishes()),
        ("no-cache", CacheWishes(no_cache=True)),
        ("No-Store", CacheWishes(no_store=True)),
        ("only-if-cached, max-age=60", CacheWishes(only_if_cached=True, max_age_s=60.0)),
        ('max-age="60"', CacheWishes(max_age_s=60.0)),
        ("max-age=60, max-age=5", CacheWishes(max_age_s=5.0)),
        ("max-age=soon", CacheWishes(max_age_s=0.0)),
        ("max-age", CacheWishes(max_age_s=0.0)),
        ("max-age=-1", CacheWishes(max_age_s=0.0)),
        ("max-age=" + "9" * 400, CacheWishes(max_age_s=2.0**31)),
        ("max-stale=60, no-transform, foo=bar", CacheWishes()),
        ('private="no-store, no-cache"', CacheWishes()),
        (" ,, no-cache ,", CacheWishes(no_cache=True)),
        ("no-caches, xno-store", CacheWishes()),
    ],
)
def test_that_cache_control_is_read_as_rfc_9111_says(header: str, wanted: CacheWishes) -> None:
    assert wishes(header) == wanted


@given(st.text(max_size=200))
def test_that_any_header_can_be_read(header: str) -> None:
    assert isinstance(wishes(header), CacheWishes)


def test_that_an_answer_is_stored_that_would_come_again() -> None:
    assert _decide(_asked(GREEDY)) == "store"
    assert _decide(_asked(SEEDED)) == "store"
    assert _decide(_asked(DRAWN)) == "sampled"
    assert _decide(_asked(DRAWN, sampled=True)) == "store"
    assert _decide(_asked(DRAWN), Cache(sampled=True)) == "store"


def test_that_no_answer_is_stored_against_a_wish() -> None:
    assert _decide(_asked(no_store=True)) == "no-store"
    assert _decide(_asked(no_cache=True)) == "store", "no-cache asks for a new one, which is stored"
    assert _decide(_asked(), Cache(enabled=False)) == "disabled"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"finish_reason": None}, "aborted"),
        ({"finish_reason": "length"}, "truncated"),
        ({"finish_reason": "content_filter"}, "filtered"),
        ({"text": " \n"}, "empty"),
        ({"text": "I'm sorry, but I can't help with that."}, "refusal"),
        ({"size_bytes": ON.max_answer_bytes + 1}, "too large"),
    ],
)
def test_that_only_whole_answers_are_stored(answer: dict[str, Any], why: str) -> None:
    assert _decide(_asked(), **answer) == why


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that request.",
        "I’m sorry, I cannot help.",
        "Sorry, I can't do that.",
        "I cannot provide instructions for that.",
        "I can't tell.",
        "I won't do this.",
        "As an AI language model, I have no opinion.",
        "As an AI, I do not have feelings.",
        "Unfortunately, I don't have that.",
        "I apologize, but this is not possible.",
        "\n**I am unable to answer.**",
        "I don't have access to the internet.",
        "I do not know.",
        "We are sorry to hear that.",
    ],
)
def test_that_a_refusal_is_known_by_its_opening(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "Paris is the capital of France.",
        "He said: I'm sorry.",
        "I can help with that. First, open the valve.",
        "I know of three ways.",
        "As an aid to memory, use a list.",
        "The sorry state of the pump means that it must be replaced.",
        "I will now explain.",
    ],
)
def test_that_an_ordinary_answer_is_no_refusal(text: str) -> None:
    assert not is_refusal(text)


@pytest.mark.parametrize(
    "question",
    ["What's the weather in Rome?", "Who is the CURRENT president?", "latest news", "What happened this week?"],
)
def test_that_questions_about_now_are_volatile(question: str) -> None:
    assert is_volatile(question)
    assert admission.ttl_s(question, ON) == 60.0
    assert admission.ttl_s(question, Cache(ttl_s=5.0)) == 5.0


@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "Do you know Python?", "What is electric currents' unit?", ""]
)
def test_that_other_questions_are_not(question: str) -> None:
    assert not is_volatile(question)
    assert admission.ttl_s(question, ON) == ON.ttl_s


def test_that_an_answer_gets_old() -> None:
    assert is_fresh(100.0, 60.0, CacheWishes(), 159.0)
    assert not is_fresh(100.0, 60.0, CacheWishes(), 160.0)
    assert not is_fresh(100.0, 60.0, CacheWishes(max_age_s=5.0), 110.0)
    assert is_fresh(100.0, None, CacheWishes(), 1e9), "a corrected one does not"
    assert not is_fresh(100.0, None, CacheWishes(max_age_s=5.0), 110.0)


def test_that_a_clock_which_was_set_back_makes_an_age_unknown() -> None:
    assert admission.age_s(1000.0, 400.0) is None
    assert not is_fresh(1000.0, 60.0, CacheWishes(), 400.0)
    assert is_fresh(1000.0, 60.0, CacheWishes(), 999.0), "a clock is stepped by a second in ordinary keeping"
    assert admission.age_s(1000.0, 999.0) == 0.0
    assert is_fresh(1000.0, None, CacheWishes(), 400.0)


def test_that_the_same_question_from_one_client_within_a_minute_is_noticed() -> None:
    repeats, clock = Repeats(), FakeClock()
    assert not repeats.note("1000", b"k", clock())
    clock.advance(59)
    assert repeats.note("1000", b"k", clock())
    assert not repeats.note("1001", b"k", clock()), "another client"
    assert not repeats.note("1000", b"other", clock())
    clock.advance(60)
    assert not repeats.note("1000", b"k", clock())


def test_that_what_was_asked_is_remembered_within_bounds() -> None:
    repeats = Repeats(max_remembered=2)
    for key in (b"a", b"b", b"c"):
        repeats.note("", key, 0.0)
    assert not repeats.note("", b"a", 1.0)
    assert repeats.note("", b"c", 1.0)


def test_that_a_repeat_regenerates_only_what_can_come_out_otherwise() -> None:
    assert not regenerates(repeated=True, is_deterministic=True, endpoint="")
    assert regenerates(repeated=True, is_deterministic=False, endpoint="")
    assert regenerates(repeated=True, is_deterministic=True, endpoint="cloud")
    assert regenerates(repeated=True, is_deterministic=True, endpoint="", is_exact=False)
    assert not regenerates(repeated=False, is_deterministic=False, endpoint="cloud", is_exact=False)
