"""A request for a tensor model whose only place is loaded, works and is free: asked without a task.

So most requests of most devices come. What dispatcher.py does for all others is done here in two steps, with nothing
to wait for between them but the worker; and what need not be done before the client has its answer is done after.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from edge_rt.errors import BackendError, EdgeRtError, ModelFormatError, ModelTooLargeError, WorkerLostError
from edge_rt.scheduler.placed_model import DispatchEvents, Failure, PlacedModel
from edge_rt.scheduler.places import Place
from edge_rt.scheduler.queue import Queue
from edge_rt.tensor_types import TensorAnswer, TensorRequest
from edge_rt.worker.channel import Inferred
from edge_rt.worker.supervisor import ModelWorker

_log = logging.getLogger(__name__)

DEVICE_ERRORS = (BackendError, ModelTooLargeError, ModelFormatError)

# Hears the answer or the error; or the request, which must be asked again, and waited for.
OnEnd = Callable[[TensorAnswer | EdgeRtError | TensorRequest], None]


class Direct:
    """One such request. Made, then begun; then it ends by itself or is cancelled."""

    __slots__ = ("_begun_at_s", "_drop", "_events", "_model", "_on_end", "_place", "_release", "_request", "_ticket")

    def __init__(
        self, model: PlacedModel, place: Place, request: TensorRequest, events: DispatchEvents, on_end: OnEnd
    ) -> None:
        self._model, self._place, self._request, self._events, self._on_end = model, place, request, events, on_end

    def begin(self, worker: ModelWorker, release: Callable[[], None]) -> bool:
        """Ask the worker, and hold its model until release. False: it cannot be asked now, and nothing is held."""
        self._begun_at_s = asyncio.get_running_loop().time()
        self._release = release
        request, candidate = self._request, self._place.row.candidate
        if (reply := request.reply) is not None and (reply.place, reply.variant) != (
            candidate.place,
            candidate.variant,
        ):
            request = replace(request, reply=None)
        try:
            drop = worker.infer_now(request, self._replied)
        except BaseException:
            release()
            raise
        if drop is None:
            release()
            return False
        self._drop = drop
        self._ticket = self._place.breaker.begin(self._begun_at_s)
        self._place.n_open += 1
        return True

    def cancel(self) -> None:
        """Drop the request: its client has left."""
        self._drop()
        self._place.breaker.abandoned(self._ticket)
        self._close()

    def _close(self) -> None:
        self._place.n_open -= 1
        self._release()

    def _replied(self, reply: Inferred | EdgeRtError) -> None:
        try:
            if isinstance(reply, Inferred):
                self._answered(reply)
            else:
                self._on_end(self._failed(reply))
        finally:
            self._close()

    def _answered(self, reply: Inferred) -> None:
        place, now_s = self._place, asyncio.get_running_loop().time()
        candidate = place.row.candidate
        answer = reply.answer(place=candidate.place, variant=candidate.variant)
        try:
            self._on_end(answer)
        finally:
            took_s = now_s - self._begun_at_s
            if answer.place == candidate.place:
                place.answered(reply.timings, took_s, now_s)
            place.breaker.succeeded(self._ticket)
            name, n_joined, answered_by = self._model.name, place.n_joined, candidate.name_of(answer.place)
            self._events.place_answered(name, answered_by, spilled=False, took_s=took_s, n_joined=n_joined)
            self._model.tell(place)

    def _failed(self, error: EdgeRtError) -> EdgeRtError | TensorRequest:
        """Charge the place where it is its fault; give the error, or what is to be asked again."""
        place, model = self._place, self._model
        if isinstance(error, WorkerLostError):
            place.breaker.abandoned(self._ticket)  # asked once more, it will show whose fault it was
            return replace(self._request, is_suspect=True)
        if not isinstance(error, DEVICE_ERRORS):
            place.breaker.abandoned(self._ticket)
            return error
        _log.warning("request %s failed on %s of %s: %s", self._request.id, place.name, model.name, error)
        self._events.place_failed(model.name, place.name)
        failure = Failure(place, self._ticket, error, asyncio.get_running_loop().time() - self._begun_at_s)
        model.settle([failure], is_answered=False)
        return error if model.pick([failure], can_copy=True) is None else self._request


class Held:
    """What such a request holds beside its place: a ticket of its model's queue."""

    __slots__ = ("_begun_at_s", "_drop", "_on_end", "_queue", "_ticket")

    def __init__(self, queue: Queue, ticket: int, on_end: OnEnd) -> None:
        self._queue, self._ticket, self._on_end = queue, ticket, on_end
        self._begun_at_s = asyncio.get_running_loop().time()

    def begin(self, ask: Callable[[OnEnd], Callable[[], None] | None]) -> Callable[[], None] | None:
        """Ask; give what drops the request, or None, and nothing is held, where it cannot be asked now."""
        try:
            drop = ask(self._ended)
        except BaseException:
            self._leave(None)
            raise
        if drop is None:
            self._leave(None)
            return None
        self._drop = drop
        self._queue.entered()
        return self._cancel

    def _ended(self, reply: TensorAnswer | EdgeRtError | TensorRequest) -> None:
        service_s = None
        try:
            if isinstance(reply, TensorAnswer):
                service_s = asyncio.get_running_loop().time() - self._begun_at_s
            self._on_end(reply)
        finally:
            self._leave(service_s)

    def _cancel(self) -> None:
        self._drop()
        self._leave(None)

    def _leave(self, service_s: float | None) -> None:
        self._queue.leave(self._ticket, service_s)
