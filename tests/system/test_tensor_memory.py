"""A worker's memory stays flat over requests of all kinds: benchmarks/flat.py asks ten thousand, this one fewer.

A request takes 32 to 256 KiB, so that one answer in ten kept by mistake shows: that is 14 MiB of growth here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_rt import config
from edge_rt.catalog.store import Store
from edge_rt.engine.arrays import to_tensor
from edge_rt.errors import EdgeRtError, InvalidRequestError
from edge_rt.runtime import Runtime
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import TensorRequest
from tests.system.test_tensor_workers import MANIFEST
from tests.system.test_workers import pid_of, run

N_WARM, N_REQUESTS = 300, 1200
MAX_COLUMNS = 16384
MAX_GROWTH_BYTES = 8 * 2**20

CONFIG = "max_batch = 8\nmax_delay_s = 0.001\n"


def write_model(path: Path) -> None:
    """Write y = x · x and t = s + 1, both of any size."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["y"]), helper.make_node("Add", ["s", "one"], ["t"])],
        "square",
        [helper.make_tensor_value_info("x", number, ["n", "m"]), helper.make_tensor_value_info("s", number, ["n", 64])],
        [helper.make_tensor_value_info("y", number, ["n", "m"]), helper.make_tensor_value_info("t", number, ["n", 64])],
        [helper.make_tensor("one", number, [1], [1.0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_catalog(folder: Path) -> dict[str, object]:
    write_model(folder / "square.onnx")
    data = (folder / "square.onnx").read_bytes()
    state = '[[state]]\ninput = "s"\noutput = "t"\nshape = [1, 64]\n'
    for name, more in (("square", f"[batching]\n{CONFIG}"), ("stateful", state)):
        text = MANIFEST.format(id=name, more=more, sha256=hashlib.sha256(data).hexdigest())
        text = text.replace("pypi:nothing==1.0#model.onnx", f"file:{folder}/square.onnx")
        (folder / f"{name}.toml").write_text(text.replace("size_bytes = 1\n", f"size_bytes = {len(data)}\n"))
    return {
        "catalog.store_dir": str(folder / "store"),
        "catalog.manifest_dirs": [str(folder)],
        "worker.force": True,
        "tensor.max_streams": 8,
    }


async def ask(runtime: Runtime, number: int, noise: random.Random) -> None:
    """Send one request: most are fine, some wrong, some given up, some of streams that are never ended."""
    n_rows, n_columns = noise.randint(1, 4), noise.randint(MAX_COLUMNS // 2, MAX_COLUMNS)
    x = to_tensor("x", np.zeros((n_rows, n_columns), np.float32))
    s = to_tensor("s", np.zeros((n_rows, 64), np.float32))
    kind = number % 10
    if kind == 0:
        request = TensorRequest(id=f"{number}", model="stateful", inputs=(x,), stream=f"{number}")
    elif kind == 1:
        request = TensorRequest(id=f"{number}", model="square", inputs=(x,))  # s is missing
    else:
        request = TensorRequest(id=f"{number}", model="square", inputs=(x, s), outputs=() if kind % 2 else ("y",))
    asked = asyncio.ensure_future(runtime.infer(request))
    if kind == 2:
        await asyncio.sleep(0)
        asked.cancel()
    with contextlib.suppress(EdgeRtError, asyncio.CancelledError):
        await asked
    if kind == 1:
        with pytest.raises(InvalidRequestError):
            asked.result()


def test_a_workers_memory_stays_flat(tmp_path: Path) -> None:
    loaded = config.load(environ={}, flags=write_catalog(tmp_path), system_file=tmp_path / "none")
    store = Store.open(loaded.config.catalog, {})
    for model in ("square", "stateful"):
        store.pull(model, progress=lambda _: None, offline=False, derive=lambda *_: None)

    async def main() -> None:
        runtime, noise = Runtime(loaded, store, Telemetry()), random.Random(0)
        await runtime.start()
        try:

            async def send(first: int, n: int) -> dict[str, int]:
                for at in range(first, first + n, 20):
                    await asyncio.gather(*(ask(runtime, at + i, noise) for i in range(20)))
                workers = {model: psutil.Process(pid_of(runtime, model)) for model in ("square", "stateful")}
                return {model: worker.memory_info().rss for model, worker in workers.items()}

            before = await send(0, N_WARM)
            after = await send(N_WARM, N_REQUESTS)
            growth = {model: after[model] - before[model] for model in before}
            assert max(growth.values()) < MAX_GROWTH_BYTES, growth
        finally:
            await runtime.close(0.0)

    run(main())
