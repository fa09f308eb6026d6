"""Ports of serial NPUs, as the configuration names them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_rt import config
from edge_rt.errors import ConfigError

NAME: Final = "npu_serial"

_SPEC: Final = re.compile(r"(?P<port>/[^\0@]{1,200})(@(?P<baud>[0-9]{4,8}))?")
_BAUD: Final = 921_600


@dataclass(frozen=True, slots=True)
class PortSpec:
    """A port as the configuration names it."""

    port: str
    baud: int = _BAUD

    @property
    def id(self) -> str:
        return Path(self.port).name


class PortWatch:
    """Says of a port, each time it is called, whether it has been plugged in since the last time."""

    def __init__(self, port: str, exists: Callable[[str], bool] = os.path.exists) -> None:
        self._port, self._exists = port, exists
        self._was_there = True

    def __call__(self) -> bool:
        was_there, self._was_there = self._was_there, self._exists(self._port)
        return self._was_there and not was_there


def parse_port(text: str) -> PortSpec:
    """Read PORT or PORT@BAUD. Raises ConfigError."""
    found = _SPEC.fullmatch(text)
    if found is None:
        problem = f"{text[:80]!r} is no port such as /dev/ttyACM0 or /dev/ttyUSB0@921600"
        raise ConfigError(key="npu.serial_ports", problem=problem, origin="the configuration")
    return PortSpec(found["port"], int(found["baud"] or _BAUD))


def configured_ports() -> tuple[PortSpec, ...]:
    return tuple(parse_port(text) for text in config.load().config.npu.serial_ports)
