"""`edge_rt bench`: llama-bench's tests on this machine, and `bench serve`, a load on a running daemon."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import click
import msgspec

from edge_rt import config
from edge_rt.backends.base import Absent, LoadOptions, ModelFile
from edge_rt.backends.dispatch import dispatch
from edge_rt.bench.metering import Metering
from edge_rt.bench.report import FORMATS, Format, Machine, Writer, writer
from edge_rt.bench.runner import Plan, Runner, Sensors, Target
from edge_rt.bench.workload import cases
from edge_rt.catalog.store import Store, is_file_name
from edge_rt.cli.bench_options import Counts, Pair, Progress, counts_option, flat, refuse_stand_in
from edge_rt.cli.bench_serve import command as serve
from edge_rt.cli.bench_tensors import is_tensor_model
from edge_rt.cli.bench_tensors import run as run_tensors
from edge_rt.devices import cpu
from edge_rt.devices import memory as machine_memory
from edge_rt.errors import ModelNotPulledError
from edge_rt.power.meter import open_meter
from edge_rt.scheduler.forms import place
from edge_rt.version import VERSION
from edge_rt.worker import memory

_TENSOR_RUNS = 30  # batches of a tensor model, unless -r says how many


@click.group("bench", invoke_without_command=True, short_help="Measure prefill and decode as llama-bench does.")
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    metavar="MODEL",
    help="ID[:VARIANT] of the catalog, or a GGUF file's path. [default: the default model]",
)
@counts_option("-p", "--n-prompt", default="512", text="Prompt tokens to prefill (pp); 0 leaves the test out.")
@counts_option("-n", "--n-gen", default="128", text="Tokens to decode (tg); 0 leaves the test out.")
@click.option(
    "-pg", "pg", type=Pair(), multiple=True, metavar="PP,TG", help="Prefill PP tokens, then decode TG in one test."
)
@counts_option("-d", "--n-depth", default="0", text="Context tokens already there before each test.")
@counts_option("-b", "--batch-size", default="2048", least=1, text="Rows one decode call may hold.")
@counts_option("-ub", "--ubatch-size", default="512", least=1, text="Rows computed at once inside it.")
@click.option(
    "-t",
    "--threads",
    type=Counts(1),
    multiple=True,
    metavar="LIST",
    help="Threads. [default: this machine's usable big cores]",
)
@click.option(
    "-r", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True, help="Timed runs of each test."
)
@click.option("-o", "--output", type=click.Choice(FORMATS), default="md", show_default=True, help="Format on stdout.")
@click.option(
    "-oe",
    "--output-err",
    type=click.Choice((*FORMATS, "none")),
    default="none",
    show_default=True,
    help="The same results on stderr, in this format.",
)
@click.option(
    "--delay",
    type=click.FloatRange(0, 3600),
    default=0.0,
    metavar="SECONDS",
    help="Rest before each test, to cool down.",
)
@click.option("--no-warmup", is_flag=True, help="Do not run each test once untimed.")
@click.option("--progress/--no-progress", default=None, help="Say on stderr what runs. [default: on a terminal]")
@click.option(
    "--backend",
    type=click.Choice(get_args(config.Backend)),
    help="Back end; auto is the first that supports the model. [default: the configured one]",
)
@click.option("--force", is_flag=True, help="Load even if memory seems too small.")
@click.option("--save-profile", is_flag=True, help="Keep what tensor models take: `edge_rt placement` goes by it.")
@click.pass_context
def command(
    ctx: click.Context,
    models: tuple[str, ...],
    n_prompt: tuple[tuple[int, ...], ...],
    n_gen: tuple[tuple[int, ...], ...],
    pg: tuple[tuple[int, int], ...],
    n_depth: tuple[tuple[int, ...], ...],
    batch_size: tuple[tuple[int, ...], ...],
    ubatch_size: tuple[tuple[int, ...], ...],
    threads: tuple[tuple[int, ...], ...],
    repetitions: int,
    output: Format,
    output_err: str,
    delay: float,
    no_warmup: bool,
    progress: bool | None,
    backend: config.Backend | None,
    force: bool,
    save_profile: bool,
) -> None:
    """Measure prefill (pp) and decode (tg) of bare models, without tokenizer and sampling.

    Options, table and JSON keys are llama-bench's. LIST is numbers and ranges: 1,2,4 or 128-512+128 or 1-8*2; an option
    may also be given more than once. The table goes to stdout, progress to stderr.

    Of a tensor model every form is measured on every device: median and 95th percentile of a batch (-b: how large),
    inferences per second, resident memory and energy. -r is the number of batches.

    `edge_rt bench serve` measures a running daemon instead.
    """
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    ctx.obj = loaded
    if ctx.invoked_subcommand is not None:
        return
    settings = loaded.config
    line = Progress(progress)
    tensors = [name for name in models if not is_file_name(name) and is_tensor_model(name, settings)]
    if save_profile and not tensors:
        raise click.UsageError("--save-profile is for tensor models: name one with -m")
    if tensors:
        run_tensors(
            tensors,
            settings,
            backend=backend or "",
            batch_sizes=flat(batch_size) if _is_given(ctx, "batch_size") else (),
            n_runs=repetitions if _is_given(ctx, "repetitions") else _TENSOR_RUNS,
            output=output,
            save_profile=save_profile,
            force=force,
            line=line,
        )
    models = tuple(name for name in models if name not in tensors)
    if tensors and not models:
        return
    tests = cases(
        n_prompt=flat(n_prompt),
        n_gen=flat(n_gen),
        pg=pg,
        n_depth=flat(n_depth),
        n_batch=flat(batch_size),
        n_ubatch=flat(ubatch_size),
        n_threads=flat(threads) or (len(cpu.usable_cores()),),
    )
    if not tests:
        raise click.UsageError("nothing to measure: -p and -n are 0 and there is no -pg")
    targets = [_target(name, backend, settings) for name in models or (settings.catalog.default_model,)]
    ctx.with_resource(metering := Metering(open_meter(settings.power, origin=_meter_origin(loaded))))
    runner = Runner(
        Plan(repetitions=repetitions, warmup=not no_warmup, delay_s=delay, kv_type=settings.engine.kv_type),
        admit=lambda target, options: None if force else _admit(target, options, settings),
        sensors=Sensors(metering=metering),
        announce=line.show,
    )
    machine = _machine()
    swept = [name for name, values in (("n_batch", batch_size), ("n_ubatch", ubatch_size)) if _given(ctx, name, values)]
    outputs = [(writer(output, machine, swept), False)]
    if output_err != "none":
        outputs.append((writer(_format(output_err), machine, swept), True))
    _write(outputs, lambda w: w.header())
    try:
        with _big_cores(max(test.n_threads for test in tests)):
            for result in runner.run(targets, tests):
                line.clear()
                _write(outputs, lambda w, result=result: w.row(result))  # type: ignore[misc]
    finally:
        line.clear()
        _write(outputs, lambda w: w.footer())


def _meter_origin(loaded: config.Loaded) -> str:
    return loaded.origins.get("power.meter", "default")


def _is_given(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT


def _given(ctx: click.Context, name: str, values: tuple[tuple[int, ...], ...]) -> bool:
    """Tell whether a swept parameter belongs in the table: given on the command line with other than its default."""
    option = {"n_batch": "batch_size", "n_ubatch": "ubatch_size"}[name]
    default = {"n_batch": (2048,), "n_ubatch": (512,)}[name]
    source = ctx.get_parameter_source(option)
    return source is not click.core.ParameterSource.DEFAULT and flat(values) != default


def _format(name: str) -> Format:
    return next(kind for kind in FORMATS if kind == name)


def _write(outputs: list[tuple[Writer, bool]], text: Callable[[Writer], str]) -> None:
    for target, to_stderr in outputs:
        click.echo(text(target), nl=False, err=to_stderr)
        (sys.stderr if to_stderr else sys.stdout).flush()


def _target(name: str, backend: config.Backend | None, settings: config.Config) -> Target:
    """Find a model, a path if it looks like one, else ID[:VARIANT] of the catalog, and what runs it."""
    if is_file_name(name):
        path = Path(name).expanduser()
        return _on(
            backend or settings.engine.backend, ModelFile(model=path.stem, variant="", path=path, quant=""), settings
        )
    model_id, _, variant = name.partition(":")
    own = settings.model(model_id)
    own = msgspec.structs.replace(own, backend=backend or own.backend, variant=variant or own.variant)
    if (own.backend or settings.engine.backend) == "null":
        placement = place(model_id, None, own, settings, features=frozenset(), find=lambda *_: None)
    else:
        store = Store.open(settings.catalog)
        placement = place(model_id, store.get(model_id), own, settings, features=cpu.features(), find=store.path)
    if placement.path is None:
        raise ModelNotPulledError(model=model_id)
    if placement.variant_reason:
        click.echo(f"edge_rt bench: {placement.variant_reason}", err=True)
    file = ModelFile(
        model=model_id, variant=placement.variant, path=Path(placement.path or model_id), quant=placement.quant
    )
    return _on(placement.backend, file, settings)


def _on(backend: str, file: ModelFile, settings: config.Config) -> Target:
    """Find the back end as a worker does, and say on stderr if it is not the first choice."""
    found, reason = dispatch(backend, file, LoadOptions(n_ctx=1, n_seq_max=1, kv_type=settings.engine.kv_type))
    if reason:
        click.echo(f"edge_rt bench: {file.model} runs on {found.name}, because {reason}", err=True)
    devices = found.probe()
    if not isinstance(devices, Absent):
        refuse_stand_in(found.name, devices[0].evidence)
    return Target(backend=found, detail="" if isinstance(devices, Absent) else devices[0].detail, file=file)


def _admit(target: Target, options: LoadOptions, settings: config.Config) -> None:
    need = target.backend.estimate(target.file, options)
    memory.check(target.file.model, need, machine_memory.available_bytes(), settings.worker.memory_margin_bytes)


@contextmanager
def _big_cores(n_threads: int) -> Iterator[None]:
    """Keep as many threads as there are big cores off the small ones, where one would hold up all the others."""
    big, before = cpu.usable().big_cpus, os.sched_getaffinity(0)
    if n_threads <= len(big):
        cpu.prefer_big_cores()
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _machine() -> Machine:
    return Machine(
        cpu_info=cpu.model().value or platform.machine(),
        cpu_features=" ".join(sorted(cpu.features())),
        board=cpu.board().value,
        kernel=platform.release(),
        governor=cpu.governor().value,
        edge_rt_version=VERSION,
    )


command.add_command(serve)
