"""One model's worker, kept alive: restarted when it dies, its unanswered requests asked once more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import Context
from typing import Protocol, TypeVar

from edge_rt import config
from edge_rt.errors import BackendLoadError, EdgeRtError, WorkerLostError
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorModelInfo, TensorRequest
from edge_rt.types import Chunk, EngineStats, GenerateRequest, ModelInfo, PinAction, PinnedPrefix
from edge_rt.worker.channel import Load
from edge_rt.worker.process import Launch, OnReply, Process

_log = logging.getLogger(__name__)

MAX_LOAD_DEATHS = 3
STABLE_S = 30.0  # a worker that lived this long owes nothing to its earlier deaths
_MAX_BACKOFF_S = 15.0

T = TypeVar("T")


def backoff_s(n_deaths: int) -> float:
    """Give the pause before the next start: none after the first death, then 0.5 s, doubling."""
    return min(0.5 * 2.0 ** (n_deaths - 2), _MAX_BACKOFF_S) if n_deaths > 1 else 0.0


def _on(info: ModelInfo | TensorModelInfo) -> str:
    evidence = f" ({info.evidence})" if info.evidence != "device" else ""
    return f"{info.backend}{evidence}" + (f", because {info.backend_reason}" if info.backend_reason else "")


class WorkerEvents(Protocol):
    """What a worker tells its owner; called on the event loop."""

    def stats(self, stats: EngineStats) -> None: ...

    def described(self, info: ModelInfo | TensorModelInfo) -> None:
        """Hear what the model is from now on, after a restart or where its device was lost or is back."""
        ...

    def restarting(self, reason: str) -> None: ...

    def down(self, error: EdgeRtError) -> None:
        """Hear that it could not be started again and has given up."""
        ...


class ModelWorker(Protocol):
    """What a worker is to those above it; Worker is one."""

    @property
    def pid(self) -> int | None: ...

    def late_s(self) -> float:
        """Tell for how long it should have been given up for want of progress; 0 while all is well."""
        ...

    async def start(self) -> ModelInfo | TensorModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]: ...

    async def prompt_ids(self, request: GenerateRequest) -> list[int]: ...

    async def detokenize(self, token_ids: list[int]) -> str: ...

    async def pins(self, tenant: str, action: PinAction, name: str, text: str) -> list[PinnedPrefix]: ...

    async def infer(self, request: TensorRequest) -> TensorAnswer: ...

    def infer_now(self, request: TensorRequest, on_reply: OnReply) -> Callable[[], None] | None:
        """Ask without a task; give what drops the request. None: infer must be asked, the process is not there."""
        ...

    async def look(self, request: MediaRequest) -> MediaAnswer: ...

    async def stop(self, error: Callable[[], EdgeRtError]) -> None: ...


class Worker:
    """A supervised process with one model. start once, then use, then stop once."""

    def __init__(self, load: Load, *, settings: config.Worker, launch: Launch, events: WorkerEvents) -> None:
        self.info: ModelInfo | TensorModelInfo | None = None
        self._load = load
        self._settings = settings
        self._launch = launch
        self._events = events
        self._process: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self._suspects = asyncio.Lock()
        self._n_deaths = 0
        self._ready_at_s = 0.0
        self._stop_error: Callable[[], EdgeRtError] | None = None
        self._advice: tuple[int | None, int | None] = (None, None)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def late_s(self) -> float:
        """Tell for how long its process should have been killed for want of progress; 0 unless that failed."""
        return self._process.late_s() if self._process is not None else 0.0

    async def start(self) -> ModelInfo | TensorModelInfo:
        """Load the model. Raises the load's error, or BackendLoadError when the process dies MAX_LOAD_DEATHS times."""
        self._starting = asyncio.get_running_loop().create_task(self._bring_up(), context=Context())
        return (await self._running()).info

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        """Let a language model compute on no more than so many threads, after a restart too; None ends that."""
        if self._load.tensor is None:
            self._advice = n_prefill_threads, n_decode_threads
            if self._process is not None:
                self._process.advise(*self._advice)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator early stops the engine within one token.

        A worker lost before the first chunk is asked once more after its restart; later, or a second time, it is
        WorkerLostError.
        """
        started = False
        for may_retry in (True, False):
            process = await self._running()
            try:
                async with aclosing(process.generate(request)) as answer:
                    async for chunk in answer:
                        started = started or not chunk.is_start
                        yield chunk
                return
            except WorkerLostError as exc:
                if started or not may_retry:
                    raise
                _log.warning("request %s is retried: %s", request.id, exc.reason)

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        return await self._retried(lambda process: process.tokenize(text, special=special, add_bos=add_bos))

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        return await self._retried(lambda process: process.prompt_ids(request))

    async def detokenize(self, token_ids: list[int]) -> str:
        return await self._retried(lambda process: process.detokenize(token_ids))

    async def pins(self, tenant: str, action: PinAction, name: str, text: str) -> list[PinnedPrefix]:
        return await self._retried(lambda process: process.pins(tenant, action, name, text))

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """Run a tensor model; asked once more after a restart, unless a stream's state was lost with the worker."""
        if request.stream:
            return await (await self._running()).infer(request)
        if request.is_suspect:
            async with self._suspects:
                return await (await self._running()).infer(request)
        return await self._retried(lambda process: process.infer(request), one_by_one=True)

    def infer_now(self, request: TensorRequest, on_reply: OnReply) -> Callable[[], None] | None:
        """Ask the process if it is there, once; give what drops the request. None: infer must be asked."""
        process = self._process
        if process is None or self._stop_error is not None or process.lost.done():
            return None
        return process.infer_now(request, on_reply)

    async def look(self, request: MediaRequest) -> MediaAnswer:
        """Run a tensor model's pipeline on a file; asked once more after a restart."""
        return await self._retried(lambda process: process.look(request), one_by_one=True)

    async def stop(self, error: Callable[[], EdgeRtError], *, drain_s: float = 0.0) -> None:
        """End the process; it is gone on return. Requests that are open after drain_s fail with error."""
        self._stop_error = error
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._process is not None:
            await self._process.stop(drain_s, error)

    async def _retried(self, call: Callable[[Process], Awaitable[T]], *, one_by_one: bool = False) -> T:
        """Ask, and ask once more if the worker dies of it.

        one_by_one  then no other request that is asked again is with it in the worker: one that kills every worker
                    would take those again that were joined with it before
        """
        try:
            return await call(await self._running())
        except WorkerLostError:
            if not one_by_one:
                return await call(await self._running())
        async with self._suspects:
            return await call(await self._running())

    async def _running(self) -> Process:
        """Give the process, after its (re)start where one is under way."""
        if self._process is not None and self._process.lost.done():
            await asyncio.sleep(0)  # _lost is scheduled already and begins the restart
        if self._process is not None and self._stop_error is None:
            return self._process
        starting = self._starting
        assert starting is not None, "start comes first"
        await asyncio.wait([starting])
        if self._stop_error is not None:
            raise self._stop_error()
        return starting.result()

    async def _bring_up(self) -> Process:
        reason = ""
        for attempt in range(MAX_LOAD_DEATHS):
            await asyncio.sleep(backoff_s(self._n_deaths + attempt))
            try:
                process = await Process.start(
                    self._launch,
                    self._load,
                    load_timeout_s=self._settings.load_timeout_s,
                    step_timeout_s=self._settings.step_timeout_s,
                    on_stats=self._events.stats,
                    on_info=self._described,
                )
            except WorkerLostError as exc:
                reason = exc.reason
                _log.warning("worker of %s died while loading (%d): %s", self._load.model, attempt + 1, reason)
                continue
            except EdgeRtError:
                raise
            except Exception as exc:
                _log.exception("worker of %s cannot be started", self._load.model)
                raise BackendLoadError(model=self._load.model, reason=f"{type(exc).__name__}: {exc}") from exc
            self._process, self.info = process, process.info
            if self._advice != (None, None):
                process.advise(*self._advice)
            self._ready_at_s = asyncio.get_running_loop().time()
            process.lost.add_done_callback(self._lost)
            _log.info("worker %d of %s is ready: %s", process.pid, self._load.model, _on(process.info))
            return process
        raise BackendLoadError(
            model=self._load.model, reason=f"its worker died {MAX_LOAD_DEATHS} times while loading, at last by {reason}"
        )

    def _described(self, info: TensorModelInfo) -> None:
        self.info = info
        self._events.described(info)

    def _lost(self, lost: asyncio.Future[str]) -> None:
        """Start again. Runs before the lost process' requests hear of it, so that they wait for the new one."""
        self._process = None
        if self._stop_error is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._ready_at_s >= STABLE_S:
            self._n_deaths = 0
        self._n_deaths += 1
        pause_s = backoff_s(self._n_deaths)
        _log.error("worker of %s is lost (%s); restarting in %g s", self._load.model, lost.result(), pause_s)
        self._events.restarting(lost.result())
        self._starting = loop.create_task(self._bring_up(), context=Context())
        self._starting.add_done_callback(self._restarted)

    def _restarted(self, starting: asyncio.Task[Process]) -> None:
        if starting.cancelled():
            return
        if (error := starting.exception()) is None:
            self._events.described(starting.result().info)
        if isinstance(error, EdgeRtError):
            _log.error("worker of %s stays down: %s", self._load.model, error)
            self._events.down(error)
