"""Compile ONNX models for Qualcomm chips, on any machine that has edge_rt[npu-qnn], and tell where each node goes.

    python hw/npu/qnn/convert.py MODEL.onnx [...] [--soc 57:75 ...] [--out DIR]

Shapes are fixed and metadata is dropped, as the back end does; quantise before (docs/quantize.md). What is compiled is
a context binary with an ONNX file around it, in DIR/MODEL-SOC; it is for looking at: a board compiles its own, since
its driver has a part in it. Ends with 1 where a node stays with the CPU or a model does not compile.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click
from tabulate import tabulate

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.artifacts import artifacts
from edge_rt.backends.npu.qnn import NAME, QnnBackend
from edge_rt.backends.npu.qnn_driver import SIMULATED_SOC
from edge_rt.errors import EdgeRtError


def convert(backend: QnnBackend, path: Path, soc: str, out: Path | None) -> tuple[list[str], bool]:
    """Compile a model for a chip; give a row of the table, and whether all of it is on the NPU."""
    name = f"{path.stem}-{soc.replace(':', '-')}"
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    with tempfile.TemporaryDirectory() as kept:
        npu = NpuOptions(require="prefer", artifacts=Path(kept) / "npu", soc={NAME: soc})
        try:
            backend.load_tensor(file, TensorOptions(n_threads=1, npu=npu)).close()
        except EdgeRtError as exc:
            return [path.name, soc, "-", "-", "-", str(exc)], False
        (made,) = artifacts(Path(kept) / "npu")
        if out is not None:
            shutil.copytree(made.folder, out / name, dirs_exist_ok=True)
    told = made.description
    here = sum(part.n_nodes for part in told.compiled.placement if not part.reason)
    rest = [f"{n} {kind}" for part in told.compiled.placement if part.reason for kind, n in part.kinds]
    n_nodes = sum(part.n_nodes for part in told.compiled.placement)
    placed, size = f"{here} of {n_nodes}", f"{made.size_bytes / 1e6:.1f} MB"
    return [path.name, soc, placed, size, f"{told.compile_s:.1f} s", ", ".join(rest)], not rest


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--soc", "socs", multiple=True, default=(SIMULATED_SOC,), show_default=True, help="As npu.soc has it.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep what is compiled here.")
def main(models: tuple[Path, ...], socs: tuple[str, ...], out: Path | None) -> None:
    """Compile MODELS for each chip."""
    backend = QnnBackend()
    if isinstance(found := backend.probe(), Absent):
        raise click.ClickException(found.reason)
    done = [convert(backend, path, soc, out) for path in models for soc in socs]
    head = ["MODEL", "SOC", "ON THE NPU", "SIZE", "COMPILED IN", "ON THE CPU, OR WHAT FAILS"]
    click.echo(tabulate([row for row, _ in done], head, tablefmt="plain", disable_numparse=True))
    click.echo(f"by {found[0].detail}")
    sys.exit(not all(is_whole for _, is_whole in done))


if __name__ == "__main__":
    main()
