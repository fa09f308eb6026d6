"""Threads and batch as actuators: t/s MEASURED here through a daemon that is advised; joules MODELLED (plant A).

    python benchmarks/advice.py [--quick] [--check] [--json FILE]

Measured: `edge_rt serve` with smollm2-135m-instruct and two threads of its own streams greedy answers without pause,
while powerd's socket, whose advice this script gives, changes decoding between one thread and two every few seconds,
and then how many of four clients are answered together too. No request may fail, and no answer may differ from what it
was without advice. What two threads win over one depends on the neighbours of the hour.

Modelled: J/token on the three boards of tests/plants, 0.08 requests/s, of threads alone at the highest clock where
nobody can set one, of the clock alone, and of both; the constants of memory and cores are plausible, not calibrated.
Bars, on the unfavourable end of the interval over seeds: threads alone take 3 % less of the chip than `performance`,
both at most half a percent more than the clock alone, and each at most a point more of late first tokens than that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
import httpx2
import power

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_rt import config
from edge_rt.catalog.store import Store
from edge_rt.power import server
from edge_rt.power.state import Advice
from tests.api.daemon import Daemon
from tests.plants import board_model, simulator, traces
from tests.plants.board_model import Board
from tests.plants.governors import Fixed, Schedutil
from tests.plants.policy_driver import PolicyDriver
from tests.plants.simulator import Result, Simulation
from tests.plants.traces import Trace

MODEL = "smollm2-135m-instruct"
N_TOKENS = 160
WINDOW_S, SETTLE_S = 3.0, 0.3
N_CLIENTS = 4
RATE_HZ, SPAN_S = 0.08, 1000.0
_MOST = {"performance": 0.97, "clock": 1.005}
PROMPTS = (
    "List the parts of a bicycle and what each is for.",
    "Explain how a tide comes about, in simple words.",
    "Write a short letter that declines an invitation.",
    "Describe the way from flour to bread.",
)
CONFIG = """
[models.{model}]
preload = true

[engine]
n_threads = 2
n_parallel = {n_parallel}
max_draft = 0
stream_interval_s = 0.0

[cache]
enabled = false

[power]
socket_path = "{path}"
"""


class Adviser:
    """powerd's own socket, with advice that the benchmark gives."""

    def __init__(self, path: Path) -> None:
        self.advice = Advice()
        self._selector = selectors.DefaultSelector()
        listener, _ = server.listen(str(path), "", {})
        self._server = server.Server(
            listener,
            self._selector,
            server.Rights(uids=frozenset({os.geteuid()})),
            dict,
            lambda: None,
            lambda *_: None,
            lambda *_: None,
            time.monotonic,
        )
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(0.02):
                key.data()
            self._server.advise(self.advice, is_dry=False, now_s=time.monotonic())

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._server.close()
        self._selector.close()


@dataclass
class Client:
    """One client that asks the same again and again; when each token came, and what the answers were."""

    daemon: Daemon
    prompt: str
    times_s: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: bool = False

    def run(self) -> None:
        with self.daemon.client() as client:
            while not self.is_over:
                try:
                    self.answers.append(self.ask(client))
                except (httpx2.HTTPError, KeyError, ValueError) as exc:
                    self.failures.append(f"{type(exc).__name__}: {exc}")

    def ask(self, client: httpx2.Client) -> str:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": N_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        text = []
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.times_s.append(time.monotonic())
                text.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
        return "".join(text)


@contextmanager
def advised(n_parallel: int) -> Iterator[tuple[Adviser, Daemon]]:
    """Run a daemon on the machine's own store beside an adviser."""
    store = Store.open(config.load().config.catalog, os.environ).root
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        directory = Path(name)
        (directory / "store").symlink_to(store)
        adviser = Adviser(directory / "p")
        try:
            extra = CONFIG.format(model=MODEL, n_parallel=n_parallel, path=directory / "p")
            with Daemon(directory, extra=extra) as daemon:
                yield adviser, daemon
        finally:
            adviser.close()


