"""What the front process has lent to one worker: clients' connections to answer, and memory that bodies lie in.

The worker's side is borrowed.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Final

from edge_rt.tensor_types import Lent, Reply
from edge_rt.worker import channel
from edge_rt.worker.parent_end import ParentChannel

MAX_LENT: Final = 32  # at a time: each holds up to two descriptors in the worker


class Lending:
    """The numbers by which the worker knows what it was lent; the one that was used least recently is taken back."""

    def __init__(self, to_worker: ParentChannel) -> None:
        self._channel = to_worker
        self._numbers: OrderedDict[Lent, int] = OrderedDict()
        self._next = count(1)

    def reply(self, reply: Reply) -> channel.SentReply | None:
        """Let the worker write an answer itself; None: it cannot be lent the connection now."""
        if (number := self._lend(reply.loan, channel.Lend)) is None:
            return None
        reply.loan.permit()
        return channel.SentReply(number, reply.head, tuple(channel.SentTensor(*output) for output in reply.outputs))

    def memory(self, memory: Lent, start: int) -> tuple[int, int] | None:
        """Let the worker read inputs where they lie; None: it cannot be lent the memory now."""
        number = self._lend(memory, channel.LendMemory)
        return None if number is None else (number, start)

    def end(self) -> None:
        """Hear that the worker is gone."""
        while self._numbers:
            self._numbers.popitem()[0].returned_by(self)

    def _lend(self, what: Lent, message: Callable[[int], channel.Lend | channel.LendMemory]) -> int | None:
        if (number := self._numbers.get(what)) is not None:
            self._numbers.move_to_end(what)
            return number
        number = next(self._next)
        if not self._channel.send_fds(message(number), what.fds()):
            return None
        self._numbers[what] = number
        what.lent_to(self, self._take_back)
        if len(self._numbers) > MAX_LENT:
            self._take_back(next(iter(self._numbers)))
        return number

    def _take_back(self, what: Lent) -> None:
        if (number := self._numbers.pop(what, None)) is not None:
            what.returned_by(self)
            self._channel.send(channel.GiveBack(number))
