"""What one inference costs through edge_rt over onnxruntime called directly: uint8 [1, 224, 224, 3], 1,000 logits.

The rival is in a process of its own, called in a loop with its best threads. edge_rt is asked over a worker's channel,
as the daemon itself asks, and by the library's client over HTTP with binary tensors (KServe v2) on the daemon's Unix
socket; the client's own work counts. Bar: the median at most 1.05 × the rival's + 0.3 ms, so the rival's rate below is
that of this limit.

--floor shows instead what the way costs at least: the same bytes through three bare processes (floor.py), hop by hop,
and beside it edge_rt's whole way with a model that sleeps for 9 ms. Each figure is a median and, in brackets, what one
of ten goes below.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import tensor_models
from floor import HOPS, Floor
from footprint import daemon as running_daemon
from tensor_subjects import Process

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.bench.samples import quantile
from edge_rt.catalog.store import Store
from edge_rt.devices import cpu
from edge_rt.engine.arrays import to_tensor
from edge_rt.errors import EdgeRtError
from edge_rt.scheduler.forms import load_message, place
from edge_rt.tensor_types import TensorModelInfo, TensorRequest
from edge_rt.types import EngineStats, ModelInfo
from edge_rt.worker.spawn import spawn
from edge_rt.worker.supervisor import Worker

FACTOR, EXTRA_S = 1.05, 0.0003
RIVALS: dict[str, dict[str, Any]] = {"default": {}, "1 thread": {"n_threads": 1}, "no spinning": {"spin": False}}
NAME = "classifier"
N_ANSWER_BYTES = 4 * 1000
SLEEP_S = 0.009  # as long as onnxruntime computes on a desktop's two cores
COMPUTING = HOPS.index("computing")

Infer = Callable[[], object]
Median = Callable[[int], float]  # the median time of n inferences, one after the other, in seconds


class Events:
    def stats(self, stats: EngineStats) -> None: ...

    def described(self, info: ModelInfo | TensorModelInfo) -> None: ...

    def restarting(self, reason: str) -> None:
        raise RuntimeError(f"the worker is lost: {reason}")

    def down(self, error: EdgeRtError) -> None: ...


@contextmanager
def channel(flags: dict[str, Any]) -> Iterator[Median]:
    """Start a worker as the daemon does, and ask it from this process' event loop, which goes on running."""
    settings = config.load(environ={}, flags=flags).config
    store = Store.open(settings.catalog, os.environ)
    placement = place(
        NAME,
        store.get(NAME),
        settings.model(NAME),
        settings,
        features=cpu.features(),
        find=store.path,
        find_asset=store.asset_path,
    )
    load = load_message(placement, settings, force=True)
    model = tensor_models.MODELS[NAME]
    ((name, pixels),) = model.feeds().items()
    request = TensorRequest(id="r", model=NAME, inputs=(to_tensor(name, pixels),))
    with asyncio.Runner() as runner:
        worker = runner.run(_started(Worker(load, settings=settings.worker, launch=spawn, events=Events())))

        async def median(n: int) -> float:
            times_s = []
            for _ in range(n):
                begun_s = time.perf_counter()
                await worker.infer(request)
                times_s.append(time.perf_counter() - begun_s)
            return quantile(sorted(times_s), 0.5)

        try:
            yield lambda n: runner.run(median(n))
        finally:
            runner.run(worker.stop(lambda: RuntimeError("over")))  # type: ignore[arg-type, return-value]


async def _started(worker: Worker) -> Worker:
    await worker.start()
    return worker


def median_s(infer: Infer, n: int) -> float:
    return quantile(sorted(_timed(infer) for _ in range(n)), 0.5)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, help="inferences of one run")
    parser.add_argument("--floor", action="store_true", help="show what the way costs, hop by hop, and end")


