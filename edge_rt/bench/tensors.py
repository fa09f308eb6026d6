"""Measures tensor models' candidates: each form on each device, in a process of its own that shows its own memory.

`python -m edge_rt.bench.tensors` is that process: it reads a Job as JSON and prints its rows, or an error of ours.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_rt import same_package
from edge_rt.backends.base import DTYPES, Accelerated, TensorSession
from edge_rt.bench.metering import Metering
from edge_rt.bench.runner import Sensors
from edge_rt.bench.samples import quantile
from edge_rt.catalog.pipelines import Classify, Detect, DetectText, Embed, FindSpeech, ReadText
from edge_rt.config import Power
from edge_rt.devices import cpu
from edge_rt.errors import BackendLoadError, BackendStepError, EdgeRtError, from_wire
from edge_rt.power.meter import open_meter
from edge_rt.tensor_types import TensorSpec
from edge_rt.worker.channel import Load, TensorLoad

_SEED = 42
_ANY = 64  # a size that nothing tells
_TEXT_TOKENS = 32
_WARM_UP = 3
_TIMEOUT_S = 900.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    load: Load
    batch_sizes: tuple[int, ...]
    n_runs: int
    power: Power = Power(meter="none")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One batch size of one candidate. Times are of a whole batch, energy_j is of one request; None: not measured."""

    variant: str
    backend: str
    device: str
    batch_size: int
    shapes: dict[str, tuple[int, ...]]
    n_runs: int
    latency_p50_s: float
    latency_p95_s: float
    latency_min_s: float
    per_s: float
    rss_bytes: int | None
    energy_j: float | None
    energy_reason: str


class _Answer(msgspec.Struct):
    rows: tuple[Row, ...] = ()
    error: tuple[str, dict[str, Any]] | None = None


