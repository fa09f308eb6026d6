"""Nordic Power Profiler Kit II as an ampere meter, up to 1 A; power is derived with the supply's voltage.

Commands are single bytes with their arguments. GET_META_DATA (0x19) answers with lines "NAME: VALUE" that hold the
calibration of its five ranges, ended by END. In ampere mode (SET_POWER_MODE 0x11, 1) with the device switched through
(DEVICE_RUNNING_SET 0x0c, 1) AVERAGE_START (0x06) makes it send 100,000 samples a second, a little-endian uint32 each:
bits 0-13 the converter's value, 14-16 the range, 18-23 a counter. Source: Nordic's own application,
https://github.com/NordicSemiconductor/pc-nrfconnect-ppk

Every hundredth sample is taken: a thousand a second tell the mean of a board's supply, and all of them would keep a
small core busy. Their counter says when a byte was lost.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

from edge_rt.devices.meters import Quality
from edge_rt.devices.serial_meter import MeterProtocolError, Port

_STOP, _START, _RUN, _MODE, _META = b"\x07", b"\x06", b"\x0c\x01", b"\x11\x01", b"\x19"
_ADC_V: Final = 1.8 / 163840
_TAKEN: Final = 100
_N_RANGES: Final = 5
_MAX_META_BYTES: Final = 4096
_MAX_A: Final = 1.2
_CHUNK: Final = 16384
_LINE: Final = re.compile(r"(?P<name>[A-Za-z]{1,16})(?P<range>[0-4])?:\s*(?P<value>\S{1,32})", re.ASCII)
_DEFAULTS: Final = {
    "R": (1031.64, 101.65, 10.15, 0.94, 0.043),
    "GS": (1.0,) * _N_RANGES,
    "GI": (1.0,) * _N_RANGES,
    "O": (0.0,) * _N_RANGES,
    "S": (0.0,) * _N_RANGES,
    "I": (0.0,) * _N_RANGES,
    "UG": (1.0,) * _N_RANGES,
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the kit says of its ranges: by name, a value for each."""

    values: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict(_DEFAULTS))

    def amperes(self, word: int, volts: float) -> float:
        """Convert one sample."""
        at = min(word >> 14 & 0x7, _N_RANGES - 1)
        v = self.values
        raw = ((word & 0x3FFF) * 4 - v["O"][at]) * (_ADC_V / v["R"][at])
        return v["UG"][at] * (raw * (v["GS"][at] * raw + v["GI"][at]) + (v["S"][at] * volts + v["I"][at]))


def parse_metadata(text: str) -> Calibration:
    """Read the kit's calibration. Raises ValueError for what is none."""
    values = {name: list(defaults) for name, defaults in _DEFAULTS.items()}
    n_found = 0
    for line in text.split("\n"):
        found = _LINE.fullmatch(line.strip())
        if found is None or found["name"] not in values or found["range"] is None:
            continue
        value = float(found["value"])
        if not math.isfinite(value) or abs(value) > 1e9:
            raise ValueError(f"{found['name']}{found['range']} is {value:g}")
        if found["name"] == "R" and value <= 0:  # some kits were never calibrated
            continue
        values[found["name"]][int(found["range"])] = value
        n_found += 1
    if n_found < _N_RANGES:
        raise ValueError("it tells no calibration")
    return Calibration({name: tuple(row) for name, row in values.items()})


class Ppk2Dialogue:
    """volts: of the supply that the current is measured in."""

    interval_s = 0.05
    quality: Quality = "derived"

    def __init__(self, volts: float) -> None:
        if not 0.8 <= volts <= 5.5:
            raise ValueError(f"{volts:g} V is not within 0.8 and 5.5")
        self._volts = volts
        self._calibration = Calibration()
        self._rest = b""
        self._n_skip = 0
        self._counter: int | None = None

    def begin(self, port: Port) -> None:
        port.write(_STOP)
        while port.read(_CHUNK):  # what was under way
            pass
        port.write(_META)
        text = b""
        while b"END" not in text and len(text) <= _MAX_META_BYTES and (data := port.read(256)):
            text += data
        try:
            self._calibration = parse_metadata(text.decode("ascii").partition("END")[0])
        except ValueError as exc:
            raise MeterProtocolError(f"is no PPK2: {exc}") from exc
        port.write(_MODE)
        port.write(_RUN)
        port.write(_START)

    def listen(self, port: Port) -> tuple[float, ...]:
        return self.feed(port.read(_CHUNK))

    def feed(self, data: bytes) -> tuple[float, ...]:
        """Take bytes as they come; give the mean of what they hold. Raises MeterProtocolError where a byte was lost."""
        data = self._rest + data
        n_words = len(data) // 4
        self._rest = data[n_words * 4 :]
        watts: list[float] = []
        for at in range(self._n_skip, n_words, _TAKEN):
            word = int.from_bytes(data[at * 4 : at * 4 + 4], "little")
            counter = word >> 18 & 0x3F
            if self._counter is not None and (self._counter + _TAKEN) & 0x3F != counter:
                raise MeterProtocolError("its samples have a gap: the port is too slow")
            self._counter = counter
            amperes = self._calibration.amperes(word, self._volts)
            if not -0.01 <= amperes <= _MAX_A:
                raise MeterProtocolError(f"{amperes:g} A is beyond what it measures")
            watts.append(max(0.0, amperes) * self._volts)
        self._n_skip = (self._n_skip - n_words) % _TAKEN if n_words > self._n_skip else self._n_skip - n_words
        return (sum(watts) / len(watts),) if watts else ()