def show_floor(n: int) -> None:
    """Print the hops of the bare processes, and edge_rt's whole way."""
    model = tensor_models.MODELS[NAME]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ert-")))
        file = folder / f"{NAME}.onnx"
        model.write(file)
        columns = [f"sleeping {1000 * SLEEP_S:g} ms", "computing"]
        hops: list[list[list[float]]] = []
        for seconds in (SLEEP_S, 0.0):
            with Floor(NAME, file, n_answer=N_ANSWER_BYTES, sleep_s=seconds) as floor:
                hops.append([floor.infer() for _ in range(n + 5)][5:])
        rows = [["us", *columns]]
        for i, name in enumerate(HOPS):
            rows.append([name, *(_us([times[i] for times in samples]) for samples in hops)])
        rows.append(["the way", *(_us([sum(times) - times[COMPUTING] for times in samples]) for samples in hops)])
        rows.append(["edge_rt's way", _us(stack.enter_context(sleeping_ways(folder))(n)), ""])
    print(harness.draw(rows, n_names=1))


def _us(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"{1e6 * quantile(ordered, 0.5):.0f} ({1e6 * quantile(ordered, 0.1):.0f})"


@contextmanager
def sleeping_ways(folder: Path) -> Iterator[Callable[[int], list[float]]]:
    """Start a daemon whose model sleeps; give what n inferences took beyond the model's own run."""
    model = tensor_models.MODELS[NAME]
    script = f"run_s={SLEEP_S},inputs={model.input}:UINT8:-1x224x224x3,outputs=y:FP32:-1x{N_ANSWER_BYTES // 4}"
    config_file = folder / "sleeper.toml"
    config_file.write_text(f'[models.sleeper]\nbackend = "null"\nvariant = "{script}"\n', encoding="utf-8")
    null = NullTensorSession(ModelFile(model="sleeper", variant=script, path=Path(), quant=""), TensorOptions())
    feeds = model.feeds()
    with running_daemon("--config", str(config_file)) as (_, path, _), Client(path) as client:

        def ways(n: int) -> list[float]:
            own_s = median_s(lambda: null.run(feeds), n)
            return [_timed(lambda: client.infer("sleeper", feeds)) - own_s for _ in range(n + 5)][5:]

        yield ways


def _timed(infer: Infer) -> float:
    begun_s = time.perf_counter()
    infer()
    return time.perf_counter() - begun_s


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    n = arguments.own.n or (20 if arguments.quick else 100)
    if arguments.own.floor:
        show_floor(n)
        return
    claims: list[harness.Claim] = []
    extra: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ert-")))
        flags = tensor_models.catalog(folder, NAME)
        file = folder / f"{NAME}.onnx"
        rivals = {
            label: stack.enter_context(Process("onnxruntime", NAME, file, **settings))
            for label, settings in RIVALS.items()
        }
        environ = {"EDGE_RT__CATALOG__STORE_DIR": flags["catalog.store_dir"]}
        environ["EDGE_RT__CATALOG__MANIFEST_DIRS"] = str(folder)
        _, path, _ = stack.enter_context(running_daemon("--model", NAME, **environ))
        client = stack.enter_context(Client(path))
        feeds = tensor_models.MODELS[NAME].feeds()
        subjects: dict[str, Median] = {
            "channel": stack.enter_context(channel(flags)),
            "HTTP, binary": lambda n: median_s(lambda: client.infer(NAME, feeds), n),
        }
        times_s = {label: min(rival.infer_s(n) for _ in range(2)) for label, rival in rivals.items()}
        best = min(times_s, key=lambda label: times_s[label])
        for name, median in subjects.items():

            def limit(rival: Process = rivals[best]) -> float:
                return 1 / (FACTOR * rival.infer_s(n) + EXTRA_S)

            pair = harness.paired(
                f"edge_rt, {name}",
                lambda median=median: 1 / median(n),  # type: ignore[misc]
                f"1.05 × onnxruntime, {best}, + 0.3 ms",
                limit,
                n_pairs=arguments.pairs(15, quick=3),
            )
            claims.append(harness.Claim(name="one inference", pair=pair, at_least=1.0))
        extra["rivals_s"] = times_s
    harness.finish(arguments, claims, extra)


if __name__ == "__main__":
    main()
