"""What devices there are and how they are, as the front process knows it: read again while they are in use.

The machine's own CPU is read here, a vendor's back end in a child process, which may take long: then it is read more
rarely. Where nobody asks for devices none is read, and no child stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextvars import Context
from dataclasses import replace

from edge_rt import config
from edge_rt.devices import cpu, memory, thermal
from edge_rt.scheduler.placement import is_hot
from edge_rt.tensor_types import DeviceState
from edge_rt.worker.probe import ProbeChildren

_log = logging.getLogger(__name__)

# Back ends on the machine's own CPU: it is always there, and its state is read here. Whether their package is installed
# their worker tells.
_ON_CPU = frozenset({"onnx_cpu"})

WATCHED_S = 60.0  # a back end that nobody has asked for so long is not read any more
COST_FACTOR = 20.0  # readings by a child may take a twentieth of the time


def cpu_state(backend: str) -> DeviceState:
    return DeviceState(
        backend=backend,
        id="cpu",
        kind="cpu",
        features=cpu.features(),
        free_bytes=memory.available_bytes().value,
        temp_c=thermal.peak_c().value,
    )


def make_probes(settings: config.Placement) -> Probes:
    return Probes(max_device_c=settings.max_device_c, cool_by_c=settings.cool_by_c, every_s=settings.probe_s)


class Probes:
    """Devices by back end. Belongs to one event loop, whose time() is the clock.

    max_device_c, cool_by_c  see placement.is_hot
    every_s  between two readings of a back end, at least
    host     describes the CPU to a back end that runs there
    """

    def __init__(
        self,
        *,
        max_device_c: float = math.inf,
        cool_by_c: float = 0.0,
        every_s: float = 2.0,
        probe: Callable[[str], Awaitable[tuple[DeviceState, ...]]] | None = None,
        host: Callable[[str], DeviceState] = cpu_state,
        on_cpu: frozenset[str] = _ON_CPU,
    ) -> None:
        self._max_device_c, self._cool_by_c, self._every_s = max_device_c, cool_by_c, every_s
        self._children = ProbeChildren()
        self._probe, self._host, self._on_cpu = probe or self._children.read, host, on_cpu
        self._found: dict[str, tuple[DeviceState, ...]] = {}
        self._due_at_s: dict[str, float] = {}  # of the next reading
        self._asked_at_s: dict[str, float] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[], None]] = []

    def configure(self, settings: config.Placement) -> None:
        """Judge heat, and read, by other settings from the next reading on."""
        self._max_device_c, self._cool_by_c = settings.max_device_c, settings.cool_by_c
        self._every_s = settings.probe_s

    def listen(self, listener: Callable[[], None]) -> None:
        """Call listener after each reading."""
        self._listeners.append(listener)

    async def ensure(self, backends: Iterable[str]) -> None:
        """Wait until each of the back ends has been probed once."""
        missing = [self._begin(b) for b in backends if b not in self._found and b not in self._on_cpu]
        if missing:
            await asyncio.wait(missing)

    def states(self, backends: Iterable[str]) -> tuple[DeviceState, ...]:
        """Give what is known now; while it is asked for, it is read again every so often."""
        now_s = asyncio.get_running_loop().time()
        states: list[DeviceState] = []
        for backend in backends:
            self._asked_at_s[backend] = now_s
            if backend in self._on_cpu and now_s >= self._due_at_s.get(backend, -math.inf):
                self._take(backend, (self._host(backend),), took_s=0.0)
            states += self._found.get(backend, ())
        if states and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.get_running_loop().create_task(self._watch(), context=Context())
        return tuple(states)

    async def close(self) -> None:
        tasks = [*self._under_way.values(), *((self._watcher,) if self._watcher is not None else ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._children.end()

    async def _watch(self) -> None:
        """Read what is due, until nobody has asked for anything for a while."""
        while True:
            now_s = asyncio.get_running_loop().time()
            watched = [b for b, at_s in self._asked_at_s.items() if now_s - at_s < WATCHED_S]
            if not watched:
                await self._children.end()
                return
            for backend in watched:
                if now_s < self._due_at_s.get(backend, -math.inf):
                    continue
                if backend in self._on_cpu:
                    self._take(backend, (self._host(backend),), took_s=0.0)
                else:
                    self._begin(backend)
            due_at_s = min((self._due_at_s[b] for b in watched if b not in self._under_way), default=math.inf)
            await asyncio.sleep(min(due_at_s - now_s, self._every_s))

    def _begin(self, backend: str) -> asyncio.Task[None]:
        if backend not in self._under_way:
            task = asyncio.get_running_loop().create_task(self._look(backend), context=Context())
            self._under_way[backend] = task
            task.add_done_callback(lambda _: self._under_way.pop(backend, None))
        return self._under_way[backend]

    async def _look(self, backend: str) -> None:
        begun_at_s = asyncio.get_running_loop().time()
        devices = await self._probe(backend)
        if backend not in self._found:
            begun_at_s = asyncio.get_running_loop().time()  # the first one starts the child, later ones do not
        for device in devices:
            if device.fault and device.fault not in {known.fault for known in self._found.get(backend, ())}:
                _log.warning("back end %s: %s", backend, device.fault)
        self._take(backend, devices, took_s=asyncio.get_running_loop().time() - begun_at_s)

    def _take(self, backend: str, devices: tuple[DeviceState, ...], *, took_s: float) -> None:
        """Keep a reading. What is hot must have cooled by a margin before it is not."""
        were_hot = {known.id for known in self._found.get(backend, ()) if known.is_hot}
        self._found[backend] = tuple(
            replace(
                device,
                is_hot=is_hot(
                    device.temp_c,
                    was_hot=device.id in were_hot,
                    max_device_c=self._max_device_c,
                    cool_by_c=self._cool_by_c,
                ),
            )
            for device in devices
        )
        self._due_at_s[backend] = asyncio.get_running_loop().time() + max(self._every_s, took_s * COST_FACTOR)
        for listener in self._listeners:
            listener()
