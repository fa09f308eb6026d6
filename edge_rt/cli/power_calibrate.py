"""`edge_rt power calibrate`: find out what this board takes at each clock, and keep it in a file."""

from __future__ import annotations

import platform
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
from tabulate import tabulate

from edge_rt import config
from edge_rt.bench.calibrating import Calibrator, Domain, MeterWatts, Plan, TypedWatts, Watts, planned_s, thinned
from edge_rt.bench.metering import Metering
from edge_rt.cli.bench_options import Progress
from edge_rt.devices import cpu, cpufreq
from edge_rt.devices.meters import Boundary, Quality
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.engine.threads import candidates
from edge_rt.errors import PowerUnknownError
from edge_rt.library_models import find_model
from edge_rt.power.calibration import DEFAULT_FILE, Calibration, write
from edge_rt.power.clock_sweep import ClockSweep
from edge_rt.power.domains import domains as power_domains
from edge_rt.power.levels import lead_of
from edge_rt.power.meter import open_meter
from edge_rt.scheduler.forms import load_message
from edge_rt.worker.tokens import load_session

_THREAD_POINTS = 3  # clocks at which fewer threads are tried
_ANY = "cpu"  # the domain's name where no clock can be set


@click.command("calibrate", short_help="Measure what this board takes at each clock.")
@click.option("-m", "--model", default="", metavar="ID[:VARIANT]", help="Model to run. [default: the default model]")
@click.option(
    "--seconds", type=click.FloatRange(0.5, 600), default=10.0, show_default=True, help="Of each phase at each clock."
)
@click.option("--points", type=click.IntRange(1, 64), default=8, show_default=True, help="Clocks to try, at most.")
@click.option(
    "--threads/--no-threads", default=True, show_default=True, help="Try fewer threads too, for half of the seconds."
)
@click.option("--idle-w", type=click.FloatRange(0.0, 1e4), help="Watts at rest, read off an instrument.")
@click.option("--active-w", type=click.FloatRange(0.0, 1e4), help="Watts while it computes, read off an instrument.")
@click.option(
    "--boundary",
    type=click.Choice(("board", "soc")),
    default="board",
    show_default=True,
    help="What the watts that are typed in are of.",
)
@click.option("--clock-hz", type=click.FloatRange(1e6, 1e11), help="The present clock, where nothing tells it.")
@click.option("--keep-clocks", is_flag=True, help="Set no clock, even where it could be set.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File to write. [default: power.model_file, else {DEFAULT_FILE}]",
)
@click.option("--progress/--no-progress", default=None, help="Say on stderr what runs. [default: on a terminal]")
@click.pass_obj
def command(
    above: config.Loaded | None,
    model: str,
    seconds: float,
    points: int,
    threads: bool,
    idle_w: float | None,
    active_w: float | None,
    boundary: Boundary,
    clock_hz: float | None,
    keep_clocks: bool,
    output: Path | None,
    progress: bool | None,
) -> None:
    """Run prefill and decode of a model at each clock and write down time and power. Let nothing else run meanwhile.

    Clocks are set as root only, and put back in the end; otherwise the present one is measured. Without a meter say
    what an instrument shows, at rest and while a model computes, with --idle-w and --active-w: the clock is kept then,
    because the watts are those of one clock.

    The file tells power where no sensor does, and tells powerd's governor which clock, and how many threads, take the
    fewest joules. Watts that are typed in are those of all threads: fewer are timed then, and none are advised.
    """
    loaded = above or config.load()
    settings = loaded.config
    if (idle_w is None) != (active_w is None):
        raise click.UsageError("--idle-w and --active-w go together")
    if idle_w is not None and active_w is not None and active_w < idle_w:
        raise click.UsageError("--active-w is less than --idle-w")
    line = Progress(progress, "edge_rt power calibrate")
    with ExitStack() as opened:
        means = _typed(idle_w, active_w, boundary) or _metered(loaded, opened)
        sweep = ClockSweep()
        why_not = "--keep-clocks" if keep_clocks else "the watts are typed in" if idle_w is not None else sweep.problem
        if why_not:
            domains = [Domain(*_present_clock(clock_hz))]
            click.echo(f"edge_rt power calibrate: at the present clock only: {why_not}", err=True)
        else:
            domains = [Domain(name, thinned(hz, points)) for name, hz in sweep.points_hz.items()]
        placement = find_model(model, settings, pull=False, progress=lambda _: None)
        session = load_session(load_message(placement, settings, force=False))
        opened.callback(session.close)
        cpu.prefer_big_cores()
        session.set_threads(len(cpu.usable_cores()))
        counts = candidates(len(cpu.usable_cores()))
        lead = domains[0] if why_not else _lead(domains)
        tried = Domain(lead.name, thinned(lead.points_hz, _THREAD_POINTS)) if threads and len(counts) > 1 else None
        plan = Plan(phase_s=seconds, idle_s=seconds, thread_phase_s=seconds / 2)
        total_s = planned_s(plan, domains, tried, counts)
        click.echo(f"edge_rt power calibrate: takes about {_minutes(total_s)}", err=True)
        calibrator = Calibrator(
            session,
            means.watts,
            plan,
            clock=None if why_not else sweep,
            announce=line.show,
        )
        with _restored(sweep):
            idle = calibrator.idle_w() if idle_w is None else idle_w
            measured = tuple(calibrator.domain(domain) for domain in domains)
            fewer = (
                calibrator.threads(tried, counts, idle_w=idle, has_watts=idle_w is None) if tried is not None else ()
            )
        line.clear()
        calibration = Calibration(
            board=cpu.board().value or cpu.model().value or platform.machine(),
            made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            boundary=means.boundary,
            quality=means.quality,
            idle_w=idle,
            domains=measured,
            utilisation=min(1.0, calibrator.utilisation),
            model=session.info.model,
            meter=means.name,
            threads=fewer,
        )
    path = output or (Path(settings.power.model_file) if settings.power.model_file else DEFAULT_FILE)
    click.echo(table(calibration), nl=False)
    write(path, calibration)
    click.echo(f"written to {path}")


