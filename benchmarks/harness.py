"""What the benchmarks share: paired runs, the machine's description, busy neighbours, arguments and reports.

A benchmark measures a claim as the ratio of A to B, run in turns on the same machine in the same minutes, because
absolute speeds of a shared or warm machine drift more than what is measured. Use:

    arguments = harness.parse(__doc__)
    with harness.busy_neighbours(1):
        pair = harness.paired("engine", run_engine, "bare loop", run_bare, n_pairs=arguments.pairs(7, quick=3))
    harness.finish(arguments, [harness.Claim(name="decode", pair=pair, at_least=0.97)])
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from edge_rt.bench.samples import quantile
from edge_rt.devices import cpu, thermal

_ROOT = Path(__file__).resolve().parent.parent

# Ends with its parent whatever happens to it: the parent's death signal is set before the loop starts.
_BUSY = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit()\n"
    "print('busy', flush=True)\n"
    "while True: pass\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two things measured in turns; a and b are rates, so a ratio over 1 means that a is faster."""

    name_a: str
    name_b: str
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.a, self.b, strict=True))

    @property
    def median_ratio(self) -> float:
        return quantile(self.ratios, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A pair and the ratio it must reach in the median; at_least None only reports."""

    name: str
    pair: Pair
    at_least: float | None = None

    @property
    def holds(self) -> bool:
        return self.at_least is None or self.pair.median_ratio >= self.at_least

    def record(self) -> dict[str, Any]:
        ratios = self.pair.ratios
        return {
            "claim": self.name,
            "a": self.pair.name_a,
            "b": self.pair.name_b,
            "a_median": quantile(self.pair.a, 0.5),
            "b_median": quantile(self.pair.b, 0.5),
            "ratio_median": quantile(ratios, 0.5),
            "ratio_q1": quantile(ratios, 0.25),
            "ratio_q3": quantile(ratios, 0.75),
            "ratio_min": min(ratios),
            "n_pairs": len(ratios),
            "at_least": self.at_least,
            "holds": self.holds,
            "a_samples": list(self.pair.a),
            "b_samples": list(self.pair.b),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Something measured by itself, for which less is better, and the most it may be in the median."""

    name: str
    unit: str
    samples: tuple[float, ...]
    at_most: float

    @property
    def median(self) -> float:
        return quantile(self.samples, 0.5)

    @property
    def holds(self) -> bool:
        return self.median <= self.at_most

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"median": self.median, "holds": self.holds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What every benchmark takes on its command line."""

    quick: bool
    check: bool
    json_file: Path | None
    own: argparse.Namespace = field(default_factory=argparse.Namespace)  # the benchmark's own options

    def pairs(self, full: int, *, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu: str
    cores: str
    features: tuple[str, ...]
    board: str | None
    kernel: str
    governor: str | None
    pressure: float | None
    temp_c: float | None
    python: str
    edge_rt: str
    commit: str
    date: str


def parse(
    description: str | None,
    arguments: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Arguments:
    """Read --quick, --check and --json FILE, and what add_options adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter runs: shows that it works, proves little"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim does not hold")
    parser.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="write everything measured to FILE")
    if add_options is not None:
        add_options(parser)
    found = parser.parse_args(arguments)
    return Arguments(quick=found.quick, check=found.check, json_file=found.json_file, own=found)


