"""Run models on Intel's NPU, compare with onnxruntime on the CPU, and write a report to send back.

    python hw/npu/openvino/accept.py [MODEL.onnx ...] [--json report.json]

Needs edge_rt[npu-openvino]. Without models it takes those that come with edge_rt. --device openvino-cpu tries the
script itself on a machine without an NPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.openvino import OpenVinoBackend, versions
from edge_rt.backends.npu.openvino_driver import NPU
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import EdgeRtError
from hw.npu.acceptance import about, cosine, feeds_for, give, json_option, spread, times_s

_MODELS = Path(__file__).parents[3] / "models"
_USUAL = ("pcb-defect.int8.onnx", "pcb-defect-small.int8.onnx", "pcb-kind.fp32.onnx")
_N_RUNS = 50
_LEAST_COSINE = 0.999


def examine(backend: OpenVinoBackend, models: list[Path], device: str, kept: Path) -> dict[str, Any]:
    """Compile, compare and measure; what fails is told in the report."""
    report: dict[str, Any] = about() | {"versions": asdict(versions())}
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
    feeds = feeds_for(file.onnx.inputs)
    expected = cpu.run(feeds)
    begun_s = time.monotonic()
    session = backend.load_tensor(file, options)
    first_s = time.monotonic() - begun_s
    try:
        answers = session.run(feeds)
        told = {
            "placement": [asdict(part) for part in session.info.placement],
            "cosine": min(cosine(answers[name], array) for name, array in expected.items()),
            "run_s": spread(times_s(session, feeds, _N_RUNS)),
            "onnx_cpu_run_s": spread(times_s(cpu, feeds, _N_RUNS)),
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


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", default=NPU, show_default=True)
@json_option
def main(models: tuple[Path, ...], device: str, file: Path | None) -> None:
    """Examine DEVICE; ends with 1 where something failed."""
    with tempfile.TemporaryDirectory(prefix="edge_rt-accept-") as kept:
        chosen = list(models) or [_MODELS / name for name in _USUAL]
        report = examine(OpenVinoBackend(), chosen, device, Path(kept))
    give(report, file)


if __name__ == "__main__":
    main()
