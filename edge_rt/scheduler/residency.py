"""Which models are in memory: loaded on demand, swapped when there is no room, unloaded when idle.

A request holds a lease on its model while it runs, and a model with leases is never unloaded. When another model
needs its place it drains: new requests wait, those that run finish; the models then take turns. Times are the event
loop's time().
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from edge_rt.errors import BackendLoadError, EdgeRtError, ModelTooLargeError, ShuttingDownError, from_wire
from edge_rt.scheduler.slots import Loaded, Make, ResidencyEvents, Slot, pick_victim
from edge_rt.tensor_types import TensorModelInfo
from edge_rt.types import ModelInfo
from edge_rt.worker.supervisor import ModelWorker

_log = logging.getLogger(__name__)

# After a load has failed, requests hear its error at once for this long; the next one tries again.
FAILED_PAUSE_S = 5.0

# Models load one after the other; one that has not ended after so long lets the next begin.
TURN_S = 10.0


class _Turn:
    """Holds a lock, until end at the latest."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock, self._has_ended = lock, False

    async def __aenter__(self) -> _Turn:
        await self._lock.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._lock.release()


class Residency:
    """The models in memory. Belongs to one event loop."""

    def __init__(self, *, max_loaded: int, events: ResidencyEvents) -> None:
        self.events = events
        self._max_loaded = max_loaded
        self._slots: dict[str, Slot] = {}
        self._loading = asyncio.Lock()  # models load in the order they were asked for
        self._watchers: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def add(self, model: str, make: Make, *, keep_alive_s: float) -> None:
        """Make a model known. keep_alive_s: unload it after so long without a lease; negative: never."""
        self._slots[model] = Slot(model, make, keep_alive_s)

    def limit(self, max_loaded: int) -> None:
        """Let another number of models be in memory; where it is lower, the next load makes the room."""
        self._max_loaded = max_loaded

    def keep(self, model: str, keep_alive_s: float) -> None:
        """Unload a model after another idle time; an idle one begins to wait anew."""
        slot = self._slots[model]
        slot.keep_alive_s = keep_alive_s
        self._disarm(slot)
        self._idle(slot)

    def keep_for(self, model: str, keep_alive_s: float) -> None:
        """Unload a model after another idle time, as a request asks, until it leaves memory; negative: never.

        One that is not in memory is kept as it always is.
        """
        slot = self._slots[model]
        if slot.loaded is not None:
            slot.asked_keep_alive_s = keep_alive_s
            self._disarm(slot)
            self._idle(slot)

    def slot(self, model: str) -> Slot:
        """Give a model's slot, to look at."""
        return self._slots[model]

    def late_s(self) -> float:
        """Tell for how long the supervision of workers has failed; 0 while all is well."""
        return max((slot.loaded.worker.late_s() for slot in self._slots.values() if slot.loaded), default=0.0)

    def has_room(self) -> bool:
        """Say whether one more model may be loaded without any other making room; memory is not looked at."""
        n_taken = sum(slot.loaded is not None or slot.state in {"waiting", "loading"} for slot in self._slots.values())
        return n_taken < self._max_loaded

    def lease(self, model: str) -> Lease:
        """Hold a model in memory in an `async with`, loading it first if need be.

        Raises the load's error, for FAILED_PAUSE_S also to those that come after it, or ShuttingDownError.
        """
        return Lease(self, self._slots[model])

    def lease_now(self, model: str) -> tuple[ModelWorker, Callable[[], None]] | None:
        """Hold a model that is ready; give its worker, and what ends the lease. None: it is not ready."""
        slot = self._slots[model]
        if self._closing or slot.state != "ready" or slot.loaded is None:
            return None
        loaded = self._take(slot, slot.loaded)
        return loaded.worker, partial(self.release, slot, loaded)

    async def load(self, model: str, *, force: bool = False) -> None:
        """Load a model now, an earlier failure notwithstanding. force skips the memory check."""
        slot = self._slots[model]
        slot.failure = None
        slot.force = slot.force or force
        async with self.lease(model):
            pass

    async def unload(self, model: str) -> None:
        """Let a model's requests finish and free its memory; those that wait load it again."""
        slot = self._slots[model]
        try:
            while slot.state != "unloaded":
                if slot.state in {"ready", "draining"}:
                    if slot.n_leases == 0:
                        await asyncio.wait([self._begin_unload(slot)])
                        return
                    slot.state = "draining"
                await self._change()
        except asyncio.CancelledError:  # who wanted it has left; others who want the place ask for it again
            if slot.state == "draining" and slot.loaded is not None:
                self._grant(slot, slot.loaded)
            raise

    async def close(self, drain_s: float) -> None:
        """Refuse new leases, give the running ones drain_s to end, then stop every worker."""
        self._closing = True
        for slot in self._slots.values():
            self._refuse(slot, ShuttingDownError())
            if slot.state in {"waiting", "loading"} and slot.task is not None:
                slot.task.cancel()
        try:
            async with asyncio.timeout(drain_s):
                while any(slot.n_leases for slot in self._slots.values()):
                    await self._change()
        except TimeoutError:
            n_open = sum(slot.n_leases for slot in self._slots.values())
            _log.warning("%d requests are cut off after %g s of draining", n_open, drain_s)
        for slot in self._slots.values():
            if slot.state in {"ready", "draining"}:
                self._begin_unload(slot)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def gave_up(self, slot: Slot, error: EdgeRtError) -> None:
        """Take note that a loaded model's worker died and could not be started again."""
        if slot.state in {"ready", "draining"}:
            self._forget(slot)
            self._failed(slot, error)

    # Leases.

    async def acquire(self, slot: Slot) -> Loaded:
        """Give a lease's model; release takes it back."""
        if self._closing:
            raise ShuttingDownError
        loop = asyncio.get_running_loop()
        if slot.state == "ready" and slot.loaded is not None:
            return self._take(slot, slot.loaded)
        if slot.state == "unloaded":
            if slot.failure is not None and loop.time() - slot.failed_at_s < FAILED_PAUSE_S:
                raise from_wire(*slot.failure.to_wire())
            self._begin_load(slot)
        waiter: asyncio.Future[Loaded] = loop.create_future()
        slot.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:
                self.release(slot, waiter.result())  # granted in the very moment of the cancellation
            if waiter in slot.waiters:
                slot.waiters.remove(waiter)
            if not slot.waiters and slot.state == "waiting" and slot.task is not None:
                slot.task.cancel()  # nobody is to be moved out for a client that has left
            raise

    def _take(self, slot: Slot, loaded: Loaded) -> Loaded:
        loaded.n_leases += 1
        slot.uses.add(asyncio.get_running_loop().time(), load_s=slot.load_s)
        return loaded

    def release(self, slot: Slot, loaded: Loaded) -> None:
        loaded.n_leases -= 1
        if slot.loaded is loaded:
            slot.used_at_s = asyncio.get_running_loop().time()
            self._idle(slot)
        self._notify()

    def _grant(self, slot: Slot, loaded: Loaded) -> None:
        """Open a slot: all who wait have their leases before anyone can move the model out again."""
        slot.state = "ready"
        for waiter in slot.waiters:
            if not waiter.done():
                waiter.set_result(self._take(slot, loaded))
        slot.waiters.clear()
        self._idle(slot)
        self._notify()

    def _refuse(self, slot: Slot, error: EdgeRtError) -> None:
        for waiter in slot.waiters:
            if not waiter.done():
                waiter.set_exception(from_wire(*error.to_wire()))
        slot.waiters.clear()

    def _idle(self, slot: Slot) -> None:
        if slot.n_leases == 0 and slot.state == "ready" and slot.idle_limit_s >= 0:
            loop = asyncio.get_running_loop()
            slot.idle_since_s = loop.time()
            if slot.expiry is None:
                slot.expiry = loop.call_later(slot.idle_limit_s, self._expire, slot)

    def _disarm(self, slot: Slot) -> None:
        if slot.expiry is not None:
            slot.expiry.cancel()
            slot.expiry = None

    def _expire(self, slot: Slot) -> None:
        # Leases leave the timer alone: to set it anew for each request would cost each request.
        slot.expiry = None
        if slot.n_leases == 0 and slot.state == "ready":
            loop = asyncio.get_running_loop()
            due_at_s = slot.idle_since_s + slot.idle_limit_s
            if loop.time() < due_at_s:
                slot.expiry = loop.call_at(due_at_s, self._expire, slot)
                return
            _log.info("%s was idle for %g s and is unloaded", slot.model, slot.idle_limit_s)
            self._begin_unload(slot)

    # Loading.

    def _begin_load(self, slot: Slot) -> None:
        slot.state = "waiting"
        slot.task = self._spawn(self._load(slot))
        slot.task.add_done_callback(lambda task: self._load_ended(slot, task))

    async def _load(self, slot: Slot) -> None:
        # One at a time: two loads that look at the free memory together would both find room for one.
        missing_bytes: int | None = None
        while True:
            async with _Turn(self._loading) as turn:
                if missing_bytes is None or self._could_free(slot, missing_bytes):
                    await self._make_room(slot, evict=missing_bytes is not None)
                slot.state = "loading"
                loaded, begun_at_s = Loaded(slot, self.events, self.gave_up), asyncio.get_running_loop().time()
                try:
                    loaded.described(await self._started(slot, loaded, turn))
                except ModelTooLargeError as exc:
                    missing_bytes = exc.need_bytes - exc.have_bytes
                    if not self._could_free(slot, missing_bytes):
                        raise
                    slot.state = "waiting"
                    continue
            loaded.loaded_at_s = asyncio.get_running_loop().time()
            slot.load_s = loaded.loaded_at_s - begun_at_s
            slot.loaded, slot.failure = loaded, None
            self._grant(slot, loaded)
            return

    async def _started(self, slot: Slot, loaded: Loaded, turn: _Turn) -> ModelInfo | TensorModelInfo:
        """Start a worker; one that takes very long, or for ever, does not hold up other models' loads."""
        start = asyncio.ensure_future(loaded.worker.start())
        try:
            if not (await asyncio.wait({start}, timeout=TURN_S))[0]:
                _log.warning("%s has been loading for %g s; other models need not wait for it", slot.model, TURN_S)
                turn.end()
            return await start
        except asyncio.CancelledError:
            start.cancel()
            await asyncio.wait({start})
            await loaded.worker.stop(ShuttingDownError)
            raise

    def _load_ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            slot.state = "unloaded"
            self._notify()
            if slot.waiters and not self._closing:
                self._begin_load(slot)  # they came between the cancellation and its effect
        elif (error := task.exception()) is not None:
            if not isinstance(error, EdgeRtError):
                _log.error("loading %s failed", slot.model, exc_info=error)
                error = BackendLoadError(model=slot.model, reason=f"{type(error).__name__}: {error}")
            self._failed(slot, error)

    def _failed(self, slot: Slot, error: EdgeRtError) -> None:
        _log.error("%s is not loaded: %s", slot.model, error)
        slot.state, slot.force = "unloaded", False
        slot.failure, slot.failed_at_s = error, asyncio.get_running_loop().time()
        self._refuse(slot, error)
        self._notify()

    # Making room.

    async def _make_room(self, slot: Slot, *, evict: bool = False) -> None:
        """Wait until one more model may be loaded, moving others out; evict: at least one of them."""
        others = [other for other in self._slots.values() if other is not slot]
        draining: Slot | None = None
        try:
            while evict or sum(o.loaded is not None or o.state == "loading" for o in others) >= self._max_loaded:
                leaving = next((o for o in others if o.state == "unloading"), None)
                victim = leaving or pick_victim(others, asyncio.get_running_loop().time())
                if victim is None:
                    if evict or all(o.state != "loading" for o in others):
                        return
                    await self._change()
                    continue
                if leaving is None and victim.n_leases == 0:
                    _log.info("%s makes room for %s", victim.model, slot.model)
                    self._begin_unload(victim)
                if victim.state == "unloading" and victim.task is not None:
                    await asyncio.wait([victim.task])
                    evict = False
                    continue
                if victim.state == "ready":
                    victim.state, draining = "draining", victim
                await self._change()
        finally:
            if draining is not None and draining.state == "draining" and draining.loaded is not None:
                self._grant(draining, draining.loaded)  # its place is not wanted any more

    def _could_free(self, slot: Slot, missing_bytes: int) -> bool:
        """Say whether unloading the other models might bring missing_bytes; RSS counts mapped weights too."""
        others = [other.loaded for other in self._slots.values() if other is not slot and other.loaded is not None]
        return bool(others) and sum(loaded.engine.rss_bytes for loaded in others) >= missing_bytes

    def _begin_unload(self, slot: Slot) -> asyncio.Task[None]:
        slot.state = "unloading"
        slot.task = self._spawn(self._unload(slot))
        return slot.task

    async def _unload(self, slot: Slot) -> None:
        assert slot.loaded is not None
        await slot.loaded.worker.stop(ShuttingDownError)
        self._forget(slot)
        slot.state, slot.force = "unloaded", False
        self._notify()
        if slot.waiters and not self._closing:
            self._begin_load(slot)

    def _forget(self, slot: Slot) -> None:
        slot.loaded = slot.asked_keep_alive_s = None
        self._disarm(slot)
        self.events.engine_gone(slot.model)

    # Waiting for anything to change.

    async def _change(self) -> None:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _notify(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._watchers.clear()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # Not in the context of the request that happens to cause it, whose id its log lines would carry for ever.
        task = asyncio.get_running_loop().create_task(coroutine, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Lease:
    """A model held in memory; a class, because generators take longer and each request holds one."""

    __slots__ = ("_loaded", "_residency", "_slot")

    def __init__(self, residency: Residency, slot: Slot) -> None:
        self._residency, self._slot = residency, slot

    async def __aenter__(self) -> ModelWorker:
        self._loaded = await self._residency.acquire(self._slot)
        return self._loaded.worker

    async def __aexit__(self, *_: object) -> None:
        self._residency.release(self._slot, self._loaded)