@dataclass(frozen=True, slots=True)
class _Means:
    """How watts are told."""

    watts: Watts
    name: str
    boundary: Boundary
    quality: Quality


def _typed(idle_w: float | None, active_w: float | None, boundary: Boundary) -> _Means | None:
    if idle_w is None or active_w is None:
        return None
    return _Means(TypedWatts(idle_w=idle_w, active_w=active_w), "typed in", boundary, "derived")


def _metered(loaded: config.Loaded, opened: ExitStack) -> _Means:
    """Open the configured meter. Raises PowerUnknownError without one."""
    chosen = open_meter(loaded.config.power, origin=loaded.origins.get("power.meter", "default"))
    if chosen.meter is None:
        raise PowerUnknownError(source="no meter", reason=chosen.reason)
    metering, meter = opened.enter_context(Metering(chosen)), chosen.meter
    if meter.quality == "modelled":
        raise PowerUnknownError(source=meter.name, reason="is a table itself, and no sensor is here")
    return _Means(MeterWatts(metering), meter.name, meter.boundary, meter.quality)


def table(found: Calibration) -> str:
    """Draw a calibration for people."""
    rows = [
        (
            domain.name,
            f"{point.max_hz / 1e6:.0f} MHz",
            f"{1 / point.prefill_s_per_token:.1f}",
            f"{point.prefill_w:.2f}",
            f"{point.prefill_w * point.prefill_s_per_token:.4g}",
            f"{1 / point.decode_s_per_token:.1f}",
            f"{point.decode_w:.2f}",
            f"{point.decode_w * point.decode_s_per_token:.4g}",
        )
        for domain in found.domains
        for point in domain.points
    ]
    head = ("domain", "clock", "prefill t/s", "W", "J/token", "decode t/s", "W", "J/token")
    text = tabulate(rows, head, "github", colalign=("left", *("right",) * 7), disable_numparse=True)
    if found.threads:
        text += f"\n\n{_thread_table(found)}"
    what = f"{found.board}: idle {found.idle_w:.2f} W of the {found.boundary}, {found.quality} ({found.meter})"
    return f"{text}\n{what}\n"


def _thread_table(found: Calibration) -> str:
    rows = [
        (
            f"{point.max_hz / 1e6:.0f} MHz",
            str(point.n_threads),
            point.phase,
            str(point.n_streams),
            f"{point.n_streams / point.s_per_token:.1f}",
            "–" if point.power_w is None else f"{point.power_w:.2f}",
            "–" if point.power_w is None else f"{point.power_w * point.s_per_token / point.n_streams:.4g}",
        )
        for point in found.threads
    ]
    head = ("clock", "threads", "phase", "streams", "t/s", "W", "J/token")
    return tabulate(rows, head, "github", colalign=("right", "right", "left", *("right",) * 4), disable_numparse=True)


def _lead(domains: list[Domain]) -> Domain:
    """Find the clock that powerd's ladder follows, at which threads are tried."""
    name = lead_of([known for known in power_domains() if known.kind == "cpu"]).name
    return next((domain for domain in domains if domain.name == name), domains[0])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _present_clock(given_hz: float | None) -> tuple[str, tuple[float, ...]]:
    """Give the domain and the clock that it has now. Raises UsageError where nothing tells it."""
    root = SysfsRoot()
    policies = [policy for policy in cpufreq.policies(root) if policy.cur_hz.value is not None]
    if policies:
        fastest = max(policies, key=lambda policy: policy.cur_hz.value or 0.0)
        return fastest.name, (given_hz or fastest.cur_hz.value or 0.0,)
    if given_hz is not None:
        return _ANY, (given_hz,)
    for text in (root.text("proc/cpuinfo").value or "").splitlines():
        name, _, value = text.partition(":")
        if name.strip() == "cpu MHz" and value.strip().replace(".", "", 1).isdecimal():
            return _ANY, (float(value) * 1e6,)
    raise click.UsageError("nothing tells this CPU's clock: say it with --clock-hz")


@contextmanager
def _restored(sweep: ClockSweep) -> Iterator[None]:
    """Put the clocks back however it ends, by SIGTERM too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for path in sweep.restore():
            click.echo(f"edge_rt power calibrate: {path} is not back: python -m edge_rt.power.restore", err=True)
