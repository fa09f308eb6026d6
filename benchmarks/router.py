"""Measure the router: how much of the gap between device and cloud it recovers, where, at what cost and how fast.

    python benchmarks/router.py --data DIR [--held DIR] [--signals FILE] [--cross] [--quick] [--check] [--json FILE]

DIR holds labelled requests as tools/router_data.py reads them ($EDGE_RT_DATA by default). A router is fitted on four
fifths of a source, by a hash of the text, and scored on the rest, in five turns; with --held it is fitted on all rows
of --data and scored on the files in the other folder. Bars are the issue's; GSM8K's needs the local model in the store.
--quick scores one fifth of the small sources and no token signals that are not in --signals yet. Every router is fitted
once, in a process of each core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import router_workload
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/ is not installed

from edge_rt.bench.samples import quantile
from edge_rt.router import fitting, metrics
from edge_rt.router.fitting import Example, Rows, Sparse
from edge_rt.router.metrics import Quality
from edge_rt.router.neighbours import Neighbours
from edge_rt.router.scorer import Scorer
from edge_rt.text_vectors import TextVectors
from tools.router_data import read_examples, read_rows
from tools.router_signals import key_of, measure_signals, read_signals, write_signals
from tools.train_confidence import logistic

F64 = NDArray[np.float64]

_N_FOLDS = 5
_FEW = 1500  # labels of the second MMLU bar
_N_DRAWS = 3  # of these labels from each fold
_CROSS = ("mmlu", "gsm8k", "mix", "mmlu_pro", "crux", "math-l5")
_MAX_DECISION_MS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure and what it must reach; None only reports."""

    name: str
    value: float
    at_least: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.at_least is None or bool(self.value >= self.at_least)  # numpy's bool is no JSON


class Lab:
    """Reads and prepares each source once. pool has a process for each core, for what takes long."""

    def __init__(self, data: Path, held: Path | None, pool: ProcessPoolExecutor, *, quick: bool) -> None:
        self.data, self.held, self.pool, self.quick = data, held, pool, quick
        self.embedder = TextVectors.load()
        self._rows: dict[tuple[Path, str], Rows] = {}

    @property
    def n_resamples(self) -> int:
        return 100 if self.quick else 500

    def rows(self, name: str, folder: Path | None = None) -> Rows:
        key = (folder or self.data, name)
        if key not in self._rows:
            self._rows[key] = fitting.prepare(read_examples(*key), self.embedder)
        return self._rows[key]

    def splits(self, name: str) -> list[tuple[Rows, Rows]]:
        """Give rows to fit and rows to score, once with --held, else for each fold."""
        rows = self.rows(name)
        if self.held is not None:
            return [(rows, self.rows(name, self.held))]
        found = []
        for fold in range(1 if self.quick else _N_FOLDS):
            held = rows.folds % _N_FOLDS == fold
            found.append((rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))))
        return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Domain:
    """Routers fitted and scored on one source; n_labels draws so many rows to fit, in each of n_draws."""

    def __init__(self, lab: Lab, name: str, *, n_labels: int = 0, n_draws: int = 1) -> None:
        self._lab, self._name, self._n_labels = lab, name, n_labels
        self._tests: list[Rows] = []
        self._fits: list[Future[F64]] = []
        self._evaluated: Future[Quality]
        for number, (train, test) in enumerate(lab.splits(name)):
            for draw in range(n_draws):
                rows = train
                if n_labels:
                    drawn = np.random.default_rng(100 * number + draw).permutation(len(train))[:n_labels]
                    rows = train.take(np.sort(drawn))
                self._tests.append(test)
                self._fits.append(lab.pool.submit(predicted, rows, test))

    def scored(self) -> list[tuple[Rows, F64]]:
        """Give the rows of each turn, and what the router that had not seen them predicts."""
        return [(test, p.result()) for test, p in zip(self._tests, self._fits, strict=True)]

    def evaluate(self) -> None:
        """Wait for the routers, and begin to work out how good they are."""
        # draws are different routers: each is ranked by itself
        gains = [_ranks(p[:, 1] - p[:, 0]) if self._n_labels else p[:, 1] - p[:, 0] for _, p in self.scored()]
        outcomes = np.concatenate([test.outcomes for test in self._tests])
        n_resamples = self._lab.n_resamples
        self._evaluated = self._lab.pool.submit(quality, np.concatenate(gains), outcomes, n_resamples=n_resamples)
        say(f"{self._name}: {len(self._fits)} fitted")

    def quality(self) -> Quality:
        """Print the table's row, and give its figures."""
        errors = [
            metrics.calibration_error(p[:, head].tolist(), test.outcomes[:, head].tolist())
            for test, p in self.scored()
            for head in range(2)
        ]
        found = self._evaluated.result()
        name = f"{self._name}{f', {self._n_labels} labels' if self._n_labels else ''}"
        print(row(name, found) + f" | {np.mean(errors):.3f} |", flush=True)
        return found