def measure(
    session: TensorSession,
    load: TensorLoad,
    *,
    batch_size: int,
    n_runs: int,
    sensors: Sensors,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Row:
    """Run a loaded model n_runs times, after a few that do not count.

    Raises what running raises, and BackendStepError where the CPU has computed in the device's place.
    """
    feeds = make_feeds(session.inputs, load, batch_size)
    for _ in range(_WARM_UP):
        session.run(feeds)
    times: list[float] = []
    n_fallbacks = _n_fallbacks(session)
    mark = sensors.energy_mark()
    for _ in range(n_runs):
        begun_ns = clock_ns()
        session.run(feeds)
        times.append((clock_ns() - begun_ns) / 1e9)
    energy = sensors.energy_j(mark)
    if n_lost := _n_fallbacks(session) - n_fallbacks:
        reason = f"the CPU computed {n_lost} times in its place while it was measured"
        raise BackendStepError(reason=f"{session.info.backend}:{session.info.device}: {reason}")
    energy_j = energy.value / (n_runs * batch_size) if energy.value else None
    info = session.info
    return Row(
        variant=info.variant,
        backend=info.backend,
        device=info.device,
        batch_size=batch_size,
        shapes={name: array.shape for name, array in feeds.items()},
        n_runs=n_runs,
        latency_p50_s=quantile(times, 0.5),
        latency_p95_s=quantile(times, 0.95),
        latency_min_s=min(times),
        per_s=batch_size * n_runs / max(sum(times), 1e-9),
        rss_bytes=sensors.rss_bytes().value,
        energy_j=energy_j,
        energy_reason="" if energy_j is not None else energy.reason or "the counter did not move",
    )


def _n_fallbacks(session: TensorSession) -> int:
    return session.device_counts().n_fallbacks if isinstance(session, Accelerated) else 0


def make_feeds(specs: Sequence[TensorSpec], load: TensorLoad, batch_size: int) -> dict[str, NDArray[Any]]:
    """Make inputs as large as the model's pipeline makes them: noise, ones where it takes integers, empty states."""
    noise = np.random.default_rng(_SEED)
    states = {state.input: state.shape for state in load.state}
    feeds: dict[str, NDArray[Any]] = {}
    for spec in specs:
        dtype = DTYPES[spec.datatype]
        shape = states.get(spec.name) or _shape(spec, load.pipeline, batch_size)
        if spec.name in states:
            feeds[spec.name] = np.zeros(shape, dtype)
        elif isinstance(load.pipeline, FindSpeech) and spec.name == load.pipeline.rate_input:
            feeds[spec.name] = np.full(shape, load.pipeline.rate_hz, dtype)
        elif spec.datatype == "BYTES":
            feeds[spec.name] = np.full(shape, b"text", dtype)
        elif spec.datatype == "UINT8":
            feeds[spec.name] = noise.integers(0, 256, shape, dtype)
        else:
            feeds[spec.name] = noise.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
    return feeds


def _shape(spec: TensorSpec, pipeline: object, batch_size: int) -> tuple[int, ...]:
    """Fill in the dimensions of any size."""
    sizes: Mapping[int, int] = {}
    if isinstance(pipeline, Classify | Detect):
        image = pipeline.image
        at = (2, 3) if image.layout == "nchw" else (1, 2)
        sizes = {at[0]: image.height, at[1]: image.width, 1 if at[0] == 2 else 3: 1 if image.color == "gray" else 3}
    elif isinstance(pipeline, DetectText):
        sizes = {1: 3, 2: 640, 3: 640}
    elif isinstance(pipeline, ReadText):
        sizes = {1: 3, 2: pipeline.height, 3: pipeline.width_step}
    elif isinstance(pipeline, FindSpeech):
        sizes = {1: pipeline.context + pipeline.window}
    elif isinstance(pipeline, Embed):
        sizes = {1: _TEXT_TOKENS}
    filled = [batch_size if at == 0 and size < 0 else size for at, size in enumerate(spec.shape)]
    return tuple(sizes.get(at, _ANY) if size < 0 else size for at, size in enumerate(filled))


def takes_batches(specs: Sequence[TensorSpec], load: TensorLoad) -> bool:
    return load.max_batch > 1 and all(spec.shape[:1] == (-1,) for spec in specs)


def run_job(job: Job, sensors: Sensors | None = None) -> tuple[Row, ...]:
    """Load and measure; the child's work."""
    from edge_rt.worker.tensor_load import load_tensor_session

    cpu.prefer_big_cores()
    load = job.load.tensor or TensorLoad()
    session = load_tensor_session(job.load)
    try:
        sizes = job.batch_sizes if takes_batches(session.inputs, load) else (1,)
        with Metering(open_meter(job.power)) as metering:
            sensors = sensors or Sensors(metering=metering)
            return tuple(measure(session, load, batch_size=n, n_runs=job.n_runs, sensors=sensors) for n in sizes)
    finally:
        session.close()


def measure_apart(job: Job, *, timeout_s: float = _TIMEOUT_S, command: Sequence[str] = ()) -> tuple[Row, ...]:
    """Measure a candidate in a process of its own. Raises the error that it tells, or BackendLoadError how it ended."""
    command = command or same_package.command("edge_rt.bench.tensors")
    try:
        child = subprocess.run(
            command, input=msgspec.json.encode(job), capture_output=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as exc:
        reason = f"measuring it did not end within {timeout_s:g} s"
        raise BackendLoadError(model=job.load.model, reason=reason) from exc
    lines = child.stdout.splitlines()
    if child.returncode != 0 or not lines:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise BackendLoadError(model=job.load.model, reason=f"measuring it ended with {how}: {last[0]}")
    answer = msgspec.json.decode(lines[-1], type=_Answer)
    if answer.error is not None:
        raise from_wire(*answer.error)
    return answer.rows


def main() -> int:
    """Run as the child."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        answer = _Answer(rows=run_job(job))
    except EdgeRtError as exc:
        answer = _Answer(error=exc.to_wire())
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
