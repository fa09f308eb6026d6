"""`edge_rt npu compile`: a form of the catalog for a board that compiles nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
import msgspec

from edge_rt import config
from edge_rt.backends.base import ModelFile
from edge_rt.backends.npu.rknn import NAME
from edge_rt.backends.npu.rknn_driver import SOCS
from edge_rt.backends.npu.rknn_export import export
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.errors import BackendLoadError, BackendUnavailableError, ModelNotPulledError
from edge_rt.scheduler.forms import chip_needs

_USUAL: Final = SOCS[0]


@click.command("compile", short_help="Compile a form for a board with Rockchip's NPU.")
@click.argument("model")
@click.option("--soc", type=click.Choice(SOCS), help=f"The board's chip. [what the form is for, else {_USUAL}]")
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Write into this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, model: str, soc: str | None, output: Path | None, as_json: bool) -> None:
    """Compile MODEL[:FORM], which has been pulled, for a board with a chip of Rockchip's, on x86-64.

    A board compiles nothing. What is written, FILE.SOC.rknn and its .json, lies beside the form's file: copy the
    model's whole folder into the board's store, where `edge_rt run MODEL:FORM` takes it. Nothing runs here.
    """
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    store = Store.open(loaded.config.catalog)
    name, _, form = model.partition(":")
    manifest = store.get(name)
    variant = _form(manifest, form)
    if (path := store.path(manifest, variant)) is None:
        raise ModelNotPulledError(model=f"{manifest.id}:{variant.id}")
    needs = chip_needs(variant.requires) if variant.requires is not None else None
    file = ModelFile(model=manifest.id, variant=variant.id, path=path, quant=variant.quant)
    try:
        made = export(file, soc or (needs.socs[0] if needs and needs.socs else _USUAL), {}, needs=needs, folder=output)
    except ImportError as exc:  # the model is read with it
        raise BackendUnavailableError(backend=NAME, reason=f"{exc.name} is not installed", extra="onnx") from exc
    size_bytes = made.file.stat().st_size
    if as_json:
        said = {
            "file": str(made.file),
            "facts": str(made.facts),
            "size_bytes": size_bytes,
            "soc": made.soc,
            "compiler": made.compiler,
            "cycles_estimate": made.cycles,
            "placement": made.placement,
            "evidence": "compiled only",
        }
        click.echo(msgspec.json.format(msgspec.json.encode(said)).decode())
        return
    for part in made.placement:
        kinds = ", ".join(f"{kind} {n}" for kind, n in part.kinds)
        click.echo(f"{part.n_nodes} on {part.provider}: {kinds}" + (f" ({part.reason})" if part.reason else ""))
    click.echo(
        f"{made.file}: {size_bytes / 1e6:.2f} MB for {made.soc} by rknn-toolkit2 {made.compiler}; it has not run"
    )
    where = output or path.parent
    click.echo(f"copy {where} into models/ of the board's store; there: edge_rt run {manifest.id}:{variant.id}")


def _form(manifest: Manifest, form: str) -> Variant:
    """Give the form that is named, else the first for RKNN. Raises ModelNotFoundError, BackendLoadError."""
    forms = [each for each in manifest.variants if NAME in each.backends]
    variant = pick_variant(manifest, frozenset(), form, backend=NAME)
    if variant not in forms:
        known = " and ".join(f"{manifest.id}:{each.id}" for each in forms) or "the catalog has none of this model"
        reason = f"it is no form for RKNN ({known}); hw/npu/rknn/convert.py compiles any float ONNX file"
        raise BackendLoadError(model=f"{manifest.id}:{variant.id}", reason=reason)
    return variant
