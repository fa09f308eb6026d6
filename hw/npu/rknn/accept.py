"""Examine a board with Rockchip's NPU, and write a report to send back.

    python hw/npu/rknn/accept.py MODEL.onnx [--runs 200] [--json report.json]

On the board: `edge_rt npu setup rknn-lite`, Rockchip's librknnrt.so of the same version in /usr/lib, edge_rt[onnx], and
MODEL.SOC.rknn with its .json beside the model (convert.py). Each way of using the cores is tried: what it computes is
compared with onnxruntime's float model on the CPU, and how long it takes is measured. On x86-64 it runs in the
simulator, which says nothing of time; the report says so.
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.npu.rows import random_feeds
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.devices import devfreq
from edge_rt.errors import EdgeRtError
from edge_rt.version import VERSION

WAYS: tuple[dict[str, str], ...] = ({}, {"cores": "0"}, {"cores": "0_1"}, {"cores": "0_1_2"}, {"contexts": "3"})


def examine(model: Path, n_runs: int, own: dict[str, str], soc: str = "") -> dict[str, Any]:
    """Try every way; what fails is told in the report, with all that was found before."""
    report: dict[str, Any] = {"edge_rt": VERSION, "python": platform.python_version(), "machine": platform.machine()}
    report["kernel"], report["model"] = platform.release(), model.name
    backend = RknnBackend()
    found = backend.probe()
    if isinstance(found, Absent):
        return report | {"failed": found.reason}
    report["device"] = {"detail": found[0].detail, "evidence": found[0].evidence, "fault": found[0].fault}
    report["npu_clocks"] = clocks()
    file = ModelFile(model=model.stem, variant="", path=model, quant="")
    ways = WAYS if found[0].evidence == "device" else WAYS[:1]
    report["ways"] = [one_way(backend, file, {**own, **way}, n_runs, soc) for way in ways]
    report["npu_clocks_after"] = clocks()
    return report


def one_way(backend: RknnBackend, file: ModelFile, own: dict[str, str], n_runs: int, soc: str) -> dict[str, Any]:
    told: dict[str, Any] = {"options": own}
    npu = NpuOptions(soc={NAME: soc} if soc else {}, options={NAME: own})
    options = TensorOptions(n_threads=1, npu=npu)
    begun_s = time.monotonic()
    try:
        session = backend.load_tensor(file, options)
    except EdgeRtError as exc:
        return told | {"failed": str(exc)}
    told["load_s"] = time.monotonic() - begun_s
    told["placement"] = msgspec.to_builtins(session.info.placement)
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions())
    taken_s: list[float] = []
    least: dict[str, float] = {}
    n_same = 0
    try:
        for seed in range(n_runs):
            feeds = random_feeds(file.onnx.inputs, 1, seed)
            for spec in file.onnx.inputs:
                if spec.datatype == "UINT8":  # pixels
                    feeds[spec.name] = np.random.default_rng(seed).integers(0, 256, feeds[spec.name].shape, np.uint8)
            begun_s = time.monotonic()
            answers = session.run(feeds)
            taken_s.append(time.monotonic() - begun_s)
            for index, (name, right) in enumerate(cpu.run(feeds).items()):
                a, b = answers[name].astype(np.float64).ravel(), right.astype(np.float64).ravel()
                cosine = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))
                least[name] = min(least.get(name, 1.0), cosine)
                n_same += index == 0 and int(a.argmax()) == int(b.argmax())
        if n_cpu := session.device_counts().n_fallbacks:
            told["failed"] = f"the chip failed, and the CPU answered {n_cpu} of {n_runs} runs: see the log"
    except EdgeRtError as exc:
        told["failed"] = str(exc)
    finally:
        session.close()
        cpu.close()
    ordered = sorted(taken_s)
    if ordered:
        told |= {"n_runs": len(ordered), "least_s": ordered[0], "median_s": ordered[len(ordered) // 2]}
        told |= {"p99_s": ordered[int(len(ordered) * 0.99)], "first_s": taken_s[0]}
        told |= {"cosine_least": least, "same_first": n_same / len(ordered)}
    return told


def clocks() -> list[dict[str, Any]]:
    """Read the NPU's clocks from the kernel; None is what it does not tell."""
    told = []
    for each in devfreq.devices():
        if each.kind == "npu":
            now = {"cur_hz": each.cur_hz.value, "max_hz": each.max_hz.value, "load": each.load.value}
            told.append({"name": each.name, "governor": each.governor.value, **now})
    return told


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--runs", default=200, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Of npu.options.")
@click.option("--soc", default="", help="Of the simulator; a board knows its own.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too.")
def main(model: Path, runs: int, options: tuple[str, ...], soc: str, file: Path | None) -> None:
    """Examine this board with MODEL; ends with 1 where something failed."""
    own = dict(each.partition("=")[::2] for each in options)
    report = examine(model, runs, own, soc)
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    click.echo(text)
    if file is not None:
        file.write_text(f"{text}\n")
    failed = "failed" in report or any("failed" in way for way in report.get("ways", []))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
