"""`edge_rt bench`: llama-bench's tests on this machine, and `bench serve`, a load on a running daemon."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, Backend, LoadOptions, ModelFile
from edge_rt.bench.report import FORMATS, Format, Machine, Writer, writer
from edge_rt.bench.runner import Plan, Runner
from edge_rt.bench.workload import cases
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.cli.bench_options import Counts, Pair, Progress, counts_option, flat
from edge_rt.cli.bench_serve import command as serve
from edge_rt.devices import cpu
from edge_rt.devices import memory as machine_memory
from edge_rt.errors import BackendUnavailableError, ModelNotPulledError
from edge_rt.worker import memory


@click.group("bench", invoke_without_command=True, short_help="measure prefill and decode as llama-bench does")
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
    default="",
    metavar="NAME",
    help="Back end, as `edge_rt devices` lists them. [default: engine.backend, else the first]",
)
@click.option("--force", is_flag=True, help="Load even if memory seems too small.")
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
    backend: str,
    force: bool,
) -> None:
    """Measure prefill (pp) and decode (tg) of bare models, without tokenizer and sampling.

    Options, table and JSON keys are llama-bench's. LIST is numbers and ranges: 1,2,4 or 128-512+128 or 1-8*2; an option
    may also be given more than once. The table goes to stdout, progress to stderr.

    `edge_rt bench serve` measures a running daemon instead.
    """
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    ctx.obj = loaded
    if ctx.invoked_subcommand is not None:
        return
    settings = loaded.config
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
    engine, detail = _backend(backend or settings.engine.backend or registry.names()[0])
    files = [_file(name, engine.name, settings) for name in models or (settings.catalog.default_model,)]
    line = Progress(progress)
    runner = Runner(
        engine,
        Plan(repetitions=repetitions, warmup=not no_warmup, delay_s=delay, kv_type=settings.engine.kv_type),
        admit=lambda file, options: None if force else _admit(engine, file, options, settings),
        announce=line.show,
    )
    machine = _machine(detail)
    swept = [name for name, values in (("n_batch", batch_size), ("n_ubatch", ubatch_size)) if _given(ctx, name, values)]
    outputs = [(writer(output, machine, swept), False)]
    if output_err != "none":
        outputs.append((writer(_format(output_err), machine, swept), True))
    _write(outputs, lambda w: w.header())
    try:
        for result in runner.run(files, tests):
            line.clear()
            _write(outputs, lambda w, result=result: w.row(result))  # type: ignore[misc]
    finally:
        line.clear()
        _write(outputs, lambda w: w.footer())


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


def _backend(name: str) -> tuple[Backend, str]:
    """Find a back end that has a device here. Raises BackendUnavailableError."""
    backend = registry.get(name)
    devices = backend.probe()
    if isinstance(devices, Absent):
        raise BackendUnavailableError(backend=name, reason=devices.reason, extra=devices.extra)
    return backend, devices[0].detail


def _file(name: str, backend: str, settings: config.Config) -> ModelFile:
    """Find a model: a path if it looks like one, else ID[:VARIANT] of the catalog. Its header is checked by now."""
    model_id, _, variant_id = name.partition(":")
    if backend == "null":
        return ModelFile(model=model_id, variant=variant_id, path=Path(model_id), quant="none")
    if "/" in name or name.endswith(".gguf"):
        path = Path(name).expanduser()
        return ModelFile(model=path.stem, variant="", path=path, quant=read_header(path).quant)
    store = Store.open(settings.catalog)
    manifest = store.get(model_id)
    variant = pick_variant(manifest, cpu.features(), variant_id or settings.model(model_id).variant)
    found = store.path(manifest, variant)
    if found is None:
        raise ModelNotPulledError(model=f"{manifest.id}:{variant.id}")
    return ModelFile(model=manifest.id, variant=variant.id, path=found, quant=variant.quant)


def _admit(backend: Backend, file: ModelFile, options: LoadOptions, settings: config.Config) -> None:
    need = backend.estimate(file, options)
    memory.check(file.model, need, machine_memory.available_bytes(), settings.worker.memory_margin_bytes)


def _machine(backend_detail: str) -> Machine:
    return Machine(
        cpu_info=cpu.model().value or platform.machine(),
        cpu_features=" ".join(sorted(cpu.features())),
        board=cpu.board().value,
        kernel=platform.release(),
        governor=cpu.governor().value,
        edge_rt_version=version("edge_rt"),
        backend_detail=backend_detail,
    )


command.add_command(serve)
