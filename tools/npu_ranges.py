"""Calibrate the catalog's models for NPUs.

    python -m tools.npu_ranges ranges  MODEL models/MODEL-npu-ranges.json   what a manifest's npu-* recipes take
    python -m tools.npu_ranges sentences RANGES.json OUT.json               the same with short texts, for 4 bit
    python -m tools.npu_ranges dataset MODEL FILE.calibration.npz           what RKNN calibrates with

MODEL must be in the store (`edge_rt models pull`). npu_inputs.py says what each is calibrated with.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import onnx

from edge_rt import config
from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.convert.npu import prepare
from edge_rt.convert.qdq import RangesFile, read_ranges
from edge_rt.errors import EdgeRtError, ModelNotPulledError
from tools import npu_inputs
from tools.activations import Statistics
from tools.npu_inputs import MAP_SHAPE, MODELS, Feed, Texts, calibration
from tools.samples import SamplesAbsentError

# Of which file each model's ranges are measured, for which shapes, and what keeps 8 bit where weights have 4.
_SOURCES: Mapping[str, str] = {"pcb-defect": "int8", "minilm-l6": "static", "pp-ocrv4-det": "fp32"}
_SHAPES: Mapping[str, Mapping[str, tuple[int, ...]]] = {"pp-ocrv4-det": {"x": (1, 3, *MAP_SHAPE)}}
# The first layer's nine weights a filter, and the heads: sizes, offsets and scores.
_INT8_NODES: Mapping[str, tuple[str, ...]] = {"pcb-defect": ("fine.0.conv", "heat", "offset", "size")}
_MODEL = click.argument("model", type=click.Choice(MODELS))


def opened(model: str) -> tuple[Store, Manifest]:
    """Give the store and a model's manifest in it."""
    store = Store.open(config.load().config.catalog)
    return store, store.get(model)


def variant_path(store: Store, manifest: Manifest, variant: str) -> Path:
    """Give a form's file. Raises ModelNotFoundError and ModelNotPulledError."""
    found = pick_variant(manifest, frozenset(), variant)
    if (path := store.path(manifest, found)) is None:
        raise ModelNotPulledError(model=f"{manifest.id}:{found.id}")
    return path


def tokenizer_path(store: Store, manifest: Manifest) -> Path | None:
    """Give the tokenizer of a model that has one and has been pulled."""
    asset = next((asset for asset in manifest.assets if asset.id == "tokenizer"), None)
    return store.asset_path(manifest, asset) if asset is not None else None


class ReportedErrors(click.Command):
    """A command whose errors are told in a line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (EdgeRtError, SamplesAbsentError, ValueError) as exc:
            raise click.ClickException(str(exc)) from exc


@click.group(help=(__doc__ or "").partition("\n")[0])
def main() -> None:
    pass


@main.command(cls=ReportedErrors)
@_MODEL
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--method", type=click.Choice(["mse", "minmax"]), default="minmax", show_default=True)
def ranges(model: str, out: Path, method: str) -> None:
    """Measure the ranges of MODEL's activations and write them to OUT with shapes and what keeps more bits."""
    if model not in _SOURCES:
        raise click.UsageError(f"{model} has the ranges of its form for CPUs: models/{model}-int8-ranges.json")
    store, manifest = opened(model)
    shapes = _SHAPES.get(model, {})
    told = RangesFile(note="", ranges={"": (0.0, 0.0)}, shapes=dict(shapes))
    proto = prepare(onnx.load(variant_path(store, manifest, _SOURCES[model])), told, name=model)
    feeds = calibration(manifest, tokenizer_path(store, manifest))
    measured = Statistics.collect(proto, feeds)
    told = RangesFile(
        note=f"{method} over {len(feeds)} inputs of tools/npu_inputs.py",
        ranges={name: _rounded(low, high) for name, (low, high) in measured.ranges(method).items()},
        shapes=dict(shapes),
        int8_nodes=_INT8_NODES.get(model, ()),
        texts=tuple(_ids(feed) for feed in feeds) if model == "minilm-l6" else (),
    )
    _write(told, out)


@main.command(cls=ReportedErrors)
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def sentences(source: Path, out: Path) -> None:
    """Write SOURCE, minilm-l6's ranges, to OUT with the sentences of its paragraphs in place of the paragraphs.

    What stands at the ends of a text is a large part of a question, and little of a paragraph.
    """
    store, manifest = opened("minilm-l6")
    texts, told = Texts(tokenizer_path(store, manifest)), read_ranges(source)
    found = tuple(tuple(texts.ids(text)) for text in npu_inputs.sentences(npu_inputs.paragraphs()[0]))
    note = f"{told.note}; texts: {len(found)} sentences of tools/paragraphs.txt"
    _write(msgspec.structs.replace(told, texts=found, note=note), out)


def _write(told: RangesFile, out: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(told).decode(), indent=1)
    out.write_text(re.sub(r"\[[-+0-9.,e\s]*\]", lambda found: "".join(found[0].split()), text) + "\n", encoding="utf-8")
    click.echo(f"{out}: {out.stat().st_size} bytes, sha256 {hashlib.sha256(out.read_bytes()).hexdigest()}", err=True)


def _ids(feed: Feed) -> tuple[int, ...]:
    return tuple(feed["input_ids"][0, : int(feed["attention_mask"].sum())].tolist())


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Keep six digits: the file is for people, too."""
    return float(f"{low:.6g}"), float(f"{high:.6g}")


@main.command(cls=ReportedErrors)
@_MODEL
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def dataset(model: str, out: Path) -> None:
    """Write MODEL's calibration inputs to OUT: an array for each input, a sample at each index of its first axis.

    FILE.calibration.npz beside FILE.onnx is what RKNN calibrates with.
    """
    store, manifest = opened(model)
    feeds = calibration(manifest, tokenizer_path(store, manifest))
    arrays: dict[str, Any] = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    np.savez(out, **arrays)
    click.echo(f"{out}: {len(feeds)} samples", err=True)


if __name__ == "__main__":
    main(prog_name="python -m tools.npu_ranges")
