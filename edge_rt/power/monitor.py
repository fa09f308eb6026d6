"""Reads a meter on a thread of its own and tells what each answer took.

The meter is read 20 times a second while something is computed, and shortly after, and once a second otherwise; never
on a caller's thread, so a slow sensor delays nobody. What is asked of it is answered from what has been read so far.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from edge_rt.devices.base import Reading, unknown
from edge_rt.devices.energy import Window
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample
from edge_rt.power.account import EnergyAccount, Open, Part, Source
from edge_rt.tensor_types import TensorTimings
from edge_rt.types import Energy, Timings

_log = logging.getLogger(__name__)

BUSY_S: Final = 0.05
IDLE_S: Final = 1.0
_LINGER_S: Final = 1.0  # between two requests that follow each other it does not go to sleep
_RECENT_S: Final = 60.0
_QUIET: Final = 0.1  # share of the CPUs' time that others may work while idle power is learned
_MARK_S: Final = 1.0  # that mark waits at most


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerNow:
    """How things stand. power_w None: unknown, for reason; idle_w None: not learned yet.

    coverage  of the last minute, or of the time since the start
    """

    power_w: float | None
    idle_w: float | None
    coverage: float
    source: str
    boundary: Boundary
    quality: Quality
    reason: str = ""


class Measured:
    """An answer that an engine computes, from here to the end of the with statement."""

    __slots__ = ("_is_over", "_monitor", "_open")

    def __init__(self, monitor: EnergyMonitor, engine: str, n_threads: int) -> None:
        self._monitor, self._open, self._is_over = monitor, monitor.begin(engine, n_threads=n_threads), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Say that nothing more is computed for it; the first time counts."""
        if not self._is_over:
            self._is_over = True
            self._monitor.abandon(self._open)

    def energy(self, timings: Timings | TensorTimings) -> Energy | None:
        """Give what it took, once it has ended; see EnergyMonitor.end."""
        return self._monitor.end(self._open, timings)

    def broken_off(self) -> Energy | None:
        """Give what it has taken so far, where it has no end; before end."""
        return None if self._is_over else self._monitor.break_off(self._open)


class Unmeasured:
    """Stands where there is no meter: every answer's energy is unknown."""

    def computing(self, engine: str, *, n_threads: int = 1) -> Self:
        del engine, n_threads
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def end(self) -> None: ...

    def energy(self, timings: Timings | TensorTimings) -> None:
        del timings