def predicted(train: Rows, test: Rows) -> F64:
    """Fit a router to some rows and give its p_local and p_cloud of others: [n, 2]."""
    return fitting.predict(fitting.fit(train), test)


def gsm8k_with_confidence(lab: Lab, signals: Path) -> Quality | None:
    """Score GSM8K by the local model's token statistics on the weak model's answers, beside the surface features."""
    folders = [lab.data] if lab.held is None else [lab.data, lab.held]
    answers = {
        r["prompt"]: r["weak_response"]
        for folder in folders
        for r in read_rows(folder, "routellm_gsm8k")
        if r["contaminated"] == "0"
    }
    known = read_signals(signals)
    missing = sum(key_of(*pair) not in known for pair in answers.items())
    if missing and lab.quick:
        print(f"GSM8K with confidence: {missing} answers without signals; not measured with --quick")
        return None
    say(f"GSM8K: token signals of {missing} answers to measure")
    known = measure_signals(
        answers.items(),
        known,
        save=lambda found: write_signals(signals, found, "SmolLM2-135M-Instruct, RouteLLM GSM8K"),
    )
    texts = {name: {e.text: e for e in read_examples(f, "gsm8k")} for name, f in zip("th", folders, strict=False)}
    gains, outcomes = [], []
    train = _with_signals(list(texts["t"].values()), answers, known)
    if lab.held is not None:
        turns = [(train, _with_signals(list(texts["h"].values()), answers, known))]
    else:
        folds = np.array([fitting.fold_of(text, 60) % _N_FOLDS for text in texts["t"]])
        turns = [((x[folds != k], y[folds != k]), (x[folds == k], y[folds == k])) for k in range(5) for x, y in [train]]
    for (x, y), (x_test, y_test) in turns:
        p = np.stack([logistic(x, y[:, head])(x_test) for head in range(2)], axis=1)
        p = 1 / (1 + np.exp(-p))
        gains.append(p[:, 1] - p[:, 0])
        outcomes.append(y_test)
    found = quality(np.concatenate(gains), np.concatenate(outcomes), n_resamples=lab.n_resamples)
    print(row("gsm8k, pre-score features and confidence", found) + " |  |")
    return found


def _with_signals(
    examples: Sequence[Example], answers: dict[str, str], known: dict[str, list[float]]
) -> tuple[F64, F64]:
    from edge_rt.router.features import surface

    x = np.array([[*known[key_of(e.text, answers[e.text])], *surface(e.text)] for e in examples])
    return x, np.array([(e.local, e.cloud) for e in examples])


