"""Sends each request for a tensor model to one of its places: the best one that works and is worth its wait.

Each place is a worker of its own, loaded when the first request goes there. A request that meets a failing device is
asked again of the next place; the device is charged with it only when another one answers: a request that fails
everywhere says nothing of devices. A stream with a state stays where its state is, and hears of a failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import replace

from edge_rt import config
from edge_rt.breaker import Ticket
from edge_rt.errors import (
    BackendStepError,
    DeadlineError,
    EdgeRtError,
    WorkerLostError,
)
from edge_rt.scheduler.comparison import Answer, Comparison, Request
from edge_rt.scheduler.direct import DEVICE_ERRORS, Direct, OnEnd
from edge_rt.scheduler.placed_model import DispatchEvents, DispatchStatus, Failure, PlacedModel, Subject
from edge_rt.scheduler.places import Place
from edge_rt.scheduler.residency import Residency
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorRequest
from edge_rt.worker.channel import Load
from edge_rt.worker.supervisor import ModelWorker, WorkerEvents

_log = logging.getLogger(__name__)

_MAX_WORKERS_LOST = 2  # by one request: it may be the request that kills them

_StreamKey = tuple[str, str, str]  # tenant, stream, form: another's stream of the same name is another stream


class Dispatcher:
    """The tensor models of one daemon. Belongs to one event loop, whose time() is the clock."""

    def __init__(
        self,
        settings: config.Placement,
        residency: Residency,
        events: DispatchEvents,
        make_worker: Callable[[Load, WorkerEvents], ModelWorker],
        *,
        max_streams: int = 256,
    ) -> None:
        self._settings = settings
        self._make_worker = make_worker
        self._residency = residency
        self._events = events
        self._max_streams = max_streams
        self._models: dict[str, PlacedModel] = {}
        self._streams: dict[str, OrderedDict[_StreamKey, Place]] = {}  # by model
        self._copies: set[asyncio.Task[Answer | None]] = set()  # that try places which were left
        self._comparison = Comparison(self._ask, self._tell_answered, events)

    def add(self, name: str, subject: Subject, *, keep_alive_s: float, slot: str = "") -> None:
        """Make a model known. slot names its first place in the residency, "" as the model; the others' are longer."""
        self._streams[name] = OrderedDict()
        self._models[name] = PlacedModel(
            name,
            subject,
            self._settings,
            self._residency,
            self._events,
            self._make_worker,
            keep_alive_s=keep_alive_s,
            slot=slot or name,
        )

    def keep(self, name: str, keep_alive_s: float) -> None:
        """Unload a model's places after another idle time; those that are there are the residency's to keep."""
        self._models[name].keep_alive_s = keep_alive_s

    def configure(self, settings: config.Placement) -> None:
        """Go by other settings from the next request on."""
        self._settings = settings
        for model in self._models.values():
            model.configure(settings)

    def replan(self) -> None:
        """Let each model's next request rank its places anew: the devices have been looked at."""
        for model in self._models.values():
            model.replan()

    async def infer(self, request: TensorRequest, due_at_s: float) -> TensorAnswer:
        """Answer a request; it waits for a place to be loaded until due_at_s.

        Raises the last place's error when all have failed, DeadlineError, and what a worker says of the request.
        """
        answer = await self._run(request, due_at_s)
        assert isinstance(answer, TensorAnswer)
        return answer

    def direct_place(self, request: TensorRequest) -> Place | None:
        """Give a request's place if it is a model's only one, and free; None: infer must be asked."""
        if request.stream or request.variant:
            return None
        return self._models[request.model].only_place()

    def begin_direct(self, place: Place, request: TensorRequest, on_end: OnEnd) -> Callable[[], None] | None:
        """Ask the place that direct_place gave; give what drops the request. None: infer must be asked."""
        if (lease := self._residency.lease_now(place.key)) is None:
            return None
        direct = Direct(self._models[request.model], place, request, self._events, on_end)
        return direct.cancel if direct.begin(*lease) else None

    async def look(self, request: MediaRequest, due_at_s: float) -> MediaAnswer:
        """Run a pipeline on a file; raises as infer does."""
        answer = await self._run(request, due_at_s)
        assert isinstance(answer, MediaAnswer)
        return answer

    async def load(self, name: str, *, force: bool = False, variant: str = "") -> None:
        """Load the first place that can be; places that were given up get another chance."""
        model = await self._models[name].version(variant).ranked(fresh=True)
        for place in model.known.values():
            if place.wrong:
                place.wrong, place.n_to_check = "", self._settings.n_checked
        error: EdgeRtError | None = None
        for place in model.order:
            try:
                await self._residency.load(place.key, force=force)
            except DEVICE_ERRORS as exc:
                error = exc
            else:
                return
        raise error or model.nowhere()

    async def unload(self, name: str) -> None:
        """Let the requests of all places finish and free their memory."""
        model = self._models[name]
        await asyncio.gather(*(self._residency.unload(place.key) for place in model.known.values()))

    def slots(self, name: str, variant: str = "") -> list[str]:
        """Name the slots of a model's places that were ever used, best first, or of one form's."""
        model = self._models[name]
        places = dict.fromkeys((*model.order, *model.known.values()))
        return [place.key for place in places if variant in ("", place.row.candidate.variant)]

    def is_in_memory(self, name: str) -> bool:
        """Say whether a worker of a model's best place is there or on its way; there may be others."""
        order = self._models[name].order
        return bool(order) and self._residency.slot(order[0].key).state != "unloaded"

    async def status(self, name: str) -> DispatchStatus:
        """Describe a model's places, best first."""
        return await self._models[name].status()

    # A request's way.

    async def _run(self, request: Request, due_at_s: float) -> Answer:
        form = request.variant if isinstance(request, TensorRequest) else ""
        model = await self._models[request.model].version(form).ranked()
        stream = _stream_key(request)
        if (
            stream is not None
            and not _starts_anew(request)
            and (home := self._streams[model.name].get(stream)) is not None
        ):
            return await self._follow(model, home, request, due_at_s)
        failures: list[Failure] = []
        is_answered = False
        try:
            while (picked := model.pick(failures, can_copy=stream is None)) is not None:
                place, spilled = picked
                model.prepare(place)
                if stream is not None:
                    self._remember(model, stream, place)
                tried = model.to_try(place, failures) if stream is None else None
                attempt = self._attempt(model, place, request, due_at_s, failures, spilled=spilled)
                if tried is not None:
                    attempt = self._beside_copy(model, tried, request, due_at_s, attempt)
                if (answer := await attempt) is not None:
                    is_answered = True
                    self._forget_if_last(model, request)
                    return answer
                n_lost = sum(isinstance(failure.error, WorkerLostError) for failure in failures)
                if failures and (n_lost >= _MAX_WORKERS_LOST or asyncio.get_running_loop().time() >= due_at_s):
                    break
            if not is_answered and stream is not None:
                self._streams[model.name].pop(stream, None)
            raise failures[-1].error if failures else model.nowhere()
        finally:
            model.settle(failures, is_answered=is_answered)

    async def _attempt(
        self,
        model: PlacedModel,
        place: Place,
        request: Request,
        due_at_s: float,
        failures: list[Failure],
        *,
        spilled: bool = False,
        copy: Ticket | None = None,
    ) -> Answer | None:
        """Ask one place.

        None if it failed, which is noted in failures, if its answer was wrong, or if the request shall be placed anew.
        copy: the ticket of a copy, which is never moved.
        """
        begun_s = asyncio.get_running_loop().time()
        ticket = copy or place.breaker.begin(begun_s)
        if place.n_to_check and isinstance(request, TensorRequest):
            request = replace(request, regions={})  # what is compared must come here; the API puts it into its region
        place.n_open += 1
        try:
            try:
                async with asyncio.timeout(None) as move:  # ends only by Place.move
                    if copy is None and _stream_key(request) is None:
                        place.movable[move] = None
                    answer = await self._ask(place, request, due_at_s)
            except TimeoutError:
                if not move.expired():
                    raise
                place.breaker.abandoned(ticket)
                return None
            finally:
                place.movable.pop(move, None)
            right = await self._comparison.checked(
                model, place, request, answer, due_at_s, tolerance=self._settings.tolerance
            )
        except DEVICE_ERRORS as exc:
            _log.warning("request %s failed on %s of %s: %s", request.id, place.name, model.name, exc)
            failures.append(Failure(place, ticket, exc, asyncio.get_running_loop().time() - begun_s))
            self._events.place_failed(model.name, place.name)
            return None
        except BaseException:
            place.breaker.abandoned(ticket)
            raise
        finally:
            place.n_open -= 1
        if right is answer:
            place.breaker.succeeded(ticket)
            self._tell_answered(model, place, answer, begun_s, spilled=spilled)
            if ticket.role == "probe":
                model.works_again(place)
        model.tell(place)
        return right

    async def _beside_copy(
        self,
        model: PlacedModel,
        tried: Place,
        request: Request,
        due_at_s: float,
        attempt: Coroutine[None, None, Answer | None],
    ) -> Answer | None:
        """Make an attempt, and let a copy of the request try a place that was left; the first answer counts.

        So it costs no client its answer to find out whether a device works again. The copy goes on without the request.
        """
        # Taken here and now: of requests that come together one tries.
        ticket = tried.breaker.begin(asyncio.get_running_loop().time(), is_copy=True)
        copied = asyncio.create_task(self._try(model, tried, ticket, _own(request), due_at_s))
        self._copies.add(copied)
        copied.add_done_callback(self._copies.discard)
        asked = asyncio.create_task(attempt)
        try:
            await asyncio.wait({asked, copied}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and (answer := copied.result()) is not None:
                return answer
            answer = await asked
            return answer if answer is not None else await copied
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait({asked})

    async def _try(
        self, model: PlacedModel, place: Place, ticket: Ticket, request: Request, due_at_s: float
    ) -> Answer | None:
        """Ask a place that was left. A failure is its own, whatever becomes of the request."""
        failures: list[Failure] = []
        if isinstance(request, TensorRequest):
            request = replace(request, regions={})  # the other one's answer may be there by then
        try:
            return await self._attempt(model, place, request, due_at_s, failures, copy=ticket)
        except EdgeRtError as exc:
            _log.info("trying %s for %s told nothing: %s", place.name, model.name, exc)
            return None
        finally:
            model.settle(failures, is_answered=True)

    async def _follow(self, model: PlacedModel, home: Place, request: Request, due_at_s: float) -> Answer:
        """Ask the place that has the stream's state, and no other."""
        assert isinstance(request, TensorRequest)
        begun_s = asyncio.get_running_loop().time()
        ticket = home.breaker.begin(begun_s)
        home.n_open += 1
        try:
            if home.wrong:
                raise BackendStepError(
                    reason=f"{home.name}, which has the stream's state, answers wrongly: {home.wrong}"
                )
            answer = await self._ask(home, request, due_at_s)
        except DEVICE_ERRORS as exc:
            self._streams[model.name].pop(_key(request), None)
            self._events.place_failed(model.name, home.name)
            lost_s = asyncio.get_running_loop().time() - begun_s
            model.settle([Failure(home, ticket, exc, lost_s)], is_answered=True)
            raise
        except BaseException:
            home.breaker.abandoned(ticket)
            raise
        finally:
            home.n_open -= 1
        home.breaker.succeeded(ticket)
        self._tell_answered(model, home, answer, begun_s)
        self._forget_if_last(model, request)
        return answer

    async def _ask(self, place: Place, request: Request, due_at_s: float) -> Answer:
        loop = asyncio.get_running_loop()
        lease = self._residency.lease(place.key)
        if self._residency.slot(place.key).state == "ready":
            worker = await lease.__aenter__()  # does not wait
            begun_at_s = loop.time()
        else:
            asked_at_s = loop.time()
            try:
                async with asyncio.timeout_at(due_at_s):
                    worker = await lease.__aenter__()
            except TimeoutError:
                raise DeadlineError(deadline_s=max(due_at_s - asked_at_s, 0.0)) from None
            begun_at_s = loop.time()
            place.load_s = begun_at_s - asked_at_s
        answer: Answer
        try:
            if isinstance(request, TensorRequest):
                answer = await worker.infer(request)
            else:
                answer = await worker.look(request)
        finally:
            await lease.__aexit__()
        now_s, candidate = loop.time(), place.row.candidate
        answer = replace(answer, place=candidate.place_of(answer.place), variant=candidate.variant)
        if answer.place == candidate.place:
            place.answered(answer.timings, now_s - begun_at_s, now_s)
        return answer

    # Bookkeeping.

    def _tell_answered(
        self, model: PlacedModel, place: Place, answer: Answer, begun_s: float, *, spilled: bool = False
    ) -> None:
        """Count an answer for what has computed it: the CPU may have, in the place of a device that was lost."""
        took_s = asyncio.get_running_loop().time() - begun_s
        name = place.row.candidate.name_of(answer.place)
        self._events.place_answered(model.name, name, spilled=spilled, took_s=took_s, n_joined=place.n_joined)

    def _remember(self, model: PlacedModel, stream: _StreamKey, place: Place) -> None:
        self._streams[model.name][stream] = place
        self._streams[model.name].move_to_end(stream)
        while len(self._streams[model.name]) > self._max_streams:
            self._streams[model.name].popitem(last=False)

    def _forget_if_last(self, model: PlacedModel, request: Request) -> None:
        if isinstance(request, TensorRequest) and request.is_last:
            self._streams[model.name].pop(_key(request), None)


def _own(request: Request) -> Request:
    """Copy a request's tensors: who sent it may use their memory again once it is answered."""
    if isinstance(request, MediaRequest):
        return request
    return replace(request, inputs=tuple(replace(tensor, data=bytes(tensor.data)) for tensor in request.inputs))


def _stream_key(request: Request) -> _StreamKey | None:
    return _key(request) if isinstance(request, TensorRequest) and request.stream else None


def _key(request: TensorRequest) -> _StreamKey:
    return request.tenant, request.stream, request.variant


def _starts_anew(request: Request) -> bool:
    return isinstance(request, TensorRequest) and request.is_first
