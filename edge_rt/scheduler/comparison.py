"""A new device's first answers are compared with the CPU's, before any of them counts as right.

One that differs puts the device out of use for the model, and its client gets the CPU's answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from edge_rt.errors import EdgeRtError
from edge_rt.scheduler.agreement import difference
from edge_rt.scheduler.direct import DEVICE_ERRORS
from edge_rt.scheduler.placed_model import DispatchEvents, Failure, PlacedModel
from edge_rt.scheduler.places import Place
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorAnswer, TensorRequest

_log = logging.getLogger(__name__)

_INLINE_BYTES = 64 * 1024  # answers that are compared on the loop itself; larger ones take a thread

Request = TensorRequest | MediaRequest
Answer = TensorAnswer | MediaAnswer
Ask = Callable[[Place, Request, float], Awaitable[Answer]]


class TellAnswered(Protocol):
    def __call__(self, model: PlacedModel, place: Place, answer: Answer, begun_s: float) -> None: ...


class Comparison:
    """Compares answers for a dispatcher. ask asks a place; tell_answered counts an answer that its client gets."""

    def __init__(self, ask: Ask, tell_answered: TellAnswered, events: DispatchEvents) -> None:
        self._ask, self._tell_answered, self._events = ask, tell_answered, events

    async def checked(
        self,
        model: PlacedModel,
        place: Place,
        request: Request,
        answer: Answer,
        due_at_s: float,
        *,
        tolerance: float,
    ) -> Answer | None:
        """Give the answer that is right: this one, or the reference's; None where the request must go elsewhere.

        As many answers as are still to be compared are, at the same time; what a device answers beside them waits for
        their verdict, so that requests neither get unproven answers nor crowd the slower device meanwhile. What the
        CPU has computed in a lost device's place is right, and proves nothing of the device.
        """
        if answer.place != place.row.candidate.place:
            return answer
        while place.n_to_check and not place.wrong:
            if (reference := model.reference(place)) is None:
                return answer
            if place.n_checking < place.n_to_check:
                return await self._compare(model, place, reference, request, answer, due_at_s, tolerance)
            verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            place.waiting.append(verdict)
            await verdict
        return None if place.wrong else answer

    async def _compare(
        self,
        model: PlacedModel,
        place: Place,
        reference: Place,
        request: Request,
        answer: Answer,
        due_at_s: float,
        tolerance: float,
    ) -> Answer | None:
        # A stream's first request: its state shall not stay on the reference.
        asked = (
            replace(request, stream="", is_first=False, is_last=False)
            if isinstance(request, TensorRequest)
            else request
        )
        begun_s = asyncio.get_running_loop().time()
        ticket = reference.breaker.begin(begun_s)
        reference.n_open += 1
        place.n_checking += 1
        try:
            expected = await self._ask(reference, asked, due_at_s)
            problem = await _difference(answer, expected, tolerance)
        except EdgeRtError as exc:
            _log.warning("an answer of %s for %s cannot be checked: %s", place.name, model.name, exc)
            lost_s = asyncio.get_running_loop().time() - begun_s
            model.settle([Failure(reference, ticket, exc, lost_s)], is_answered=isinstance(exc, DEVICE_ERRORS))
            return answer
        except BaseException:
            reference.breaker.abandoned(ticket)
            raise
        finally:
            reference.n_open -= 1
            place.n_checking -= 1
            place.wake()
        reference.breaker.succeeded(ticket)
        if not problem:
            place.n_to_check = max(0, place.n_to_check - 1)
            return answer
        if not place.wrong:
            place.wrong = problem
            _log.error("%s is not used for %s any more: %s", place.name, model.name, problem)
            self._events.place_wrong(model.name, place.name)
        if isinstance(request, TensorRequest) and request.stream:
            return None
        self._tell_answered(model, reference, expected, begun_s)
        return expected


async def _difference(answer: Answer, expected: Answer, tolerance: float) -> str:
    n_bytes = sum(len(t.data) for t in answer.outputs) if isinstance(answer, TensorAnswer) else 0
    if n_bytes <= _INLINE_BYTES:
        return difference(answer, expected, tolerance)
    return await asyncio.to_thread(difference, answer, expected, tolerance)
