"""Compare a form of a model as an NPU computes it with the float parent, and with the same file on the CPU.

    python -m tools.npu_accuracy qnn efficientnet-lite0
    python -m tools.npu_accuracy qnn pcb-defect:npu-w4a16 --data DEEPPCB --json

What is measured is the compiled model, loaded by edge_rt's own back end with `require = "npu"`: nothing is answered by
the CPU in its place. The form, and what it is made of, must be in the store (`edge_rt models pull`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import onnx
import onnxruntime
from tabulate import tabulate

from edge_rt.backends import registry
from edge_rt.backends.base import ModelFile, NpuOptions, TensorBackend, TensorOptions, TensorSession
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.hosted import HostedVendor, Limits
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.convert.unquantized import is_quantized, unquantize
from edge_rt.errors import BackendUnavailableError
from edge_rt.scheduler.forms import chip_needs
from edge_rt.tensor_types import NodePlacement
from tools.npu_inputs import MODELS, Feed
from tools.npu_judges import Figure, Outputs, judge_for
from tools.npu_ranges import ReportedErrors, opened, tokenizer_path, variant_path

_CPU = "CPUExecutionProvider"
_LIMITS = Limits(probe_s=120, compile_s=3600, load_s=600, run_s=900)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a compiled model; evidence says what computed it."""

    model: str
    backend: str
    device: str
    evidence: str
    load_s: float
    run_s: float  # a run, the median
    n_nodes: int
    n_nodes_elsewhere: int
    figures: tuple[Figure, ...]


@click.command(cls=ReportedErrors, help=(__doc__ or "").partition("\n")[0])
@click.argument("vendor")
@click.argument("model")
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="DeepPCB, for pcb-defect.")
@click.option("-n", "n_inputs", type=click.IntRange(2, 1000), default=200, show_default=True)
@click.option("--soc", default="", help="The chip, as its vendor names it.")
@click.option(
    "--cores", is_flag=True, help="Measure the cores that the vendor computes on where it has no NPU: OpenVINO's."
)
@click.option("--prefer", is_flag=True, help="Take a form of which some nodes are the CPU's, which is told.")
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, help="Of the vendor's compiler; repeat it.")
@click.option("--artifacts", type=click.Path(file_okay=False, path_type=Path), help="Keep what is compiled here.")
@click.option("--json", "as_json", is_flag=True)
def main(
    vendor: str,
    model: str,
    data: Path | None,
    n_inputs: int,
    soc: str,
    cores: bool,
    prefer: bool,
    options: tuple[str, ...],
    artifacts: Path | None,
    as_json: bool,
) -> None:
    """Print how far MODEL[:FORM] on VENDOR's NPU is from its float parent."""
    name, _, form = model.partition(":")
    if name not in MODELS:
        raise click.UsageError(f"{name} has no forms for NPUs; these have: {', '.join(MODELS)}")
    store, manifest = opened(name)
    backend = f"npu_{vendor}"
    variant = pick_variant(manifest, frozenset(), form, backend=backend)
    judge = judge_for(manifest, n=n_inputs, data=data, tokenizer=tokenizer_path(store, manifest))
    path = variant_path(store, manifest, variant.id)
    npu = NpuOptions(
        require="prefer" if cores or prefer else "npu",
        artifacts=artifacts,
        soc={backend: soc} if soc else {},
        needs=chip_needs(variant.requires) if variant.requires is not None else None,
        options={backend: _parsed(options)} if options else {},
    )
    begun_s = time.monotonic()
    session = load(backend, manifest, variant, path, npu)
    load_s = time.monotonic() - begun_s
    try:
        device = session.info.device
        given, run_s = run_all(session, judge.feeds)
        info = session.info
        if info.device != device or (cores and "cpu" not in device):
            raise ValueError(f"{device} was to be measured, and {info.device} is what answers")
    finally:
        session.close()
    answers = {
        "npu": given,
        "cpu": on_cpu(onnx.load(path), judge.feeds),
        "float": on_cpu(float_parent(store, manifest, variant), judge.feeds),
    }
    report = Report(
        model=f"{manifest.id}:{variant.id}",
        backend=info.backend,
        device=info.device,
        evidence=info.evidence,
        load_s=load_s,
        run_s=run_s,
        n_nodes=sum(part.n_nodes for part in info.placement),
        n_nodes_elsewhere=elsewhere(info.placement),
        figures=tuple(judge.figures(answers)),
    )
    click.echo(msgspec.json.encode(report).decode() if as_json else table(report))


def _parsed(options: Sequence[str]) -> dict[str, str]:
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise click.UsageError(f"--option {option}: must be NAME=VALUE")
        found[name] = value
    return found


def load(backend: str, manifest: Manifest, variant: Variant, path: Path, npu: NpuOptions) -> TensorSession:
    """Load a form on a back end that must be here. Raises BackendError."""
    file = ModelFile(model=manifest.id, variant=variant.id, path=path, quant=variant.quant)
    return patient(backend).load_tensor(file, TensorOptions(npu=npu))


def patient(name: str) -> TensorBackend:
    """Give a back end that leaves a simulator time on a busy machine. Raises BackendUnavailableError."""
    found = registry.get(name)
    if not isinstance(found, TensorBackend):
        raise BackendUnavailableError(backend=name, reason="it runs language models")
    if isinstance(found, NpuBackend) and isinstance(found.vendor, HostedVendor):
        found.vendor.limit(_LIMITS)
    return found


def run_all(session: TensorSession, feeds: Sequence[Feed]) -> tuple[list[Outputs], float]:
    """Run one feed after the other; gives the answers and the median of what a run took."""
    answers: list[Outputs] = []
    took_s = []
    for index, feed in enumerate(feeds, 1):
        begun_s = time.monotonic()
        answers.append(session.run(feed))
        took_s.append(time.monotonic() - begun_s)
        if index % 20 == 0 or index == len(feeds):
            click.echo(f"{index} of {len(feeds)} inputs, {took_s[-1]:.2f} s", err=True)
    return answers, sorted(took_s)[len(took_s) // 2]


def on_cpu(model: onnx.ModelProto, feeds: Sequence[Feed]) -> list[Mapping[str, Any]]:
    """Compute with onnxruntime's CPU kernels."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[_CPU])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, dict(feed)), strict=True)) for feed in feeds]


def float_parent(store: Store, manifest: Manifest, variant: Variant) -> onnx.ModelProto:
    """Give what a form was derived from in float: the nearest parent that is a form, without its quantisation."""
    parent = manifest.variant(variant.derived_from) or variant
    model = onnx.load(variant_path(store, manifest, parent.id))
    return unquantize(model) if is_quantized(model) else model


def elsewhere(placement: Sequence[NodePlacement]) -> int:
    """Count the nodes that are not on the device that was meant."""
    return sum(part.n_nodes for part in placement if part.reason)


def table(report: Report) -> str:
    """Draw a report for people."""
    n_there = report.n_nodes - report.n_nodes_elsewhere
    head = (
        f"{report.model} on {report.backend}:{report.device} ({report.evidence}): {n_there} of {report.n_nodes} nodes, "
        f"loaded in {report.load_s:.2f} s, a run {report.run_s:.3f} s"
    )
    rows = [(f.measure, f.of, f"{f.value:.4f}", f.n, f.data) for f in report.figures]
    return head + "\n" + tabulate(rows, ("MEASURE", "OF", "VALUE", "N", "DATA"), "plain", disable_numparse=True)


if __name__ == "__main__":
    main(prog_name="python -m tools.npu_accuracy")