class EnergyMonitor:
    """Any thread may ask; only the monitor's own reads the meter, which it closes in the end.

    idle_w  what is known of the machine's idle power from before; None: nothing
    load    share of all CPUs' time that was worked since it was asked last; None: not known
    """

    def __init__(
        self,
        meter: Meter,
        *,
        idle_w: float | None = None,
        load: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter, self._load, self._clock = meter, load, clock
        self._account = EnergyAccount(
            Source(meter.name, meter.boundary, meter.quality), meter.interval_s, idle_w=idle_w
        )
        self._started_s = self._read_s = clock()
        self._next_s = float("-inf")  # when the meter is read next, if nobody wakes its thread
        self._used_s = float("-inf")  # when something was computed last
        self._lock = threading.Lock()
        self._read = threading.Condition()
        self._n_reads = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="edge_rt-meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading and close the meter."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._meter.close()

    # -- what answers take -----------------------------------------------------------------------------------------

    def computing(self, engine: str, *, n_threads: int = 1) -> Measured:
        """Keep account of an answer while it is computed; each engine has a name of its own."""
        return Measured(self, engine, n_threads)

    def begin(self, engine: str, *, n_threads: int = 1) -> Open:
        """Note that an engine computes an answer; to be followed by abandon, with or without end before."""
        now_s = self._clock()
        with self._lock:
            self._used_s = now_s
            is_late = self._next_s - now_s > max(BUSY_S, self._meter.interval_s)
            answer = self._account.begin(engine, now_s, weight=float(max(1, n_threads)))
        if is_late:
            self._wake.set()
        return answer

    def end(self, answer: Open, timings: Timings | TensorTimings) -> Energy | None:
        """Give what an answer that has just ended took, by its timings; None where the meter told too little."""
        decode: Part | None = None
        if isinstance(timings, Timings):
            prefill = Part(timings.prefill_s, timings.prefill_engine_s, ends_before_s=timings.decode_s)
            decode = Part(timings.decode_s, timings.decode_engine_s)
        else:
            prefill = Part(timings.compute_s, timings.engine_s)
        with self._lock:
            return self._account.end(answer, self._clock(), prefill=prefill, decode=decode)

    def break_off(self, answer: Open) -> Energy | None:
        """Give what an answer without an end has taken; None where the meter told too little."""
        with self._lock:
            return self._account.break_off(answer, self._clock())

    def abandon(self, answer: Open) -> None:
        """Note that nothing more is computed for an answer."""
        with self._lock:
            self._used_s = self._clock()
            self._account.abandon(answer, self._used_s)

    # -- what the meter tells --------------------------------------------------------------------------------------

    def now(self) -> PowerNow:
        now_s = self._clock()
        with self._lock:
            account = self._account
            power_w = account.log.power_w(now_s)
            return PowerNow(
                power_w=power_w,
                idle_w=account.idle_w,
                coverage=account.log.window(max(self._started_s, now_s - _RECENT_S), now_s).coverage,
                source=account.source.name,
                boundary=account.source.boundary,
                quality=account.source.quality,
                reason="" if power_w is not None else account.log.reason or "the last value is too old",
            )

    def mark(self) -> float:
        """Let the meter be read at once, wait for it, and give the time of that."""
        with self._read:
            n_reads = self._n_reads
            self._wake.set()
            self._read.wait_for(lambda: self._n_reads > n_reads or self._is_closing, _MARK_S)
            return self._clock()

    def window(self, from_s: float, to_s: float) -> Window:
        """Give what is known of the energy between two moments of the monotonic clock."""
        with self._lock:
            return self._account.log.window(from_s, to_s)

    # -- the monitor's thread --------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Read once; give how long to wait until the next time."""
        with self._lock:
            is_busy = self._is_busy()
        asked_s = self._clock()
        reading = self._meter.read(asked_s)
        now_s, interval_s = (asked_s + self._clock()) / 2, self._meter.interval_s  # it was read in between
        load = None if is_busy else self._load()
        period_s, longest_s = max(BUSY_S if is_busy else IDLE_S, interval_s), max(IDLE_S, interval_s)
        with self._lock:
            self._account.log.interval_s = interval_s  # some meters show it only after a while, or are found late
            self._account.source = Source(self._meter.name, self._meter.boundary, self._meter.quality)
            # A period that has just become shorter began as the longer one.
            self._account.log.take(reading, now_s, period_s=max(period_s, min(now_s - self._read_s, longest_s)))
            if load is not None and load > _QUIET:
                self._account.disturbed(now_s)
            self._account.learn_idle(now_s)
            self._read_s = now_s
            # Something may have begun meanwhile, which found no need to wake this thread.
            wait_s = max(BUSY_S if self._is_busy() else IDLE_S, interval_s)
            self._next_s = now_s + wait_s
        with self._read:
            self._n_reads += 1
            self._read.notify_all()
        return wait_s

    def _is_busy(self) -> bool:
        return self._account.is_busy or self._clock() - self._used_s < _LINGER_S

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._wake.clear()
                self._wake.wait(self.tick())
        except Exception as exc:  # noqa: BLE001 - whose answers are computed shall not notice
            _log.exception("%s is not read any more", self._meter.name)
            gone: Reading[Sample] = unknown(self._meter.name, f"{type(exc).__name__}: {exc}")
            with self._lock:
                self._account.log.take(gone, self._clock())
        finally:
            self._meter.close()
