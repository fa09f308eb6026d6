"""The semantic cache's claims: what the guard refuses, what a stream of questions hits and at which error, how fast.

False hits: CheckList's and GSM-Plus's hard pairs at cosine 0.90, with the guard and without. Stream: questions of
Quora's pairs once each, whole duplicate clusters shuffled, drawn three times; the right answer is that of the same
cluster. Errors are wrong hits over all requests; a verified would-be hit is neither hit nor error. Beside it the best
static threshold in hindsight, which nobody can know beforehand, and GPTCache's default of 0.8.

    python benchmarks/cache_semantic.py --data DIR --check --json out.json
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import qqp
from numpy.typing import NDArray

from edge_rt.bench.samples import quantile
from edge_rt.cache import similarity
from edge_rt.cache.judge import PairJudge
from edge_rt.cache.lexical import differs, read
from edge_rt.cache.refusal import refusal
from edge_rt.cache.semantic import MIN_SIMILARITY, N_NEAREST, SemanticTier
from edge_rt.cache.threshold import ErrorController, Evidence, sigmoid
from edge_rt.cache.vector_index import VectorIndex
from edge_rt.text_vectors import N_DIMENSIONS, TextVectors

MAX_ERROR, VERIFY_SHARE = 0.02, 0.05
WINDOW = 1000
N_ENTRIES = 10_000


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    directory = qqp.data_dir(arguments.own.data)
    vectors = TextVectors.load()
    questions = qqp.Questions(qqp.rows(directory, "qqp_pairs"))
    if arguments.own.fit:
        _fit(questions, vectors)
        return
    figures: list[harness.Figure] = []
    extra: dict[str, Any] = {"false hits": _false_hits(directory, vectors, figures)}
    extra["stream"] = _streams(
        questions, vectors, 1 if arguments.quick else 3, 4000 if arguments.quick else 9500, figures
    )
    extra["latency"] = _latency(questions, vectors, 400 if arguments.quick else 2000, figures)
    harness.finish(arguments, extra=extra, figures=figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the public query pairs lie; else $EDGE_RT_DATA")
    parser.add_argument("--fit", action="store_true", help="fit score.py's and threshold.py's weights")


def _false_hits(directory: Path, vectors: TextVectors, figures: list[harness.Figure]) -> list[dict[str, Any]]:
    templates = [(c, t, same, pairs) for (c, t, same), pairs in qqp.checklist(directory).items()]
    templates.append(("GSM-Plus", "changed numbers", False, qqp.changed_numbers(directory)))
    found = []
    for capability, template, is_same, pairs in templates:
        a, b = vectors.embed([one for one, _ in pairs]), vectors.embed([other for _, other in pairs])
        is_near = (a * b).sum(axis=1) >= 0.9
        passes = np.array([not differs(read(one), read(other)) for one, other in pairs])
        refused = np.array([bool(refusal(one) or refusal(other)) for one, other in pairs])
        found.append({
            "capability": capability, "template": template, "same": is_same, "n": len(pairs),
            "cosine": float(is_near.mean()), "guard": float((is_near & passes).mean()),
            "tier": float((is_near & passes & ~refused).mean()),
        })  # fmt: skip
    head = ["capability", "template", "means the same", "pairs", "hit at 0.90", "with guard", "and refused classes"]
    lines = [
        [f["capability"], f["template"][:60], "yes" if f["same"] else "no", str(f["n"])]
        + [f"{f[kind]:.3f}" for kind in ("cosine", "guard", "tier")]
        for f in found
    ]
    print(harness.draw([head, *lines], n_names=3), "\n")

    def mean(kind: str, capabilities: Sequence[str], *, is_same: bool) -> float:
        rates = [f[kind] for f in found if f["capability"] in capabilities and f["same"] == is_same]
        return float(np.mean(rates)) if rates else 0.0

    for name, capability, at_most in (
        ("false hits, negation", "Negation", 0.01),
        ("false hits, before and after", "Temporal", 0.05),
        ("false hits, changed number", "GSM-Plus", 0.02),
    ):
        rate = mean("guard", [capability], is_same=False)
        figures.append(harness.Figure(name=name, unit="share", samples=(rate,), at_most=at_most))
    everything = sorted({f["capability"] for f in found} - {"GSM-Plus"})
    kept = mean("guard", everything, is_same=True) / max(mean("cosine", everything, is_same=True), 1e-9)
    figures.append(harness.Figure(name="CheckList's true hits lost", unit="share", samples=(1 - kept,), at_most=0.4))
    return found


def _streams(
    questions: qqp.Questions, vectors: TextVectors, n_streams: int, n: int, figures: list[harness.Figure]
) -> list[dict[str, Any]]:
    found = []
    for seed in range(n_streams):
        asked = questions.stream(seed, n)
        clusters = [questions.cluster[question] for question in asked]
        hits, errors, n_verified = _replay(asked, clusters, vectors, seed)
        sliding = np.convolve(errors[WINDOW:], np.ones(WINDOW), "valid") / WINDOW
        blocks = [float(errors[at : at + WINDOW].mean()) for at in range(WINDOW, len(asked) - WINDOW + 1, WINDOW)]
        half = len(asked) // 2
        found.append({
            "seed": seed, "n": len(asked), "hits": float(hits.mean()), "errors": float(errors.mean()),
            "hits, second half": float(hits[half:].mean()), "errors, second half": float(errors[half:].mean()),
            "worst 1,000": max(blocks), "worst sliding 1,000": float(sliding.max()), "blocks": blocks,
            "verified": n_verified / max(n_verified + int(hits.sum()), 1), **_static(asked, clusters, vectors),
        })  # fmt: skip
        print(f"stream {seed + 1} of {n_streams} done", file=sys.stderr)
    names = [name for name in found[0] if name not in {"seed", "blocks"}]
    rows = [[name, *(f"{f[name]:.4g}" for f in found)] for name in names]
    print(harness.draw([["stream", *(str(f["seed"]) for f in found)], *rows], n_names=1), "\n")
    for name, key, at_most in (
        ("stream: requests without a hit", "hits", 0.78),
        ("stream: errors", "errors", MAX_ERROR),
        ("stream: errors in the worst 1,000 after the first", "worst 1,000", MAX_ERROR),
    ):
        samples = tuple(1 - f[key] if key == "hits" else f[key] for f in found)
        figures.append(harness.Figure(name=name, unit="share", samples=samples, at_most=at_most))
    return found


def _replay(
    asked: Sequence[str], clusters: Sequence[str], vectors: TextVectors, seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], int]:
    """Send a stream through the tier as the runtime does; an answer is its cluster's name."""
    draw = random.Random(seed)
    controller = ErrorController(MAX_ERROR, VERIFY_SHARE)
    tier = SemanticTier(vectors, controller, mode="on", max_entries=len(asked), draw=draw.random)
    hits, errors = np.zeros(len(asked), np.bool_), np.zeros(len(asked), np.bool_)
    answers: dict[bytes, str] = {}
    n_verified = 0
    for at, (question, cluster) in enumerate(zip(asked, clusters, strict=True)):
        found = tier.lookup(b"", question)
        if found.outcome == "hit" and found.match is not None:
            hits[at], errors[at] = True, answers[found.match.answer_ref] != cluster
            continue
        n_verified += found.outcome == "verify"
        for match in found.matches:
            tier.verified(match, answers[match.answer_ref] == cluster)
        answers[ref := at.to_bytes(4, "big")] = cluster
        tier.admit(b"", question, ref, "")
    return hits, errors, n_verified


