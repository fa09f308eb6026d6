"""Compile an ONNX model for Rockchip's NPU, on x86-64, and put it beside the model for a board.

    python hw/npu/rknn/convert.py MODEL.onnx --soc rk3588 [--dtype w8a8 --dataset ranges.npz] [--float NAME,NAME]

Writes MODEL.SOC.rknn and MODEL.SOC.rknn.json; copy both and MODEL.onnx to the board, where `npu_rknn` runs them and
accept.py examines them. Needs `edge_rt npu setup rknn` and edge_rt[onnx].

With --tries it also runs the model in Rockchip's simulator on random inputs, against onnxruntime. The simulator runs no
exported file: it is the same compiler's work of the same sources that is tried, not the file that was written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.npu.rknn_driver import ALGORITHMS, COMPILED, DTYPES, SOCS
from edge_rt.backends.npu.rows import random_feeds
from edge_rt.backends.npu.vendor import CompileRequest
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import EdgeRtError


def convert(model: Path, soc: str, own: dict[str, str]) -> tuple[Path, dict[str, Any]]:
    """Compile a model; give the file that was written, and what its .json tells. Raises EdgeRtError."""
    backend, file, options = RknnBackend(), _file(model), _options(soc, own)
    found = backend.probe()
    if isinstance(found, Absent):
        raise click.ClickException(found.reason)
    if (reason := backend.supports_tensor(file, options)) is not None:
        raise click.ClickException(reason)
    target = backend.vendor.target(file, found[0], options)
    with tempfile.TemporaryDirectory() as folder:
        request = CompileRequest(file=file, device=found[0], target=target, folder=Path(folder), rows=1)
        compiled = backend.vendor.compile(request)
        written = model.with_name(f"{model.stem}.{soc}.rknn")
        shutil.copyfile(Path(folder, COMPILED), written)
    told = {
        "soc": soc,
        "compiler": target.versions.compiler,
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "sha256": hashlib.sha256(written.read_bytes()).hexdigest(),
        "calibration_sha256": target.calibration,
        "facts": msgspec.to_builtins(compiled.facts),
    }
    written.with_name(f"{written.name}.json").write_text(json.dumps(told, indent=1))
    return written, told


def try_out(model: Path, soc: str, own: dict[str, str], n_tries: int) -> dict[str, float]:
    """Run the model in the simulator and on the CPU; give the least cosine of each output."""
    file, options = _file(model), _options(soc, own)
    npu, cpu = RknnBackend().load_tensor(file, options), OnnxCpuBackend().load_tensor(file, options)
    least: dict[str, float] = {}
    try:
        for seed in range(n_tries):
            feeds = random_feeds(file.onnx.inputs, 1, seed)
            for spec in file.onnx.inputs:
                if spec.datatype == "UINT8":  # pixels
                    noise = np.random.default_rng(seed)
                    feeds[spec.name] = noise.integers(0, 256, feeds[spec.name].shape, np.uint8)
            right = cpu.run(feeds)
            for name, answer in npu.run(feeds).items():
                a, b = answer.astype(np.float64).ravel(), right[name].astype(np.float64).ravel()
                cosine = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))
                least[name] = min(least.get(name, 1.0), cosine)
        if npu.device_counts().n_fallbacks:
            raise click.ClickException("the simulator has failed, and the CPU answered for it: see the log above")
    finally:
        npu.close()
        cpu.close()
    return least


def _file(model: Path) -> ModelFile:
    return ModelFile(model=model.stem, variant="", path=model, quant="")


def _options(soc: str, own: dict[str, str]) -> TensorOptions:
    npu = NpuOptions(soc={NAME: soc}, options={NAME: own})
    return TensorOptions(n_threads=1, npu=npu)


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--soc", type=click.Choice(SOCS), required=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="fp16", show_default=True)
@click.option("--dataset", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Calibration, .npz.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), help="How ranges are found.")
@click.option("--method", help="What shares a scale: channel, layer, group32 …")
@click.option("--float", "kept", help="Tensors whose layers stay in 16 bit.")
@click.option("--tries", default=0, type=click.IntRange(0, 1000), help="Runs in the simulator.")
def main(model: Path, soc: str, tries: int, kept: str | None, **given: str | None) -> None:
    """Compile MODEL."""
    own = {name: value for name, value in {**given, "float": kept}.items() if value}
    try:
        written, told = convert(model, soc, own)
        for part in told["facts"]["placement"]:
            kinds = ", ".join(f"{kind} {n}" for kind, n in part["kinds"])
            click.echo(
                f"{part['n_nodes']} on {part['provider']}: {kinds}" + (f" ({part['reason']})" * bool(part["reason"]))
            )
        click.echo(f"{told['facts']['cycles']} cycles by the compiler's own estimate; nothing has measured them")
        for name, cosine in (try_out(model, soc, own, tries) if tries else {}).items():
            click.echo(f"simulator: {name}: cosine with onnxruntime's float {cosine:.5f} at least, of {tries} runs")
    except EdgeRtError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(f"{written}: {written.stat().st_size / 1e6:.2f} MB; the file itself has run nowhere yet")


if __name__ == "__main__":
    main()
