"""Examine a board with Rockchip's NPU, and write a report to send back.

    python hw/npu/rknn/accept.py MODEL.onnx [--runs 200] [--json report.json]

On the board: `edge_rt npu setup rknn-lite`, Rockchip's librknnrt.so of the same version in /usr/lib, edge_rt[onnx], and
MODEL.SOC.rknn with its .json beside the model (convert.py). Each way of using the cores is tried: what it computes is
compared with onnxruntime's float model on the CPU, and how long it takes is measured. On x86-64 it runs in the
simulator, which says nothing of time; the report says so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.devices import devfreq
from edge_rt.errors import EdgeRtError
from hw.npu.acceptance import about, cosine, feeds_for, give, json_option, spread

WAYS: tuple[dict[str, str], ...] = ({}, {"cores": "0"}, {"cores": "0_1"}, {"cores": "0_1_2"}, {"contexts": "3"})


def examine(model: Path, n_runs: int, own: dict[str, str], soc: str = "") -> dict[str, Any]:
    """Try every way; what fails is told in the report, with all that was found before."""
    report: dict[str, Any] = about() | {"model": model.name}
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
    failed = [way["failed"] for way in report["ways"] if "failed" in way]
    return report | ({"failed": "; ".join(failed)} if failed else {})


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
            feeds = feeds_for(file.onnx.inputs, seed)
            begun_s = time.monotonic()
            answers = session.run(feeds)
            taken_s.append(time.monotonic() - begun_s)
            for index, (name, right) in enumerate(cpu.run(feeds).items()):
                least[name] = min(least.get(name, 1.0), cosine(answers[name], right))
                n_same += index == 0 and int(answers[name].argmax()) == int(right.argmax())
        if n_cpu := session.device_counts().n_fallbacks:
            told["failed"] = f"the chip failed, and the CPU answered {n_cpu} of {n_runs} runs: see the log"
    except EdgeRtError as exc:
        told["failed"] = str(exc)
    finally:
        session.close()
        cpu.close()
    if taken_s:
        told |= {"run_s": spread(taken_s), "first_s": taken_s[0]}
        told |= {"cosine_least": least, "same_first": n_same / len(taken_s)}
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
@json_option
def main(model: Path, runs: int, options: tuple[str, ...], soc: str, file: Path | None) -> None:
    """Examine this board with MODEL; ends with 1 where something failed."""
    own = dict(each.partition("=")[::2] for each in options)
    report = examine(model, runs, own, soc)
    give(report, file)


if __name__ == "__main__":
    main()