def _static(asked: Sequence[str], clusters: Sequence[str], vectors: TextVectors) -> dict[str, float]:
    """Give what one cosine threshold for the whole stream does, without a guard: the best in hindsight, and 0.8."""
    rows = vectors.embed(asked)
    best, is_right = np.zeros(len(asked), np.float32), np.zeros(len(asked), np.bool_)
    for start in range(0, len(asked), 256):
        products = np.einsum("ij,kj->ik", rows[start : start + 256], rows[: start + 256])
        for at in range(max(start, 1), min(start + 256, len(asked))):
            nearest = int(products[at - start, :at].argmax())
            best[at], is_right[at] = products[at - start, nearest], clusters[nearest] == clusters[at]
    order = np.argsort(-best)
    n_allowed = int((np.cumsum(~is_right[order]) <= MAX_ERROR * len(asked)).sum())
    is_hit = best >= 0.8
    return {
        "best static, hits": n_allowed / len(asked),
        "best static, threshold": float(best[order[n_allowed - 1]]),
        "at 0.8, hits": float(is_hit.mean()),
        "at 0.8, errors": float((is_hit & ~is_right).mean()),
    }


def _latency(
    questions: qqp.Questions, vectors: TextVectors, n_asked: int, figures: list[harness.Figure]
) -> dict[str, float]:
    """Time lookups that end at a stored question among N_ENTRIES, as a hit's do; CPU and wall."""
    asked = questions.stream(0, N_ENTRIES + n_asked)
    controller = ErrorController(0.5, VERIFY_SHARE, n_shadow=0)
    tier = SemanticTier(vectors, controller, mode="on", max_entries=N_ENTRIES, draw=lambda: 1.0)
    start_s = time.process_time()
    for at, question in enumerate(asked[:N_ENTRIES]):
        tier.admit(b"", question, at.to_bytes(4, "big"), "")
    admit_s = (time.process_time() - start_s) / N_ENTRIES
    wall_ms, cpu_ms = [], []
    for question in asked[N_ENTRIES:]:
        wall, cpu = time.perf_counter(), time.thread_time()
        found = tier.lookup(b"", question)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if found.matches:
            wall_ms.append(wall * 1e3)
            cpu_ms.append(cpu * 1e3)
    p95_ms = quantile(cpu_ms, 0.95)
    name = f"lookup that ends at a stored question, {N_ENTRIES:,} entries, p95 of CPU time"
    figures.append(harness.Figure(name=name, unit="ms", samples=(p95_ms,), at_most=5.0))
    record = {"lookups": len(cpu_ms), "admit, ms": admit_s * 1e3, "vectors, MB": tier.stats()["bytes"] / 2**20}
    for kind, samples in (("cpu", cpu_ms), ("wall", wall_ms)):
        record |= {f"{kind} p50, ms": quantile(samples, 0.5), f"{kind} p95, ms": quantile(samples, 0.95)}
    rows = [[key, f"{value:.3f}"] for key, value in record.items()]
    print(harness.draw([["lookup", "figure"], *rows], n_names=1), "\n")
    return record


