"""What calibrating a board has found: power and speed at each of its clocks. Standard library only: powerd reads it.

The file is JSON that `edge_rt power calibrate` writes or a person does, and it is trusted with nothing: every field is
checked, an unknown one refused.

    {"version": 1, "board": "Raspberry Pi 5", "made_at": "2026-11-30T08:00:00Z", "model": "smollm2-135m-instruct",
     "meter": "tc66 /dev/ttyACM0", "boundary": "board", "quality": "measured", "idle_w": 2.7, "utilisation": 1.0,
     "domains": [{"name": "policy0", "points": [
       {"max_hz": 1.5e9, "prefill_s_per_token": 0.0009, "decode_s_per_token": 0.021, "prefill_w": 4.1, "decode_w": 3.8}
     ]}]}

Version 2 has "threads" beside that, what both phases take on fewer threads:

    {"phase": "decode", "max_hz": 1.5e9, "n_threads": 2, "n_streams": 1, "s_per_token": 0.024, "power_w": 3.2}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

from edge_rt.devices.meters import Boundary, Quality
from edge_rt.errors import ConfigError
from edge_rt.regular import read_regular

DEFAULT_FILE: Final = Path("/var/lib/edge_rt/power.json")
VERSION: Final = 2
_VERSIONS: Final = (1, VERSION)  # the first one knew nothing of threads

Phase = Literal["prefill", "decode"]

_MAX_BYTES: Final = 2**20
_MAX_DOMAINS: Final = 64
_MAX_POINTS: Final = 256
_MAX_THREAD_POINTS: Final = 1024
_MAX_COUNT: Final = 1024
_MAX_CHARS: Final = 200
_MAX_W: Final = 1e5
_WORKING_W: Final = (1e-3, _MAX_W)  # nothing computes for 0 W: no meter was there
# Below and above, it is another unit: kHz, MHz.
_HZ: Final = (1e6, 1e11)
_S_PER_TOKEN: Final = (1e-9, 1e4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One upper clock of a domain, all other domains at their highest.

    prefill_s_per_token, decode_s_per_token  of one request alone
    prefill_w, decode_w  while nothing else runs; idle power is in them
    """

    max_hz: float
    prefill_s_per_token: float
    decode_s_per_token: float
    prefill_w: float
    decode_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedDomain:
    """points ascend by max_hz; name as in power.state.Domain, or "cpu" where the kernel lets nobody set a clock."""

    name: str
    points: tuple[Point, ...]

    def at(self, hz: float | None) -> Point:
        """Give the highest point that is not above a clock; the highest of all where the clock is not known."""
        if hz is None:
            return self.points[-1]
        below = [point for point in self.points if point.max_hz <= hz * 1.001]
        return below[-1] if below else self.points[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPoint:
    """One phase on some threads, at an upper clock of the domain that leads, all others at their highest.

    n_streams    answers that are decoded together; 1 for a prompt
    s_per_token  of each stream
    power_w      idle power is in it; None: nothing measured it
    """

    phase: Phase
    max_hz: float
    n_threads: int
    n_streams: int
    s_per_token: float
    power_w: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that is known of a board.

    made_at      UTC, ISO 8601
    model        that was run for it
    meter        that measured, or how the watts came in
    idle_w       with the daemon idle
    utilisation  share of all CPUs' time that the runs took, 0..1: what the points' power belongs to
    threads      the same with fewer threads and more streams; () where that was not measured
    """

    board: str
    made_at: str
    boundary: Boundary
    quality: Quality
    idle_w: float
    domains: tuple[CalibratedDomain, ...]
    utilisation: float = 1.0
    model: str = ""
    meter: str = ""
    threads: tuple[ThreadPoint, ...] = ()

    def domain(self, name: str) -> CalibratedDomain | None:
        return next((domain for domain in self.domains if domain.name == name), None)


def read(path: Path) -> Calibration | None:
    """Read and check a file; None where there is none. Raises ConfigError naming the place and what is wrong there."""
    try:
        raw = read_regular(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(
            key="power.model_file", problem=f"cannot be read: {exc.strerror or exc}", origin=str(path)
        ) from exc
    return parse(raw, origin=str(path))


def parse(raw: bytes, *, origin: str) -> Calibration:
    """Check a file's content. Raises ConfigError as read does."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(key="power.model_file", problem=f"is not JSON: {str(exc)[:200]}", origin=origin) from exc
    reader = _Reader(origin)
    table = reader.table(found, "", {"version", *(field.name for field in fields(Calibration))})
    if reader.number(table, "", "version", (0, 1e9)) not in _VERSIONS:
        raise reader.wrong("version", f"must be {VERSION} or less: another edge_rt made this; calibrate again")
    calibration = Calibration(
        board=reader.text(table, "", "board"),
        made_at=reader.text(table, "", "made_at"),
        boundary=reader.word(table, "", "boundary", get_args(Boundary)),
        quality=reader.word(table, "", "quality", get_args(Quality)),
        idle_w=reader.number(table, "", "idle_w", (0.0, _MAX_W)),
        utilisation=reader.number(table, "", "utilisation", (0.01, 1.0), default=1.0),
        model=reader.text(table, "", "model", default=""),
        meter=reader.text(table, "", "meter", default=""),
        domains=tuple(
            _domain(reader, entry, f"domains[{at}]")
            for at, entry in enumerate(reader.items(table, "", "domains", _MAX_DOMAINS))
        ),
        threads=tuple(
            _thread_point(reader, entry, f"threads[{at}]")
            for at, entry in enumerate(reader.items(table, "", "threads", _MAX_THREAD_POINTS, is_optional=True))
        ),
    )
    names = [domain.name for domain in calibration.domains]
    if len(set(names)) < len(names):
        raise reader.wrong("domains", "a name comes twice")
    for at, domain in enumerate(calibration.domains):
        for number, point in enumerate(domain.points):
            if min(point.prefill_w, point.decode_w) < calibration.idle_w:
                place = f"domains[{at}].points[{number}]"
                raise reader.wrong(place, f"takes less than the idle board's {calibration.idle_w:g} W")
    for at, found_point in enumerate(calibration.threads):
        if found_point.power_w is not None and found_point.power_w < calibration.idle_w:
            raise reader.wrong(f"threads[{at}]", f"takes less than the idle board's {calibration.idle_w:g} W")
    return calibration


def _domain(reader: _Reader, entry: object, place: str) -> CalibratedDomain:
    table = reader.table(entry, place, {"name", "points"})
    points = []
    for at, raw in enumerate(reader.items(table, place, "points", _MAX_POINTS)):
        here = f"{place}.points[{at}]"
        values = reader.table(raw, here, {field.name for field in fields(Point)})
        points.append(
            Point(
                max_hz=reader.number(values, here, "max_hz", _HZ),
                prefill_s_per_token=reader.number(values, here, "prefill_s_per_token", _S_PER_TOKEN),
                decode_s_per_token=reader.number(values, here, "decode_s_per_token", _S_PER_TOKEN),
                prefill_w=reader.number(values, here, "prefill_w", _WORKING_W),
                decode_w=reader.number(values, here, "decode_w", _WORKING_W),
            )
        )
    if any(low.max_hz >= high.max_hz for low, high in pairwise(points)):
        raise reader.wrong(f"{place}.points", "max_hz must rise from each to the next")
    return CalibratedDomain(name=reader.text(table, place, "name"), points=tuple(points))


def _thread_point(reader: _Reader, entry: object, place: str) -> ThreadPoint:
    values = reader.table(entry, place, {field.name for field in fields(ThreadPoint)})
    return ThreadPoint(
        phase=reader.word(values, place, "phase", get_args(Phase)),
        max_hz=reader.number(values, place, "max_hz", _HZ),
        n_threads=reader.count(values, place, "n_threads"),
        n_streams=reader.count(values, place, "n_streams"),
        s_per_token=reader.number(values, place, "s_per_token", _S_PER_TOKEN),
        power_w=None if values.get("power_w") is None else reader.number(values, place, "power_w", _WORKING_W),
    )


def encode(calibration: Calibration) -> bytes:
    """Write a calibration as parse reads it, and older ones too where it has nothing that they do not know."""
    table = asdict(calibration)
    if not calibration.threads:
        del table["threads"]
    return json.dumps({"version": VERSION if calibration.threads else 1, **table}, indent=2).encode() + b"\n"


def write(path: Path, calibration: Calibration) -> None:
    """Replace the file; who reads it meanwhile has the old one or the new one. Raises OSError.

    What read would refuse is not written: ConfigError.
    """
    raw = encode(calibration)
    parse(raw, origin="what was measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


class _Reader:
    """Takes values out of decoded JSON, each checked."""

    def __init__(self, origin: str) -> None:
        self._origin = origin

    def wrong(self, place: str, problem: str) -> ConfigError:
        return ConfigError(key=place or "power.model_file", problem=problem, origin=self._origin)

    def table(self, value: object, place: str, known: set[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(place, "must be an object")
        if unknown := sorted(value.keys() - known):
            raise self.wrong(_join(place, unknown[0][:_MAX_CHARS]), "is not known")
        return value

    def items(
        self, table: Mapping[str, Any], place: str, name: str, limit: int, *, is_optional: bool = False
    ) -> list[object]:
        value = self._get(table, place, name, [] if is_optional else None)
        if value == [] and is_optional:
            return []
        if not isinstance(value, list) or not 0 < len(value) <= limit:
            raise self.wrong(_join(place, name), f"must be a list of 1 to {limit}")
        return value

    def text(self, table: Mapping[str, Any], place: str, name: str, *, default: str | None = None) -> str:
        value = self._get(table, place, name, default)
        if not isinstance(value, str) or len(value) > _MAX_CHARS or not value.isprintable():
            raise self.wrong(_join(place, name), f"must be printable text of up to {_MAX_CHARS} characters")
        return value

    def word(self, table: Mapping[str, Any], place: str, name: str, known: tuple[str, ...]) -> Any:
        value = self._get(table, place, name, None)
        if value not in known:
            raise self.wrong(_join(place, name), f"must be one of {', '.join(known)}")
        return value

    def count(self, table: Mapping[str, Any], place: str, name: str) -> int:
        value = self._get(table, place, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
            raise self.wrong(_join(place, name), f"must be a whole number from 1 to {_MAX_COUNT}")
        return value

    def number(
        self,
        table: Mapping[str, Any],
        place: str,
        name: str,
        within: tuple[float, float],
        *,
        default: float | None = None,
    ) -> float:
        value = self._get(table, place, name, default)
        low, high = within
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # which no NaN is, and an integer may be beyond what is a float
            raise self.wrong(_join(place, name), f"must be a number from {low:g} to {high:g}")
        return float(value)

    def _get(self, table: Mapping[str, Any], place: str, name: str, default: object) -> Any:
        value = table.get(name, default)
        if value is None:
            raise self.wrong(_join(place, name), "is missing")
        return value


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
