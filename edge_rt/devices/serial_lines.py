"""Lines that home-made meters print: an INA219 or INA226 on a microcontroller, a line a sample.

    V=5.12 I=0.734 P=3.758        volts, amperes, watts, in any order; separated by spaces, commas or semicolons
    V=5.12,I=0.734                power is V × I then
    mV=5120 mA=734 mW=3758        the thousandth of each
    5.12,0.734,3.758              bare numbers: W alone, or V A, or V A W
    # anything                    passed over, as empty lines are

A line that is anything else, or whose P is not its V × I, is refused: a wrong shunt shows there.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Final

from edge_rt.devices.meters import Quality
from edge_rt.devices.serial_meter import MeterProtocolError, Port

MAX_LINE_BYTES: Final = 128

_NUMBER: Final = r"[+-]?(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})"
_NAMED: Final = re.compile(rf"(?P<name>mV|mA|mW|V|U|I|A|P|W)=(?P<value>{_NUMBER})", re.ASCII)
_BARE: Final = re.compile(_NUMBER, re.ASCII)
_SEPARATOR: Final = re.compile(r"\s*[,;]\s*|\s+", re.ASCII)
_UNITS: Final = {
    "V": ("v", 1.0),
    "U": ("v", 1.0),
    "mV": ("v", 1e-3),
    "I": ("a", 1.0),
    "A": ("a", 1.0),
    "mA": ("a", 1e-3),
    "P": ("w", 1.0),
    "W": ("w", 1.0),
    "mW": ("w", 1e-3),
}
_BARE_ORDERS: Final = {1: ("w",), 2: ("v", "a"), 3: ("v", "a", "w")}
_MAX_V: Final = 100.0
_MAX_A: Final = 100.0
_MAX_W: Final = 5000.0
_NOISE_W: Final = 0.05  # around nothing a shunt may read a little below
_MISMATCH: Final = (0.1, 0.05)  # share, and watts: INA chips round their power register
_MAX_BAD: Final = 20  # lines one after the other
_CHUNK: Final = 4096
_INTERVALS_S: Final = (0.05, 2.0)  # USB hands lines over in bursts
_LEARNED: Final = 0.2  # of the difference, with each line


def power_w(line: str) -> float | None:
    """Give the watts of a line; None for one to pass over. Raises ValueError saying what is wrong with it."""
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    values: dict[str, float] = {}
    parts = _SEPARATOR.split(line)
    if all(_BARE.fullmatch(part) for part in parts):
        if len(parts) not in _BARE_ORDERS:
            raise ValueError(f"{len(parts)} numbers are not W, V A or V A W")
        values = dict(zip(_BARE_ORDERS[len(parts)], map(float, parts), strict=True))
    else:
        for part in parts:
            found = _NAMED.fullmatch(part)
            if found is None:
                raise ValueError(f"{part[:20]!r} is not NAME=NUMBER")
            unit, factor = _UNITS[found["name"]]
            if unit in values:
                raise ValueError(f"{found['name']} comes twice")
            values[unit] = float(found["value"]) * factor
    return _checked(values)


def _checked(values: dict[str, float]) -> float:
    volts, amperes, watts = values.get("v"), values.get("a"), values.get("w")
    if volts is not None and not 0 <= volts <= _MAX_V:
        raise ValueError(f"{volts:g} V is not within 0 and {_MAX_V:g}")
    if amperes is not None and abs(amperes) > _MAX_A:
        raise ValueError(f"{amperes:g} A is beyond {_MAX_A:g}")
    product = volts * amperes if volts is not None and amperes is not None else None
    if watts is None:
        if product is None:
            raise ValueError("neither P nor both V and I")
        watts = product
    elif product is not None and abs(watts - product) > max(_MISMATCH[1], _MISMATCH[0] * abs(product)):
        raise ValueError(f"P = {watts:g} W is not V × I = {product:.4g} W: a wrong shunt?")
    if not -_NOISE_W <= watts <= _MAX_W:
        raise ValueError(f"{watts:g} W is not within 0 and {_MAX_W:g}: is the shunt the wrong way round?")
    return max(0.0, watts)


class LineDialogue:
    """Listens to lines. The first line after opening may be a part of one and does not count."""

    quality: Quality = "measured"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval_s = _INTERVALS_S[1]  # until it shows
        self._clock = clock
        self._heard_s: float | None = None
        self._buffer = bytearray()
        self._is_first = True
        self._is_skipping = False  # a line that is too long
        self._n_bad = 0

    def begin(self, port: Port) -> None:
        """It sends by itself."""

    def listen(self, port: Port) -> tuple[float, ...]:
        data = port.read(1)  # waits for the first byte only
        if data:
            data += port.read(min(_CHUNK, getattr(port, "in_waiting", 0)))
        return self.feed(data)

    def feed(self, data: bytes) -> tuple[float, ...]:
        """Take bytes as they come. Raises MeterProtocolError when too many lines in a row are none."""
        watts: list[float] = []
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            if self._is_first or self._is_skipping:
                self._is_first = self._is_skipping = False
                continue
            if (value := self._value(line)) is not None:
                watts.append(value)
        if watts:
            self._learn_interval(len(watts))
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer.clear()
            if not self._is_skipping:
                self._bad(f"a line has more than {MAX_LINE_BYTES} bytes")
            self._is_skipping = True
        return tuple(watts)

    def _learn_interval(self, n_lines: int) -> None:
        now_s = self._clock()
        if self._heard_s is not None:
            low, high = _INTERVALS_S
            spacing_s = min(max((now_s - self._heard_s) / n_lines, low), high)
            self.interval_s += _LEARNED * (spacing_s - self.interval_s)
        self._heard_s = now_s

    def _value(self, line: bytes) -> float | None:
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"a line has more than {MAX_LINE_BYTES} bytes")
            value = power_w(line.decode("ascii"))
        except ValueError as exc:  # UnicodeDecodeError too
            self._bad(f"{line[:40]!r}: {'not ASCII' if isinstance(exc, UnicodeDecodeError) else exc}")
            return None
        if value is not None:
            self._n_bad = 0
        return value if value is None or math.isfinite(value) else None

    def _bad(self, problem: str) -> None:
        self._n_bad += 1
        if self._n_bad >= _MAX_BAD:
            raise MeterProtocolError(f"its lines are no samples (docs/energy.md): {problem}")
