"""Run models on Intel's NPU, compare with onnxruntime on the CPU, and write a report to send back.

    python hw/npu/openvino/accept.py [MODEL.onnx ...] [--json report.json]

Needs edge_rt[npu-openvino]. Without models it takes those that come with edge_rt. --device openvino-cpu tries the
script itself on a machine without an NPU.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions, TensorSession
from edge_rt.backends.npu.openvino import OpenVinoBackend, versions
from edge_rt.backends.npu.openvino_driver import NPU
from edge_rt.backends.npu.rows import random_feeds
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import EdgeRtError
from edge_rt.version import VERSION

_MODELS = Path(__file__).parents[3] / "models"
_USUAL = ("pcb-defect.int8.onnx", "pcb-defect-small.int8.onnx", "pcb-kind.fp32.onnx")
_N_RUNS = 50
_LEAST_COSINE = 0.999


def examine(backend: OpenVinoBackend, models: list[Path], device: str, kept: Path) -> dict[str, Any]:
    """Compile, compare and measure; what fails is told in the report."""
    report: dict[str, Any] = {"edge_rt": VERSION, "kernel": platform.release(), "versions": asdict(versions())}
    found = backend.probe()
    if isinstance(found, Absent):
        return report | {"failed": found.reason}
    report["devices"] = [asdict(each) for each in found]
    if device not in {each.id for each in found}:
        return report | {"failed": f"no device {device}: " + "; ".join(each.detail for each in found)}
    report["models"] = []
    for path in models:
        told: dict[str, Any] = {"model": path.name}
        try:
            told |= _one(backend, ModelFile(model=path.stem, variant="", path=path, quant=""), device, kept)
        except EdgeRtError as exc:
            told["failed"] = str(exc)
        report["models"].append(told)
    failed = [told["model"] for told in report["models"] if "failed" in told or told["cosine"] < _LEAST_COSINE]
    return report | ({"failed": f"see {', '.join(failed)}"} if failed else {})


def _one(backend: OpenVinoBackend, file: ModelFile, device: str, kept: Path) -> dict[str, Any]:
    npu = NpuOptions(require="npu" if device == NPU else "prefer", artifacts=kept)
    options = TensorOptions(n_threads=1, device=device, npu=npu)
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
    feeds = random_feeds(file.onnx.inputs, 1)
    expected = cpu.run(feeds)
    begun_s = time.monotonic()
    session = backend.load_tensor(file, options)
    first_s = time.monotonic() - begun_s
    try:
        cosine = min(_cosine(session.run(feeds)[name], array) for name, array in expected.items())
        told = {
            "placement": [asdict(part) for part in session.info.placement],
            "cosine": cosine,
            "run_median_s": _median_s(session, feeds),
            "onnx_cpu_median_s": _median_s(cpu, feeds),
            "telemetry": asdict(session.telemetry()),
            "computed_on": session.computed_on,
            "n_cpu": session.device_counts().n_fallbacks,
        }
    finally:
        session.close()
        cpu.close()
    begun_s = time.monotonic()
    backend.load_tensor(file, options).close()
    return told | {"first_load_s": first_s, "second_load_s": time.monotonic() - begun_s}


def _cosine(found: Any, expected: Any) -> float:
    a, b = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))


def _median_s(session: TensorSession, feeds: dict[str, Any], clock: Callable[[], float] = time.monotonic) -> float:
    times_s = []
    for _ in range(_N_RUNS):
        begun_s = clock()
        session.run(feeds)
        times_s.append(clock() - begun_s)
    return sorted(times_s)[_N_RUNS // 2]


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", default=NPU, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too.")
def main(models: tuple[Path, ...], device: str, file: Path | None) -> None:
    """Examine DEVICE; ends with 1 where something failed."""
    with tempfile.TemporaryDirectory(prefix="edge_rt-accept-") as kept:
        chosen = list(models) or [_MODELS / name for name in _USUAL]
        report = examine(OpenVinoBackend(), chosen, device, Path(kept))
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    click.echo(text)
    if file is not None:
        file.write_text(text + "\n")
    sys.exit("failed" in report)


if __name__ == "__main__":
    main()
