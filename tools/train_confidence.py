"""Measure how sure the default model is when right and when wrong, and fit the router's second judge to it.

    python -m tools.train_confidence --data DIR [--decodes FILE] [--out FILE]

Decodes four hundred questions greedily through the library (some minutes), or takes what an earlier run wrote to
--decodes. Prints how well doubt tells wrong from right on questions that the fit had not seen.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_rt import library
from edge_rt.router import calibration, confidence, metrics
from edge_rt.router.confidence import CHECKPOINTS, NAMES, Stage, Table
from edge_rt.router.fitting import F64, fold_of, minimise
from edge_rt.types import GenerateRequest, Message, Sampling, TokenSignal
from tools.known_answers import Known, long_questions, short_questions

_N_STREAMS = 8
_N_LONG = 70
_N_FOLDS = 5
_L2 = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    kind: str
    question: str
    text: str
    is_right: bool
    signals: tuple[TokenSignal, ...]
    pieces: tuple[int, ...]  # characters of the text that there were after each token

    def text_after(self, n_tokens: int) -> str:
        return self.text if n_tokens >= len(self.pieces) else self.text[: self.pieces[n_tokens - 1]]


def decode(questions: Iterable[Known], model_id: str) -> list[Decode]:
    """Answer them all, greedily, several at a time."""
    with library.load_text(model_id) as model, ThreadPoolExecutor(_N_STREAMS) as threads:

        def answer(numbered: tuple[int, Known]) -> Decode:
            number, known = numbered
            request = GenerateRequest(
                id=f"known-{number}",
                model=model.info.model,
                messages=(Message(role="user", content=known.question),),
                max_tokens=known.max_tokens,
                sampling=Sampling(temperature=0.0),
                max_signals=CHECKPOINTS[-1],
            )
            text = ""
            signals: list[TokenSignal] = []
            pieces: list[int] = []
            for chunk in model.stream(request):
                text += chunk.text
                signals += chunk.signals
                pieces += [len(text)] * len(chunk.token_ids)
            return Decode(
                kind=known.kind,
                question=known.question,
                text=text,
                is_right=known.is_right(text),
                signals=tuple(signals),
                pieces=tuple(pieces),
            )

        return list(threads.map(answer, enumerate(questions)))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What is known of each answer at one checkpoint, of those that got there: a row each."""

    answers: NDArray[np.int64]
    x: F64

    @classmethod
    def at(cls, decodes: Sequence[Decode], n_tokens: int | None) -> Moments:
        """Look after n_tokens, or at answers that are whole; one that is over at a checkpoint is judged as whole."""
        last = CHECKPOINTS[-1]
        here = [
            i
            for i, d in enumerate(decodes)
            if (len(d.pieces) > n_tokens if n_tokens is not None else len(d.pieces) <= last)
        ]
        n = n_tokens or last
        x = [
            confidence.summary(decodes[i].signals[:n], decodes[i].text_after(n), is_whole=n_tokens is None)
            for i in here
        ]
        return cls(np.array(here, np.int64), np.array(x, np.float64))


def logistic(x: F64, y: F64) -> Callable[[F64], F64]:
    """Fit a logistic regression of a few features; gives a function from rows to log-odds."""
    mean, deviation, w = _logistic(x, y)
    return lambda rows: _log_odds(rows, mean, deviation, w)


def area_under(scores: F64, wrong: F64) -> float:
    """Give the chance that a wrong answer has the higher doubt than a right one (AUROC); NaN where all are alike."""
    high, low = scores[wrong > 0], scores[wrong == 0]
    if not len(high) or not len(low):
        return float("nan")
    above = (high[:, None] > low).sum() + 0.5 * (high[:, None] == low).sum()
    return float(above / (len(high) * len(low)))


def _logistic(x: F64, y: F64) -> tuple[F64, F64, F64]:
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    z = np.hstack([np.clip((x - mean) / deviation, -4, 4), np.ones((len(x), 1))])
    hold = np.full(z.shape[1], _L2)
    hold[-1] = 0

    def loss(w: F64) -> tuple[float, F64]:
        s = z @ w
        return float((np.logaddexp(0, s) - y * s).sum() + (hold * w) @ w / 2), z.T @ (
            1 / (1 + np.exp(-s)) - y
        ) + hold * w

    return mean, deviation, minimise(loss, np.zeros(z.shape[1]))


