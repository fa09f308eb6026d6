"""What powerd costs: CPU with work and without, memory, a hint, and the way back after SIGKILL.

Bars: at most 1 % of a core at 20 Hz, 20 MB resident, and limits back within 1 s of a kill. The machine that powerd sees
is a tree of plain files with as many clocks as asked for (--clocks): a read of real sysfs takes 1 µs through a kept
descriptor, of a plain file about as long. What its decisions save is another benchmark's matter.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness

from edge_rt import same_package
from edge_rt.devices import memory
from edge_rt.power.client import HintSender, ask
from edge_rt.power.state import Hint

_POLICY = "sys/devices/system/cpu/cpufreq/policy{}"
_KHZ = (600_000, 1_000_000, 1_500_000, 2_000_000, 2_400_000)
_STEP_S = 0.05
_N_HINTS, _N_SENDERS = 100, 20


def machine(root: Path, n_clocks: int) -> None:
    """Write n_clocks cpufreq policies of one CPU each, a chip's meter and four temperature sensors."""
    files = {
        "proc/sys/kernel/random/boot_id": "00000000-0000-4000-8000-000000000000",
        "proc/stat": "".join(f"cpu{i} 100 0 100 800 0 0 0 0\n" for i in range(n_clocks)),
        "sys/class/hwmon/hwmon0/name": "ina226",
        "sys/class/hwmon/hwmon0/power1_input": "4200000",
        "sys/class/hwmon/hwmon0/in1_input": "5100",
        "sys/class/hwmon/hwmon0/curr1_input": "823",
    }
    for i in range(4):
        zone = f"sys/class/thermal/thermal_zone{i}"
        files |= {f"{zone}/type": f"cpu{i}-thermal", f"{zone}/temp": "52000"}
    for i in range(n_clocks):
        folder = _POLICY.format(i)
        files |= {
            f"{folder}/scaling_max_freq": str(_KHZ[-1]),
            f"{folder}/scaling_min_freq": str(_KHZ[0]),
            f"{folder}/cpuinfo_max_freq": str(_KHZ[-1]),
            f"{folder}/cpuinfo_min_freq": str(_KHZ[0]),
            f"{folder}/scaling_available_frequencies": " ".join(map(str, _KHZ)),
            f"{folder}/scaling_driver": "cpufreq-dt",
            f"{folder}/scaling_governor": "schedutil",
            f"{folder}/related_cpus": str(i),
            f"{folder}/affected_cpus": str(i),
        }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")


