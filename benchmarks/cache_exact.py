"""The exact cache's claims: what a hit takes, in the server and over the socket, and what eviction keeps.

Bars: 95 of 100 hits take at most 0.5 ms in the server (key, look-up, replay; values in memory and, beside it, values
that are read from the disk first) and at most 2 ms over the socket of a real daemon, whole and as a stream; on each
block trace the eviction's hit ratio is never more than 1 point below LRU's, and above it at two of 1k, 5k and 20k
blocks. Each p95 is that of a run of requests; the median of the runs counts.

Traces: Mooncake's block hashes (mooncake_*.csv.xz of the public data, --data DIR or $EDGE_RT_DATA); every block counts
as one entry of one size, which says nothing about prefixes that depend on each other. Without them the other claims
are measured, and --check fails.

    python benchmarks/cache_exact.py --data DIR --check --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import lzma
import os
import random
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import harness
from footprint import daemon as running_daemon
from unix_http import UnixConnection

from edge_rt.bench.samples import quantile
from edge_rt.cache.answers import Answers
from edge_rt.cache.eviction import S3Fifo
from edge_rt.cache.exact import ExactTier
from edge_rt.cache.key import Identity
from edge_rt.cache.store import Store
from edge_rt.config import Cache
from edge_rt.telemetry import Telemetry
from edge_rt.types import Chunk, GenerateRequest, Message, Timings, Usage

MAX_SERVER_MS, MAX_SOCKET_MS = 0.5, 2.0
MAX_BELOW_LRU_POINTS, MAX_NOT_ABOVE = 1.0, 1
CAPACITIES = (1_000, 5_000, 20_000)

CONFIG = """
[catalog]
default_model = "null"
store_dir = "{folder}/store"
[models.null]
backend = "null"
preload = true
"""


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    n_runs, n_requests = (3, 200) if arguments.quick else (9, 1000)
    figures = [*_in_server(n_runs, n_requests), *_over_socket(n_runs, n_requests)]
    traces = _traces(arguments.own.data)
    ratios: dict[str, Any] = {}
    for name, path in traces.items():
        # A trace's beginning is not the trace: --quick leaves out the two larger caches, not blocks.
        blocks = _blocks(path)
        ratios[name] = _hit_ratios(blocks, CAPACITIES[:1] if arguments.quick else CAPACITIES)
        figures += _bars(name, ratios[name])
    if not traces:
        print("no mooncake_*.csv.xz here: name their directory by --data DIR or EDGE_RT_DATA", file=sys.stderr)
        figures.append(harness.Figure(name="block traces that are missing", unit="", samples=(1.0,), at_most=0.0))
    print(_table(ratios))
    harness.finish(arguments, extra={"hit ratios": ratios}, figures=figures)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, metavar="DIR", help="where the block traces lie; else $EDGE_RT_DATA")


# In the server.


def _request(n: int) -> GenerateRequest:
    messages = (
        Message(role="system", content="You answer questions about the machine you run on. " * 4),
        Message(role="user", content=f"What does message number {n} of the log mean, and what should be done? " * 2),
    )
    return GenerateRequest(id=str(n), model="m", messages=messages, tenant="uid:1000", max_tokens=256)


def _answer(n: int) -> Iterator[Chunk]:
    for i in range(199):
        yield Chunk(text=f"word{i} ", token_ids=(i,))
    yield Chunk(
        text=f"number {n}.",
        token_ids=(199,),
        finish_reason="stop",
        usage=Usage(prompt_tokens=90, completion_tokens=200),
        timings=Timings(queue_s=0, prefill_s=0.3, prefill_tokens=90, decode_s=8, decode_tokens=199, ttft_s=0.3),
    )


@contextmanager
def _answers(folder: Path, n_entries: int) -> Iterator[tuple[Answers, Store]]:
    settings, events = Cache(), Telemetry()
    store = Store.open(
        folder / "cache.sqlite", max_bytes=settings.max_bytes, max_value_bytes=settings.max_answer_bytes, events=events
    )
    tier, identity = ExactTier(settings, store, events), Identity(model="m", file_sha256="0" * 64)
    for n in range(n_entries):
        recorder = tier.recorder()
        for chunk in _answer(n):
            recorder.add(chunk)
        if tier.admit(_request(n), identity, recorder, time.time()) != "store":
            sys.exit("an answer was not stored")
        if n % 200 == 199:
            store.flush()  # no daemon brings them as fast as this loop
    store.flush()
    try:
        yield Answers(tier, lambda _: (identity,)), store
    finally:
        store.close()


def _in_server(n_runs: int, n_requests: int) -> list[harness.Figure]:
    n_entries = 5000
    dice = random.Random(1)
    hot: list[float] = []
    cold: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        with _answers(Path(folder), n_entries) as (answers, store):
            requests = [_request(n) for n in range(n_entries)]
            for _ in range(n_runs):
                asked = dice.choices(requests, k=n_requests)
                hot.append(_p95_ms(asyncio.run(_look_ups(answers, asked))))
            print(f"{store.stats().n_entries} entries, {store.stats().size_bytes / 2**20:.1f} MiB", file=sys.stderr)
        for _ in range(n_runs):  # each with a store that was opened just now, so that nothing is in memory
            with _answers(Path(folder), 0) as (answers, _):
                asked = dice.sample(requests, k=n_requests)
                cold.append(_p95_ms(asyncio.run(_look_ups(answers, asked))))
    return [
        _figure("p95 of a hit in the server, value in memory", hot, MAX_SERVER_MS),
        _figure("p95 of a hit in the server, value on disk", cold, MAX_SERVER_MS),
    ]


async def _look_ups(answers: Answers, requests: Sequence[GenerateRequest]) -> list[float]:
    took_s = []
    for request in requests:
        begun_s = time.perf_counter()
        found = await answers.look_up(request)
        took_s.append(time.perf_counter() - begun_s)
        if found.stored is None:
            sys.exit("a stored answer was not found")
    return took_s


# Over the socket.


def _over_socket(n_runs: int, n_requests: int) -> list[harness.Figure]:
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        config = Path(folder) / "config.toml"
        config.write_text(CONFIG.format(folder=folder))
        with running_daemon("--config", str(config)) as (_, path, _seconds):
            connection = UnixConnection(path)
            figures = []
            for name, stream in (("whole", False), ("a stream", True)):
                runs = []
                bodies = [_body(n, stream) for n in range(50)]
                for body in bodies:
                    _ask(connection, body, "")
                for _ in range(n_runs):
                    took_s = [_ask(connection, bodies[n % 50], "hit-exact") for n in range(n_requests)]
                    runs.append(_p95_ms(took_s))
                figures.append(_figure(f"p95 of a hit over the socket, {name}", runs, MAX_SOCKET_MS))
            connection.close()
    return figures


def _body(n: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": f"{'stream' if stream else 'whole'} number {n} " + "of the log " * 40}]
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 1000, "stream": stream}).encode()


def _ask(connection: UnixConnection, body: bytes, wanted: str) -> float:
    begun_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    took_s = time.perf_counter() - begun_s
    if response.status != 200 or (wanted and response.headers["x-edge-cache"] != wanted):
        sys.exit(f"{response.status}, x-edge-cache {response.headers['x-edge-cache']}")
    return took_s


# Block traces.


class Kept(Protocol):
    def ask(self, block: int) -> bool: ...


class Lru:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def ask(self, block: int) -> bool:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return True
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return False


class Ours:
    def __init__(self, capacity: int) -> None:
        self._policy: S3Fifo[int] = S3Fifo(capacity)

    def ask(self, block: int) -> bool:
        if block in self._policy:
            self._policy.hit(block)
            return True
        self._policy.add(block, 1)
        return False


def _traces(given: Path | None) -> dict[str, Path]:
    found = given or (Path(os.environ["EDGE_RT_DATA"]) if "EDGE_RT_DATA" in os.environ else None)
    if found is None:
        return {}
    bases = (found, found / "router_cache")
    paths = [path for base in bases for path in sorted(base.glob("mooncake_*.csv.xz"))]
    return {path.name.removesuffix(".csv.xz"): path for path in paths}


def _blocks(path: Path) -> list[int]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        return [int(block) for row in csv.DictReader(file) for block in row["hash_ids"].split()]


def _hit_ratios(blocks: Sequence[int], capacities: Sequence[int]) -> dict[int, dict[str, float]]:
    makes: dict[str, Callable[[int], Kept]] = {"lru": Lru, "s3-fifo": Ours}
    return {
        capacity: {name: sum(map(make(capacity).ask, blocks)) / len(blocks) for name, make in makes.items()}
        for capacity in capacities
    }


def _bars(name: str, ratios: dict[int, dict[str, float]]) -> list[harness.Figure]:
    below = [100 * (found["lru"] - found["s3-fifo"]) for found in ratios.values()]
    n_not_above = sum(points >= 0 for points in below)
    return [
        harness.Figure(
            name=f"{name}: most below LRU", unit="points", samples=(max(below),), at_most=MAX_BELOW_LRU_POINTS
        ),
        harness.Figure(
            name=f"{name}: sizes not above LRU", unit="", samples=(float(n_not_above),), at_most=MAX_NOT_ABOVE
        ),
    ]


def _table(ratios: dict[str, dict[int, dict[str, float]]]) -> str:
    rows = [["trace", "blocks kept", "LRU", "S3-FIFO, adaptive"]]
    for name, sizes in ratios.items():
        rows += [[name, f"{size:,}", f"{f['lru']:.4f}", f"{f['s3-fifo']:.4f}"] for size, f in sizes.items()]
    return harness.draw(rows, n_names=1) if ratios else ""


def _figure(name: str, samples: Sequence[float], at_most: float) -> harness.Figure:
    return harness.Figure(name=name, unit="ms", samples=tuple(samples), at_most=at_most)


def _p95_ms(took_s: Sequence[float]) -> float:
    return quantile(took_s, 0.95) * 1e3


if __name__ == "__main__":
    main()
