"""The worker's service for a tensor model.

The main thread computes, the reader takes messages, and clerks run pipelines: they decode pictures and wait for the
inferences of theirs, which are joined with all others.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from edge_rt.backends.base import Substituted, TensorSession
from edge_rt.devices import memory
from edge_rt.engine import waiting
from edge_rt.engine.arrays import to_array, to_tensor
from edge_rt.engine.calls import Arrays, Call
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.engine.tensors import TensorEngine, TensorSettings
from edge_rt.errors import BackendLoadError, BackendStepError, EdgeRtError, UnsupportedFeatureError
from edge_rt.tensor_types import MediaRequest, Tensor, TensorModelInfo, TensorTimings
from edge_rt.worker import channel, service
from edge_rt.worker.borrowed import Borrowed
from edge_rt.worker.channel import ChannelError, Load, TensorLoad
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.prepare import load_prepared
from edge_rt.worker.regions import fetch, put

_log = logging.getLogger(__name__)

# Pictures decoded at a time; large ones wait for one another (images.turn_for).
_N_CLERKS = 4
# What the reader may compute itself: no cancellation, deadline or figure is late by more.
_MAX_HOLD_UP_S = 0.05
_KEPT_BYTES = 8 * 2**20  # of freed memory, as the daemon keeps: a request's tensors would be new pages each time


class Engine(service.Engine, waiting.Engine, Protocol):
    """What the service needs of a TensorEngine."""


def tensor_settings(load: TensorLoad) -> TensorSettings:
    return TensorSettings(
        max_batch=load.max_batch,
        max_delay_s=load.max_delay_s,
        state=load.state,
        max_streams=load.max_streams,
        max_state_bytes=load.max_tensor_bytes,
    )


def start_tensors(load: TensorLoad, session: TensorSession) -> tuple[TensorEngine, Pipeline | None]:
    """Put an engine and the manifest's pipeline on a loaded model, and let its info tell of them.

    Raises BackendLoadError, ModelFormatError and BackendUnavailableError.
    """
    engine = TensorEngine(session, tensor_settings(load))
    kept = {name for tensor in load.state for name in (tensor.input, tensor.output)}
    pipeline = make_pipeline(
        load,
        [spec for spec in session.inputs if spec.name not in kept],
        [spec for spec in session.outputs if spec.name not in kept],
    )
    session.info = replace(
        session.info,
        max_batch=engine.max_batch,
        is_stateful=bool(load.state),
        task=pipeline.task if pipeline is not None else "",
    )
    return engine, pipeline


def to_call(request: channel.Infer) -> Call:
    """Read a request's tensors. Raises InvalidRequestError for bytes that are not what they claim."""
    return Call(
        id=request.id,
        feeds={tensor.name: to_array(fetch(tensor)) for tensor in request.tensors()},
        outputs=request.outputs,
        stream=request.stream,
        is_first=request.is_first,
        is_last=request.is_last,
        tenant=request.tenant,
        deadline_s=request.deadline_s,
    )


class _RequestSink:
    """Sends one request's answer to the front process, or writes it to its client and tells the front process."""

    __slots__ = ("_borrowed", "_channel", "_id", "_place", "_regions", "_reply", "_substitute")

    def __init__(
        self, out: WorkerChannel, request: channel.Infer, place: str, substitute: Callable[[], str], borrowed: Borrowed
    ) -> None:
        self._channel = out
        self._id = request.id
        self._regions = request.regions
        self._place, self._substitute = place, substitute
        self._reply, self._borrowed = request.reply, borrowed

    def answered(self, outputs: Arrays, timings: TensorTimings, *, n_stream_calls: int) -> None:
        tensors = [self._written(to_tensor(name, array)) for name, array in outputs.items()]
        sent = tuple(map(channel.SentTensor.of, tensors))
        data = [tensor.data for tensor in tensors if tensor.data]
        n_written, substitute = 0, self._substitute()
        if (reply := self._reply) is not None and not substitute:  # whose head names the place that was meant
            n_written = self._borrowed.write(reply, sent, data)
            if n_written == len(reply.head) + sum(map(len, data)):
                sent, data = (), []
        answer = channel.Inferred(
            self._id,
            sent,
            timings=timings,
            place=self._place,
            n_stream_calls=n_stream_calls,
            n_written=n_written,
            substitute=substitute,
        )
        try:
            self._channel.send(answer, data, at_once=True)
        except ChannelError as exc:
            raise BackendStepError(reason=f"the answer cannot be sent: {exc}") from exc

    def _written(self, tensor: Tensor) -> Tensor:
        region = self._regions.get(tensor.name)
        return tensor if region is None else put(tensor, region)

    def failed(self, error: EdgeRtError) -> None:
        self._channel.send(channel.Failed(self._id, *error.to_wire()))


