from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from edge_rt.convert.qdq import quantize_int8
from tests.unit.tools.small_models import classifier, run, vectors
from tools.activations import Counts, Statistics
from tools.layers import Judge


def test_merged_statistics_equal_one_shot(tmp_path: Path) -> None:
    model, feeds = classifier(), vectors(30)
    at_once = Statistics.collect(model, feeds)
    in_parts = Statistics.collect(model, feeds[20:])
    for part in (feeds[:7], feeds[7:20]):
        in_parts.merge(Statistics.collect(model, part))
    at_once.save(tmp_path / "a")
    in_parts.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert at_once.n_inputs == 30
    assert at_once.ranges() == in_parts.ranges()
    assert Statistics.load(tmp_path / "a").ranges() == at_once.ranges()


def test_minmax_is_what_was_seen() -> None:
    model, feeds = classifier(), vectors(10)
    answers = run(model, feeds)
    low, high = Statistics.collect(model, feeds).ranges("minmax")["y"]
    assert (low, high) == (answers.min(), answers.max())


def test_the_range_of_least_error_cuts_a_lone_outlier() -> None:
    counts = Counts()
    counts.add(np.random.default_rng(0).normal(size=1_000_000))
    plain = counts.range_mse()
    assert plain[1] == pytest.approx(counts.high, rel=0.3)
    counts.add(np.array([1000.0]))
    cut = counts.range_mse()
    assert 200 < cut[1] < 600  # a step of 4 for all others would cost more than a part of this one value
    assert -5 < cut[0] < -2


def test_a_range_that_cuts_nothing_is_kept() -> None:
    counts = Counts()
    counts.add(np.linspace(0, 6, 1000))  # as a ReLU6 gives
    assert counts.range_mse() == (0.0, pytest.approx(6, rel=1e-6))


def test_recalibrating_from_recent_inputs_helps_on_them() -> None:
    """The inputs grow five times as large: the old ranges cut them, the new ones hold both."""
    model, old, new = classifier(), vectors(40), vectors(40, seed=1, scale=5)
    statistics = Statistics.collect(model, old)
    judge, judge_old = Judge(model, vectors(20, seed=2, scale=5)), Judge(model, vectors(20, seed=3))
    before = judge.error(quantize_int8(model, statistics.ranges()))
    before_old = judge_old.error(quantize_int8(model, statistics.ranges()))
    statistics.merge(Statistics.collect(model, new))
    after = judge.error(quantize_int8(model, statistics.ranges()))
    assert before > 0.05
    assert after < before / 10
    assert judge_old.error(quantize_int8(model, statistics.ranges())) < 30 * before_old


def test_old_inputs_fade() -> None:
    """The inputs shrink again: with old ones fading the range follows, without it does not."""
    model, large, small = classifier(), vectors(40, scale=50), vectors(40, seed=1)
    kept = Statistics.collect(model, large)
    recent = Statistics.collect(model, small)
    faded = kept.fade(half_life=2, n_new=recent.n_inputs)
    kept.merge(recent)
    faded.merge(recent)
    assert faded.n_inputs == pytest.approx(40, abs=0.1)
    judge = Judge(model, vectors(20, seed=2))
    stale, fresh = (judge.error(quantize_int8(model, s.ranges())) for s in (kept, faded))
    assert fresh < stale / 4


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Counts().add(np.array([1.0, np.nan]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"format":1,"activations":{"x":{"n_inputs":1,"low":0,"high":1,"bins":{"4096":1}}}}',
        '{"format":1,"activations":{"x":{"n_inputs":1,"low":0,"high":1,"bins":{"1":-1}}}}',
    ],
)
def test_other_files_are_no_statistics(text: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        Statistics.load(tmp_path / "s")
