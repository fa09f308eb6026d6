"""One worker process as the front process sees it: spawned, loaded, spoken to, watched, and seen to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from edge_rt.errors import BackendLoadError, EdgeRtError, SlowReaderError, WorkerLostError, from_wire
from edge_rt.tensor_types import (
    Data,
    MediaAnswer,
    MediaRequest,
    TensorAnswer,
    TensorModelInfo,
    TensorRequest,
)
from edge_rt.types import Chunk, EngineStats, GenerateRequest, ModelInfo, PinAction, PinnedPrefix
from edge_rt.worker import channel
from edge_rt.worker.answer_stream import MAX_UNREAD, AnswerStream
from edge_rt.worker.lending import Lending
from edge_rt.worker.parent_end import ParentChannel

_log = logging.getLogger(__name__)

_KILL_CONFIRM_S = 5.0
_EXIT_S = 0.4  # from the end of a child's work to its exit


class Handle(Protocol):
    """A child's process."""

    pid: int

    def kill(self) -> None: ...

    async def wait(self) -> int:
        """Wait for its end and its last output; give the exit status, -N for signal N."""
        ...

    def last_words(self) -> str:
        """Give the last line it wrote that looks like a reason, '' if there is none."""
        ...


_Reply = list[int] | str | channel.Inferred | channel.PinsOut | MediaAnswer
OnReply = Callable[[channel.Inferred | EdgeRtError], None]
Launch = Callable[[], Awaitable[tuple[socket.socket, Handle]]]