def _fit(questions: qqp.Questions, vectors: TextVectors) -> None:
    """Fit the weights on a stream that shares no cluster with those measured, nor with the judge's training."""
    measured = frozenset(questions.cluster[q] for seed in range(3) for q in questions.stream(seed))
    asked = questions.stream(qqp.FIT_SEED, without=measured)
    pairs = _pairs(asked, vectors)
    labels = np.array([questions.cluster[asked[p.at]] == questions.cluster[asked[p.other]] for p in pairs], np.float64)
    weights, bias = _logistic(np.array([p.values for p in pairs]), labels, penalty=3.0)
    print("WEIGHTS =", tuple(round(float(w), 4) for w in weights))
    print("BIAS =", round(bias, 4), f"# {len(pairs)} pairs")
    scores = [bias + float(weights @ np.array(p.values)) for p in pairs]
    x, y = _evidence(asked, questions, pairs, scores)
    weights, bias = _logistic(x[:, 1:], y, penalty=1.0)
    print("_PRIOR =", tuple(round(float(w), 2) for w in (bias, *weights)), f"# {len(x)} matches; n_served by hand")


def _logistic(x: NDArray[np.float64], y: NDArray[np.float64], *, penalty: float) -> tuple[NDArray[np.float64], float]:
    """Give weights and bias; the penalty is on weights of standardised columns."""
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-9
    z = np.c_[np.ones(len(x)), (x - mean) / scale]
    weights = np.zeros(z.shape[1])
    hold = np.r_[0.0, np.full(x.shape[1], penalty)]
    for _ in range(30):  # Newton's method, ridge
        p = 1 / (1 + np.exp(-z @ weights))
        hessian = (z * (p * (1 - p))[:, None]).T @ z + np.diag(hold)
        weights += np.linalg.solve(hessian, z.T @ (y - p) - hold * weights)
    by_unit = weights[1:] / scale
    return by_unit, float(weights[0] - (by_unit * mean).sum())


@dataclass(frozen=True, slots=True)
class _Pair:
    """A question by its number in the stream, an earlier one near it, and their measures with the judge's word."""

    at: int
    other: int
    values: tuple[float, ...]


def _pairs(asked: Sequence[str], vectors: TextVectors) -> list[_Pair]:
    """Give each question's nearest earlier ones that nothing forbids."""
    index: VectorIndex[int] = VectorIndex(len(asked), N_DIMENSIONS)
    subjects = [similarity.subject(question, vectors) for question in asked]
    judge = PairJudge.load()
    found = []
    for at, (question, vector) in enumerate(zip(asked, vectors.embed(asked), strict=True)):
        if refusal(question):
            continue
        near = index.nearest(b"", vector, N_NEAREST)
        for other, cosine in near:
            a, b = subjects[at], subjects[other]
            if cosine >= MIN_SIMILARITY and not differs(a.reading, b.reading):
                rivals = [c for rival, c in near if rival != other]
                values = similarity.measures(a, b, vectors, cosine=cosine, rivals=rivals)
                judged = similarity.judged(a, b, vectors, judge, values)
                found.append(_Pair(at, other, (*values, judged)))
        index.add(b"", at, vector)
    return found


def _evidence(
    asked: Sequence[str], questions: qqp.Questions, pairs: Sequence[_Pair], scores: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Replay a stream in which everything is compared and nothing served: each match's evidence, and was it right."""
    near: dict[int, list[tuple[int, float]]] = {}
    for pair, score in zip(pairs, scores, strict=True):
        near.setdefault(pair.at, []).append((pair.other, score))
    known: dict[tuple[int, int], bool] = {}
    marks: dict[int, list[tuple[float, bool]]] = {}
    rows, labels = [], []
    for at, matches in near.items():
        for other, score in matches:
            right, wrong = ([s for s, is_right in marks.get(other, ()) if is_right is kind] for kind in (True, False))
            votes = [(s, known.get((max(o, other), min(o, other)))) for o, s in matches if o != other]
            support, against = (
                max((sigmoid(s) for s, is_same in votes if is_same is kind), default=0.0) for kind in (True, False)
            )
            evidence = Evidence(
                score, max(wrong, default=None), min(right, default=None), len(wrong), len(right), 0, support, against
            )
            rows.append(evidence.features())
            labels.append(questions.cluster[asked[at]] == questions.cluster[asked[other]])
        for (other, score), is_right in zip(matches, labels[-len(matches) :], strict=True):
            known[at, other] = is_right
            for entry in (at, other):
                marks.setdefault(entry, []).append((score, is_right))
    return np.array(rows), np.array(labels, np.float64)


if __name__ == "__main__":
    main()
