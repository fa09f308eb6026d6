"""Requests whose answers have a form, and wait for the clerk that compiles their grammars."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edge_rt.turns import Turns, in_turn
from edge_rt.types import GenerateRequest
from edge_rt.worker import channel


class FormsDesk:
    """Gives requests in turn, by the time that the clerk has spent for each tenant: grammars may take a second each,
    and one who asks for many of those waits for himself alone.

    clock  seconds; what lies between two calls of get is the first one's request's
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns = Turns()
        self._waiting: list[channel.Generate] = []
        self._changed = threading.Condition()
        self._served: tuple[GenerateRequest, float] | None = None

    def put(self, message: channel.Generate) -> None:
        request = message.request
        with self._changed:
            others = [w.request for w in self._waiting] + ([self._served[0]] if self._served is not None else [])
            self._turns.join(request.priority, request.tenant, [(r.priority, r.tenant) for r in others])
            self._waiting.append(message)
            self._changed.notify()

    def drop(self, request_id: str) -> bool:
        """Forget a request that still waits; say whether it did."""
        with self._changed:
            kept = [w for w in self._waiting if w.request.id != request_id]
            is_dropped = len(kept) < len(self._waiting)
            self._waiting = kept
            return is_dropped

    def get(self) -> channel.Generate:
        """Wait for the next request; the one before is done."""
        with self._changed:
            if self._served is not None:
                request, since_s = self._served
                self._turns.charge(request.priority, request.tenant, self._clock() - since_s)
                self._served = None
            while not self._waiting:
                self._changed.wait()
            waiting = ((w.request.priority, w.request.tenant, i) for i, w in enumerate(self._waiting))
            message = self._waiting.pop(in_turn(self._turns, waiting)[0])
            self._served = message.request, self._clock()
            return message
