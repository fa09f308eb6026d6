"""What one inference costs through edge_rt over onnxruntime called directly: uint8 [1, 224, 224, 3], 1,000 logits.

The rival is in a process of its own, called in a loop with its best threads. edge_rt is asked over a worker's channel,
as the daemon itself asks, and over HTTP with binary tensors (KServe v2) on the daemon's Unix socket; the client's own
work counts. Bar: the median at most 1.05 × the rival's + 0.3 ms, so the rival's rate below is that of this limit.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import tensor_models
from footprint import daemon as running_daemon
from tensor_subjects import Process

from edge_rt import config
from edge_rt.bench.samples import quantile
from edge_rt.catalog.store import Store
from edge_rt.devices import cpu
from edge_rt.engine.arrays import to_tensor
from edge_rt.errors import EdgeRtError
from edge_rt.scheduler.forms import load_message, place
from edge_rt.tensor_types import TensorRequest
from edge_rt.types import EngineStats
from edge_rt.worker.spawn import spawn
from edge_rt.worker.supervisor import Worker

FACTOR, EXTRA_S = 1.05, 0.0003
RIVALS: dict[str, dict[str, Any]] = {"default": {}, "1 thread": {"n_threads": 1}, "no spinning": {"spin": False}}
NAME = "classifier"

Infer = Callable[[], object]


class HttpClient(http.client.HTTPConnection):
    """Sends the same inference again and again over one connection."""

    def __init__(self, path: Path) -> None:
        super().__init__("edge_rt")
        self._path = path
        model = tensor_models.MODELS[NAME]
        ((_, pixels),) = model.feeds().items()
        tensor = {
            "name": model.input,
            "datatype": "UINT8",
            "shape": list(pixels.shape),
            "parameters": {"binary_data_size": pixels.nbytes},
        }
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        self._body = head + pixels.tobytes()
        self._headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def infer(self) -> bytes:
        self.request("POST", f"/v2/models/{NAME}/infer", self._body, self._headers)
        response = self.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(body.decode())
        return body


class Events:
    def stats(self, stats: EngineStats) -> None: ...

    def restarting(self, reason: str) -> None:
        raise RuntimeError(f"the worker is lost: {reason}")

    def down(self, error: EdgeRtError) -> None: ...


@contextmanager
def channel(flags: dict[str, Any]) -> Iterator[Infer]:
    """Start a worker as the daemon does, and ask it from this process' event loop."""
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
        try:
            yield lambda: runner.run(worker.infer(request))
        finally:
            runner.run(worker.stop(lambda: RuntimeError("over")))  # type: ignore[arg-type, return-value]


async def _started(worker: Worker) -> Worker:
    await worker.start()
    return worker


def median_s(infer: Infer, n: int) -> float:
    samples = []
    for _ in range(n):
        begun_s = time.perf_counter()
        infer()
        samples.append(time.perf_counter() - begun_s)
    return quantile(sorted(samples), 0.5)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, help="inferences of one run")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    n = arguments.own.n or (20 if arguments.quick else 100)
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
        subjects: dict[str, Infer] = {
            "channel": stack.enter_context(channel(flags)),
            "HTTP, binary": HttpClient(path).infer,
        }
        times_s = {label: min(rival.infer_s(n) for _ in range(2)) for label, rival in rivals.items()}
        best = min(times_s, key=lambda label: times_s[label])
        for name, infer in subjects.items():

            def limit(rival: Process = rivals[best]) -> float:
                return 1 / (FACTOR * rival.infer_s(n) + EXTRA_S)

            pair = harness.paired(
                f"edge_rt, {name}",
                lambda infer=infer: 1 / median_s(infer, n),  # type: ignore[misc]
                f"1.05 × onnxruntime, {best}, + 0.3 ms",
                limit,
                n_pairs=arguments.pairs(15, quick=3),
            )
            claims.append(harness.Claim(name="one inference", pair=pair, at_least=1.0))
        extra["rivals_s"] = times_s
    harness.finish(arguments, claims, extra)


if __name__ == "__main__":
    main()
