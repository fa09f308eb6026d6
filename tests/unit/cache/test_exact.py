"""A stored answer comes back as it was sent, to whom it belongs, while it stands."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_rt.cache import admin, stored
from edge_rt.cache.exact import ExactTier, Look
from edge_rt.cache.key import Identity
from edge_rt.cache.store import Store
from edge_rt.cache.stored import Piece, Recorder, replay
from edge_rt.config import Cache
from edge_rt.types import (
    CacheWishes,
    Chunk,
    Energy,
    GenerateRequest,
    Message,
    Origin,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from tests.fakes import FakeClock

HERE = Identity(model="m", variant="q4", file_sha256="1" * 64)
CLOUD = Identity(model="m", endpoint="far", upstream="https://example.org/v1 big")
NOW_S = 1e9
TIMES = Timings(queue_s=9.0, prefill_s=0.5, prefill_tokens=3, decode_s=1.5, decode_tokens=2, ttft_s=9.5)


class Events:
    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.saved_s = self.saved_j = 0.0
        self.verified: list[bool] = []
        self.size = (0, 0)
        self.n_evicted = self.n_rejected = 0

    def cache_looked_up(self, state: str, *, saved_s: float = 0.0, saved_j: float = 0.0) -> None:
        self.states[state] += 1
        self.saved_s += saved_s
        self.saved_j += saved_j

    def cache_verified(self, *, is_right: bool) -> None:
        self.verified.append(is_right)

    def cache_decided(self, decision: str) -> None:
        self.decisions[decision] += 1

    def cache_size(self, *, n_entries: int, size_bytes: int) -> None:
        self.size = (n_entries, size_bytes)

    def cache_evicted(self, n: int) -> None:
        self.n_evicted += n

    def cache_rejected(self) -> None:
        self.n_rejected += 1


class Bench:
    """An exact tier over a store of its own."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.settings = Cache(**settings)
        self.events, self.clock = Events(), FakeClock()
        self.store = Store.open(
            path, max_bytes=self.settings.max_bytes, max_value_bytes=self.settings.max_bytes, events=self.events
        )
        self.tier = ExactTier(self.settings, self.store, self.events, clock=self.clock)

    def look(self, request: GenerateRequest, *identities: Identity, now_s: float = NOW_S) -> Look:
        return asyncio.run(self.tier.look_up(request, identities or (HERE,), now_s))

    def answer(self, request: GenerateRequest, *chunks: Chunk, identity: Identity = HERE, now_s: float = NOW_S) -> str:
        recorder = self.tier.recorder()
        for chunk in chunks or said("Paris", "."):
            recorder.add(chunk)
        return self.tier.admit(request, identity, recorder, now_s)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "cache.sqlite")
    yield made
    made.store.close()


def asked(text: str = "What is the capital of France?", **values: Any) -> GenerateRequest:
    return GenerateRequest(**{"id": "1", "model": "m", "messages": (Message(role="user", content=text),), **values})


def said(*texts: str, finish_reason: Any = "stop", **last: Any) -> tuple[Chunk, ...]:
    chunks = [Chunk(text=text, token_ids=(i,)) for i, text in enumerate(texts)]
    end = {"usage": Usage(prompt_tokens=3, completion_tokens=len(texts), cached_tokens=1), "timings": TIMES, **last}
    chunks[-1] = replace(chunks[-1], finish_reason=finish_reason, **end)
    return tuple(chunks)


def test_a_stored_answer_still_says_which_stop_string_ended_it(bench: Bench) -> None:
    bench.answer(asked(stop=("END",)), *said("Paris", ".", stopped_by="END"))
    hit = bench.look(asked(stop=("END",)))
    assert hit.stored is not None
    assert replay(hit.stored, NOW_S)[-1].stopped_by == "END"