@dataclass(slots=True)
class _Errand:
    """A request that the clerks have or shall have; the engine does not know of it yet."""

    request: channel.Infer | MediaRequest
    arrived_s: float
    infer: waiting.WaitingInfer | None = None  # of a media request, once begun


class Service(service.Service):
    """Turns messages into calls of a tensor engine. place is what computes, for the answers.

    substitute  names the place that has computed the last run instead, "" where none has
    info        tells what the model is; where that changes the front process hears of it beside the figures
    """

    def __init__(
        self,
        out: WorkerChannel,
        engine: Engine,
        pipeline: Pipeline | None,
        rss_bytes: Callable[[], int],
        *,
        place: str,
        substitute: Callable[[], str] = lambda: "",
        info: Callable[[], TensorModelInfo] | None = None,
        max_streams: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(out, engine, rss_bytes, clock=clock)
        self._engine = engine
        self._pipeline = pipeline
        self._place, self._substitute = place, substitute
        self._info, self._told = info, info() if info is not None else None
        self._max_streams = max_streams
        self._borrowed = Borrowed()
        self._desk: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._errands: dict[str, _Errand] = {}
        self._changed = threading.Condition()

    def _has_work(self) -> bool:
        return bool(self._errands)

    def _rest(self) -> None:
        memory.give_back()

    def _send_stats(self) -> None:
        if self._info is not None and (info := self._info()) != self._told:
            self._told = info
            self._channel.send(channel.Described(info))
        super()._send_stats()

    # -- the reader's thread ---------------------------------------------------------------------------------------

    def _take(self, message: channel.ToWorker, *, is_last: bool) -> None:
        if isinstance(message, channel.Infer):
            try:
                self._borrowed.fetch(message)
                if "BYTES" in [tensor.datatype for tensor in message.sent]:
                    self._to_clerks(message)  # element by element takes a while
                else:
                    self._infer(message, is_alone=is_last and self._channel.is_quiet())
            except Exception as exc:  # noqa: BLE001 - as in _failures_of
                self._failed(message.id, exc)
        elif isinstance(message, channel.Look):
            self._to_clerks(message.request)
        elif isinstance(message, channel.Cancel):
            self._cancel(message.id)
        elif isinstance(message, channel.Lend):
            self._borrowed.add(message.loan, (self._channel.take_fd(), self._channel.take_fd()))
        elif isinstance(message, channel.LendMemory):
            self._borrowed.add_memory(message.loan, self._channel.take_fd())
        elif isinstance(message, channel.GiveBack):
            self._borrowed.give_back(message.loan)
        elif isinstance(message, channel.Generate | channel.ReadPrompt):
            with self._failures_of(message.request.id):
                raise UnsupportedFeatureError(feature="a request for text to a tensor model")
        elif isinstance(message, channel.Tokenize | channel.Detokenize):
            with self._failures_of(message.id):
                raise UnsupportedFeatureError(feature="a request for text to a tensor model")

    def _to_clerks(self, request: channel.Infer | MediaRequest) -> None:
        errand = _Errand(request, self._clock())
        with self._changed:
            self._errands[request.id] = errand
        self._desk.put(errand)

    def _cancel(self, request_id: str) -> None:
        with self._changed:
            errand = self._errands.pop(request_id, None)  # the clerk that comes to it finds it gone
        if errand is not None and errand.infer is not None:
            errand.infer.abandon()
        self._engine.cancel(request_id)

    def _stop(self, drain_s: float) -> None:
        """Stop the engine once the clerks are through: their pipelines still need it."""
        threading.Thread(target=self._stop_after_errands, args=(drain_s,), name="drain", daemon=True).start()

    def _stop_after_errands(self, drain_s: float) -> None:
        begun_s = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: not self._errands, drain_s)
        self._engine.stop(max(0.0, begun_s + drain_s - self._clock()))

    # -- the clerks' threads ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            errand = self._desk.get()
            with self._failures_of(errand.request.id):
                self._do(errand)
            with self._changed:
                self._errands.pop(errand.request.id, None)
                self._changed.notify_all()

    def _do(self, errand: _Errand) -> None:
        request = errand.request
        if isinstance(request, MediaRequest):
            self._look(errand, request)
            return
        call = to_call(request)
        with self._changed:  # a cancellation comes before this, or finds the call in the engine
            if self._errands.pop(request.id, None) is not None:
                self._engine.submit(call, self._sink(request))

    def _infer(self, request: channel.Infer, *, is_alone: bool) -> None:
        """Give a request to the engine; one that nobody comes with is computed on this very thread.

        So no other thread has to wake up for it. What comes meanwhile is read after it, and joined then.
        """
        call, sink = to_call(request), self._sink(request)
        if is_alone:
            self._engine.call(call, sink, max_s=_MAX_HOLD_UP_S)
        else:
            self._engine.submit(call, sink)

    def _sink(self, request: channel.Infer) -> _RequestSink:
        return _RequestSink(self._channel, request, self._place, self._substitute, self._borrowed)

    def _look(self, errand: _Errand, request: MediaRequest) -> None:
        if self._pipeline is None:
            remedy = "it has no pipeline: ask it with tensors"
            raise UnsupportedFeatureError(feature=f"a file for {request.model}", remedy=remedy)
        infer = waiting.WaitingInfer(
            self._engine,
            request_id=request.id,
            tenant=request.tenant,
            deadline_s=request.deadline_s,
            begun_s=errand.arrived_s,
            max_streams=self._max_streams,
            clock=self._clock,
        )
        with self._changed:
            if request.id not in self._errands:
                return
            errand.infer = infer
        infer.check_deadline()
        try:
            answer = self._pipeline.run(request, infer)
        finally:
            infer.close()
        try:
            place = answer.place or self._substitute() or self._place
            self._channel.send(channel.Found(request.id, replace(answer, place=place)))
        except ChannelError as exc:
            raise BackendStepError(reason=f"the answer cannot be sent: {exc}") from exc

    @contextmanager
    def _failures_of(self, request_id: str) -> Iterator[None]:
        """Tell the front process why a request cannot be answered; one odd request must not end a thread."""
        try:
            yield
        except waiting.AbandonedError:
            pass
        except Exception as exc:  # noqa: BLE001 - as above
            self._failed(request_id, exc)

    def _failed(self, request_id: str, exc: Exception) -> None:
        error = exc
        if not isinstance(error, EdgeRtError):
            _log.error("request %s cannot be answered", request_id, exc_info=exc)
            error = BackendStepError(reason=f"{type(exc).__name__}: {exc}")
        self._channel.send(channel.Failed(request_id, *error.to_wire()))


