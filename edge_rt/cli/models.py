"""`edge_rt models`: what models there are, and bring, check and remove their files."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.catalog.chains import Chain
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.manifest import UNKNOWN_LICENSE, Asset, Manifest, Variant, as_variant
from edge_rt.catalog.ownership import give_to_owner
from edge_rt.catalog.pipelines import task
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.cli.progress import pull_progress, size_text
from edge_rt.devices import cpu
from edge_rt.errors import BackendError, ModelChecksumError, ModelNotPulledError
from edge_rt.scheduler.forms import load_message, place
from edge_rt.worker.convert import convert
from edge_rt.worker.derive import derive


class _Catalog:
    """The store and the settings the subcommands work with."""

    def __init__(self, loaded: config.Loaded):
        self.config = loaded.config
        self.store = Store.open(loaded.config.catalog)
        self.features = cpu.features()
        for error in self.store.left_out().values():
            click.echo(f"edge_rt: a manifest is left out: {error}", err=True)

    def find(self, name: str) -> tuple[Manifest, Variant | None]:
        """Split MODEL[:VARIANT], or MODEL:ADAPTER; the variant is None when not named."""
        model_id, _, variant_id = name.partition(":")
        manifest = self.store.get(model_id)
        if not variant_id:
            return manifest, None
        return manifest, manifest.adapter(variant_id) or pick_variant(manifest, frozenset(), variant_id)

    def chain(self, name: str) -> Chain | None:
        return next((chain for chain in self.store.chains() if chain.id == name), None)

    def parts(self, name: str) -> tuple[str, ...]:
        """Give the models that a chain asks; any other name is its own."""
        chain = self.chain(name)
        return chain.parts if chain is not None else (name,)

    def picked(self, manifest: Manifest) -> Variant:
        """Give the variant that runs unless a request names another: the configured one, else this CPU's best."""
        settings = self.config.model(manifest.id)
        backend = settings.backend or self.config.engine.backend
        return pick_variant(manifest, self.features, settings.variant, backend=backend)


_pass_catalog = click.make_pass_decorator(_Catalog)