@contextmanager
def powerd(n_clocks: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start powerd on a tree of its own; yields it and the tree when it is ready."""
    with tempfile.TemporaryDirectory(prefix="ert-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        root = Path(folder)
        machine(root, n_clocks)
        (root / "c.toml").write_text(f'[power]\nenabled = true\nsocket_path = "{root / "p"}"\n')
        told.bind(str(root / "n"))
        told.settimeout(60.0)
        command = same_package.command("edge_rt.power.powerd", "--root", folder)
        process = subprocess.Popen(
            [*command, "--config", str(root / "c.toml"), "--snapshot", str(root / "snapshot")],
            env={**os.environ, "NOTIFY_SOCKET": str(root / "n")},
            stderr=subprocess.DEVNULL,
        )
        try:
            while b"READY=1" not in told.recv(4096):
                pass
            yield process, root
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def cpu_s(root: Path) -> tuple[float, int]:
    """Ask for the CPU time it has taken, and the steps it has made."""
    found = ask(str(root / "p"), "status", timeout_s=10.0)
    return float(found["cpu_s"]), int(found["n_steps"])


def busy(root: Path, seconds: float) -> tuple[float, float]:
    """Send what a decoding daemon sends; give its share of a core in per cent, and its looks a second."""
    sender = HintSender(str(root / "p"))
    (before_s, before), begun_s = cpu_s(root), time.monotonic()
    while (now_s := time.monotonic()) < begun_s + seconds:
        tpot_s = 0.02 + 0.001 * (int(now_s * 4) % 5)
        sender.send(Hint(work="decode", n_running=2, tpot_s=tpot_s, n_threads=4, sent_s=now_s))
        time.sleep(0.5)  # as often as the daemon repeats itself
    (after_s, after), took_s = cpu_s(root), time.monotonic() - begun_s
    sender.close()
    return 100 * (after_s - before_s) / took_s, (after - before) / took_s


def idle(root: Path, seconds: float) -> float:
    (before_s, _), begun_s = cpu_s(root), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_s(root)[0] - before_s) / (time.monotonic() - begun_s)


def hint_us(path: str, *, is_heard: bool) -> float:
    """Time one hint on the daemon's side, some at a time on a connection of their own: powerd bears with no flood."""
    took_s = 0.0
    for _ in range(_N_SENDERS):
        sender = HintSender(path)
        hint = Hint(work="decode", n_running=2, tpot_s=0.02, n_threads=4, sent_s=time.monotonic())
        sender.send(hint)
        begun_s = time.perf_counter()
        heard = [sender.send(hint) for _ in range(_N_HINTS)]
        took_s += time.perf_counter() - begun_s
        sender.close()
        if any(heard) is not is_heard or all(heard) is not is_heard:
            raise RuntimeError(f"powerd heard {sum(heard)} of {_N_HINTS} hints")
        time.sleep(0.05)
    return 1e6 * took_s / (_N_SENDERS * _N_HINTS)


def restored_s(n_clocks: int) -> float:
    """Kill a powerd that has set clocks, and time the restorer until all of them are back."""
    with powerd(n_clocks) as (process, root):
        limits = [root / _POLICY.format(i) / "scaling_max_freq" for i in range(n_clocks)]
        before = [limit.read_text() for limit in limits]
        sender = HintSender(str(root / "p"))
        while all(limit.read_text() == was for limit, was in zip(limits, before, strict=True)):
            sender.send(Hint(work="decode", n_running=1, tpot_s=0.01, sent_s=time.monotonic()))
            time.sleep(_STEP_S)
        sender.close()
        process.send_signal(signal.SIGKILL)
        begun_s = time.perf_counter()
        process.wait()
        command = same_package.command("edge_rt.power.restore", "--root", str(root))
        subprocess.run([*command, "--snapshot", str(root / "snapshot")], check=True, stderr=subprocess.DEVNULL)
        took_s = time.perf_counter() - begun_s
        if [limit.read_text() for limit in limits] != before:
            raise RuntimeError("a limit is not back")
        return took_s


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--clocks", type=int, default=16, help="cpufreq policies: 1 on a Pi, one a CPU on amd-pstate")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    n_clocks, n_runs = int(arguments.own.clocks), arguments.pairs(5, quick=2)
    span_s = 3.0 if arguments.quick else 20.0
    shares: list[float] = []
    rates: list[float] = []
    with powerd(n_clocks) as (process, root):
        for _ in range(n_runs):
            share, rate = busy(root, span_s)
            shares.append(share)
            rates.append(rate)
        time.sleep(3.0)  # the last hint is forgotten
        still = tuple(idle(root, span_s) for _ in range(n_runs))
        rss_mb = (memory.process_rss_bytes(process.pid).value or 0) / 1e6
        heard = tuple(hint_us(str(root / "p"), is_heard=True) for _ in range(n_runs))
    alone = tuple(hint_us("/nonexistent/p", is_heard=False) for _ in range(n_runs))
    back = tuple(restored_s(n_clocks) for _ in range(n_runs))
    print(f"{n_clocks} clocks, {min(rates):.1f} looks a second with work; files instead of a kernel\n")
    harness.finish(
        arguments,
        figures=[
            harness.Figure(name="CPU with work", unit="% of a core", samples=tuple(shares), at_most=1.0),
            harness.Figure(name="CPU without work", unit="% of a core", samples=still, at_most=0.2),
            harness.Figure(name="resident memory", unit="MB", samples=(rss_mb,), at_most=20.0),
            harness.Figure(name="a hint, on the daemon's side", unit="µs", samples=heard, at_most=100.0),
            harness.Figure(name="a hint without powerd", unit="µs", samples=alone, at_most=5.0),
            harness.Figure(name="limits back after SIGKILL", unit="s", samples=back, at_most=1.0),
        ],
        extra={"n_clocks": n_clocks, "looks_hz": rates},
    )


if __name__ == "__main__":
    main()
