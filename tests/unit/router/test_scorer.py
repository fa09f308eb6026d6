from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.router import features, fitting, metrics, weights
from edge_rt.router.fitting import Example
from edge_rt.router.neighbours import Neighbours
from edge_rt.router.scorer import SHIPPED, Score, Scorer, Sketch, moved_by
from edge_rt.router.weights import Weights


@cache
def direction(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode(errors="replace")).digest()[:4], "big")
    return np.random.default_rng(seed).standard_normal(256).astype(np.float32)


class HashEmbedder:
    """Places texts by their words: each word has a fixed random direction."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), 256), np.float32)
        for row, text in enumerate(texts):
            for word in text.lower().split():
                vectors[row] += direction(word)
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


_EASY = ("capital", "colour", "name", "city", "animal", "river", "song")
_HARD = ("integral", "prove", "theorem", "derive", "matrix", "lemma", "modulo")


def requests(n: int, seed: int) -> list[Example]:
    """Easy ones, which both models answer, and hard ones, which mostly the cloud does."""
    rng = random.Random(seed)
    found = []
    for i in range(n):
        hard = rng.random() < 0.5
        words = [rng.choice(_HARD if hard else _EASY) for _ in range(3)] + [f"w{rng.randrange(200)}" for _ in range(4)]
        local = float(rng.random() < (0.3 if hard else 0.9))
        cloud = float(rng.random() < 0.9)
        found.append(
            Example(text=f"{i} {' '.join(words)}?", local=local, cloud=cloud, topic="hard" if hard else "easy")
        )
    return found


@pytest.fixture(scope="module")
def fitted() -> Weights:
    return fitting.fit(fitting.prepare(requests(700, 1), HashEmbedder()), note="made up")


@pytest.fixture(scope="module")
def scorer(fitted: Weights) -> Scorer:
    return Scorer(fitted, HashEmbedder())


def scores(scorer: Scorer, examples: list[Example]) -> list[Score]:
    return [scorer.score(e.text) for e in examples]


def test_hard_requests_of_another_day_gain_most(scorer: Scorer) -> None:
    fresh = requests(400, 2)
    found = scores(scorer, fresh)
    quality = metrics.evaluate(
        [s.gain for s in found], [e.local for e in fresh], [e.cloud for e in fresh], n_resamples=0
    )
    assert quality.apgr > 0.68
    assert metrics.calibration_error([s.p_local for s in found], [e.local for e in fresh]) < 0.1
    assert found[0].reasons


def test_labels_without_a_pattern_make_a_router_of_chance() -> None:
    rng = random.Random(5)
    rows = [replace(e, local=float(rng.random() < 0.5), topic="") for e in requests(700, 3)]
    scorer = Scorer(fitting.fit(fitting.prepare(rows, HashEmbedder())), HashEmbedder())
    fresh = [replace(e, local=float(rng.random() < 0.5)) for e in requests(600, 4)]
    gains = [s.gain for s in scores(scorer, fresh)]
    quality = metrics.evaluate(gains, [e.local for e in fresh], [e.cloud for e in fresh], n_resamples=0)
    assert quality.apgr == pytest.approx(0.5, abs=0.09)


def test_a_saved_file_scores_the_same(fitted: Weights, scorer: Scorer, tmp_path: Path) -> None:
    fitted.save(tmp_path / "w")
    again = Scorer.load(tmp_path / "w", embedder=HashEmbedder())
    for example in requests(20, 6):
        a, b = scorer.score(example.text), again.score(example.text)
        assert (a.p_local, a.p_cloud) == pytest.approx((b.p_local, b.p_cloud), abs=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]  # nothing half written is left


@pytest.mark.parametrize("text", ["", " ", "\x00", "\ud800", "?" * 100_000, "मनुष्य", "a\nb" * 5000])
def test_any_text_gets_probabilities(scorer: Scorer, text: str) -> None:
    found = scorer.score(text, n_turns=40, max_tokens=10**9)
    assert 0 <= found.p_local <= 1
    assert 0 <= found.p_cloud <= 1


def test_one_request_is_scored_as_many_are(fitted: Weights, scorer: Scorer) -> None:
    examples = requests(50, 7)
    many = fitting.predict(fitted, fitting.prepare(examples, HashEmbedder()))
    for p, found in zip(many, scores(scorer, examples), strict=True):
        assert (found.p_local, found.p_cloud) == pytest.approx(tuple(p), abs=1e-3)


def test_kinds_are_told_by_their_words_where_vectors_say_nothing() -> None:
    class Blind:
        def embed(self, texts: Sequence[str]) -> np.ndarray:
            return np.zeros((len(texts), 256), np.float32)

    fitted = fitting.fit(fitting.prepare(requests(700, 1), Blind()))
    scorer = Scorer(fitted, Blind())
    asked = requests(60, 8)
    told = [scorer.score(e.text).reasons[0].startswith(f"looks like {e.topic}") for e in asked]
    assert sum(told) >= 54


@pytest.mark.parametrize(
    ("gain", "before", "after"),
    [
        (0.0, (0.4, 0.6), (0.4, 0.6)),
        (0.2, (0.4, 0.6), (0.3, 0.7)),
        (-0.4, (0.4, 0.6), (0.6, 0.4)),
        (0.3, (0.05, 0.2), (0.0, 0.45)),
        (0.3, (0.8, 0.95), (0.55, 1.0)),
        (9.0, (0.5, 0.5), (0.0, 1.0)),
    ],
)
def test_probabilities_are_moved_apart_and_stay_ones(
    gain: float, before: tuple[float, float], after: tuple[float, float]
) -> None:
    assert moved_by(gain, *before) == pytest.approx(after)


def test_a_gain_that_the_judges_miss_is_predicted_and_noise_is_not() -> None:
    x = np.c_[np.random.default_rng(1).standard_normal((600, 8)), np.ones(600)]
    missed = 0.1 * x[:, 0] + 0.02 * np.random.default_rng(2).standard_normal(600)
    found = fitting._fit_gain(x, missed)
    assert found[0] == pytest.approx(0.1 * 600 / 1600, rel=0.2), "held down by the penalty"
    few = np.c_[np.random.default_rng(3).standard_normal((60, 200)), np.ones(60)] * 30
    assert not fitting._fit_gain(few, np.random.default_rng(4).standard_normal(60)).any()
    assert not fitting._fit_gain(x, np.full(600, np.nan)).any()


def test_what_was_learnt_here_is_asked(scorer: Scorer, fitted: Weights) -> None:
    text = "9 capital city name w1 w2?"
    plain = scorer.score(text)

    class Learnt:
        neighbours = Neighbours(np.repeat(HashEmbedder().embed([text]), 60, 0), np.zeros((60, 2), np.float32))

        def correct(self, sketch: Sketch) -> tuple[float, float] | None:
            return None

    taught = Scorer(fitted, HashEmbedder(), Learnt()).score(text)
    assert taught.p_local < plain.p_local / 2
    assert "similar ones here: 0% good on the device" in taught.reasons


def test_too_few_labels_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 50"):
        fitting.fit(fitting.prepare(requests(30, 1), HashEmbedder()))


def edited(data: bytes, at: int, new: bytes) -> bytes:
    body = bytearray(data)
    body[at : at + len(new)] = new
    return bytes(body)


def sealed(body: bytes) -> bytes:
    """Give a file whose checksum is right: what somebody writes who knows the format."""
    return b"ERTROUT3" + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: b"", "beginning"),
        (lambda d: edited(d, 7, b"1"), "another version"),
        (lambda d: d[:30], "checksum"),
        (lambda d: d[:-1], "checksum"),
        (lambda d: edited(d, 5000, b"\xff"), "checksum"),
        (lambda d: d + b"\0", "checksum"),
        (lambda d: sealed(d[40:-4]), "cut off"),
        (lambda d: sealed(d[40:] + b"\0"), "too many"),
        (lambda d: sealed(b"\xff\xff\xff\xff" + d[44:]), "header"),
        (lambda d: sealed(d[40:].replace(b"log_chars", b"log_chart")), "other surface features"),
        (lambda d: sealed(d[40:].replace(b'"topics": [', b'"topics": {')), "contents"),
        (lambda d: sealed(d[40:-12] + np.array([0.5, np.nan, 0.5], "<f4").tobytes()), "no number"),
        (lambda d: sealed(d[40:-12] + np.array([2, -1, 0], "<f4").tobytes()), "blend"),
        (lambda d: bytes(weights.MAX_FILE_BYTES + 1), "longer"),
    ],
)
def test_a_hostile_file_is_refused(fitted: Weights, tmp_path: Path, change, problem: str) -> None:
    fitted.save(tmp_path / "w")
    (tmp_path / "w").write_bytes(change((tmp_path / "w").read_bytes()))
    with pytest.raises(ModelFormatError, match=problem):
        weights.load(tmp_path / "w")


def test_the_shipped_weights_are_sound_and_small() -> None:
    assert SHIPPED.stat().st_size < 1_000_000
    shipped = weights.load(SHIPPED)
    assert "mmlu" in shipped.note
    assert shipped.terms.shape == (2, features.N_HASHED)


def test_the_shipped_weights_tell_easy_from_hard() -> None:
    vectors = pytest.importorskip("edge_rt.text_vectors")
    try:
        scorer = Scorer(weights.load(SHIPPED), vectors.TextVectors.load())
    except vectors.BackendUnavailableError as exc:
        pytest.skip(str(exc))
    easy = scorer.score("What is the capital of France?")
    hard = scorer.score(
        "Let $f(x) = x^3 - 3x + 1$. Find the sum of the squares of the roots of $f(f(x)) = 0$ and prove your answer."
    )
    assert easy.p_local > hard.p_local
    assert hard.gain > 0
