"""`edge_rt npu vela`: a model for Arm's Ethos-U, and which of its operators the NPU takes."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.catalog.store import Store, is_file_name
from edge_rt.errors import BackendLoadError, BackendUnavailableError, ModelNotPulledError

_USUAL: Final = "ethos-u55-256"


@click.command("vela", short_help="Compile a quantised model for Arm's Ethos-U.")
@click.argument("model")
@click.option(
    "-a",
    "--accelerator",
    "accelerators",
    multiple=True,
    default=(_USUAL,),
    show_default=True,
    help="ethos-u55-128, ethos-u65-256, ethos-u85-256, …; repeat it to compare.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the compiled file here.",
)
@click.option("--tflite", type=click.Path(dir_okay=False, path_type=Path), help="Keep what Vela was given here, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    accelerators: tuple[str, ...],
    output: Path | None,
    tflite: Path | None,
    as_json: bool,
) -> None:
    """Make an int8 TensorFlow Lite file of MODEL and compile it by Vela.

    MODEL is a pulled model of the catalog (pcb-defect, or efficientnet-lite0:int8), a quantised ONNX file (QDQ) or a
    .tflite. Nothing runs: cycles, times and memory are Vela's estimate for the system that it names.
    """
    if output is not None and len(accelerators) > 1:
        raise click.UsageError("--output keeps one file: name one --accelerator")
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    source = _source(model, loaded)
    try:
        from edge_rt.backends.onnx_model import read_model
        from edge_rt.convert.tflite import convert_tflite
        from edge_rt.convert.vela import compile_for_ethos
    except ImportError as exc:
        raise BackendUnavailableError(backend="vela", reason=f"{exc.name} is not installed", extra="npu-vela") from exc
    with tempfile.TemporaryDirectory(prefix="edge_rt-vela-") as scratch:
        given = source
        if source.suffix != ".tflite":
            kinds = {kind for kind, _ in read_model(source).kinds}  # checks the file, which may be anybody's
            if "QuantizeLinear" not in kinds:
                reason = (
                    "it is not quantised, and Ethos-U computes with integers: take its W8A8 form (docs/quantize.md)"
                )
                raise BackendLoadError(model=source.name, reason=reason)
            given = tflite or Path(scratch) / f"{source.stem}.tflite"
            convert_tflite(source, given)
        reports = [
            compile_for_ethos(given, output or Path(scratch) / f"{accelerator}.tflite", accelerator)
            for accelerator in accelerators
        ]
    if as_json:
        said = [{**asdict(each), "file": None if output is None else str(output)} for each in reports]
        click.echo(msgspec.json.format(msgspec.json.encode(said)).decode())
        return
    head = ["ACCELERATOR", "ON THE NPU", "CYCLES", "ESTIMATE", "SRAM", "FLASH", "DRAM", "SYSTEM"]
    rows = [
        [
            each.accelerator,
            f"{each.n_npu} of {each.n_operators}",
            f"{each.n_cycles / 1e6:.1f} M",
            f"{each.inference_s * 1e3:.1f} ms at {each.clock_hz / 1e6:.0f} MHz",
            *(f"{n_bytes / 2**10:.0f} KiB" for n_bytes in (each.sram_bytes, each.flash_bytes, each.dram_bytes)),
            f"{each.system}, {each.memory_mode}",
        ]
        for each in reports
    ]
    click.echo(tabulate(rows, head, tablefmt="plain", disable_numparse=True))
    click.echo(f"{reports[0].compiler}, {reports[0].evidence}: all but the placement is its estimate")
    for each in reports:
        for left in each.cpu:
            click.echo(f"{each.accelerator}: on the CPU: {left.kind} {left.output}: {left.reason}")


def _source(model: str, loaded: config.Loaded) -> Path:
    if is_file_name(model) or model.endswith((".onnx", ".tflite")):
        return Path(model)
    store = Store.open(loaded.config.catalog)
    model_id, _, variant_id = model.partition(":")
    manifest = store.get(model_id)
    wanted = [each for each in manifest.variants if not variant_id or each.id == variant_id]
    for variant in sorted(wanted, key=lambda each: "int8" not in each.id):
        if (path := store.path(manifest, variant)) is not None:
            return path
    raise ModelNotPulledError(model=model)