@dataclass(kw_only=True)
class Measured:
    """Tokens a second under each advice, in turns; requests and what became of them."""

    rates: dict[str, list[float]]
    n_answers: int
    failures: list[str]
    n_different: int
    n_changes: int


def measure(n_clients: int, ways: dict[str, Advice], n_windows: int) -> Measured:
    """Stream without pause while the advice goes round the ways, n_windows times each."""
    with advised(n_clients) as (adviser, daemon):
        clients = [Client(daemon, prompt) for prompt in PROMPTS[:n_clients]]
        with daemon.client() as plain:
            expected = {client.prompt: Client(daemon, client.prompt).ask(plain) for client in clients}
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        rates: dict[str, list[float]] = {name: [] for name in ways}
        spans = []
        for name, advice in itertools.islice(itertools.cycle(ways.items()), n_windows * len(ways)):
            adviser.advice = advice
            time.sleep(SETTLE_S)
            begun_s = time.monotonic()
            time.sleep(WINDOW_S)
            spans.append((name, begun_s, time.monotonic()))
        for client in clients:
            client.is_over = True
        for thread in threads:
            thread.join()
    for name, begun_s, ended_s in spans:
        n = sum(begun_s <= at_s < ended_s for client in clients for at_s in client.times_s)
        rates[name].append(n / (ended_s - begun_s))
    return Measured(
        rates=rates,
        n_answers=sum(len(client.answers) for client in clients),
        failures=[failure for client in clients for failure in client.failures],
        n_different=sum(text != expected[client.prompt] for client in clients for text in client.answers),
        n_changes=len(spans),
    )


# -- modelled --------------------------------------------------------------------------------------------------------


def played(board: Board, trace: Trace, seed: int, *, has_clocks: bool, has_threads: bool) -> Result:
    """Run the product's policy with the clock, the threads, or both."""
    model = board.calibration(error=0.02, seed=seed, with_threads=has_threads)
    if not has_clocks:
        model = board_model.without_clocks(model)
    driver = PolicyDriver(model, power.LIMITS, seed=seed, kernel=None if has_clocks else Fixed(board.top))
    result = Simulation(board, trace, driver, name="edge_rt").run()
    driver.finish()
    return result


def excess(results: Sequence[Result], others: Sequence[Result]) -> list[float]:
    """Give the points of first tokens that are late and were not with the others."""
    slo_s = power.LIMITS.ttft_slo_s
    return [100 * (a.late_first(slo_s) - b.late_first(slo_s)) for a, b in zip(results, others, strict=True)]


