"""powerd's meter for those who may not read the sensors: RAPL's counters are root's, and so is a Pi's power chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast, get_args

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.errors import DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.power.client import ask

INTERVAL_S: Final = 0.2  # powerd counts more often than it is asked

_TIMEOUT_S: Final = 0.2
_SLACK_S: Final = 0.02
_MAX_J: Final = 1e15
_MAX_S: Final = 1e9

Ask = Callable[[str], Mapping[str, Any]]


def powerd_name(name: str) -> str:
    """Give the name of a meter of powerd's, whose own name this is."""
    return f"powerd's {name[:80]}" if name.isprintable() else "powerd's meter"


def ask_power(path: str) -> Mapping[str, Any]:
    return ask(path, "power", timeout_s=_TIMEOUT_S)


class PowerdMeter:
    """A Meter. reason says why powerd has none to offer; "" if it has. It is asked once when this is made."""

    def __init__(self, path: str, *, ask: Ask = ask_power) -> None:
        self._path, self._ask = path, ask
        self._last: tuple[float, float] | None = None  # at_s and covered_s
        self.name, self.reason = "powerd", ""
        self.boundary: Boundary = "board"
        self.quality: Quality = "measured"
        self.interval_s = INTERVAL_S
        try:
            told = self._ask(path)
        except (DaemonUnreachableError, DaemonLostError, InvalidRequestError) as exc:
            self.reason = str(exc)
            return
        name, boundary, quality = told.get("meter"), told.get("boundary"), told.get("quality")
        if not isinstance(name, str) or boundary not in get_args(Boundary) or quality not in get_args(Quality):
            self.reason = f"powerd has no meter: {str(told.get('reason', ''))[:200]}"
            return
        self.name = powerd_name(name)
        self.boundary, self.quality = cast("Boundary", boundary), cast("Quality", quality)
        self.interval_s = max(INTERVAL_S, _number(told, "interval_s", 60.0) or 0.0)

    def read(self, now_s: float) -> Reading[Sample]:
        """Ask powerd. Unknown once after a time in which its own meter was silent, which its joules leave out."""
        try:
            told = self._ask(self._path)
        except (DaemonUnreachableError, DaemonLostError, InvalidRequestError) as exc:
            self._last = None
            return unknown(self.name, str(exc))
        at_s, covered_s = _number(told, "at_s", _MAX_S), _number(told, "covered_s", _MAX_S)
        energy_j = _number(told, "energy_j", _MAX_J)
        if at_s is None or covered_s is None or energy_j is None:
            self._last = None
            return unknown(self.name, str(told.get("reason") or "it tells no joules")[:200])
        last, self._last = self._last, (at_s, covered_s)
        if last is not None and (covered_s - last[1]) < (at_s - last[0]) - _SLACK_S:
            return unknown(self.name, str(told.get("reason") or "its meter was silent for a while")[:200])
        age_s = max(0.0, now_s - at_s)
        power_w = None if told.get("reason") else _number(told, "power_w", 1e5)  # with one its meter is silent now
        return known(Sample(energy_j=energy_j, power_w=power_w, age_s=age_s), self.name)

    def close(self) -> None: ...


def _number(told: Mapping[str, Any], name: str, most: float) -> float | None:
    value = told.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= most else None
