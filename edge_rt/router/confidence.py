"""How likely an answer that the device has begun is wrong, by how sure its model was of the first tokens. Pure.

    judge = Judge.load(None)
    doubt = judge.doubt(signals, text)  # None before the first checkpoint

What is looked at after 8, 16 and 32 tokens, or once a shorter answer is whole: quantiles of the tokens' probability,
margin and entropy, words that repeat, and an opening that hedges or declines. The shipped map was measured on the
default model; docs/router.md says on what, and how well it holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.router.calibration import Isotonic
from edge_rt.types import TokenSignal

CHECKPOINTS = (8, 16, 32)
SHIPPED = Path(__file__).parent / "confidence.json"

NAMES = (
    "logprob_mean",
    "logprob_least",
    "logprob_5",
    "logprob_10",
    "logprob_25",
    "margin_10",
    "margin_25",
    "margin_50",
    "entropy_mean",
    "entropy_50",
    "entropy_75",
    "entropy_90",
    "log_tokens",
    "repeated_share",
    "hedges",
    "is_whole",
)

_MAX_FILE_BYTES = 2**18
_MAX_Z = 4.0
_HEDGE = re.compile(
    r"^\W*(?:i(?:'m| am) (?:not sure|unable|sorry|afraid)|i (?:can(?:not|'t)|do(?:n't| not) (?:know|have))|sorry\b"
    r"|as an ai|unfortunately|it(?:'s| is) (?:not clear|unclear|difficult|hard to)|there (?:is no|isn't))",
    re.IGNORECASE,
)


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known at one checkpoint: a linear map of standardised features, and the calibration of its result."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A judge's file. stages: of CHECKPOINTS in order, then of answers that are whole."""

    version: int
    features: tuple[str, ...]
    stages: tuple[Stage, ...]
    note: str = ""


class Judge:
    """Maps the signals of an answer's tokens to the probability that it is wrong."""

    def __init__(self, table: Table) -> None:
        """Raises InvalidRequestError for a table that is not sound."""
        if table.version != 1 or table.features != NAMES or len(table.stages) != len(CHECKPOINTS) + 1:
            raise InvalidRequestError(param="confidence", problem="is of another version, or has other features")
        for stage in table.stages:
            lists = (stage.mean, stage.deviation, stage.weights)
            if any(len(each) != len(NAMES) or not all(map(math.isfinite, each)) for each in lists):
                raise InvalidRequestError(param="confidence", problem=f"each stage needs {len(NAMES)} finite numbers")
            if min(stage.deviation) <= 0 or not math.isfinite(stage.bias):
                raise InvalidRequestError(param="confidence", problem="deviations must be positive, the bias finite")
        self.note = table.note
        self._stages = table.stages
        self._maps = [Isotonic(scores=s.scores, probabilities=s.probabilities) for s in table.stages]

    @classmethod
    def load(cls, path: Path | None = None) -> Judge:
        """Read a file, the shipped one if path is None. Raises ModelFormatError for one that is not sound, OSError."""
        path = path or SHIPPED
        with open_regular(path) as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ModelFormatError(path=str(path), field="file", problem=f"longer than {_MAX_FILE_BYTES} bytes")
        try:
            return cls(msgspec.json.decode(data, type=Table))
        except (msgspec.DecodeError, InvalidRequestError, RecursionError) as exc:
            raise ModelFormatError(path=str(path), field="contents", problem=str(exc)[:200]) from exc

    def doubt(self, signals: Sequence[TokenSignal], text: str, *, is_whole: bool = False) -> float | None:
        """Give P(wrong), by the last checkpoint that was reached; None before the first of an unfinished answer.

        signals  of the answer's tokens, from its first on
        text     of these tokens
        is_whole nothing will follow; its first 32 tokens are looked at
        """
        if is_whole:
            return self._at(len(CHECKPOINTS), signals[: CHECKPOINTS[-1]], text) if signals else None
        reached = [i for i, n in enumerate(CHECKPOINTS) if n <= len(signals)]
        return self._at(reached[-1], signals[: CHECKPOINTS[reached[-1]]], text) if reached else None

    def _at(self, number: int, signals: Sequence[TokenSignal], text: str) -> float:
        found = summary(signals, text, is_whole=number == len(CHECKPOINTS))
        return self._maps[number](score(self._stages[number], found))


def score(stage: Stage, found: Sequence[float]) -> float:
    """Give the log-odds that the answer is wrong, not calibrated yet."""
    total = stage.bias
    for value, mean, deviation, weight in zip(found, stage.mean, stage.deviation, stage.weights, strict=True):
        total += weight * min(max((value - mean) / deviation, -_MAX_Z), _MAX_Z)
    return total


def summary(signals: Sequence[TokenSignal], text: str, *, is_whole: bool) -> tuple[float, ...]:
    """Give the features of NAMES. Raises InvalidRequestError for no signals."""
    if not signals:
        raise InvalidRequestError(param="signals", problem="must be those of at least one token")
    logprobs = sorted(_finite(s.logprob) for s in signals)
    margins = sorted(_finite(s.margin) for s in signals)
    entropies = sorted(_finite(s.entropy) for s in signals)
    words = text.lower().split()
    pairs = list(zip(words, words[1:], words[2:], strict=False))
    return (
        math.fsum(logprobs) / len(logprobs),
        logprobs[0],
        *(_quantile(logprobs, q) for q in (0.05, 0.10, 0.25)),
        *(_quantile(margins, q) for q in (0.10, 0.25, 0.50)),
        math.fsum(entropies) / len(entropies),
        *(_quantile(entropies, q) for q in (0.50, 0.75, 0.90)),
        math.log(len(signals)),
        1 - len(set(pairs)) / len(pairs) if pairs else 0.0,
        float(_HEDGE.match(text) is not None),
        float(is_whole),
    )


def _quantile(ranked: Sequence[float], q: float) -> float:
    place = q * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def _finite(value: float) -> float:
    """A banned token's logprob is -inf, which must not drown everything else."""
    return min(max(value, -30.0), 30.0) if not math.isnan(value) else 0.0