def modelled(n_seeds: int, span_s: float) -> tuple[list[list[str]], list[harness.Figure], list[dict[str, Any]]]:
    """Compare threads, clock and both on each board."""
    rows = [["board", "what is set", "÷", "chip J/token", "board J/token", "late, points", "tpot p95"]]
    figures, records = [], []
    for name in board_model.NAMES:
        board = board_model.load(name)
        found: dict[str, list[Result]] = {}
        for seed in range(n_seeds):
            trace = traces.poisson(seed, rate_hz=RATE_HZ, span_s=span_s)
            found.setdefault("performance", []).append(simulator.run(board, trace, Fixed(board.top), name="p"))
            found.setdefault("schedutil", []).append(
                simulator.run(board, trace, Schedutil(board.points_hz), name="schedutil")
            )
            for what, has_clocks, has_threads in (
                ("threads", False, True),
                ("clock", True, False),
                ("clock + threads", True, True),
            ):
                result = played(board, trace, seed, has_clocks=has_clocks, has_threads=has_threads)
                found.setdefault(what, []).append(result)
        for what, other in (
            ("threads", "performance"),
            ("clock", "schedutil"),
            ("clock + threads", "schedutil"),
            ("clock + threads", "clock"),
        ):
            ratios = {
                of: power.interval(
                    [getattr(a, of) / getattr(b, of) for a, b in zip(found[what], found[other], strict=True)]
                )
                for of in ("soc_j_token", "board_j_token")
            }
            more = power.interval(excess(found[what], found["performance"]))
            tpot = sorted(s for result in found[what] for s in result.tpot_s)
            rows.append(
                [
                    board.name,
                    what,
                    other,
                    *(
                        f"{100 * (m - 1):+.1f} % [{100 * (lo - 1):+.1f}, {100 * (hi - 1):+.1f}]"
                        for m, lo, hi in ratios.values()
                    ),
                    f"{more[0]:+.2f}",
                    f"{1000 * tpot[int(0.95 * len(tpot))]:.0f} ms",
                ]
            )
            records.append({"board": board.name, "what": what, "over": other, "ratios": ratios, "late": more})
            if other == "schedutil":
                continue
            where = f"modelled: {board.name}: {what} ÷ {other}"
            figures.append(
                harness.Figure(
                    name=f"{where}, chip J/token",
                    unit="ratio, high end",
                    samples=(ratios["soc_j_token"][2],),
                    at_most=_MOST[other],
                )
            )
            figures.append(
                harness.Figure(
                    name=f"{where}, late − {other}",
                    unit="points, high end",
                    samples=(power.interval(excess(found[what], found[other]))[2],),
                    at_most=1.0,
                )
            )
    return rows, figures, records


def rates(found: Measured) -> list[list[str]]:
    rows = [["measured here", "t/s", "least", "most", "windows"]]
    for name, values in found.rates.items():
        ordered = sorted(values)
        rows.append(
            [name, f"{ordered[len(ordered) // 2]:.1f}", f"{ordered[0]:.1f}", f"{ordered[-1]:.1f}", str(len(ordered))]
        )
    return rows


def judged(name: str, found: Measured) -> Sequence[harness.Figure]:
    print(
        f"{name}: {found.n_answers} answers while the advice changed {found.n_changes} times, "
        f"{len(found.failures)} failed, {found.n_different} were another\n"
        + harness.draw(rates(found), n_names=1)
        + "\n"
    )
    return (
        harness.Figure(name=f"{name}: requests lost", unit="", samples=(float(len(found.failures)),), at_most=0.0),
        harness.Figure(name=f"{name}: answers changed", unit="", samples=(float(found.n_different),), at_most=0.0),
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("measured", "modelled"), help="one half")


def measured(n_windows: int) -> tuple[list[harness.Figure], dict[str, Any]]:
    """Advise one client's threads, then four clients' threads and how many of them are answered together."""
    ways = {f"decode on {n} thread{'s' * (n > 1)}": Advice(n_decode_threads=n) for n in (1, 2)}
    one = measure(1, ways, n_windows)
    ways = {
        "4 answers together": Advice(n_decode_threads=2, max_batch=4),
        "2 answers together": Advice(n_decode_threads=2, max_batch=2),
        "1 answer, 1 thread": Advice(n_decode_threads=1, max_batch=1),
    }
    many = measure(N_CLIENTS, ways, n_windows)
    figures = [*judged("one stream", one), *judged("four clients", many)]
    return figures, {"one": asdict(one), "many": asdict(many)}


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    figures: list[harness.Figure] = []
    extra: dict[str, Any] = {}
    if arguments.own.only != "modelled":
        found, record = measured(arguments.pairs(10, quick=3))
        figures += found
        extra |= record
    if arguments.own.only != "measured":
        rows, bars, records = modelled(arguments.pairs(20, quick=3), SPAN_S / 4 if arguments.quick else SPAN_S)
        print("modelled (plant A): boards with plausible constants, not calibrated; no watt is measured\n")
        print(harness.draw(rows, n_names=3) + "\n")
        figures += bars
        extra["modelled (plant A)"] = records
    harness.finish(arguments, figures=figures, extra=extra)


if __name__ == "__main__":
    main()