@click.group("models", short_help="List, pull, import, show, verify and remove models.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """See which models there are, and bring, check and remove their files.

    The files stand in the store: catalog.store_dir, which is /var/lib/edge_rt for root and ~/.local/share/edge_rt for
    others unless the configuration says otherwise. `edge_rt models list` names the place.
    """
    ctx.obj = catalog = _Catalog(ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load())
    ctx.call_on_close(lambda: give_to_owner(catalog.store.root))


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
@_pass_catalog
def list_models(catalog: _Catalog, as_json: bool) -> None:
    """List every model and variant, and whether it is here.

    The variant marked * is the one that runs on this machine: the configured one, else the first that runs fast on
    this CPU.
    STATE is pulled, partial (a pull was cut short and goes on where it stopped) or absent.
    """
    rows = [_row(catalog, manifest, variant) for manifest in catalog.store.manifests() for variant in manifest.variants]
    rows += [_chain_row(catalog, chain) for chain in catalog.store.chains()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = [
        (
            row["model"],
            row["kind"],
            row["variant"] + ("*" if row["picked"] else ""),
            row["quant"],
            size_text(row["size_bytes"]) if row["size_bytes"] else "" if "+" in row["variant"] else "?",
            row["state"],
            row["license"],
        )
        for row in rows
    ]
    head = ("MODEL", "KIND", "VARIANT", "QUANT", "SIZE", "STATE", "LICENSE")
    click.echo(tabulate(table, head, "plain", disable_numparse=True))
    click.echo(f"store: {catalog.store.root}", err=True)


def _row(catalog: _Catalog, manifest: Manifest, variant: Variant) -> dict[str, Any]:
    state, have_bytes = catalog.store.state(manifest, variant)
    path = catalog.store.path(manifest, variant)
    return {
        "model": manifest.id,
        "kind": manifest.kind,
        "variant": variant.id,
        "quant": variant.quant,
        # A derived file's size is known once it has been made.
        "size_bytes": variant.size_bytes or (have_bytes if state == "pulled" else None),
        "state": state,
        "have_bytes": have_bytes,
        "license": manifest.license,
        "picked": variant == catalog.picked(manifest),
        "default": manifest.id == catalog.config.catalog.default_model,
        "path": str(path) if path else None,
    }


def _chain_row(catalog: _Catalog, chain: Chain) -> dict[str, Any]:
    """Describe a chain as a row: it is pulled when the forms of its models that run here are."""
    known = {manifest.id: manifest for manifest in catalog.store.manifests()}
    parts = [known.get(part) for part in chain.parts]
    states = {catalog.store.state(m, catalog.picked(m))[0] if m is not None else "absent" for m in parts}
    return {
        "model": chain.id,
        "kind": str(type(chain).__struct_config__.tag),
        "variant": " + ".join(chain.parts),
        "quant": "",
        "size_bytes": None,
        "state": "pulled" if states == {"pulled"} else "absent",
        "have_bytes": 0,
        "license": " + ".join(sorted({m.license for m in parts if m is not None})),
        "picked": False,
        "default": False,
        "path": None,
    }


@command.command("pull")
@click.argument("names", metavar="[MODEL]...", nargs=-1)
@click.option("--offline", is_flag=True, help="Never use the network; fail if something would have to be fetched.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array of what is there now.")
@_pass_catalog
def pull(catalog: _Catalog, names: tuple[str, ...], offline: bool, as_json: bool) -> None:
    """Fetch models into the store and print the paths of their files.

    MODEL is an id as `edge_rt models list` shows it, or ID:VARIANT; of a chain all its models are pulled. Without a
    MODEL it is the default model.
    Without a VARIANT it is the one this machine runs, with the variant that one is derived from, if any.

    A pull that was cut short goes on where it stopped: run it again. What is there already is left alone.
    """
    done = []
    with pull_progress() as progress:
        asked = names or (catalog.config.catalog.default_model,)
        for name in [part for named in asked for part in catalog.parts(named)]:
            manifest, variant = catalog.find(name)
            variant = variant or catalog.picked(manifest)
            catalog.store.pull(
                manifest.id,
                variant.id,
                progress=progress,
                offline=offline or catalog.config.catalog.offline,
                derive=derive,
            )
            done.append(_row(catalog, manifest, variant))
    if as_json:
        click.echo(json.dumps(done, indent=2))
    else:
        for row in done:
            click.echo(row["path"])


@command.command("import", short_help="Take a model of your own into the store.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--id", "model_id", default="", help="The model's id; without it the file's name.")
@click.option("--license", "license_id", metavar="SPDX", default="", help="Its licence; without it the file's own.")
@click.option(
    "--vocab",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Where a folder's tokenizer is.",
)
@_pass_catalog
def import_model(catalog: _Catalog, path: Path, model_id: str, license_id: str, vocab: Path | None) -> None:
    """Take a model of your own into the store, so that all commands and the daemon know it by its id.

    PATH is a GGUF file, which is copied, or a folder of ONNX Runtime GenAI with 4-bit weights (MatMulNBits), which
    are written as a GGUF file. A folder needs --vocab: a GGUF file of the same model in any quantisation, for the
    tokenizer, the chat template and the hyperparameters. PATH stays as it is.

    `edge_rt models rm` removes the copy and its entry.
    """
    with pull_progress() as progress:
        manifest = catalog.store.add(
            path, model_id=model_id, license_id=license_id, vocab=vocab, progress=progress, convert=convert
        )
    if manifest.license == UNKNOWN_LICENSE:
        click.echo("the file names no licence that has an SPDX id; --license says what it is", err=True)
    click.echo(manifest.id)


@command.command("show", short_help="Show a model, its files and what is inside them.")
@click.argument("name", metavar="MODEL")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_pass_catalog
def show(catalog: _Catalog, name: str, as_json: bool) -> None:
    """Show what a model is, where its files come from, and what is inside those that are here.

    MODEL is an id, or ID:VARIANT or ID:ADAPTER for one of them.
    """
    if (chain := catalog.chain(name)) is not None:
        told = {name: value for name, value in msgspec.to_builtins(chain).items() if value not in (None, "", 0)}
        click.echo(json.dumps(told, indent=2) if as_json else tabulate(told.items(), tablefmt="plain"))
        return
    manifest, wanted = catalog.find(name)
    facts: dict[str, Any] = {
        "model": manifest.id,
        "name": manifest.name,
        "license": manifest.license,
        "source_note": manifest.source_note,
        "kind": manifest.kind,
        "task": task(manifest.pipeline) if manifest.pipeline is not None else None,
        "arch": manifest.arch,
        "n_params": manifest.n_params,
        "n_ctx": manifest.n_ctx or None,
        "n_ctx_train": manifest.n_ctx_train or None,
    }
    variants = [_details(catalog, manifest, v) for v in manifest.variants if wanted in (None, v)]
    adapters = [adapter for adapter in manifest.adapters if wanted in (None, as_variant(adapter))]
    assets = [_asset(catalog, manifest, adapter, "adapter") for adapter in adapters]
    if wanted is None or wanted in manifest.variants:  # which need them
        assets += [_asset(catalog, manifest, asset, "asset") for asset in manifest.assets]
        assets += [_asset(catalog, manifest, asset, "material") for asset in manifest.materials]
    if as_json:
        click.echo(json.dumps({**facts, "variants": variants, "assets": assets}, indent=2))
        return
    for index, table in enumerate([facts, *variants, *assets]):
        rows = [(key, value) for key, value in table.items() if value not in (None, "")]
        click.echo(("\n" if index else "") + tabulate(rows, tablefmt="plain", disable_numparse=True))


def _details(catalog: _Catalog, manifest: Manifest, variant: Variant) -> dict[str, Any]:
    row = _row(catalog, manifest, variant)
    record = catalog.store.record(manifest, variant)
    path = catalog.store.path(manifest, variant)
    accuracy = variant.accuracy
    details = {
        "variant": variant.id,
        "quant": variant.quant,
        "perplexity": variant.perplexity,
        "accuracy": f"{accuracy.metric} {accuracy.value} on {accuracy.data}, n = {accuracy.n}" if accuracy else None,
        "state": row["state"],
        "picked": row["picked"],
        "size_bytes": row["size_bytes"],
        "sha256": record.sha256 if record else variant.sha256 or None,
        "source": variant.source or None,
        "derived_from": variant.derived_from or None,
        "derive": variant.derive or None,
        "made_by": record.tool if record and record.tool else None,
        "path": row["path"],
    }
    if manifest.kind == "tensor":
        return {**details, **_tensors(path)}
    runner = _runner(catalog, manifest, variant) if path else {"backend": None, "backend_reason": None}
    return {**details, **runner, **_header(path)}


def _tensors(path: Path | None) -> dict[str, str | None]:
    """Tell a tensor model's inputs and outputs; without a file or the extra `onnx` nothing."""
    if path is None or find_spec("onnx") is None:
        return {"inputs": None, "outputs": None}
    from edge_rt.backends.onnx_model import read_model

    model = read_model(path)
    inputs, outputs = (
        ", ".join(f"{spec.name} {spec.datatype} [{', '.join(map(str, spec.shape))}]" for spec in specs)
        for specs in (model.inputs, model.outputs)
    )
    return {"inputs": inputs, "outputs": outputs}


def _header(path: Path | None) -> dict[str, Any]:
    header = read_header(path) if path else None
    return {
        "layers": header.n_layers if header else None,
        "vocabulary": header.n_vocab if header else None,
        "tensors": len(header.tensors) if header else None,
        "kv_bytes_per_token_f16": header.kv_elements_per_token * 2 if header else None,
        "chat_template": ("in the file" if header.chat_template else "none") if header else None,
    }


def _asset(catalog: _Catalog, manifest: Manifest, asset: Asset, role: str) -> dict[str, Any]:
    path = catalog.store.asset_path(manifest, asset)
    return {
        role: asset.id,
        "state": catalog.store.state(manifest, as_variant(asset))[0],
        "size_bytes": asset.size_bytes,
        "sha256": asset.sha256,
        "source": asset.source,
        "path": str(path) if path else None,
    }


def _runner(catalog: _Catalog, manifest: Manifest, variant: Variant) -> dict[str, str | None]:
    """Tell which back end would run a file that is here; without one, only why."""
    from edge_rt.backends.dispatch import dispatch  # numpy and llama.cpp, which no other subcommand needs
    from edge_rt.worker.load import unpack

    settings = msgspec.structs.replace(catalog.config.model(manifest.id), variant=variant.id)
    placement = place(
        manifest.id,
        manifest,
        settings,
        catalog.config,
        features=catalog.features,
        find=catalog.store.path,
        find_asset=catalog.store.asset_path,
    )
    try:
        backend, reason = dispatch(placement.backend, *unpack(load_message(placement, catalog.config, force=False)))
    except BackendError as exc:
        return {"backend": None, "backend_reason": str(exc)}
    return {"backend": backend.name, "backend_reason": reason or None}


@command.command("verify", short_help="Hash the files of models again.")
@click.argument("names", metavar="[MODEL]...", nargs=-1)
@_pass_catalog
def verify(catalog: _Catalog, names: tuple[str, ...]) -> None:
    """Read the files of models again and compare their sha256 with what it was when they were pulled.

    MODEL is an id or ID:VARIANT. Without one everything in the store is checked. The exit code is 1 if any file has
    changed.
    """
    broken, n_checked = False, 0
    with pull_progress() as progress:
        asked = [part for name in names for part in catalog.parts(name)]
        for name in asked or [m.id for m in catalog.store.manifests()]:
            manifest, wanted = catalog.find(name)
            files = manifest.files() if wanted is None else (wanted,)
            present = [file for file in files if catalog.store.path(manifest, file) is not None]
            if names and not present:
                raise ModelNotPulledError(model=name)
            for variant in present:
                n_checked += 1
                try:
                    for path in catalog.store.verify(manifest.id, variant.id, progress=progress):
                        click.echo(f"ok {path}")
                except ModelChecksumError as exc:
                    broken = True
                    click.echo(f"edge_rt: {exc}", err=True)
    if broken:
        sys.exit(1)
    if not n_checked:
        click.echo(f"nothing has been pulled into {catalog.store.root} yet", err=True)


@command.command("rm")
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
@_pass_catalog
def remove(catalog: _Catalog, names: tuple[str, ...]) -> None:
    """Delete the files of models, partial ones too.

    MODEL is an id, or ID:VARIANT for one variant of it. What all variants need, such as labels, goes with the last. A
    daemon that has the model loaded keeps answering from it
    until it unloads it.
    """
    for name in names:
        if (chain := catalog.chain(name)) is not None:
            raise click.UsageError(f"{name} has no files of its own; its models are {' and '.join(chain.parts)}.")
    for name, (manifest, variant) in [(name, catalog.find(name)) for name in names]:
        freed = catalog.store.remove(manifest.id, variant.id if variant else "")
        click.echo(f"{name}: " + (f"{size_text(freed)} freed" if freed else "was not here"), err=True)