class Process:
    """One child with one loaded model. Made by start; once lost it stays lost."""

    def __init__(
        self,
        handle: Handle,
        load: channel.Load,
        *,
        step_timeout_s: float,
        on_stats: Callable[[EngineStats], None],
        on_info: Callable[[TensorModelInfo], None],
    ) -> None:
        self.info: ModelInfo | TensorModelInfo  # set by start
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._handle = handle
        self._load = load
        self._step_timeout_s = step_timeout_s
        self._on_stats, self._on_info = on_stats, on_info
        self._channel = ParentChannel(self._received, self._disconnected)
        self._loaded: asyncio.Future[ModelInfo | TensorModelInfo] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, AnswerStream] = {}
        self._replies: dict[str, Callable[[Any], None]] = {}  # each hears a _Reply or an EdgeRtError, once
        self._ids = count()
        self._lending = Lending(self._channel)
        self._watchdog: asyncio.TimerHandle | None = None
        self._progress_at_s = 0.0
        self._done = (-1, 0)
        self._kill_reason = ""
        self._stop_error: Callable[[], EdgeRtError] | None = None
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        launch: Launch,
        load: channel.Load,
        *,
        load_timeout_s: float,
        step_timeout_s: float,
        on_stats: Callable[[EngineStats], None],
        on_info: Callable[[TensorModelInfo], None] = lambda _: None,
    ) -> Process:
        """Spawn a child and load the model in it.

        Raises the child's own error, BackendLoadError after load_timeout_s, or WorkerLostError when it dies in between;
        the child is gone by then.
        """
        try:
            sock, handle = await launch()
        except OSError as exc:
            raise BackendLoadError(model=load.model, reason=f"its process cannot be started: {exc}") from exc
        self = cls(handle, load, step_timeout_s=step_timeout_s, on_stats=on_stats, on_info=on_info)
        try:
            await self._channel.connect(sock)
        except BaseException:  # nobody would hear of its end yet, so kill cannot wait for that
            sock.close()
            handle.kill()
            await handle.wait()
            raise
        try:
            self._channel.send(load)
            async with asyncio.timeout(load_timeout_s):
                self.info = await self._loaded
        except TimeoutError:
            await self.kill("it did not load in time")
            raise BackendLoadError(
                model=load.model, reason=f"not loaded within worker.load_timeout_s = {load_timeout_s:g} s"
            ) from None
        except BaseException:
            await self.kill("its load was given up")
            raise
        return self

    @property
    def pid(self) -> int:
        return self._handle.pid

    def late_s(self) -> float:
        """Tell for how long the child has been overdue; 0 while it moves, has nothing to do, or is lost."""
        if self.lost.done() or not (self._streams or self._replies):
            return 0.0
        return max(0.0, asyncio.get_running_loop().time() - self._progress_at_s - self._step_timeout_s)

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        """Let a language model compute on no more than so many threads, from its next step on; None ends that."""
        if not self.lost.done():
            self._channel.send(channel.Advise(n_prefill_threads, n_decode_threads))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator before its end stops the engine within one token.

        Raises the engine's error for this request, or WorkerLostError.
        """
        self._check_alive()
        wire_id = f"{request.id}~{next(self._ids)}"
        stream = AnswerStream()
        # Sent first: a request too large for the channel raises here and leaves nothing behind.
        self._channel.send(channel.Generate(replace(request, id=wire_id)))
        self._streams[wire_id] = stream
        self._watch()
        try:
            while True:
                chunk = await stream.next()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(wire_id, None) is not None:
                self._channel.send(channel.Cancel(wire_id))

    async def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        wire_id = self._wire_id()
        reply = await self._ask(wire_id, channel.Tokenize(wire_id, text, special, add_bos))
        assert isinstance(reply, list)
        return reply

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        wire_id = self._wire_id()
        reply = await self._ask(wire_id, channel.ReadPrompt(replace(request, id=wire_id)))
        assert isinstance(reply, list)
        return reply

    async def detokenize(self, token_ids: list[int]) -> str:
        wire_id = self._wire_id()
        reply = await self._ask(wire_id, channel.Detokenize(wire_id, token_ids))
        assert isinstance(reply, str)
        return reply

    async def pins(self, tenant: str, action: PinAction, name: str, text: str) -> list[PinnedPrefix]:
        """Pin, unpin or list the beginnings of prompts that stay; see channel.Pins."""
        wire_id = self._wire_id()
        reply = await self._ask(wire_id, channel.Pins(wire_id, tenant, action, name, text))
        assert isinstance(reply, channel.PinsOut)
        return reply.pins

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        """Run a tensor model. Cancelling the call drops the request unless it computes already."""
        wire_id = self._wire_id()
        attached = [tensor.data for tensor in request.inputs if tensor.data]
        reply = await self._ask(wire_id, channel.Infer.of(request, wire_id), attached, can_cancel=True)
        assert isinstance(reply, channel.Inferred)
        return reply.answer()

    def infer_now(self, request: TensorRequest, on_reply: OnReply) -> Callable[[], None]:
        """Run a tensor model as infer does, without a task; give what drops the request."""
        wire_id = self._wire_id()
        reply = None if request.reply is None else self._lending.reply(request.reply)
        place = None if request.memory is None else self._lending.memory(*request.memory)
        attached = [tensor.data for tensor in request.inputs if tensor.data] if place is None else ()
        self._send(wire_id, channel.Infer.of(request, wire_id, reply, place), attached, on_reply)
        return partial(self._drop, wire_id)

    def _drop(self, wire_id: str) -> None:
        if self._replies.pop(wire_id, None) is not None:
            self._channel.send(channel.Cancel(wire_id))

    async def look(self, request: MediaRequest) -> MediaAnswer:
        """Run a tensor model's pipeline on a file; cancelled as infer is."""
        wire_id = self._wire_id()
        reply = await self._ask(wire_id, channel.Look(replace(request, id=wire_id)), can_cancel=True)
        assert isinstance(reply, MediaAnswer)
        return reply

    async def stop(self, drain_s: float, error: Callable[[], EdgeRtError]) -> None:
        """Let the child finish what runs within drain_s and exit, else kill it; requests open by then get error."""
        self._stop_error = error
        self._channel.send(channel.Shutdown(drain_s))
        await asyncio.wait([self.lost], timeout=drain_s + _EXIT_S)
        await self.kill("stopped")

    async def kill(self, reason: str) -> None:
        """Kill the child and see that it is gone."""
        self._kill_reason = self._kill_reason or reason
        self._handle.kill()
        self._channel.close()
        await asyncio.wait([self.lost])

    def _wire_id(self) -> str:
        return str(next(self._ids))

    async def _ask(
        self, wire_id: str, message: channel.ToWorker, attached: Sequence[Data] = (), *, can_cancel: bool = False
    ) -> _Reply:
        reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._send(wire_id, message, attached, partial(_settle, reply))
        try:
            return await reply
        finally:
            self._replies.pop(wire_id, None)
            if can_cancel and reply.cancelled():
                self._channel.send(channel.Cancel(wire_id))

    def _send(
        self, wire_id: str, message: channel.ToWorker, attached: Sequence[Data], on_reply: Callable[[Any], None]
    ) -> None:
        self._check_alive()
        self._channel.send(message, attached)
        self._replies[wire_id] = on_reply
        self._watch()

    def _check_alive(self) -> None:
        if self.lost.done():
            raise WorkerLostError(model=self._load.model, reason=self.lost.result())

    # Called by the channel, on the event loop.

    def _received(self, message: channel.FromWorker) -> None:
        if type(message) is channel.ChunkOut:
            self._progress_at_s = asyncio.get_running_loop().time()
            self._chunk(message.id, message.chunk)
        elif type(message) is channel.Inferred:
            self._replied(message.id, message)
        elif type(message) is channel.Stats:
            if (done := _done(message.stats)) != self._done:
                self._done = done
                self._progress_at_s = asyncio.get_running_loop().time()
            self._on_stats(message.stats)
        elif type(message) is channel.Failed:
            self._failed(message.id, from_wire(message.code, message.fields))
        elif isinstance(message, channel.Ready | channel.TensorReady):
            if not self._loaded.done():
                self._loaded.set_result(message.info)
        elif isinstance(message, channel.Described):
            if self._loaded.done():
                self.info = message.info
                self._on_info(message.info)
        elif isinstance(message, channel.TokensOut):
            self._replied(message.id, message.token_ids)
        elif isinstance(message, channel.TextOut):
            self._replied(message.id, message.text)
        elif isinstance(message, channel.PinsOut):
            self._replied(message.id, message)
        elif isinstance(message, channel.Found):
            self._replied(message.id, message.answer)

    def _chunk(self, wire_id: str, chunk: Chunk) -> None:
        stream = self._streams.get(wire_id)
        if stream is None:
            return  # cancelled; this chunk was already on its way
        stream.push(chunk)
        if chunk.finish_reason is not None:
            del self._streams[wire_id]
        elif stream.n_unread > MAX_UNREAD:
            del self._streams[wire_id]
            self._channel.send(channel.Cancel(wire_id))
            stream.chunks.clear()
            stream.fail(SlowReaderError(unread=stream.n_unread, limit=MAX_UNREAD))

    def _failed(self, wire_id: str, error: EdgeRtError) -> None:
        self._progress_at_s = asyncio.get_running_loop().time()
        if wire_id == "":
            if not self._loaded.done():
                self._loaded.set_exception(error)
        elif (stream := self._streams.pop(wire_id, None)) is not None:
            stream.fail(error)
        else:
            self._replied(wire_id, error)

    def _replied(self, wire_id: str, value: _Reply | EdgeRtError) -> None:
        self._progress_at_s = asyncio.get_running_loop().time()
        if (on_reply := self._replies.pop(wire_id, None)) is not None:
            try:
                on_reply(value)
            except Exception:  # noqa: BLE001 - whoever cannot take its reply must not cost the others theirs
                _log.exception("the reply to request %s cannot be taken", wire_id)

    def _disconnected(self, problem: str) -> None:
        self._burial = asyncio.get_running_loop().create_task(self._bury(problem))

    async def _bury(self, problem: str) -> None:
        """Learn why the child is gone and end its requests."""
        status = await self._wait(_EXIT_S)
        if status is None:
            self._handle.kill()  # without its channel it is of no use
            status = await self._wait(_KILL_CONFIRM_S)
        if status is None:
            # Only a task stuck inside the kernel survives SIGKILL; nothing more can be done from here.
            _log.error("worker %d of %s survives SIGKILL", self.pid, self._load.model)
        reason = self._kill_reason or describe_exit(status, problem, self._handle.last_words())
        if status is None and self._kill_reason:
            reason += ", and it cannot be killed"
        self.lost.set_result(reason)
        self._lending.end()
        if not self._loaded.done():
            self._loaded.set_exception(WorkerLostError(model=self._load.model, reason=reason))
        self._loaded.exception()  # seen, also where start was cancelled and nobody awaits it
        self._fail_all(self._stop_error or (lambda: WorkerLostError(model=self._load.model, reason=reason)))

    async def _wait(self, timeout_s: float) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._handle.wait()
        except TimeoutError:
            return None

    def _fail_all(self, error: Callable[[], EdgeRtError]) -> None:
        for stream in self._streams.values():
            stream.fail(error())
        self._streams.clear()
        while self._replies:
            self._replied(next(iter(self._replies)), error())

    # A child that computes without a token, a step, a product or a reply for too long hangs inside the back end.

    def _watch(self) -> None:
        """Watch over a request that has just been sent."""
        loop = asyncio.get_running_loop()
        if len(self._streams) + len(self._replies) == 1:  # it did nothing before, and had nothing to do
            self._progress_at_s = loop.time()
        if self._watchdog is None:
            self._watchdog = loop.call_later(self._step_timeout_s, self._look)

    def _look(self) -> None:
        self._watchdog = None
        if not self._streams and not self._replies:
            return
        loop = asyncio.get_running_loop()
        due_at_s = self._progress_at_s + self._step_timeout_s
        if loop.time() < due_at_s:
            self._watchdog = loop.call_at(due_at_s, self._look)
            return
        self._kill_reason = f"killed: no progress for worker.step_timeout_s = {self._step_timeout_s:g} s"
        _log.error("worker %d of %s hangs; killing it", self.pid, self._load.model)
        self._handle.kill()
        self._channel.close()  # one that cannot be killed, deep inside a driver, is lost all the same


def _done(stats: EngineStats) -> tuple[int, int]:
    """Count what shows that a child gets on: its steps, and in the middle of a long one its accelerator's products."""
    return stats.steps_total, stats.device_products_total + stats.device_fallbacks_total


def _settle(future: asyncio.Future[_Reply], value: _Reply | EdgeRtError) -> None:
    if future.done():
        return
    if isinstance(value, EdgeRtError):
        future.set_exception(value)
    else:
        future.set_result(value)


def describe_exit(status: int | None, problem: str, last_words: str) -> str:
    """Say for people how a child ended.

    status   as waitpid tells it, -N for signal N; None if it has not ended
    problem  what the channel saw

    Who was killed could not say why: what was said last is of something else.
    """
    if status is None:
        what = f"{problem}, and it cannot be killed"
    elif status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        if -status == signal.SIGKILL:
            return f"{name}, perhaps out of memory"
        what = name
    else:
        what = f"exit status {status}"
    return f"{what}: {last_words}" if last_words else what
