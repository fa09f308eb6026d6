"""Temperature, threshold and intervals against cases worked out by hand, and what they do on items never seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools.calibrate_cascade import (
    Answers,
    CalibrationError,
    choose_threshold,
    confidence,
    highest_loss,
    main,
    outcome,
    paired_difference,
    read_answers,
    temperature,
    wilson,
)


def world(n: int, seed: int, *, sharpness: float = 1.0) -> Answers:
    """Items of four classes; the first model sees them through twice the noise. sharpness scales its logits only."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 4, n)
    truth = np.eye(4)[label]

    def logits(noise: float) -> np.ndarray:
        return (truth + rng.normal(0, noise, truth.shape)) / noise**2  # the log odds that such an observation gives

    return Answers(first=logits(0.6) * sharpness, last=logits(0.3), label=label)


def test_temperature_finds_how_far_logits_were_stretched() -> None:
    for sharpness in (0.3, 1.0, 4.0):
        answers = world(8000, 1, sharpness=sharpness)
        assert temperature(answers.first, answers.label) == pytest.approx(sharpness, rel=0.06)


def test_tempered_confidence_is_how_often_it_is_right() -> None:
    answers = world(8000, 2, sharpness=5.0)
    sure = confidence(answers.first, temperature(answers.first, answers.label))
    right = answers.first.argmax(axis=1) == answers.label
    for low, high in ((0.4, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0)):
        inside = (sure >= low) & (sure < high)
        assert right[inside].mean() == pytest.approx(sure[inside].mean(), abs=0.04)


def test_confidence_by_hand() -> None:
    logits = np.log(np.array([[8.0, 1.0, 1.0], [1.0, 1.0, 2.0]]))
    assert confidence(logits, 1.0) == pytest.approx([0.8, 0.5])
    assert confidence(logits, 3.0)[0] == pytest.approx(0.5)  # cube root of 8 against two ones
    assert np.isfinite(confidence(np.array([[1e4, -1e4]]), 0.05)).all()


def by_hand() -> Answers:
    """Ten items, surest first; the first model is wrong on items 3, 6 and 8, the last on item 8."""
    sure = np.linspace(5, 1, 10)
    first = np.stack([sure, np.zeros(10)], axis=1)
    last = np.tile([9.0, 0.0], (10, 1))
    first[[3, 6, 8]] = first[[3, 6, 8]][:, ::-1]
    last[8] = last[8][::-1]
    return Answers(first=first, last=last, label=np.zeros(10, np.int64))


@pytest.mark.parametrize(("max_loss", "n_stopped"), [(0.0, 3), (0.09, 3), (0.1, 6), (0.2, 10)])
def test_threshold_by_hand(max_loss: float, n_stopped: int) -> None:
    answers = by_hand()
    sure = confidence(answers.first, 1.0)
    stopped = sure >= choose_threshold(sure, lambda s: outcome(answers, s).cost.value, max_loss)
    assert stopped.tolist() == [True] * n_stopped + [False] * (10 - n_stopped)


def test_outcome_by_hand() -> None:
    result = outcome(by_hand(), np.arange(10) < 7)
    assert (result.n, result.stopped.value) == (10, 0.7)
    assert (result.first_accuracy, result.last_accuracy) == (0.7, 0.9)
    assert result.cascade_accuracy == pytest.approx(0.7)
    assert result.cost.value == pytest.approx(0.2)
    assert result.cost.low < 0.2 < result.cost.high


def test_nothing_stops_where_the_first_model_is_never_good_enough() -> None:
    answers = Answers(first=np.array([[0.0, 5.0]] * 4), last=np.array([[5.0, 0.0]] * 4), label=np.zeros(4, np.int64))
    sure = confidence(answers.first, 1.0)
    assert not (sure >= choose_threshold(sure, highest_loss(answers), 0.1)).any()


def test_equal_confidences_stop_together() -> None:
    answers = Answers(
        first=np.array([[3.0, 0.0]] * 3 + [[0.0, 3.0]]), last=np.array([[5.0, 0.0]] * 4), label=np.zeros(4, np.int64)
    )
    sure = confidence(answers.first, 1.0)
    loss = lambda stopped: outcome(answers, stopped).cost.value  # noqa: E731
    assert choose_threshold(sure, loss, 0.0) > sure[0]
    assert choose_threshold(sure, loss, 0.25) == sure[0]


def test_intervals_by_the_book() -> None:
    share = wilson(0, 100)  # Wilson's upper end at none of 100 is z² / (n + z²)
    assert (share.value, share.low) == (0, 0)
    assert share.high == pytest.approx(3.8415 / 103.8415, abs=1e-5)
    half = wilson(50, 100)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    none = paired_difference(0, 0, 98)
    assert (none.low, none.high) == pytest.approx((-0.0196, 0.0196), abs=1e-4)
    some = paired_difference(10, 4, 98)
    assert some.value == pytest.approx(6 / 98)
    assert (some.low, some.high) == pytest.approx((0.06 - 0.0750, 0.06 + 0.0750), abs=1e-3)


def test_the_command_keeps_its_promise_on_items_never_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("held_out", 3), ("test", 4)):
        answers = world(4000, seed, sharpness=3.0)
        np.savez(tmp_path / f"{name}.npz", first=answers.first, last=answers.last, label=answers.label)
    assert main([str(tmp_path / "held_out.npz"), str(tmp_path / "test.npz"), "--max-loss", "0.01"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["temperature"] == pytest.approx(3.0, rel=0.1)
    assert told["held_out"]["cost"]["high"] <= 0.01
    assert told["test"]["cost"]["value"] <= 0.01
    assert 0.2 < told["test"]["stopped"]["value"] < 0.95
    assert told["test"]["first_accuracy"] < told["test"]["cascade_accuracy"] - 0.05


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"first": np.zeros((4, 3))}, "differ"),
        ({"label": np.array([0, 1, 2, 1, 0])}, "labels from 0 to 2 of 2 classes"),
        ({"last": np.full((5, 2), np.nan)}, "not finite"),
        ({"label": np.zeros((0,), int), "first": np.zeros((0, 2)), "last": np.zeros((0, 2))}, "differ"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, change: dict[str, np.ndarray], problem: str) -> None:
    arrays = {"first": np.zeros((5, 2)), "last": np.zeros((5, 2)), "label": np.zeros(5, int)} | change
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(CalibrationError, match=problem):
        read_answers(tmp_path / "a.npz")


def test_what_is_no_archive_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.npz").write_bytes(b"no archive")
    assert main([str(tmp_path / "a.npz"), str(tmp_path / "a.npz")]) == 1
    assert "it must be an .npz file" in capsys.readouterr().err
    np.savez(tmp_path / "b.npz", first=np.zeros((2, 2)))
    with pytest.raises(CalibrationError, match="last"):
        read_answers(tmp_path / "b.npz")
