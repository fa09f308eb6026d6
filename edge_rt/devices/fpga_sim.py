"""The INT4 engine in simulation, where edge_rt runs from its own checkout: right, and some million times too slow.

Its RTL runs as a program (hw/fpga/sim), which is no part of an installed package: it is looked for by name.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

from edge_rt.devices.fpga import Seen
from edge_rt.devices.fpga_ring import Caps, EnginePort, identify
from edge_rt.errors import DeviceNotFoundError

DEVICE_ID = "fpga-sim"
_HARDWARE = "hw.fpga.sim"
_MEMORY_PAGE = 4096


def look(config_name: str) -> Seen:
    """Say whether the simulator is here."""
    try:
        has_checkout = importlib.util.find_spec(_HARDWARE) is not None
    except ModuleNotFoundError:
        has_checkout = False
    if not has_checkout:
        return Seen(missing="the simulator is part of edge_rt's sources, hw/fpga, and not of the installed package")
    try:
        import_module(f"{_HARDWARE}.build").find(import_module(f"{_HARDWARE}.build").CONFIGS[config_name])
    except RuntimeError as exc:
        return Seen(missing=str(exc))
    return Seen(detail=f"the INT4 engine's RTL in Verilator, {config_name}: simulated, no figure of it is a speed")


def open_board(config_name: str) -> SimulatedBoard:
    """Compile the simulator if need be, some seconds. Raises DeviceNotFoundError."""
    if missing := look(config_name).missing:
        raise DeviceNotFoundError(device=DEVICE_ID, reason=missing, remedy="run it from a checkout with verilator")
    build = import_module(f"{_HARDWARE}.build")
    try:
        library = build.build(build.CONFIGS[config_name])
    except RuntimeError as exc:
        raise DeviceNotFoundError(device=DEVICE_ID, reason=str(exc), remedy="see hw/fpga/rtl") from exc
    return SimulatedBoard(library)


class SimulatedBoard:
    """One simulated engine."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._open: list[Any] = []
        self.caps: Caps = identify(self._port(_MEMORY_PAGE), DEVICE_ID)
        self.close()

    def allocate(self, n_bytes: int) -> EnginePort:
        port: EnginePort = self._port(n_bytes)
        return port

    def _port(self, n_bytes: int) -> Any:
        engine = import_module(f"{_HARDWARE}.engine").RtlEngine.open(self._library, n_bytes)
        self._open.append(engine)
        return import_module(f"{_HARDWARE}.port").RtlPort(engine)

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