def test_that_an_answer_comes_back_as_a_stream_with_usage(bench: Bench) -> None:
    miss = bench.look(asked())
    assert (miss.state, miss.stored, miss.is_repeated) == ("miss", None, False)
    assert miss.flight_key is not None
    assert bench.answer(asked()) == "store"
    hit = bench.look(asked(id="2", stream=False), now_s=NOW_S + 10)
    assert hit.state == "hit-exact"
    assert hit.stored is not None
    chunks = replay(hit.stored, NOW_S + 10)
    assert "".join(chunk.text for chunk in chunks) == "Paris."
    assert [chunk.finish_reason for chunk in chunks] == ["stop"]
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=3)
    assert chunks[-1].timings is not None
    assert chunks[0].origin == Origin(reason="stored", cache="hit-exact", age_s=10.0)
    assert sum((chunk.token_ids for chunk in chunks), ()) == (0, 1)
    assert (bench.events.states, bench.events.saved_s) == ({"hit-exact": 1}, 2.0)
    assert bench.events.size[0] == 1


def test_that_a_long_answer_comes_back_in_pieces_of_whole_characters(bench: Bench) -> None:
    logprob = TokenLogprob(token_id=1, raw=b"\xe2", logprob=-0.5, top=((1, b"\xff", -0.5), (2, b"x", -2.0)))
    chunks = [Chunk(text="é" * 100, token_ids=(n,), logprobs=(logprob,)) for n in range(100)]
    bench.answer(asked(top_logprobs=2), *chunks, *said("end"))
    hit = bench.look(asked(top_logprobs=2))
    assert hit.stored is not None
    again = replay(hit.stored, NOW_S)
    assert len(again) > 3
    assert "".join(chunk.text for chunk in again) == "é" * 10_000 + "end"
    assert sum((chunk.logprobs for chunk in again), ()) == (logprob,) * 100
    assert [chunk.finish_reason for chunk in again] == [None] * (len(again) - 1) + ["stop"]
    assert [chunk.origin is not None for chunk in again] == [True] + [False] * (len(again) - 1)


def test_that_no_tenant_gets_anothers_answer(bench: Bench, tmp_path: Path) -> None:
    bench.answer(asked(tenant="1000"))
    assert bench.look(asked(tenant="1001")).state == "miss"
    assert bench.look(asked(tenant="1000")).state == "hit-exact"
    one, other = bench.look(asked("x", tenant="1000")), bench.look(asked("x", tenant="1001"))
    assert one.flight_key != other.flight_key
    shared = Bench(tmp_path / "shared.sqlite", isolate=False)
    shared.answer(asked(tenant="1000"))
    assert shared.look(asked(tenant="1001")).state == "hit-exact"
    shared.store.close()


def test_that_an_answer_stands_for_its_time(bench: Bench) -> None:
    bench.answer(asked())
    bench.answer(asked("What is the weather today?"))
    assert bench.look(asked(), now_s=NOW_S + 86_399).state == "hit-exact"
    assert bench.look(asked(), now_s=NOW_S + 86_400).state == "miss"
    assert bench.look(asked("What is the weather today?"), now_s=NOW_S + 61).state == "miss"
    assert len(bench.store) == 0, "what is too old is removed"


def test_that_a_clock_which_jumps_costs_hits_and_nothing_else(bench: Bench) -> None:
    bench.answer(asked())
    assert bench.look(asked(), now_s=NOW_S - 1e6).state == "miss", "set back: its age is not known"
    assert bench.look(asked(), now_s=NOW_S + 1).state == "hit-exact", "set right again"
    bench.answer(asked("b"), now_s=NOW_S + 1e8)
    assert bench.look(asked("b"), now_s=NOW_S).state == "miss", "stored while the clock was ahead"
    bench.answer(asked("b"), now_s=NOW_S)
    assert bench.look(asked("b"), now_s=NOW_S).state == "hit-exact"
    assert bench.look(asked(), now_s=NOW_S + 1e8).state == "miss"