def cross_tables(lab: Lab) -> dict[str, dict[str, float]]:
    """Print APGR of routers fitted on one source and scored on another, and of those that saw all other sources."""
    names = _CROSS[1:3] if lab.quick else _CROSS
    rows = {name: lab.rows(name) for name in names}

    def begin(train: Sequence[str], tests: Sequence[str]) -> Future[dict[str, float]]:
        chosen = {name: rows[name] for name in tests}
        return lab.pool.submit(_apgrs, joined([rows[name] for name in train]), chosen)

    singles = {name: begin((name,), [other for other in names if other != name]) for name in names}
    rest = {} if lab.quick else {name: begin([other for other in names if other != name], (name,)) for name in names}
    table: dict[str, dict[str, float]] = {}
    for name, found in singles.items():
        table[name] = found.result()
        say(f"fitted on {name}")
    if rest:
        table["all others"] = {name: found.result()[name] for name, found in rest.items()}
    print(f"\n| fitted on \\ scored on | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for fitted_on, apgrs in table.items():
        print(f"| {fitted_on} | {' | '.join(f'{apgrs[n]:.3f}' if n in apgrs else '–' for n in names)} |")
    return table


def _apgrs(train: Rows, tests: Mapping[str, Rows]) -> dict[str, float]:
    weights = fitting.fit(train)
    return {name: _apgr(weights, rows) for name, rows in tests.items()}


def _apgr(weights: fitting.Weights, rows: Rows) -> float:
    p = fitting.predict(weights, rows)
    return quality(p[:, 1] - p[:, 0], rows.outcomes, n_resamples=0).apgr


def joined(parts: Sequence[Rows]) -> Rows:
    """Lay rows of several sources behind each other, as if their texts had been prepared together."""
    begins = np.cumsum([0, *(len(part) for part in parts)])
    terms = Sparse(
        np.concatenate([part.terms.row + begin for part, begin in zip(parts, begins, strict=False)]),
        np.concatenate([part.terms.column for part in parts]),
        np.concatenate([part.terms.value for part in parts]),
        int(begins[-1]),
    )
    topics = tuple(topic for part in parts for topic in part.topics)
    stacked: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("surface", "vectors", "outcomes", "folds")
    }
    return Rows(terms=terms, topics=topics, **stacked)


def decision_times(lab: Lab) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Time single requests, with 2,000 labelled neighbours: wall clock and the thread's own CPU time, in ms."""
    texts = [e.text for e in read_examples(lab.data, "mix")][:: 8 if lab.quick else 2]
    scorer = Scorer.load(embedder=lab.embedder)
    vectors = lab.embedder.embed(texts[:500])
    known = np.tile(vectors, (4, 1))[:2000]
    scorer.learnt = _Neighbourly(Neighbours(known, np.ones((len(known), 2), np.float32)))
    wall, own = [], []
    for text in texts:
        t, c = time.perf_counter(), time.thread_time()
        scorer.score(text)
        own.append((time.thread_time() - c) * 1000)
        wall.append((time.perf_counter() - t) * 1000)
    return tuple(wall), tuple(own)


@dataclass(frozen=True, slots=True)
class _Neighbourly:
    neighbours: Neighbours

    def correct(self, sketch: object) -> None: ...


def quality(gains: F64, outcomes: F64, *, n_resamples: int) -> Quality:
    weak, strong = outcomes.T.tolist()
    return metrics.evaluate(gains.tolist(), weak, strong, n_resamples=n_resamples)


def row(name: str, q: Quality) -> str:
    return (
        f"| {name} | {q.n} | {q.weak:.3f} → {q.strong:.3f} | {q.apgr:.3f} ({q.low:.2f}–{q.high:.2f}) "
        f"| {100 * q.cpt50:.1f} / {100 * q.cpt80:.1f} | {q.pgr40:.3f}"
    )


