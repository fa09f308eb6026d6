"""OpenVINO's CPU device beside onnxruntime: runs a CPU-second, how far off, and loading what was compiled.

Both run the same files on one thread, as back ends of edge_rt: npu_openvino with OpenVINO in its host process, whose
CPU time counts with what the way there takes, onnx_cpu in this process. No bar is set: which is faster differs by
the model and the CPU, and a placement goes by its own measurement. Of EfficientNet-Lite0 it tells how often both name
the same class first, on the 200 photographs of tools/picture_set.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image

from edge_rt import config
from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.openvino import OpenVinoBackend
from edge_rt.backends.npu.openvino_driver import CPU
from edge_rt.backends.npu.session import NpuSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.pipelines import Classify
from edge_rt.catalog.store import Store
from edge_rt.engine.images import prepare
from tools.picture_set import pictures

MODELS = ("efficientnet-lite0:fp32", "efficientnet-lite0:int8", "pcb-defect:int8", "minilm-l6:fp32", "minilm-l6:int8")
N_TOKENS = 128
RUN_S = 1.0  # of each sample
Feeds = Mapping[str, NDArray[Any]]


def model_file(store: Store, name: str) -> ModelFile:
    model_id, _, variant_id = name.partition(":")
    manifest = store.get(model_id)
    variant = next(each for each in manifest.variants if each.id == variant_id)
    path = store.path(manifest, variant)
    if path is None:
        raise SystemExit(f"{name} is not here: edge_rt models pull {name}")
    return ModelFile(model=model_id, variant=variant_id, path=path, quant=variant.quant)


def some_feeds(file: ModelFile) -> Feeds:
    rng = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in file.onnx.inputs:
        shape = tuple(size if size > 0 else (1 if axis == 0 else N_TOKENS) for axis, size in enumerate(spec.shape))
        if spec.datatype == "INT64":
            drawn: NDArray[Any] = np.ones(shape, np.int64)
            if spec.name == "input_ids":
                drawn = rng.integers(1000, 30_000, shape)
            elif spec.name == "token_type_ids":
                drawn = np.zeros(shape, np.int64)
        else:
            drawn = rng.integers(0, 256, shape).astype(np.uint8)
        feeds[spec.name] = drawn
    return feeds


def rate(session: Any, feeds: Feeds, spent_s: Callable[[], float], seconds: float) -> Callable[[], float]:
    """Give what measures runs a second of CPU time, by what all processes that compute have spent."""

    def measure() -> float:
        begun_s, end_s, n_runs = spent_s(), time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            session.run(feeds)
            n_runs += 1
        return n_runs / (spent_s() - begun_s)

    return measure


def with_host(session: NpuSession) -> Callable[[], float]:
    """Give what tells the CPU time of this process and of the session's host together."""
    host = psutil.Process(session._npu.pid)  # type: ignore[union-attr]

    def spent_s() -> float:
        times = host.cpu_times()
        return time.process_time() + times.user + times.system

    return spent_s


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def same_class(ours: Any, theirs: Any, n: int) -> float:
    """Give the share of photographs of which both name the same class first."""
    pipeline = Store.open(config.load().config.catalog).get("efficientnet-lite0").pipeline
    assert isinstance(pipeline, Classify)
    n_same = n_seen = 0
    for picture in pictures(n):
        pixels, _ = prepare(Image.fromarray(picture), pipeline.image)
        best = {int(session.run({"image": pixels[None]})["logits"].argmax()) for session in (ours, theirs)}
        n_same, n_seen = n_same + (len(best) == 1), n_seen + 1
    return n_same / n_seen


def main() -> None:
    arguments = harness.parse(__doc__)
    backend = OpenVinoBackend()
    if isinstance(found := backend.probe(), Absent):
        raise SystemExit(found.reason)
    store = Store.open(config.load().config.catalog)
    n_pairs, seconds = arguments.pairs(9, quick=2), 0.1 if arguments.quick else RUN_S
    claims: list[harness.Claim] = []
    facts: dict[str, Any] = {}
    for name in MODELS:
        file = model_file(store, name)
        feeds = some_feeds(file)
        with tempfile.TemporaryDirectory() as kept:
            npu = NpuOptions(artifacts=Path(kept))
            options = TensorOptions(n_threads=1, device=CPU, npu=npu)
            loads_s = []
            for _ in range(2):
                begun_s = time.perf_counter()
                theirs = backend.load_tensor(file, options)
                loads_s.append(time.perf_counter() - begun_s)
                if len(loads_s) == 1:
                    theirs.close()
            ours = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
            expected, got = ours.run(feeds), theirs.run(feeds)
            told: dict[str, Any] = {
                "cosine": min(cosine(got[each], expected[each]) for each in expected),
                "first_load_s": loads_s[0],
                "second_load_s": loads_s[1],
            }
            pair = harness.paired(
                "npu_openvino",
                rate(theirs, feeds, with_host(theirs), seconds),
                "onnx_cpu",
                rate(ours, feeds, time.process_time, seconds),
                n_pairs=n_pairs,
            )
            claims.append(harness.Claim(name=name, pair=pair))
            if name.startswith("efficientnet"):
                told["same_class"] = same_class(ours, theirs, 20 if arguments.quick else 200)
            if theirs.counts.n_cpu:
                raise SystemExit(f"{name}: {theirs.counts.n_cpu} runs were computed by onnxruntime instead")
            ours.close()
            theirs.close()
        facts[name] = told
        print(f"{name}: {told}", flush=True)
    harness.finish(arguments, claims, extra=facts)


if __name__ == "__main__":
    main()
