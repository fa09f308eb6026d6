"""The worker's service for a language model.

The main thread runs the engine, the reader takes messages and sends the engine's figures, and a clerk renders and
tokenises prompts, so that a long one holds up neither the steps nor a cancellation. Another takes the requests whose
answers have a form, by turns: their grammars are compiled first.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from edge_rt.backends import registry
from edge_rt.backends.base import Backend, TokenSession
from edge_rt.backends.dispatch import dispatch
from edge_rt.devices import cpu, memory
from edge_rt.devices.base import Reading
from edge_rt.devices.idle import IdleMeter
from edge_rt.engine.pinning import Pinning, pin
from edge_rt.engine.prefix_room import PrefixRoom
from edge_rt.engine.sequence import Sink
from edge_rt.engine.start import start_engine
from edge_rt.engine.tokens import EngineSettings, TokenEngine
from edge_rt.errors import (
    BackendLoadError,
    BackendStepError,
    ContextBeyondTrainingError,
    EdgeRtError,
    UnsupportedFeatureError,
)
from edge_rt.types import Chunk, GenerateRequest, PinnedPrefix
from edge_rt.worker import channel, service
from edge_rt.worker.channel import ChannelError, Load
from edge_rt.worker.draft import FoundDraft, load_draft, resolve_draft, with_draft
from edge_rt.worker.forms_desk import FormsDesk
from edge_rt.worker.load import unpack
from edge_rt.worker.memory import check
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.prefixes import open_disk, pin_configured

_log = logging.getLogger(__name__)

_Requests = channel.Generate | channel.ReadPrompt  # what has a request, whose id is its own
_Errand = _Requests | channel.Tokenize | channel.Detokenize | channel.Pins


class Engine(service.Engine, Pinning, Protocol):
    """What the worker needs of a TokenEngine."""

    def submit(self, request: GenerateRequest, sink: Sink) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None: ...

    def prompt_ids(self, request: GenerateRequest) -> list[int]: ...

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]: ...

    def detokenize(self, token_ids: list[int]) -> str: ...


def load_session(
    load: Load,
    draft: FoundDraft | None = None,
    *,
    find: Callable[[str], Backend] = registry.get,
    available: Callable[[], Reading[int]] = memory.available_bytes,
) -> TokenSession:
    """Load a model on the back end chosen for it, if the memory suffices for it and the draft that is loaded next.

    Raises ModelError or BackendError.
    """
    file, options = unpack(load)
    backend, reason = dispatch(load.backend, file, options, find=find)
    if not load.force:
        if load.path and options.n_ctx > (n_ctx_train := file.header.n_ctx_train):
            raise ContextBeyondTrainingError(model=load.model, n_ctx=options.n_ctx, n_ctx_train=n_ctx_train)
        need = with_draft(backend.estimate(file, options), draft)
        check(load.model, need, available(), load.memory_margin_bytes)
    session = backend.load(file, options)
    vocab = session.vocab
    session.info = replace(
        session.info, backend_reason=reason, bos_text=vocab.bos_text or "", eos_text=vocab.eos_text or ""
    )
    if load.chat_template is not None:
        session.vocab = replace(session.vocab, chat_template=load.chat_template)
        session.info = replace(session.info, has_chat_template=True)
    return session


def make_engine(
    load: Load, session: TokenSession, draft: FoundDraft | None, idle_cores: Callable[[], float | None]
) -> TokenEngine:
    """Make the engine; the thread that calls this must be the one that runs it."""
    disk = open_disk(load, session)
    settings = engine_settings(load)
    engine = start_engine(
        session,
        settings,
        n_threads=load.n_threads,
        idle_cores=idle_cores,
        disk=disk,
        draft_model=load_draft(load, session, draft),
    )
    pin_configured(load, engine)
    engine.warm_up()
    return engine


def engine_settings(load: Load) -> EngineSettings:
    max_bytes = load.max_prefix_bytes
    room = PrefixRoom(memory.available_bytes, load.memory_margin_bytes, clock=time.monotonic)
    return EngineSettings(
        max_stall_s=load.max_stall_s,
        stream_interval_s=load.stream_interval_s,
        max_prefix_bytes=max_bytes if max_bytes >= 0 else room,
        isolate_prefixes=load.isolate_prefixes,
        max_draft=load.max_draft,
        min_draft=load.min_draft,
        min_draft_chance=load.min_draft_chance,
    )


class _RequestSink:
    """Sends one request's chunks to the front process, and the figures before the last of them."""

    __slots__ = ("_channel", "_id", "_send_stats")

    def __init__(self, out: WorkerChannel, request_id: str, send_stats: Callable[[], object]) -> None:
        self._channel = out
        self._id = request_id
        self._send_stats = send_stats

    def chunk(self, chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            self._send_stats()  # who has the whole answer finds its tokens in the metrics
        try:
            self._channel.send(channel.ChunkOut(self._id, chunk))
        except ChannelError as exc:
            self.failed(BackendStepError(reason=f"the answer cannot be sent: {exc}"))

    def failed(self, error: EdgeRtError) -> None:
        self._channel.send(channel.Failed(self._id, *error.to_wire()))


class Service(service.Service):
    """Turns messages into calls of a token engine."""

    def __init__(
        self,
        out: WorkerChannel,
        engine: Engine,
        rss_bytes: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(out, engine, rss_bytes, clock=clock)
        self._engine = engine
        self._desk: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        # A grammar may take long to compile, which shall hold up others with a grammar alone.
        self._forms_desk = FormsDesk()
        self._desks: queue.SimpleQueue[Callable[[], _Errand]] = queue.SimpleQueue()
        self._desks.put(self._desk.get)
        self._desks.put(self._forms_desk.get)
        # The engine does not know a request yet that the clerk still has; a cancellation must not fall between.
        self._lock = threading.Lock()
        self._unsubmitted: set[str] = set()
        self._cancelled: set[str] = set()

    def _has_work(self) -> bool:
        return bool(self._unsubmitted)

    def _take(self, message: channel.ToWorker, *, is_last: bool) -> None:  # noqa: ARG002 - all are quickly taken
        if isinstance(message, channel.Cancel):
            with self._lock:
                if self._forms_desk.drop(message.id):  # what nobody wants is not compiled
                    self._unsubmitted.discard(message.id)
                    return
                if message.id in self._unsubmitted:
                    self._cancelled.add(message.id)
                    return
            self._engine.cancel(message.id)
        elif isinstance(message, channel.Advise):
            self._engine.advise(message.n_prefill_threads, message.n_decode_threads)
        elif isinstance(message, channel.Infer | channel.Look):
            error = UnsupportedFeatureError(feature="a request for tensors to a language model")
            request_id = message.id if isinstance(message, channel.Infer) else message.request.id
            self._channel.send(channel.Failed(request_id, *error.to_wire()))
        elif not isinstance(message, Load | channel.Lend | channel.LendMemory | channel.GiveBack | channel.Shutdown):
            if isinstance(message, channel.Generate):
                with self._lock:
                    self._unsubmitted.add(message.request.id)
                if message.request.response_format is not None or message.request.tools:
                    self._forms_desk.put(message)
                    return
            self._desk.put(message)

    def run(self, *, n_clerks: int = 2) -> bool:
        return super().run(n_clerks=n_clerks)

    def _work(self) -> None:
        take = self._desks.get()  # each clerk has one
        while True:
            message = take()
            request_id = message.request.id if isinstance(message, _Requests) else message.id
            sink = _RequestSink(self._channel, request_id, self._send_stats)
            try:
                self._do(message, sink)
            except EdgeRtError as exc:
                sink.failed(exc)
            except Exception as exc:  # noqa: BLE001 - one odd request must not end the clerk
                _log.exception("request %s cannot be taken", request_id)
                sink.failed(BackendStepError(reason=f"{type(exc).__name__}: {exc}"))

    def _do(self, message: _Errand, sink: _RequestSink) -> None:
        if isinstance(message, channel.Tokenize):
            ids = self._engine.tokenize(message.text, special=message.special, add_bos=message.add_bos)
            self._channel.send(channel.TokensOut(message.id, ids))
        elif isinstance(message, channel.ReadPrompt):
            ids = self._engine.prompt_ids(message.request)
            self._channel.send(channel.TokensOut(message.request.id, ids))
        elif isinstance(message, channel.Pins):
            self._pin(message, sink)
        elif isinstance(message, channel.Detokenize):
            self._channel.send(channel.TextOut(message.id, self._engine.detokenize(message.token_ids)))
        else:
            try:
                self._engine.submit(message.request, sink)
            finally:
                with self._lock:
                    self._unsubmitted.discard(message.request.id)
                    was_cancelled = message.request.id in self._cancelled
                    self._cancelled.discard(message.request.id)
                if was_cancelled:
                    self._engine.cancel(message.request.id)

    def _pin(self, message: channel.Pins, sink: _RequestSink) -> None:
        def done(found: list[PinnedPrefix] | EdgeRtError) -> None:
            if isinstance(found, EdgeRtError):
                sink.failed(found)
            else:
                self._channel.send(channel.PinsOut(message.id, found))

        pin(self._engine, done, action=message.action, tenant=message.tenant, name=message.name, text=message.text)


def serve(
    out: WorkerChannel,
    load: Load,
    rss_bytes: Callable[[], int],
    *,
    load_session: Callable[[Load, FoundDraft | None], TokenSession] = load_session,
    make_engine: Callable[[Load, TokenSession, FoundDraft | None, Callable[[], float | None]], Engine] = make_engine,
) -> int:
    """Load a language model and serve it; give the exit status."""
    idle_cores = IdleMeter(cpu.usable().cpus)
    idle_cores()  # it measures from here
    try:
        draft = resolve_draft(load)
        session = load_session(load, draft)
        engine = make_engine(load, session, draft, idle_cores)
    except EdgeRtError as exc:
        return service.refuse(out, exc)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the front process must hear of it
        _log.exception("loading %s failed", load.model)
        return service.refuse(out, BackendLoadError(model=load.model, reason=f"{type(exc).__name__}: {exc}"))
    out.send(channel.Ready(session.info))
    is_orderly = Service(out, engine, rss_bytes).run()
    out.flush()
    session.close()
    return 0 if is_orderly else 1
