"""Real inference on a modelled board: a worker process gets the share of a CPU that the board's clock stands for.

The board's server looks 50 times a second: it takes the clock that the board's policy has, sets the worker's quota
accordingly, measures the CPU time the worker took of it, and has the board's CPUs as busy. So tokens and their times
are real, and whatever writes scaling_max_freq is felt by the worker; watts, joules and heat are modelled.

A quota stops memory as well as computing, and a real clock does not. So in decode, which waits for memory most of the
time, the quota follows the model t = stall + compute * f_max / f; the stall's share is the board's, not the worker's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal, Protocol

from edge_rt.devices.cgroup import groups
from edge_rt.devices.sysfs import SysfsRoot
from tests.plants.board import Board

Phase = Literal["idle", "prefill", "decode"]

PERIOD_S = 0.02  # shorter ones are quantised by the scheduler's own slices
_MIN_SHARE = 0.06  # the kernel takes no quota below 1 ms
_LOOK_S = 0.02
_REPAY_S = 0.1
_STALL = {"idle": 0.0, "prefill": 0.0, "decode": 0.78}  # of the time at the highest clock; plausible, not calibrated
_STALLED_ACTIVITY = 0.4  # a core that waits for memory switches less


class Quota(Protocol):
    """Limits processes to a share of n_cpus. kind says by what."""

    kind: str

    def set(self, share: float) -> None: ...

    def close(self) -> None: ...


class CgroupQuota:
    """A control group of its own, version 1 or 2. Raises OSError where it cannot be made."""

    def __init__(self, pids: list[int], n_cpus: int) -> None:
        self._n_cpus = n_cpus
        found = groups(SysfsRoot(), "cpu")
        if not found:
            raise OSError("no control group with a cpu controller")
        self.kind = f"cgroup v{found[0].version}"
        self._parent = Path("/", found[0].path)
        self._own = self._parent / f"edge_rt-board-{os.getpid()}"
        self._file = self._own / ("cpu.cfs_quota_us" if found[0].version == 1 else "cpu.max")
        self._own.mkdir(exist_ok=True)
        try:
            if found[0].version == 1:
                (self._own / "cpu.cfs_period_us").write_text(str(round(PERIOD_S * 1e6)), encoding="ascii")
                (self._own / "cpu.shares").write_text("200000", encoding="ascii")  # what else runs takes none of it
            self.set(1.0)
            for pid in pids:
                (self._own / "cgroup.procs").write_text(str(pid), encoding="ascii")
        except OSError:
            self.close()
            raise

    def set(self, share: float) -> None:
        quota_us = round(max(_MIN_SHARE, min(1.0, share)) * self._n_cpus * PERIOD_S * 1e6)
        text = str(quota_us) if self._file.name == "cpu.cfs_quota_us" else f"{quota_us} {round(PERIOD_S * 1e6)}"
        self._file.write_text(text, encoding="ascii")

    def close(self) -> None:
        for pid in (self._own / "cgroup.procs").read_text(encoding="ascii").split():
            try:
                (self._parent / "cgroup.procs").write_text(pid, encoding="ascii")
            except ProcessLookupError:
                continue  # it has ended
        self._own.rmdir()


class DutyQuota:
    """Stops and continues the processes, where no control group can be had. Coarser: 50 ms periods."""

    kind = "SIGSTOP duty cycle"
    _PERIOD_S = 0.05

    def __init__(self, pids: list[int], n_cpus: int) -> None:
        self._pids, self._share, self._is_over = pids, 1.0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, share: float) -> None:
        self._share = max(_MIN_SHARE, min(1.0, share))

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._send(signal.SIGCONT)

    def _run(self) -> None:
        while not self._is_over.wait(self._share * self._PERIOD_S):
            if self._share < 1.0:
                self._send(signal.SIGSTOP)
                self._is_over.wait((1.0 - self._share) * self._PERIOD_S)
                self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def quota(pids: list[int], n_cpus: int) -> Quota:
    """Give the best that this machine has."""
    try:
        return CgroupQuota(pids, n_cpus)
    except OSError:
        return DutyQuota(pids, n_cpus)


def share_of(phase: Phase, clock: float) -> float:
    """Give the share of its speed at the highest clock that a phase has at another, clock of 0..1 of the highest."""
    stall = _STALL[phase]
    return 1.0 / (stall + (1.0 - stall) / clock)


def activity(phase: Phase, clock: float) -> float:
    """Give how much of the time the CPUs switch while they work on a phase."""
    stall = _STALL[phase]
    stalled = stall / (stall + (1.0 - stall) / clock)
    return 1.0 - stalled * (1.0 - _STALLED_ACTIVITY)


def cpu_s(pid: int) -> float:
    """Read the CPU time of another process, to the nanosecond. Raises OSError when it has ended."""
    return time.clock_gettime((~pid << 3) | 2)


class Coupling:
    """Couples processes to a board's first policy, in the process that serves the board, until it is closed.

    n_cpus  that the processes may use at most; they stand for all the policy's CPUs
    phase   what they work on now
    cycles  of the board's clock since the beginning
    """

    def __init__(self, board: Board, lock: threading.Lock, pids: list[int], n_cpus: int) -> None:
        self._board, self._lock, self._pids, self._n_cpus = board, lock, pids, n_cpus
        self._clock = board.profile.clocks[0]
        self.quota = quota(pids, n_cpus)
        self.phase: Phase = "idle"
        self.n_looks, self.cycles, self.failure = 0, 0.0, ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the processes go. Raises RuntimeError with what went wrong meanwhile."""
        self._is_over.set()
        self._thread.join()
        self.quota.close()
        if self.failure:
            raise RuntimeError(self.failure)

    def _run(self) -> None:
        try:
            last_s, last_cpu_s, share, debt_s = time.monotonic(), self._cpu_s(), 1.0, 0.0
            while not self._is_over.wait(_LOOK_S):
                now_s, now_cpu_s, phase = time.monotonic(), self._cpu_s(), self.phase
                used_s, allowed_s = (now_cpu_s - last_cpu_s) / self._n_cpus, share * (now_s - last_s)
                with self._lock:
                    hz = self._board.hz(self._clock.name)
                    clock = hz / self._clock.points[-1][0]
                    busy = min(1.0, used_s / allowed_s)
                    self._board.load(busy, self._clock.name, activity(phase, clock))
                self.cycles += hz * (now_s - last_s)
                # The scheduler notices an empty quota at its next tick. What was taken too much is given back.
                debt_s = max(0.0, debt_s + used_s - allowed_s)
                last_s, last_cpu_s, share = now_s, now_cpu_s, share_of(phase, clock)
                self.quota.set(share - debt_s / _REPAY_S)
                self.n_looks += 1
        except Exception as error:  # noqa: BLE001 - it is raised where the coupling ends
            self.failure = f"{type(error).__name__}: {error}"

    def _cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self._pids)
