"""The semantic tier with its store: hits are given, computed answers verify, and both survive a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

pytest.importorskip("wordllama", reason="needs edge_rt[vectors]")

from edge_rt.answering import Answering
from edge_rt.cache.answers import Answers
from edge_rt.cache.exact import ExactTier
from edge_rt.cache.key import Identity
from edge_rt.cache.meaning import Meanings
from edge_rt.cache.semantic import Mode
from edge_rt.cache.store import Store
from edge_rt.config import Cache
from edge_rt.text_vectors import TextVectors
from edge_rt.types import Chunk, GenerateRequest, Message, Timings, Usage
from tests.unit.cache.test_answers import AnsweringEvents
from tests.unit.cache.test_semantic import ASKED as QUESTION
from tests.unit.cache.test_semantic import SAME, teach, tier_of

TIMES = Timings(queue_s=0.0, prefill_s=1.0, prefill_tokens=3, decode_s=2.0, decode_tokens=1, ttft_s=1.0)
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


@pytest.fixture(scope="module")
def vectors() -> TextVectors:
    return TextVectors.load()


class Bench:
    """A daemon's cache over a folder; another one over the same folder is the daemon started again."""

    def __init__(self, folder: Path, vectors: TextVectors, *, mode: Mode = "on") -> None:
        self.says = "Cook something simple every day."
        self.n_asked = 0
        self.events = AnsweringEvents()
        self.store = Store.open(folder / "cache.sqlite", max_bytes=2**20, max_value_bytes=2**20)
        exact = ExactTier(Cache(), self.store, self.events)
        self.semantic = tier_of(vectors, mode=mode)
        self.meanings = Meanings(exact, self.semantic, folder / "cache.semantic.json")
        answers = Answers(exact, lambda _: (Identity(model="m"),), meanings=self.meanings)
        self.answering = Answering(self.generate, self.events, cache=answers)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.n_asked += 1
        yield Chunk(text=self.says, finish_reason="stop", usage=USAGE, timings=TIMES)

    def ask(self, question: str, *, system: str = "") -> Chunk:
        messages = (Message(role="user", content=question),)
        if system:
            messages = (Message(role="system", content=system), *messages)
        request = GenerateRequest(id="1", model="m", messages=messages)

        async def ask() -> Chunk:
            async with aclosing(self.answering.generate(request)) as chunks:
                first, *_ = [chunk async for chunk in chunks]
                return first

        return asyncio.run(ask())

    def close(self) -> None:
        self.meanings.save()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path, vectors: TextVectors) -> Iterator[Bench]:
    made = Bench(tmp_path, vectors)
    teach(made.semantic)
    yield made
    made.close()


def test_a_question_that_means_the_same_gets_the_stored_answer(bench: Bench) -> None:
    assert bench.ask(QUESTION).origin is not None
    again = bench.ask(SAME)
    assert again.text == "Cook something simple every day."
    assert again.origin is not None
    assert (again.origin.cache, bench.n_asked) == ("hit-semantic", 1)
    assert again.origin.similarity is not None
    assert 0.6 < again.origin.similarity <= 1.0


def test_another_system_message_is_another_conversation(bench: Bench) -> None:
    bench.ask(QUESTION)
    other = bench.ask(SAME, system="Answer in French.")
    assert other.origin is not None
    assert (other.origin.cache, bench.n_asked) == ("miss", 2)


def test_in_shadow_mode_nothing_is_given_and_everything_is_compared(tmp_path: Path, vectors: TextVectors) -> None:
    bench = Bench(tmp_path, vectors, mode="shadow")
    teach(bench.semantic)
    bench.ask(QUESTION)
    answer = bench.ask(SAME)
    assert answer.origin is not None
    assert (answer.origin.cache, bench.n_asked) == ("shadow", 2)
    assert bench.semantic.stats()["right"] >= 1
    bench.close()


def test_an_answer_that_left_the_store_is_computed_anew(bench: Bench) -> None:
    bench.ask(QUESTION)
    bench.store.remove([key for key, *_ in bench.store.items()])
    answer = bench.ask(SAME)
    assert answer.origin is not None
    assert (answer.origin.cache, bench.n_asked) == ("miss", 2)


def test_questions_and_what_was_verified_survive_a_restart(tmp_path: Path, vectors: TextVectors) -> None:
    before = Bench(tmp_path, vectors)
    teach(before.semantic)
    before.ask(QUESTION)
    before.close()
    after = Bench(tmp_path, vectors)
    asyncio.run(after.meanings.rebuild())
    answer = after.ask(SAME)
    assert answer.origin is not None
    assert (answer.origin.cache, after.n_asked) == ("hit-semantic", 0)
    after.close()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"controller": 3, "verified": {}}', b"\xff" * 100])
def test_a_damaged_state_begins_anew(
    tmp_path: Path, vectors: TextVectors, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache.semantic.json").write_bytes(content)
    bench = Bench(tmp_path, vectors)
    asyncio.run(bench.meanings.rebuild())
    assert "cannot be used" in caplog.text
    assert bench.ask(QUESTION).origin is not None
    bench.close()