def substitute_of(session: TensorSession, place: str) -> Callable[[], str]:
    """Give what names the place that has computed the last run, "" where that is the session's own."""
    if not isinstance(session, Substituted):
        return lambda: ""
    substituted: Substituted = session
    return lambda: "" if substituted.computed_on == place else substituted.computed_on


def serve(
    out: WorkerChannel,
    load: Load,
    tensor: TensorLoad,
    rss_bytes: Callable[[], int],
    *,
    load_session: Callable[[Load], TensorSession] = load_prepared,
) -> int:
    """Load a tensor model and serve it; give the exit status."""
    try:
        session = load_session(load)
        engine, pipeline = start_tensors(tensor, session)
        engine.warm_up()
    except EdgeRtError as exc:
        return service.refuse(out, exc)
    except Exception as exc:  # noqa: BLE001 - whatever it is, the front process must hear of it
        _log.exception("loading %s failed", load.model)
        return service.refuse(out, BackendLoadError(model=load.model, reason=f"{type(exc).__name__}: {exc}"))
    gc.collect()
    memory.give_back()
    memory.keep_freed(_KEPT_BYTES)
    gc.freeze()  # what is here now stays: a collection that looks at it all holds up a request
    out.send(channel.TensorReady(session.info))
    place = f"{session.info.backend}:{session.info.device}"
    tensors = Service(
        out,
        engine,
        pipeline,
        rss_bytes,
        place=place,
        substitute=substitute_of(session, place),
        info=lambda: session.info,
        max_streams=tensor.max_streams,
    )
    is_orderly = tensors.run(n_clerks=_N_CLERKS)
    out.flush()
    session.close()
    return 0 if is_orderly else 1
