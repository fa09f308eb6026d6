"""`edge_rt fpga`: what models would take of an FPGA's engine."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tabulate import tabulate

from edge_rt import config
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.fpga_cycles import BOARDS, MIN_INTENSITY
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu
from edge_rt.errors import BackendUnavailableError, ModelNotPulledError, UnsupportedFeatureError

if TYPE_CHECKING:
    from edge_rt.backends.fpga_onnx_cost import PlanCost

# Of the figures by their names, in JSON: what no board has run must not pass for a measurement.
_EVIDENCE = {"cycles": "projected", "engine_s": "projected", "host_s": "measured here", "cpu_s": "measured here"}


@click.group("fpga", short_help="Tell what ONNX models would take of an FPGA's engine.")
def command() -> None:
    """Tell what models would take of an FPGA's engine. docs/fpga.md tells more of it."""


def _number(_context: click.Context, _option: click.Parameter, value: float) -> float:
    if math.isnan(value):  # which is in every range
        raise click.BadParameter("nan is no number")
    return value


@command.command("plan", short_help="Show what of a model would run there, and how long.")
@click.argument("model", metavar="MODEL")
@click.option("--board", type=click.Choice(list(BOARDS)), default="kv260", show_default=True)
@click.option(
    "--intensity",
    type=click.FloatRange(min=0),
    callback=_number,
    default=MIN_INTENSITY,
    show_default=True,
    help="Multiplications per byte that crosses; products with fewer stay on the CPU.",
)
@click.option(
    "--size", type=click.IntRange(min=1), default=1, help="For sizes that the model leaves open. [default: 1]"
)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Of the CPU. [default: its big cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def plan(
    above: config.Loaded | None, model: str, board: str, intensity: float, size: int, threads: int, as_json: bool
) -> None:
    """Show which nodes of MODEL, an ONNX file or ID[:VARIANT], an FPGA's engine would compute, and which stay and why.

    No FPGA is needed. Cycles are projected by the model that tests hold to the RTL, each job by itself. What the CPU
    does beside the engine is measured here, and so is onnxruntime with the whole model: on the board itself the two
    tell what the engine is worth.
    """
    try:
        from edge_rt.backends.fpga_onnx_cost import measure
        from edge_rt.backends.fpga_onnx_plan import Rule
    except ImportError as exc:
        raise BackendUnavailableError(backend="fpga", reason=f"{exc.name} is not installed", extra="onnx") from exc
    cost = measure(
        _file((above or config.load()).config, model),
        TensorOptions(n_threads=threads),
        BOARDS[board],
        Rule(min_intensity=intensity),
        free_size=size,
    )
    click.echo(json.dumps({"evidence": _EVIDENCE, **asdict(cost)}, indent=2) if as_json else _text(cost))


def _file(settings: config.Config, name: str) -> ModelFile:
    if name.endswith(".onnx"):
        path = Path(name).expanduser()
        return ModelFile(model=path.stem, variant="", path=path, quant="")
    model_id, _, wanted = name.partition(":")
    store = Store.open(settings.catalog, os.environ)
    manifest = store.get(model_id)
    if manifest.kind != "tensor":
        raise UnsupportedFeatureError(feature=f"a plan for the language model {model_id}")
    variant = pick_variant(manifest, cpu.features(), wanted)
    if (found := store.path(manifest, variant)) is None:
        raise ModelNotPulledError(model=model_id)
    return ModelFile(model=model_id, variant=variant.id, path=found, quant=variant.quant)


def _text(cost: PlanCost) -> str:
    heads = ["node", "", "rows", "weights", "vectors", "jobs", "cycles", "ms", "use"]
    rows = [
        [
            each.label,
            each.kind,
            each.n_rows,
            each.k,
            each.n_vectors,
            each.n_jobs,
            f"{each.cycles:,.0f}",
            f"{1e3 * each.engine_s:.3f}",
        ]
        for each in cost.products
    ]
    stayed = [
        [part.n_nodes, ", ".join(f"{kind} {n}" for kind, n in part.kinds), part.reason]
        for part in cost.placement
        if part.reason
    ]
    return "\n".join(
        [
            f"projected for {cost.board}; no board has run",
            tabulate(rows, headers=heads[:-1], disable_numparse=True, colalign=["left", "left", *["right"] * 6]),
            "",
            "on the CPU",
            tabulate(stayed, tablefmt="plain", disable_numparse=True),
            "",
            f"engine, projected      {1e3 * cost.engine_s:9.2f} ms in {cost.n_starts} starts",
            f"CPU beside it, here    {1e3 * cost.host_s:9.2f} ms",
            f"onnxruntime alone, here{1e3 * cost.cpu_s:9.2f} ms",
        ]
    )