def _ranks(values: F64) -> F64:
    return np.argsort(np.argsort(values, kind="stable")) / len(values)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGE_RT_DATA"), metavar="DIR")
    parser.add_argument("--held", type=Path, metavar="DIR", help="score on the rows of these files instead of folds")
    default = Path(__file__).parent / "router_signals.json"
    parser.add_argument("--signals", type=Path, default=default, metavar="FILE", help="token signals measured before")
    parser.add_argument("--cross", action="store_true", help="only the tables of routers scored on other sources")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    own = arguments.own
    if own.data is None or not (own.data / "routellm_mmlu.csv.xz").exists():
        sys.exit(
            "the labelled requests are missing: --data DIR or EDGE_RT_DATA names the folder with their .csv.xz files"
        )
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # in the processes that are begun now: each has a core
    n_cores, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    bars: list[Bar] = []
    extra: dict[str, object] = {}
    with ProcessPoolExecutor(n_cores, mp_context=context) as pool:
        lab = Lab(own.data, own.held, pool, quick=arguments.quick)
        if not own.cross:
            bars = measure(lab, own.signals)
        if own.cross or not arguments.quick:
            extra["cross"] = cross_tables(lab)
    figures = []
    if not own.cross:
        wall, cpu = decision_times(lab)
        print(f"\ndecision: wall p50 {quantile(wall, 0.5):.2f}, p95 {quantile(wall, 0.95):.2f} ms; ", end="")
        print(f"own CPU time p50 {quantile(cpu, 0.5):.2f}, p95 {quantile(cpu, 0.95):.2f} ms")
        figures = [
            harness.Figure(
                name="route decision p95", unit="ms", samples=(quantile(wall, 0.95),), at_most=_MAX_DECISION_MS
            )
        ]
    extra["bars"] = [asdict(bar) | {"holds": bar.holds} for bar in bars]
    print()
    for bar in bars:
        limit = "" if bar.at_least is None else f", must be at least {bar.at_least:g}: {'yes' if bar.holds else 'NO'}"
        print(f"{bar.name}: {bar.value:.3f}{limit}{f' ({bar.note})' if bar.note else ''}")
    missed = [bar.name for bar in bars if not bar.holds]
    if arguments.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    try:
        harness.finish(arguments, extra=extra, figures=figures)
    except SystemExit as ended:
        sys.exit(1 if arguments.check and missed else ended.code)


def measure(lab: Lab, signals: Path) -> list[Bar]:
    print("| source | rows | device → cloud | APGR (95 %) | CPT50 / CPT80 | PGR@40 | calibration error |")
    print("|---|---:|---|---|---|---:|---:|")
    bars: list[Bar] = []
    domains = [Domain(lab, "mix"), Domain(lab, "gsm8k")]
    if not lab.quick:
        domains += [Domain(lab, "mmlu"), Domain(lab, "mmlu", n_labels=_FEW, n_draws=_N_DRAWS)]
        if lab.held is None:
            domains += [Domain(lab, name) for name in ("mmlu_pro", "crux", "math-l5", "gsm-phi")]
    for domain in domains:
        domain.evaluate()
    found = [domain.quality() for domain in domains]
    bars += [Bar(name="14-task mix APGR", value=found[0].apgr, at_least=0.85)]
    bars += [Bar(name="14-task mix PGR@40", value=found[0].pgr40, at_least=0.87)]
    if not lab.quick:
        bars += [Bar(name="MMLU APGR, all rows", value=found[2].apgr, at_least=0.65)]
        bars += [Bar(name=f"MMLU APGR, {_FEW} labels", value=found[3].apgr, at_least=0.62)]
    if (sure := gsm8k_with_confidence(lab, signals)) is not None:
        bars += [Bar(name="GSM8K APGR with confidence", value=sure.apgr, at_least=0.65)]
    random = metrics.mean_random(*lab.rows("gsm8k").outcomes.T.tolist(), n_routers=20)
    bars += [Bar(name="random router's APGR, GSM8K", value=random.apgr, note="published 0.497")]
    load = router_workload.replay(domains[0].scored())
    print(f"\n{load}")
    bars += [Bar(name="workload: local share", value=load.local_share, at_least=0.6)]
    bars += [Bar(name="workload: cost saved", value=load.cost_saved, at_least=0.4)]
    bars += [Bar(name="workload: gap recovered", value=load.recovered, at_least=0.8)]
    return bars


if __name__ == "__main__":
    main()