def paired(
    name_a: str,
    run_a: Callable[[], float],
    name_b: str,
    run_b: Callable[[], float],
    *,
    n_pairs: int = 7,
    n_warmup: int = 1,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Pair:
    """Run A and B in turns and keep each run's rate (more is better).

    The order changes from pair to pair (AB, BA, AB, …), so that a machine that slows down favours neither.
    """
    for _ in range(n_warmup):
        run_a()
        run_b()
    a: list[float] = []
    b: list[float] = []
    for number in range(n_pairs):
        turns = ((a, run_a), (b, run_b)) if number % 2 == 0 else ((b, run_b), (a, run_a))
        for samples, run in turns:
            samples.append(run())
        say(f"{number + 1}/{n_pairs}: {name_a} {a[-1]:.2f}, {name_b} {b[-1]:.2f}, ratio {a[-1] / b[-1]:.3f}")
    return Pair(name_a=name_a, name_b=name_b, a=tuple(a), b=tuple(b))


@contextmanager
def busy_neighbours(n_processes: int, cpus: Sequence[int] = ()) -> Iterator[tuple[int, ...]]:
    """Keep n_processes other processes computing, each bound to one of cpus in turn if given; yields their ids.

    They run when the block begins, and they and only they are ended with it.
    """
    neighbours: list[subprocess.Popen[str]] = []
    try:
        for number in range(n_processes):
            command = [sys.executable, "-c", _BUSY, str(os.getpid())]
            neighbours.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            if cpus:
                os.sched_setaffinity(neighbours[-1].pid, {cpus[number % len(cpus)]})
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            if neighbour.stdout.readline() != "busy\n":
                raise RuntimeError(f"busy neighbour {neighbour.pid} did not start")
        yield tuple(neighbour.pid for neighbour in neighbours)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
        for neighbour in neighbours:
            neighbour.wait()
            if neighbour.stdout is not None:
                neighbour.stdout.close()


def machine() -> Machine:
    """Describe where and when the numbers are measured."""
    usable = cpu.usable()
    return Machine(
        cpu=cpu.model().value or platform.machine(),
        cores=f"{len(usable.cpus)} usable, {usable.n_physical} physical, {len(usable.big_cpus)} big",
        features=tuple(sorted(cpu.features())),
        board=cpu.board().value,
        kernel=platform.release(),
        governor=cpu.governor().value,
        pressure=cpu.pressure().value,
        temp_c=thermal.peak_c().value,
        python=platform.python_version(),
        edge_rt=version("edge_rt"),
        commit=_commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def table(claims: Sequence[Claim]) -> str:
    """Draw the claims as a Markdown table."""
    head = ["claim", "A", "B", "A median", "B median", "A/B median", "q1–q3", "min", "pairs", "must be", "holds"]
    rows = [head] + [
        [
            r["claim"],
            r["a"],
            r["b"],
            f"{r['a_median']:.2f}",
            f"{r['b_median']:.2f}",
            f"{r['ratio_median']:.3f}",
            f"{r['ratio_q1']:.3f}–{r['ratio_q3']:.3f}",
            f"{r['ratio_min']:.3f}",
            str(r["n_pairs"]),
            "" if r["at_least"] is None else f"≥ {r['at_least']:g}",
            "" if r["at_least"] is None else ("yes" if r["holds"] else "NO"),
        ]
        for r in (claim.record() for claim in claims)
    ]
    return draw(rows, n_names=3)


def figures_table(figures: Sequence[Figure]) -> str:
    """Draw the figures as a Markdown table."""
    rows = [["figure", "unit", "median", "min–max", "runs", "at most", "holds"]] + [
        [
            figure.name,
            figure.unit,
            f"{figure.median:.2f}",
            f"{min(figure.samples):.2f}–{max(figure.samples):.2f}",
            str(len(figure.samples)),
            f"{figure.at_most:g}",
            "yes" if figure.holds else "NO",
        ]
        for figure in figures
    ]
    return draw(rows, n_names=2)


def draw(rows: Sequence[Sequence[str]], *, n_names: int) -> str:
    """Align a table whose first n_names columns are words, flush left, and the rest numbers, flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        [row[i].ljust(widths[i]) if i < n_names else row[i].rjust(widths[i]) for i in range(len(row))] for row in rows
    ]
    lines.insert(1, ["-" * w if i < n_names else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def finish(
    arguments: Arguments,
    claims: Sequence[Claim] = (),
    extra: dict[str, Any] | None = None,
    figures: Sequence[Figure] = (),
) -> NoReturn:
    """Print the tables and the machine, write the JSON file, and exit: 1 if --check was given and a bar is missed."""
    where = machine()
    if claims:
        print(table(claims))
    if figures:
        print(figures_table(figures))
    print(f"\n{where.cpu}, {where.cores}, Linux {where.kernel}, commit {where.commit}, {where.date}")
    if arguments.json_file is not None:
        record = {"machine": asdict(where), "quick": arguments.quick, "claims": [claim.record() for claim in claims]}
        record["figures"] = [figure.record() for figure in figures]
        arguments.json_file.write_text(json.dumps(record | (extra or {}), indent=2) + "\n", encoding="utf-8")
    missed = [bar.name for bar in (*claims, *figures) if not bar.holds]
    if arguments.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _commit() -> str:
    """Name the commit, with + if the tree differs from it; "unknown" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=_ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
