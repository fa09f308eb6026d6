"""What devices there are and how they are, as the front process knows it: probed in children, kept for a while."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context

from edge_rt.devices import cpu, memory, thermal
from edge_rt.tensor_types import DeviceState
from edge_rt.worker.probe import probe

_log = logging.getLogger(__name__)

# Back ends on the machine's own CPU: it is always there, and its state is read here. Whether their package is installed
# their worker tells.
_ON_CPU = frozenset({"onnx_cpu"})

MAX_AGE_S = 30.0
HOT_AGE_S = 10.0  # of a device that is left for its heat: it is wanted back


def cpu_state(backend: str) -> DeviceState:
    return DeviceState(
        backend=backend,
        id="cpu",
        kind="cpu",
        features=cpu.features(),
        free_bytes=memory.available_bytes().value,
        temp_c=thermal.peak_c().value,
    )


class Probes:
    """Devices by back end. Belongs to one event loop.

    max_device_c  from which on a device is hot
    host          describes the CPU to a back end that runs there
    """

    def __init__(
        self,
        *,
        max_device_c: float = math.inf,
        probe: Callable[[str], Awaitable[tuple[DeviceState, ...]]] = probe,
        host: Callable[[str], DeviceState] = cpu_state,
        on_cpu: frozenset[str] = _ON_CPU,
    ) -> None:
        self._max_device_c = max_device_c
        self._probe, self._host, self._on_cpu = probe, host, on_cpu
        self._found: dict[str, tuple[DeviceState, ...]] = {}
        self._found_at_s: dict[str, float] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, backends: Iterable[str]) -> None:
        """Wait until each of the back ends has been probed once."""
        missing = [self._begin(b) for b in backends if b not in self._found and b not in self._on_cpu]
        if missing:
            await asyncio.wait(missing)

    def states(self, backends: Iterable[str]) -> tuple[DeviceState, ...]:
        """Give what is known now; what is old is probed again by the side."""
        now_s = asyncio.get_running_loop().time()
        states: list[DeviceState] = []
        for backend in backends:
            if backend in self._on_cpu:
                states.append(self._host(backend))
                continue
            found = self._found.get(backend, ())
            is_hot = any(device.temp_c is not None and device.temp_c >= self._max_device_c for device in found)
            if now_s - self._found_at_s.get(backend, -math.inf) >= (HOT_AGE_S if is_hot else MAX_AGE_S):
                self._begin(backend)
            states += found
        return tuple(states)

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way.values())

    def _begin(self, backend: str) -> asyncio.Task[None]:
        if backend not in self._under_way:
            task = asyncio.get_running_loop().create_task(self._look(backend), context=Context())
            self._under_way[backend] = task
            task.add_done_callback(lambda _: self._under_way.pop(backend, None))
        return self._under_way[backend]

    async def _look(self, backend: str) -> None:
        devices = await self._probe(backend)
        for device in devices:
            if device.fault and device not in self._found.get(backend, ()):
                _log.warning("back end %s: %s", backend, device.fault)
        self._found[backend] = devices
        self._found_at_s[backend] = asyncio.get_running_loop().time()
