"""Find from which confidence on a cascade may stop at its first model, and tell what that saves and costs.

    python -m tools.calibrate_cascade HELD_OUT.npz TEST.npz --max-loss 0.01

Each file has the logits of both models for the same items, `first` and `last` [n, classes], and the right `label` [n].
Temperature and threshold are found on the first file alone; the second one tells what they do on items never seen.
tools/pcb measures its detectors' cascade with the same functions, by boards and mean average precision.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Loss = Callable[[NDArray[np.bool_]], float]  # of accuracy, given which items stop at the first model

_Z = 1.959964  # 95 %
_GOLDEN = (sqrt(5) - 1) / 2
_TEMPERATURES = (0.05, 20.0)
_NEVER = 2.0  # above every confidence


class CalibrationError(Exception):
    """Files that do not hold what a calibration needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Both models' logits [n, classes] for the same n items, and what would be right [n]."""

    first: NDArray[np.float64]
    last: NDArray[np.float64]
    label: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of n items; low and high: its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a cascade does on n items: how many stop at the first model, and the accuracy that this costs.

    cost  the last model's accuracy on all items less the cascade's
    """

    n: int
    stopped: Share
    first_accuracy: float
    last_accuracy: float
    cascade_accuracy: float
    cost: Share


def temperature(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Find what to divide logits by so that their softmax is as likely as it says: the least cross entropy."""
    low, high = np.log(_TEMPERATURES)
    while high - low > 1e-4:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if _cross_entropy(logits / np.exp(left), label) <= _cross_entropy(logits / np.exp(right), label):
            high = right
        else:
            low = left
    return float(np.exp((low + high) / 2))


def confidence(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Give the probability of each item's likeliest class."""
    return np.exp(-_log_sum(logits / temperature - (logits / temperature).max(axis=1, keepdims=True)))


def choose_threshold(confidence: NDArray[np.float64], loss: Loss, max_loss: float) -> float:
    """Give the least confidence to stop at for which the loss is at most max_loss.

    All thresholds above it do so too: one that is good again only below a bad one was lucky. 2 if there is none.
    """
    chosen = _NEVER
    for threshold in np.unique(confidence)[::-1]:
        if loss(confidence >= threshold) > max_loss + 1e-12:
            break
        chosen = float(threshold)
    return chosen


def highest_loss(answers: Answers) -> Loss:
    """Give what a cascade of two classifiers loses at most: the upper end of its 95 % interval.

    A threshold chosen by the loss itself would promise what a few lucky items made of it.
    """
    return lambda stopped: outcome(answers, stopped).cost.high


def outcome(answers: Answers, stopped: NDArray[np.bool_]) -> Outcome:
    first, last = _right(answers)
    cascade = np.where(stopped, first, last)
    lost, won = int(np.sum(last & ~cascade)), int(np.sum(cascade & ~last))
    return Outcome(
        n=len(stopped),
        stopped=wilson(int(stopped.sum()), len(stopped)),
        first_accuracy=float(first.mean()),
        last_accuracy=float(last.mean()),
        cascade_accuracy=float(cascade.mean()),
        cost=paired_difference(lost, won, len(stopped)),
    )


def wilson(n_hits: int, n: int) -> Share:
    """Give a share and Wilson's interval, which is sound at 0 and 1 too."""
    share = n_hits / n
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return Share(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half))


def paired_difference(n_lost: int, n_won: int, n: int) -> Share:
    """Give (lost - won) / n and Agresti and Min's interval for pairs: it has a width when nothing differed."""
    adjusted = n + 2
    middle = (n_lost - n_won) / adjusted
    half = _Z * sqrt(n_lost + n_won + 1 - (n_lost - n_won) ** 2 / adjusted) / adjusted
    return Share(value=(n_lost - n_won) / n, low=middle - half, high=middle + half)


def read_answers(path: Path) -> Answers:
    """Raises CalibrationError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            answers = Answers(
                first=arrays["first"].astype(np.float64),
                last=arrays["last"].astype(np.float64),
                label=arrays["label"].astype(np.int64),
            )
    except (OSError, ValueError, KeyError) as exc:
        raise CalibrationError(f"{path}: {exc}; it must be an .npz file with first, last and label") from exc
    n, shape = len(answers.label), answers.first.shape
    if answers.label.ndim != 1 or len(shape) != 2 or shape != answers.last.shape or shape[0] != n or not n:
        raise CalibrationError(
            f"{path}: first {shape}, last {answers.last.shape} and label {answers.label.shape} differ"
        )
    if answers.label.min() < 0 or answers.label.max() >= shape[1]:
        raise CalibrationError(
            f"{path}: labels from {answers.label.min()} to {answers.label.max()} of {shape[1]} classes"
        )
    if not (np.isfinite(answers.first).all() and np.isfinite(answers.last).all()):
        raise CalibrationError(f"{path}: has logits that are not finite")
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.calibrate_cascade", description=__doc__.partition("\n")[0])
    parser.add_argument("held_out", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument(
        "--max-loss", type=float, default=0.01, help="accuracy that may be lost, 0.01: a point, at 95 %% confidence"
    )
    options = parser.parse_args(arguments)
    try:
        held_out, test = read_answers(options.held_out), read_answers(options.test)
    except CalibrationError as exc:
        print(f"calibrate_cascade: {exc}", file=sys.stderr)
        return 1
    by = temperature(held_out.first, held_out.label)
    threshold = choose_threshold(confidence(held_out.first, by), highest_loss(held_out), options.max_loss)
    told = {"temperature": round(by, 4), "threshold": round(threshold, 6), "max_loss": options.max_loss}
    for name, answers in (("held_out", held_out), ("test", test)):
        told[name] = asdict(outcome(answers, confidence(answers.first, by) >= threshold))
    print(json.dumps(told, indent=1))
    return 0


def _right(answers: Answers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    return answers.first.argmax(axis=1) == answers.label, answers.last.argmax(axis=1) == answers.label


def _cross_entropy(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    return float(np.mean(_log_sum(logits) - logits[np.arange(len(label)), label]))


def _log_sum(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    highest = logits.max(axis=1)
    total: NDArray[np.float64] = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return total


if __name__ == "__main__":
    raise SystemExit(main())
