"""Run models on Qualcomm's NPU, compare them with onnxruntime on the CPU, and write a report to send back.

    python hw/npu/qnn/accept.py [MODEL.onnx ...] [--json report.json] [--allow-simulator]

Needs edge_rt[npu-qnn]. Without models it takes the catalog's forms for NPUs that are in the store; edge_rt models pull
efficientnet-lite0:npu-w8a8 pcb-defect:npu-w8a8 pcb-defect:npu-w4a16 brings some. --allow-simulator tries the script
itself where no NPU is, on x86-64. The host process is killed once: the report says who answered, and after how long the
NPU was used again.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt import config
from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.qnn import NAME, QnnBackend
from edge_rt.backends.npu.qnn_driver import NODES
from edge_rt.backends.npu.session import NpuSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.store import Store
from edge_rt.errors import EdgeRtError
from hw.npu.acceptance import about, cosine, feeds_for, give, json_option, spread, times_s

_LEAST_COSINE = 0.995  # of noise; pictures are nearer
_MAX_BACK_S = 10.0
_N_RUNS, _N_SIMULATED_RUNS = 50, 2


def examine(backend: QnnBackend, files: list[ModelFile], kept: Path, *, may_simulate: bool) -> dict[str, Any]:
    """Compile, compare and measure; what fails is told in the report."""
    report: dict[str, Any] = about() | {
        "device_tree": _read("/proc/device-tree/model"),
        "soc": {name: _read(f"/sys/devices/soc0/{name}") for name in ("machine", "soc_id", "revision")},
        "nodes": [node for node in NODES if Path(node).exists()],
    }
    found = backend.probe()
    report["versions"] = asdict(backend.vendor.versions())
    if isinstance(found, Absent):
        return report | {"failed": found.reason}
    (device,) = found
    report["device"] = asdict(device)
    if device.fault or (device.evidence != "device" and not may_simulate):
        return report | {"failed": device.fault or f"no NPU, only its {device.evidence}"}
    report["capabilities"] = msgspec.to_builtins(backend.vendor.capabilities(device))
    n_runs = _N_RUNS if device.evidence == "device" else _N_SIMULATED_RUNS
    report["models"] = [_one(backend, file, kept, n_runs) for file in files]
    failed = [f"{told['model']}: {told['failed']}" for told in report["models"] if "failed" in told]
    return report | ({"failed": "; ".join(failed)} if failed else {})


def _one(backend: QnnBackend, file: ModelFile, kept: Path, n_runs: int) -> dict[str, Any]:
    told: dict[str, Any] = {"model": f"{file.model}:{file.variant}"}
    try:
        told |= _measured(backend, file, kept, n_runs)
    except EdgeRtError as exc:
        return told | {"failed": str(exc)}
    if told["cosine"] < _LEAST_COSINE:
        told["failed"] = f"cosine {told['cosine']:.5f}, at least {_LEAST_COSINE}"
    if told["back_s"] > _MAX_BACK_S or told["answered_meanwhile"] != "onnx_cpu:cpu":
        told["failed"] = f"after its host was killed {told['answered_meanwhile']}, back after {told['back_s']:.1f} s"
    return told


def _measured(backend: QnnBackend, file: ModelFile, kept: Path, n_runs: int) -> dict[str, Any]:
    options = TensorOptions(n_threads=1, max_batch=8, npu=NpuOptions(require="prefer", artifacts=kept))
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1, max_batch=8))
    feeds = feeds_for(file.onnx.inputs)
    right = cpu.run(feeds)
    begun_s = time.monotonic()
    session = backend.load_tensor(file, options)
    first_s = time.monotonic() - begun_s
    try:
        answers = session.run(feeds)
        told = {
            "placement": [asdict(part) for part in session.info.placement],
            "computed_on": session.computed_on,
            "cosine": min(cosine(answers[name], array) for name, array in right.items()),
            "first_load_s": first_s,
            "run_s": spread(times_s(session, feeds, n_runs)),
            "cpu_run_s": spread(times_s(cpu, feeds, n_runs)),
            "telemetry": asdict(session.telemetry()),
        } | _lost(session, feeds)
    finally:
        session.close()
        cpu.close()
    begun_s = time.monotonic()
    backend.load_tensor(file, options).close()
    return told | {"second_load_s": time.monotonic() - begun_s}


def _lost(session: NpuSession, feeds: dict[str, Any]) -> dict[str, Any]:
    """Kill the host, and wait for another one while requests come."""
    assert session.host_pid is not None
    os.kill(session.host_pid, signal.SIGKILL)
    session.run(feeds)
    meanwhile, begun_s = session.computed_on, time.monotonic()
    while session.computed_on != f"{session.info.backend}:{session.info.device}":
        if time.monotonic() - begun_s > 6 * _MAX_BACK_S:
            break
        session.run(feeds)
    return {"answered_meanwhile": meanwhile, "back_s": time.monotonic() - begun_s}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip("\0\n ")[:200]
    except OSError:
        return ""


def in_store() -> Iterator[ModelFile]:
    """Give the forms for this back end that have been pulled."""
    store = Store.open(config.load().config.catalog, os.environ)
    for manifest in store.manifests():
        for variant in manifest.variants:
            if NAME in variant.backends and (path := store.path(manifest, variant)) is not None:
                yield ModelFile(model=manifest.id, variant=variant.id, path=path, quant=variant.quant)


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@click.option("--allow-simulator", is_flag=True, help="Run where there is only the simulator.")
def main(models: tuple[Path, ...], file: Path | None, allow_simulator: bool) -> None:
    """Examine the NPU; ends with 1 where something failed."""
    files = [ModelFile(model=path.stem, variant="", path=path, quant="") for path in models] or list(in_store())
    if not files:
        raise click.ClickException("no model is in the store: edge_rt models pull efficientnet-lite0:npu-w8a8")
    with tempfile.TemporaryDirectory(prefix="edge_rt-accept-") as kept:
        report = examine(QnnBackend(), files, Path(kept) / "npu", may_simulate=allow_simulator)
    give(report, file)


if __name__ == "__main__":
    main()
