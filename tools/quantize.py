"""Quantise ONNX models: calibrate, find what suffers, choose a form for each layer, check for mixed ranges.

    python -m tools.quantize calibrate model.onnx pictures/ --manifest model.toml --stats stats.json
    python -m tools.quantize lint      model.onnx pictures/ --manifest model.toml
    python -m tools.quantize int8      model.onnx model.int8.onnx --stats stats.json
    python -m tools.quantize layers    model.onnx pictures/ --manifest model.toml --stats stats.json
    python -m tools.quantize mixed     model.onnx small.onnx pictures/ --manifest model.toml --stats stats.json \\
        --max-error 0.02

docs/quantize.md explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import onnx
from onnx import ModelProto
from tabulate import tabulate

from edge_rt.convert.qdq import RangesFile, quantize_int8
from edge_rt.convert.unquantized import is_quantized
from edge_rt.errors import EdgeRtError
from tools.activations import Statistics
from tools.feeds import Feeds, image_input
from tools.layers import Form, Judge, Step, find_layers, measure, search
from tools.lint_ranges import MIN_LEVELS, lint
from tools.lint_scales import lint_scales

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)
_INPUTS = click.argument("inputs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
_MODEL = click.argument("model", type=_FILE)
_MANIFEST = click.option("--manifest", type=_FILE, help="Prepare pictures as this manifest's pipeline says.")
_STATS = click.option("--stats", required=True, type=_FILE, help="What `calibrate` wrote.")
_METHOD = click.option(
    "--method",
    type=click.Choice(["mse", "minmax"]),
    default="mse",
    show_default=True,
    help="A range of the least squared error, or from the least value to the greatest.",
)
_FLOAT = click.option("--float", "keep_float", metavar="NODE", multiple=True, help="Leave a node float; repeat it.")


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (EdgeRtError, ValueError, msgspec.DecodeError) as exc:
            raise click.ClickException(str(exc)) from exc


@click.group(cls=_Group, help=__doc__.partition("\n")[0], context_settings={"max_content_width": 110})
def main() -> None:
    pass


def _read(path: Path) -> ModelProto:
    """Read a model and give names to nodes that have none."""
    model = onnx.load(path)
    taken = {node.name for node in model.graph.node}
    for index, node in enumerate(model.graph.node):
        if not node.name:
            name = f"{node.op_type}_{index}"
            node.name = name if name not in taken else f"{name}_{node.output[0]}"
            taken.add(node.name)
    return model


@main.command()
@_MODEL
@_INPUTS
@_MANIFEST
@click.option("--stats", required=True, type=_OUT, help="Where to write; what is there already is added to.")
@click.option(
    "--half-life",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N",
    help="After N newer inputs an older one counts half. Without it all count alike.",
)
@click.option("--ranges", type=_OUT, help="Write the ranges too, as a manifest's recipe qdq-int8 takes them.")
@click.option("--note", default="", help="Of the ranges: what they were made from.")
@_METHOD
def calibrate(
    model: Path,
    inputs: tuple[Path, ...],
    manifest: Path | None,
    stats: Path,
    half_life: float | None,
    ranges: Path | None,
    note: str,
    method: str,
) -> None:
    """Run the float MODEL over INPUTS (.npz files, pictures, folders) and count its activations' values.

    Run it again with recent inputs to re-calibrate: the counts add up, exactly as if all had been counted at once. With
    --half-life older ones fade.
    """
    proto = _read(model)
    feeds = Feeds(inputs, proto, image_input(manifest))
    found = Statistics.collect(proto, (feeds[i] for i in range(len(feeds))))
    if stats.exists():
        before = Statistics.load(stats)
        if half_life is not None:
            before = before.fade(half_life, found.n_inputs)
        before.merge(found)
        found = before
    found.save(stats)
    click.echo(f"{stats}: {len(found.counts)} activations over {found.n_inputs:g} inputs", err=True)
    if ranges is not None:
        told = note or f"{method} over {found.n_inputs:g} inputs"
        file = RangesFile(note=told, ranges=found.ranges(method))
        ranges.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


@main.command("int8")
@_MODEL
@click.argument("out", type=_OUT)
@_STATS
@_METHOD
@_FLOAT
def int8(model: Path, out: Path, stats: Path, method: str, keep_float: tuple[str, ...]) -> None:
    """Write MODEL in 8 bit to OUT."""
    proto = _read(model)
    _check_names(proto, keep_float)
    made = quantize_int8(proto, Statistics.load(stats).ranges(method), float_nodes=keep_float, name=model.name)
    _write(made, out, model)


@main.command()
@_MODEL
@_INPUTS
@_MANIFEST
@_STATS
@_METHOD
@click.option("--form", "forms", multiple=True, type=click.Choice(["int8", "int4"]), default=("int8", "int4"))
def layers(
    model: Path, inputs: tuple[Path, ...], manifest: Path | None, stats: Path, method: str, forms: tuple[Form, ...]
) -> None:
    """Quantise one layer of MODEL at a time and print what that does to its outputs over INPUTS, the worst first.

    The error is |found - expected|² / |expected|² of the worst output.
    """
    proto = _read(model)
    judge = Judge(proto, Feeds(inputs, proto, image_input(manifest)))
    steps = measure(proto, Statistics.load(stats).ranges(method), judge, forms, _progress(proto, forms))
    table = [
        (s.layer.name, s.layer.op, s.layer.n_weights, s.form, f"{s.error:.3g}")
        for s in sorted(steps, key=lambda s: -s.error)
    ]
    click.echo(tabulate(table, ("LAYER", "OPERATOR", "WEIGHTS", "FORM", "ERROR"), "plain", disable_numparse=True))


@main.command()
@_MODEL
@click.argument("out", type=_OUT)
@_INPUTS
@_MANIFEST
@_STATS
@_METHOD
@_FLOAT
@click.option("--max-error", type=click.FloatRange(min=0), help="Give the smallest model within this error.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Give the least error within this size.")
@click.option("--form", "forms", multiple=True, type=click.Choice(["int8", "int4"]), default=("int8", "int4"))
def mixed(
    model: Path,
    out: Path,
    inputs: tuple[Path, ...],
    manifest: Path | None,
    stats: Path,
    method: str,
    keep_float: tuple[str, ...],
    max_error: float | None,
    max_bytes: int | None,
    forms: tuple[Form, ...],
) -> None:
    """Choose float, int8 or int4 for each layer of MODEL within one budget, and write that to OUT.

    Layers that the outputs depend on most, measured over INPUTS, keep more bits. A matrix of 4 bit is computed as such,
    a convolution's weights are stored in 4 bit and computed in float.
    """
    if (max_error is None) == (max_bytes is None):
        raise click.UsageError("give --max-error or --max-bytes")
    proto = _read(model)
    _check_names(proto, keep_float)
    judge = Judge(proto, Feeds(inputs, proto, image_input(manifest)))
    ranges = Statistics.load(stats).ranges(method)
    steps = measure(proto, ranges, judge, forms, _progress(proto, forms))
    steps = [step for step in steps if step.layer.name not in keep_float]
    found = search(
        proto, ranges, judge, steps, max_error=max_error, max_bytes=max_bytes, keep_float=frozenset(keep_float)
    )
    _write(found.model, out, model)
    forms_found = ", ".join(f"{n} {form}" for form, n in sorted(Counter(found.plan.values()).items()))
    click.echo(f"layers: {forms_found}; error {found.error:.3g}", err=True)
    click.echo(tabulate(list(found.plan.items()), ("LAYER", "FORM"), "plain"))


@main.command("lint")
@_MODEL
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, path_type=Path))
@_MANIFEST
@click.option("--min-levels", type=click.FloatRange(min=0), default=MIN_LEVELS, show_default=True)
@click.pass_context
def lint_command(
    ctx: click.Context, model: Path, inputs: tuple[Path, ...], manifest: Path | None, min_levels: float
) -> None:
    """Find outputs of MODEL whose parts differ so much over INPUTS that they must not share one scale.

    Prints each with the nodes to leave float (`int8 --float NODE …`), and exits with 1 if there is one. A quantised
    MODEL needs no INPUTS: its own scales tell.
    """
    proto = _read(model)
    findings: Sequence[object]
    if is_quantized(proto):
        findings = lint_scales(proto, min_levels)
    elif not inputs:
        raise click.UsageError("a float model needs INPUTS to run over")
    else:
        findings = lint(proto, Feeds(inputs, proto, image_input(manifest)), min_levels=min_levels)
    for finding in findings:
        click.echo(str(finding))
    if findings:
        ctx.exit(1)
    click.echo("no tensor has parts that are lost in one scale", err=True)


def _check_names(model: ModelProto, names: tuple[str, ...]) -> None:
    known = {node.name for node in model.graph.node}
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no node is named {unknown[0]!r}")


def _progress(model: ModelProto, forms: tuple[Form, ...]) -> Callable[[Step], None]:
    n_steps = sum(form in layer.forms for layer in find_layers(model) for form in forms)
    numbers = iter(range(1, n_steps + 1))

    def report(step: Step) -> None:
        number = next(numbers)
        if number % 10 == 0 or number == n_steps:
            click.echo(f"{number} of {n_steps}: {step.layer.name} in {step.form}, error {step.error:.3g}", err=True)

    return report


def _write(made: ModelProto, out: Path, model: Path) -> None:
    out.write_bytes(made.SerializeToString(deterministic=True))
    click.echo(f"{out}: {out.stat().st_size} bytes, {model} has {model.stat().st_size}", err=True)


if __name__ == "__main__":
    main(prog_name="python -m tools.quantize")