def test_that_cache_control_is_obeyed(bench: Bench) -> None:
    def wish(**values: Any) -> GenerateRequest:
        return asked(cache=CacheWishes(**values))

    bench.answer(asked())
    assert bench.look(wish(no_cache=True)).state == "bypass"
    assert bench.look(wish(no_cache=True)).flight_key is None, "computed anew, not joined"
    assert bench.look(wish(no_store=True)).state == "bypass"
    assert bench.look(wish(only_if_cached=True)).state == "hit-exact"
    assert bench.look(wish(max_age_s=5.0), now_s=NOW_S + 5).state == "hit-exact"
    assert bench.look(wish(max_age_s=5.0), now_s=NOW_S + 6).state == "miss"
    assert len(bench.store) == 1, "too old for a wish is not too old for others"
    assert bench.answer(wish(no_store=True)) == "no-store"
    assert bench.answer(wish(no_cache=True), *said("new")) == "store"
    hit = bench.look(asked())
    assert hit.stored is not None
    assert hit.stored.text == "new"


def test_that_drawn_answers_are_kept_when_that_is_asked_for(bench: Bench) -> None:
    drawn = asked(sampling=Sampling(temperature=0.8))
    assert bench.look(drawn).state == "bypass"
    assert bench.look(drawn).flight_key is None, "two clients each want a draw of their own"
    assert bench.answer(drawn) == "sampled"
    wished = replace(drawn, cache=CacheWishes(sampled=True))
    assert bench.answer(wished) == "store"
    assert bench.look(wished).state == "hit-exact"


def test_that_asking_again_regenerates_what_can_come_out_otherwise(bench: Bench) -> None:
    drawn = asked(sampling=Sampling(temperature=0.8), cache=CacheWishes(sampled=True))
    assert bench.look(drawn).state == "miss"
    bench.answer(drawn)
    again = bench.look(drawn)
    assert (again.state, again.is_repeated, again.flight_key) == ("bypass", True, None)
    assert bench.look(replace(drawn, cache=CacheWishes(sampled=True, only_if_cached=True))).state == "hit-exact"
    bench.clock.advance(60)
    assert bench.look(drawn).state == "hit-exact"
    greedy = asked()
    bench.answer(greedy)
    assert [bench.look(greedy).is_repeated for _ in range(2)] == [False, True]
    assert bench.look(greedy).state == "hit-exact", "it would come out the same"


def test_that_a_clouds_answer_is_found_where_it_may_answer(bench: Bench) -> None:
    origin = Origin(endpoint="far", reason="hard", cost=0.01)
    bench.answer(
        asked(),
        *(replace(c, origin=origin if i == 0 else None) for i, c in enumerate(said("Paris", "."))),
        identity=CLOUD,
    )
    assert bench.look(asked(route="local"), HERE).state == "miss"
    hit = bench.look(asked(tenant=""), HERE, CLOUD)
    bench.clock.advance(100)
    hit = bench.look(asked(), HERE, CLOUD)
    assert hit.stored is not None
    assert (hit.stored.endpoint, hit.stored.cost) == ("far", 0.01)
    assert replay(hit.stored, NOW_S)[0].origin == Origin(endpoint="far", reason="stored", cache="hit-exact", age_s=0.0)
    assert bench.look(asked(), HERE, CLOUD).state == "bypass", "asked again within a minute"
    assert bench.tier.forget_other_files(HERE) == 0, "a cloud's answer does not hang on this device's file"


def test_that_requests_of_other_routes_do_not_share_a_generation(bench: Bench) -> None:
    keys = {bench.look(asked(route=route), HERE).flight_key for route in ("auto", "local", "cloud")}
    assert len(keys) == 3


def test_that_a_new_model_file_makes_answers_unreachable_and_removes_them(bench: Bench) -> None:
    other = replace(HERE, file_sha256="2" * 64)
    bench.answer(asked())
    assert bench.look(asked(), other).state == "miss"
    assert bench.tier.forget_other_files(HERE) == 0
    assert bench.tier.forget_other_files(other) == 1
    assert len(bench.store) == 0


