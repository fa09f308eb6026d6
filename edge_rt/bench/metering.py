"""Energy of a stretch of time, by the meter that the configuration names."""

from __future__ import annotations

from typing import Final, Self

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Quality
from edge_rt.power.meter import Chosen
from edge_rt.power.monitor import EnergyMonitor, Measured, Unmeasured

_MIN_COVERAGE: Final = 0.9


class Metering:
    """Reads a meter as often as it has values, from its making to close. Without a meter all is unknown.

    source  the meter's name; boundary, quality: None without one
    """

    def __init__(self, chosen: Chosen) -> None:
        self._reason = chosen.reason
        self._monitor: EnergyMonitor | None = chosen.monitor()
        self._busy: Measured | Unmeasured = (self._monitor or Unmeasured()).computing("measurement")
        meter = chosen.meter
        self.source = "no meter" if meter is None else meter.name
        self.boundary: Boundary | None = None if meter is None else meter.boundary
        self.quality: Quality | None = None if meter is None else meter.quality
        self._interval_s = 0.0 if meter is None else meter.interval_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._busy.end()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def mark(self) -> float:
        """Begin a stretch: the meter is read at once."""
        return 0.0 if self._monitor is None else self._monitor.mark()

    def watts_since(self, mark: float) -> Reading[float]:
        """Give the mean power since mark; unknown if the meter had too few values."""
        return self._since(mark)[0]

    def joules_since(self, mark: float) -> Reading[float]:
        """Give the energy since mark; unknown as watts_since is, and for a stretch shorter than the meter's steps."""
        watts, span_s = self._since(mark)
        if self._monitor is not None and span_s < self._interval_s:
            reason = (
                f"{span_s * 1e3:.0f} ms are too short for a meter with a value every {self._interval_s * 1e3:.0f} ms"
            )
            return unknown(self.source, reason)
        return watts if watts.value is None else known(watts.value * span_s, self.source)

    def _since(self, mark: float) -> tuple[Reading[float], float]:
        if self._monitor is None:
            return unknown(self.source, self._reason or "it is closed"), 0.0
        window, now = self._monitor.window(mark, self._monitor.mark()), self._monitor.now()
        if window.mean_w is None or window.coverage < _MIN_COVERAGE:
            reason = now.reason or f"had values for {window.coverage:.0%} of the time"
            return unknown(self.source, reason), window.span_s
        return known(window.mean_w, self.source), window.span_s
