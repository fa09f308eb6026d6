"""powerd's settings: the [power] table of the daemon's file, read with tomllib and checked here. Standard library only.

Keys and defaults are those of edge_rt.config.Power, which powerd does not import: it would bring msgspec. A test holds
the two together. Environment variables and flags of the daemon do not reach powerd.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

from edge_rt.errors import ConfigError
from edge_rt.regular import read_regular

SYSTEM_FILE: Final = "/etc/edge_rt/config.toml"
ACTUATORS: Final = ("cpufreq", "devfreq", "epp", "rapl")
_MAX_BYTES: Final = 2**20

# Least and most of each number; least is not allowed itself where it is written as an exclusive bound.
_RANGES: Final = {
    "max_w": (0.0, math.inf),
    "battery_w": (0.0, math.inf),
    "max_c": (30.0, 120.0),
    "interval_s": (0.02, 1.0),
    "ttft_slo_s": (0.0, math.inf),
    "tpot_slo_s": (0.0, math.inf),
}
_MORE_THAN_LEAST: Final = frozenset({"ttft_slo_s", "tpot_slo_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """[power] of config.example.toml, which says what each key means."""

    meter: str = "auto"
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.1
    socket_path: str = "/run/edge_rt/power.sock"
    socket_group: str = "edge_rt"
    enabled: bool = False
    force: bool = False
    actuators: tuple[str, ...] = ("cpufreq",)
    max_w: float = 0.0
    battery_w: float = 0.0
    cap_group: str = ""
    max_c: float = 80.0
    interval_s: float = 0.05
    model_file: str = ""


def find(file: str | None, environ: Mapping[str, str], system_file: str = SYSTEM_FILE) -> str | None:
    """Name the file to read: the one asked for, $EDGE_RT_CONFIG, or the system's where there is one."""
    if file or environ.get("EDGE_RT_CONFIG"):
        return file or environ["EDGE_RT_CONFIG"]
    return system_file if os.path.lexists(system_file) else None


def load(file: str | None) -> Settings:
    """Read [power] of a file; None gives the defaults. Raises ConfigError naming key, value and file."""
    if file is None:
        return Settings()
    try:
        values = tomllib.loads(read_regular(Path(file), _MAX_BYTES).decode("utf-8"))
    except OSError as exc:
        problem = f"cannot be read: {exc.strerror}"
        raise ConfigError(key="configuration file", problem=problem, origin=file) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(key="TOML", problem=str(exc), origin=file) from exc
    table = values.get("power", {})
    if not isinstance(table, dict):
        raise ConfigError(key="power", problem=f"Expected a table, got {table!r}", origin=file)
    return check(table, file)


def check(table: Mapping[str, Any], origin: str) -> Settings:
    """Check a [power] table. Raises ConfigError."""
    known = {field.name: field.default for field in fields(Settings)}
    checked: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known or known[name] is MISSING:
            problem = f"no such key; there are {', '.join(known)}"
            raise ConfigError(key=f"power.{name}", problem=problem, origin=origin)
        problem, found = _checked(name, value, known[name])
        if problem:
            raise ConfigError(key=f"power.{name}", problem=f"{problem}, got {value!r}", origin=origin)
        checked[name] = found
    return Settings(**checked)


def _checked(name: str, value: Any, default: Any) -> tuple[str, Any]:
    """Give what is wrong with a value, "" if nothing is, and the value as Settings holds it."""
    if isinstance(default, bool):
        return ("" if isinstance(value, bool) else "Expected `bool`"), value
    if isinstance(default, str):
        return ("" if isinstance(value, str) else "Expected `str`"), value
    if isinstance(default, tuple):
        if not isinstance(value, list) or any(item not in ACTUATORS for item in value):
            return f"Expected a list of {', '.join(ACTUATORS)}", value
        return "", tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "Expected `float`", value
    least, most = _RANGES[name]
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return "must be finite", value
    if number < least or number > most or (number == least and name in _MORE_THAN_LEAST):
        return f"Expected `float` {'>' if name in _MORE_THAN_LEAST else '>='} {least}" + (
            f" and <= {most}" if math.isfinite(most) else ""
        ), value
    return "", number
