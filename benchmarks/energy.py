"""What it costs to account for energy, and whether the answers' joules add up to the meter's.

Bars: reading a meter takes at most 1 % of a core while something is computed; what answers are told they took together
differs by at most 5 % from what the meter counted while they were computed, from one stream to several models at once.

The watts are simulated, for no sensor is here: 4 W and 6 W more for each core that this process keeps busy. The model
and its engine are real. RAPL's counters are plain files, whose read takes about as long as one of sysfs.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import harness

import edge_rt
from edge_rt import config
from edge_rt.devices.base import Reading, known
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample
from edge_rt.devices.powercap import EnergyMeter
from edge_rt.devices.serial_meter import open_serial
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.monitor import EnergyMonitor
from edge_rt.power.shared import MONITORS
from edge_rt.types import Timings

_IDLE_W, _CORE_W = 4.0, 6.0
_SPEAKER = """
import sys, time
while True:
    sys.stdout.buffer.write(b"V=5.1 I=1.25 P=6.375\\n"); sys.stdout.flush(); time.sleep(0.05)
"""
_TIMINGS = Timings(
    queue_s=0.0,
    prefill_s=0.1,
    prefill_tokens=10,
    decode_s=0.2,
    decode_tokens=10,
    ttft_s=0.1,
    prefill_engine_s=0.1,
    decode_engine_s=0.2,
)


class SimulatedMeter:
    """Counts joules by the CPU time of this process."""

    name = "simulated"
    boundary: Boundary = "board"
    quality: Quality = "modelled"
    interval_s = 0.01

    def read(self, now_s: float) -> Reading[Sample]:
        return known(Sample(energy_j=_IDLE_W * now_s + _CORE_W * time.process_time()), self.name)

    def close(self) -> None: ...


def thread_share(meter: Meter, seconds: float, *, is_busy: bool) -> float:
    """Give what reading a meter takes of a core, in percent; nothing else runs in this process meanwhile."""
    monitor = EnergyMonitor(meter)
    monitor.start()
    open_answer = monitor.begin("m") if is_busy else None
    time.sleep(2.5)  # it lingers after work
    begun_s, before_s = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = 100 * (time.process_time() - before_s) / (time.monotonic() - begun_s)
    if open_answer is not None:
        monitor.abandon(open_answer)
    monitor.close()
    return share


def rapl(root: Path) -> EnergyMeter:
    for i, name in enumerate(("package-0", "dram")):
        zone = root / f"sys/class/powercap/intel-rapl:{i}"
        zone.mkdir(parents=True, exist_ok=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("123456789\n")
        (zone / "max_energy_range_uj").write_text("262143328850\n")
    return EnergyMeter(SysfsRoot(root))


def serial_share(seconds: float) -> float:
    """The same of a meter that prints 20 lines a second; who prints is another process."""
    device, port = pty.openpty()
    tty.setraw(port)
    speaker = subprocess.Popen([sys.executable, "-c", _SPEAKER], stdout=device)
    try:
        return thread_share(open_serial(f"serial:{os.ttyname(port)}:lines"), seconds, is_busy=True)
    finally:
        speaker.kill()
        speaker.wait()
        os.close(port)
        os.close(device)


def account_us(n: int = 2000) -> float:
    """Give the CPU time of one answer's account, on the caller's thread."""
    monitor = EnergyMonitor(SimulatedMeter())
    monitor.start()
    begun_s = time.thread_time()
    for _ in range(n):
        with monitor.computing("m") as measured:
            measured.energy(_TIMINGS)
    took_us = 1e6 * (time.thread_time() - begun_s) / n
    monitor.close()
    return took_us


def missing_percent(models: Sequence[edge_rt.Model], n_streams: int, seconds: float) -> tuple[float, float]:
    """Keep n_streams busy on each model; give by how much their joules miss the meter's, in percent, and the joules."""
    monitor = models[0]._energy
    assert isinstance(monitor, EnergyMonitor)
    spent: list[float] = []
    begun_s = monitor.mark()

    def stream(model: edge_rt.Model, number: int) -> None:
        while time.monotonic() - begun_s < seconds:
            answer = model.generate(f"Count from {number} on, please.", max_tokens=48, temperature=0.9)
            answer.text()
            if answer.usage is None or answer.usage.energy is None:
                raise RuntimeError("an answer does not tell what it took")
            spent.append(answer.usage.energy.total_j)

    threads = [threading.Thread(target=stream, args=(model, i)) for model in models for i in range(n_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted_j = monitor.window(begun_s, monitor.mark()).energy_j
    return 100 * abs(1 - sum(spent) / counted_j), counted_j


def main() -> None:
    arguments = harness.parse(__doc__)
    n_runs, seconds = arguments.pairs(5, quick=2), 3.0 if arguments.quick else 15.0
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        busy = tuple(thread_share(rapl(Path(folder)), seconds, is_busy=True) for _ in range(n_runs))
        idle = tuple(thread_share(rapl(Path(folder)), seconds, is_busy=False) for _ in range(n_runs))
    lines = tuple(serial_share(seconds) for _ in range(n_runs))
    each = tuple(account_us() for _ in range(n_runs))
    loaded = config.load(flags={"power.meter": "none"})
    monitor = EnergyMonitor(SimulatedMeter(), idle_w=_IDLE_W)
    monitor.start()
    # The library opens a meter by its settings; these models get the simulated one.
    MONITORS._open[loaded.config.power.meter, loaded.config.power.model_file] = monitor, 1
    missing: dict[str, list[float]] = {"one stream": [], "4 streams": [], "2 models, 2 streams each": []}
    joules: dict[str, list[float]] = {name: [] for name in missing}
    with ExitStack() as opened:
        models = [opened.enter_context(edge_rt.load(settings=loaded)) for _ in range(2)]
        for model in models:
            model.generate("warm up", max_tokens=8).text()
        for _ in range(n_runs):
            for name, chosen, n_streams in (
                ("one stream", models[:1], 1),
                ("4 streams", models[:1], 4),
                ("2 models, 2 streams each", models, 2),
            ):
                percent, counted_j = missing_percent(chosen, n_streams, seconds)
                missing[name].append(percent)
                joules[name].append(counted_j)
    harness.finish(
        arguments,
        figures=[
            harness.Figure(name="reading RAPL with work", unit="% of a core", samples=busy, at_most=1.0),
            harness.Figure(name="reading RAPL without work", unit="% of a core", samples=idle, at_most=0.2),
            harness.Figure(name="reading 20 lines a second", unit="% of a core", samples=lines, at_most=1.0),
            harness.Figure(name="the account of an answer", unit="µs", samples=each, at_most=100.0),
            *(
                harness.Figure(name=f"joules that answers miss, {name}", unit="%", samples=tuple(samples), at_most=5.0)
                for name, samples in missing.items()
            ),
        ],
        extra={"joules_simulated": joules},
    )


if __name__ == "__main__":
    main()
