"""The judge of pairs: what it prefers, that it is symmetric, and that only sound files are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("wordllama", reason="needs edge_rt[vectors]")

from edge_rt.cache import judge, similarity
from edge_rt.cache.judge import PairJudge
from edge_rt.errors import ModelFormatError
from edge_rt.text_vectors import TextVectors


@pytest.fixture(scope="module")
def vectors() -> TextVectors:
    return TextVectors.load()


@pytest.fixture(scope="module")
def shipped() -> PairJudge:
    return PairJudge.load()


def judged(vectors: TextVectors, shipped: PairJudge, one: str, other: str) -> float:
    a, b = similarity.subject(one, vectors), similarity.subject(other, vectors)
    cosine = float(np.prod(vectors.embed([one, other]), axis=0).sum())
    measured = similarity.measures(a, b, vectors, cosine=cosine, rivals=())
    return similarity.judged(a, b, vectors, shipped, measured)


@pytest.mark.parametrize(
    ("question", "same", "near"),
    [
        ("How do I lose weight?", "What is a good way to lose weight?", "How do I lose my accent?"),
        (
            "How can I learn Python quickly?",
            "What is the fastest way to learn Python?",
            "How can I learn Java quickly?",
        ),
        ("How do I cook rice?", "What is the best way to cook rice?", "How do I cook beans?"),
    ],
)
def test_it_knows_which_words_may_stand_for_which(
    vectors: TextVectors, shipped: PairJudge, question: str, same: str, near: str
) -> None:
    assert judged(vectors, shipped, question, same) > judged(vectors, shipped, question, near)


def test_neither_question_is_the_first(vectors: TextVectors, shipped: PairJudge) -> None:
    rng = np.random.default_rng(1)
    for n_a, n_b in ((1, 1), (3, 17), (32, 5), (40, 16)):
        a, b = (shipped.align(rng.standard_normal((n, 256)).astype(np.float32)) for n in (n_a, n_b))
        measured = rng.standard_normal(judge.N_MEASURES).tolist()
        assert shipped.log_odds(a, b, measured) == pytest.approx(shipped.log_odds(b, a, measured), abs=1e-3)


def test_what_is_beyond_the_last_token_that_counts_changes_nothing(shipped: PairJudge) -> None:
    rows = np.random.default_rng(2).standard_normal((judge.MAX_TOKENS + 9, 256)).astype(np.float32)
    whole, cut = shipped.align(rows), shipped.align(rows[: judge.MAX_TOKENS])
    np.testing.assert_array_equal(whole.seen, cut.seen)


def test_measures_out_of_any_range_leave_a_number(shipped: PairJudge) -> None:
    one = shipped.align(np.zeros((2, 256), np.float32))
    assert np.isfinite(shipped.log_odds(one, one, [1e30] * judge.N_MEASURES))


def test_the_measures_are_those_it_was_trained_on() -> None:
    assert len(similarity.NAMES) == judge.N_MEASURES
    assert judge.SHIPPED.stat().st_size < 150_000


def sealed(body: bytes) -> bytes:
    """Give a file whose checksum is right: what somebody writes who knows the format."""
    return b"ERTJUDG1" + hashlib.sha256(body).digest() + body


def with_deviation(data: bytes, value: float) -> bytes:
    at = 40 + 2 * judge.N_MEASURES
    return sealed(data[40:at] + np.array([value], "<f2").tobytes() + data[at + 2 :])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: b"", "beginning"),
        (lambda d: b"ERTJUDG2" + d[8:], "another version"),
        (lambda d: d[:-1], "bytes long"),
        (lambda d: d + b"\0", "bytes long"),
        (lambda d: d[:900] + bytes([d[900] ^ 1]) + d[901:], "checksum"),
        (lambda d: sealed(d[40:-2] + np.array([np.nan], "<f2").tobytes()), "must be numbers"),
        (lambda d: sealed(d[40:-2] + np.array([np.inf], "<f2").tobytes()), "must be numbers"),
        (lambda d: with_deviation(d, 0.0), "positive"),
    ],
)
def test_a_hostile_file_is_refused(change: Callable[[bytes], bytes], problem: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(change(judge.SHIPPED.read_bytes()))
    with pytest.raises(ModelFormatError, match=problem):
        PairJudge.load(tmp_path / "w")


def test_a_written_file_is_read_again(tmp_path: Path) -> None:
    weights = judge.read_weights(judge.SHIPPED)
    judge.write_weights(tmp_path / "w", weights)
    assert (tmp_path / "w").read_bytes() == judge.SHIPPED.read_bytes()
    with pytest.raises(ValueError, match="weights must be"):
        judge.write_weights(tmp_path / "w", {**weights, "mean": np.zeros(3)})
