"""Compile an ONNX model for Rockchip's NPU, on x86-64, and put it beside the model for a board.

    python hw/npu/rknn/convert.py MODEL.onnx --soc rk3588 [--dtype w8a8 --dataset ranges.npz] [--float NAME,NAME]

Writes MODEL.SOC.rknn and MODEL.SOC.rknn.json; copy both and MODEL.onnx to the board, where `npu_rknn` runs them and
accept.py examines them. Needs `edge_rt npu setup rknn` and edge_rt[onnx].

With --tries it also runs the model in Rockchip's simulator on random inputs, against onnxruntime. The simulator runs no
exported file: it is the same compiler's work of the same sources that is tried, not the file that was written.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from edge_rt.backends.base import ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.npu.rknn_driver import ALGORITHMS, DTYPES, SOCS
from edge_rt.backends.npu.rknn_export import export
from edge_rt.backends.npu.rows import random_feeds
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import EdgeRtError


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
@click.option("--dtype", type=click.Choice(DTYPES), help="[what the file's form says, else fp16]")
@click.option("--dataset", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Calibration, .npz.")
@click.option("--algorithm", type=click.Choice(ALGORITHMS), help="How ranges are found.")
@click.option("--method", help="What shares a scale: channel, layer, group32 …")
@click.option("--float", "kept", help="Tensors whose layers stay in 16 bit.")
@click.option("--tries", default=0, type=click.IntRange(0, 1000), help="Runs in the simulator.")
def main(model: Path, soc: str, tries: int, kept: str | None, **given: str | None) -> None:
    """Compile MODEL."""
    own = {name: value for name, value in {**given, "float": kept}.items() if value}
    try:
        made = export(_file(model), soc, own)
        for part in made.placement:
            kinds = ", ".join(f"{kind} {n}" for kind, n in part.kinds)
            click.echo(f"{part.n_nodes} on {part.provider}: {kinds}" + (f" ({part.reason})" if part.reason else ""))
        click.echo(f"{made.cycles} cycles by the compiler's own estimate; nothing has measured them")
        for name, cosine in (try_out(model, soc, own, tries) if tries else {}).items():
            click.echo(f"simulator: {name}: cosine with onnxruntime's float {cosine:.5f} at least, of {tries} runs")
    except EdgeRtError as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(f"{made.file}: {made.file.stat().st_size / 1e6:.2f} MB; the file itself has run nowhere yet")


if __name__ == "__main__":
    main()