@pytest.mark.parametrize(
    ("chunks", "decision"),
    [
        (said("Par", finish_reason="length"), "truncated"),
        ((Chunk(text="Par"),), "aborted"),
        (said("I'm sorry, but I can't help with that."), "refusal"),
        (said("x" * 2**20, "x" * 100), "too large"),
        (said("\x00" * 2**19), "too large"),
    ],
)
def test_that_nothing_half_or_huge_is_stored(bench: Bench, chunks: tuple[Chunk, ...], decision: str) -> None:
    assert bench.answer(asked(), *chunks) == decision
    assert len(bench.store) == 0
    assert bench.events.decisions == {decision: 1}


def test_that_clearing_while_an_answer_is_computed_keeps_it_out(bench: Bench) -> None:
    recorder = bench.tier.recorder()
    bench.store.clear()
    for chunk in said("x"):
        recorder.add(chunk)
    assert bench.tier.admit(asked(), HERE, recorder, NOW_S) == "cleared"
    assert bench.answer(asked()) == "store"
    assert bench.look(asked()).state == "hit-exact"


def test_that_what_another_version_stored_is_removed(bench: Bench) -> None:
    bench.answer(asked())
    key = bench.tier.key(asked(), HERE)
    meta = bench.store.meta(key)
    assert meta is not None
    bench.store.put(key, meta, b'{"model":"m","colour":"red"}')
    assert bench.look(asked()).state == "miss"
    assert len(bench.store) == 0


def test_that_a_recorder_lets_go_of_what_grows_too_large() -> None:
    recorder = Recorder(10)
    recorder.add(Chunk(text="12345678"))
    recorder.add(Chunk(text="9" * 10))
    assert recorder.size_bytes > 10
    assert recorder.pieces() == ()


def test_that_a_text_set_by_hand_is_divided() -> None:
    assert stored.pieces_of("") == (Piece(""),)
    assert "".join(piece.text for piece in stored.pieces_of("ab" * 5000)) == "ab" * 5000
    assert stored.title("  What\nis  it?  ") == "What is it?"


def test_that_a_corrected_answer_stands_against_time_regenerating_and_computed_ones(bench: Bench) -> None:
    drawn = asked(sampling=Sampling(temperature=0.8), cache=CacheWishes(sampled=True))
    bench.answer(drawn)
    key = bench.tier.key(drawn, HERE)
    admin.correct(bench.store, key, bench.store.get_now(key), "Rome, no: Paris.", NOW_S)
    for now_s in (NOW_S, NOW_S + 1, NOW_S + 1e8, NOW_S - 1e8):
        hit = bench.look(drawn, now_s=now_s)
        assert hit.stored is not None
        assert hit.stored.text == "Rome, no: Paris."
    assert bench.answer(replace(drawn, cache=CacheWishes(sampled=True, no_cache=True))) == "corrected"
    chunks = replay(hit.stored, NOW_S)
    assert chunks[0].origin is not None
    assert chunks[0].origin.reason == "corrected"
    assert bench.tier.forget_other_files(replace(HERE, file_sha256="2" * 64)) == 1, "another model, another answer"


def test_a_hit_saves_the_joules_beyond_idle_power(bench: Bench) -> None:
    energy = Energy(total_j=5.0, above_idle_j=3.0)
    measured = Usage(prompt_tokens=3, completion_tokens=2, energy=energy)
    bench.answer(asked(), *said("Paris", ".", usage=measured))
    hit = bench.look(asked(id="2"))
    assert bench.events.saved_j == 3.0
    assert hit.stored is not None
    last = replay(hit.stored, NOW_S)[-1]
    assert last.usage is not None
    assert last.usage.energy is None  # nothing was computed for it
