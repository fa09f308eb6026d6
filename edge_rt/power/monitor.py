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
from typing import Final

from edge_rt.devices.base import Reading, unknown
from edge_rt.devices.energy import Window
from edge_rt.devices.meters import Boundary, Meter, Quality, Sample
from edge_rt.power.account import EnergyAccount, Open, Part, Source
from edge_rt.types import Energy

_log = logging.getLogger(__name__)

BUSY_S: Final = 0.05
IDLE_S: Final = 1.0
_LINGER_S: Final = 1.0  # between two requests that follow each other it does not go to sleep
_RECENT_S: Final = 60.0


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


class EnergyMonitor:
    """Any thread may ask; only the monitor's own reads the meter, which it closes in the end.

    idle_w  what is known of the machine's idle power from before; None: nothing
    """

    def __init__(
        self, meter: Meter, *, idle_w: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meter, self._clock = meter, clock
        self._account = EnergyAccount(
            Source(meter.name, meter.boundary, meter.quality), meter.interval_s, idle_w=idle_w
        )
        self._busy_s = max(BUSY_S, meter.interval_s)
        self._idle_s = max(IDLE_S, meter.interval_s)
        self._started_s = self._read_s = clock()
        self._used_s = float("-inf")  # when something was computed last
        self._lock = threading.Lock()
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

    def begin(self, model: str) -> Open:
        """Note that a model computes an answer; to be followed by abandon, with or without end before."""
        now_s = self._clock()
        with self._lock:
            self._used_s = now_s
            is_late = now_s - self._read_s > self._busy_s
            answer = self._account.begin(model, now_s)
        if is_late:
            self._wake.set()
        return answer

    def end(self, answer: Open, *, prefill: Part, decode: Part | None = None) -> Energy | None:
        """Give what an answer that has just ended took; None where the meter told too little. See EnergyAccount.end."""
        with self._lock:
            return self._account.end(answer, self._clock(), prefill=prefill, decode=decode)

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

    def window(self, from_s: float, to_s: float) -> Window:
        """Give what is known of the energy between two moments of the monotonic clock."""
        with self._lock:
            return self._account.log.window(from_s, to_s)

    # -- the monitor's thread --------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Read once; give how long to wait until the next time."""
        with self._lock:
            is_busy = self._account.is_busy or self._clock() - self._used_s < _LINGER_S
        period_s = self._busy_s if is_busy else self._idle_s
        reading = self._meter.read(self._clock())
        now_s = self._clock()
        with self._lock:
            # A period that has just become shorter began as the longer one.
            self._account.log.take(reading, now_s, period_s=max(period_s, min(now_s - self._read_s, self._idle_s)))
            self._account.learn_idle(now_s)
            self._read_s = now_s
        return period_s

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