def _log_odds(x: F64, mean: F64, deviation: F64, w: F64) -> F64:
    found: F64 = np.clip((x - mean) / deviation, -4, 4) @ w[:-1] + w[-1]
    return found


def _numbers(values: F64) -> tuple[float, ...]:
    return tuple(round(float(v), 5) for v in values)


def fit_table(decodes: Sequence[Decode], note: str) -> Table:
    """Fit one linear map to all checkpoints together and a calibration to each; print how good they are."""
    wrong = np.array([float(not d.is_right) for d in decodes])
    folds = np.array([fold_of(d.question, _N_FOLDS) for d in decodes])
    moments = [Moments.at(decodes, n) for n in (*CHECKPOINTS, None)]
    every = np.concatenate([m.answers for m in moments])
    x = np.concatenate([m.x for m in moments])
    unseen = [np.zeros(len(m.answers)) for m in moments]
    for fold in range(_N_FOLDS):
        fitted = _logistic(x[folds[every] != fold], wrong[every[folds[every] != fold]])
        for found, moment in zip(unseen, moments, strict=True):
            held = folds[moment.answers] == fold
            found[held] = _log_odds(moment.x[held], *fitted)
    mean, deviation, w = _logistic(x, wrong[every])
    maps = [
        calibration.fit(found.tolist(), wrong[m.answers].tolist(), max_points=24)
        for found, m in zip(unseen, moments, strict=True)
    ]
    for number, n_tokens in enumerate(CHECKPOINTS):
        _report(
            decodes,
            wrong,
            n_tokens,
            (moments[number], unseen[number], maps[number]),
            (moments[-1], unseen[-1], maps[-1]),
        )
    stages = [
        Stage(
            mean=_numbers(mean),
            deviation=_numbers(deviation),
            weights=_numbers(w[:-1]),
            bias=float(w[-1]),
            scores=map_.scores,
            probabilities=map_.probabilities,
        )
        for map_ in maps
    ]
    return Table(version=1, features=NAMES, stages=tuple(stages), note=note)


_Judged = tuple[Moments, F64, calibration.Isotonic]


def _report(decodes: Sequence[Decode], wrong: F64, n_tokens: int, running: _Judged, whole: _Judged) -> None:
    """Print how good doubt is after n_tokens, or at the end of answers that are shorter."""
    doubt = np.full(len(decodes), np.nan)
    for moment, found, map_ in (whole, running):  # who is still running has no say in the other
        doubt[moment.answers] = [map_(s) for s in found]
    short = np.array([len(d.pieces) <= n_tokens for d in decodes])
    doubt[short] = np.array([whole[2](s) for s in whole[1]])[np.isin(whole[0].answers, np.flatnonzero(short))]
    kinds = " ".join(
        f"{kind} {area_under(doubt[pick], wrong[pick]):.2f} ({wrong[pick].mean():.0%} of {int(pick.sum())} wrong)"
        for kind in sorted({d.kind for d in decodes})
        for pick in [np.array([d.kind == kind for d in decodes])]
    )
    error = metrics.calibration_error(doubt.tolist(), wrong.tolist())
    print(
        f"after {n_tokens} tokens ({int((~short).sum())} of {len(decodes)} answers go on): AUROC "
        f"{area_under(doubt, wrong):.3f}, calibration error {error:.3f}; {kinds}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGE_RT_DATA"), metavar="DIR")
    parser.add_argument("--decodes", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2-135m-instruct", metavar="MODEL")
    parser.add_argument("--out", type=Path, default=confidence.SHIPPED, metavar="FILE")
    given = parser.parse_args()
    if given.data is None:
        parser.error("say where the data are: --data DIR or EDGE_RT_DATA")
    if given.decodes is not None and given.decodes.exists():
        decodes = [msgspec.json.decode(line, type=Decode) for line in given.decodes.read_bytes().splitlines()]
    else:
        decodes = decode([*short_questions(), *long_questions(given.data, _N_LONG)], given.model)
        if given.decodes is not None:
            given.decodes.write_bytes(b"".join(msgspec.json.encode(d) + b"\n" for d in decodes))
    table = fit_table(decodes, f"{given.model}, {len(decodes)} greedy answers")
    given.out.write_text(json.dumps(msgspec.to_builtins(table)) + "\n", encoding="utf-8")
    print(f"{given.out}: {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
