"""What the daemon has to do, told to powerd as it changes: at each arrival, each change of phase, and every 0.5 s.

The front process knows of a request when it came, when it got its place, and when its first token came back. How many
tokens a prompt has it estimates by its length, for it has no tokenizer, until the engine begins with it and says how
many it computes: those of a kept prefix are none of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Final, Protocol

from edge_rt.power.state import Hint, Work
from edge_rt.types import GenerateRequest

_log = logging.getLogger(__name__)

REPEAT_S: Final = 0.5  # while there is work: a hint that is older than 2 s counts no more
_SETTLE_S: Final = 0.05  # changes that need no hurry share one hint
_IDLE_S: Final = 0.1  # after the last request, for the next one may follow at once
_URGENT_S: Final = 0.02  # between hints in any case
_CHARS_PER_TOKEN: Final = 4.0
_TPOT_WEIGHT: Final = 0.3  # of an answer's newest chunk in its moving average


class Sender(Protocol):
    """Where hints go; edge_rt.power.client.HintSender is one."""

    problem: str

    def send(self, hint: Hint) -> bool: ...

    def close(self) -> None: ...


def estimated_tokens(request: GenerateRequest) -> int:
    """Estimate a prompt's tokens by its length, at least one."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    texts = [message.content for message in request.messages] if request.messages else [request.prompt or ""]
    return max(1, round(sum(map(len, texts)) / _CHARS_PER_TOKEN))


class LoopWatch:
    """Tells by the running event loop when a socket can be read."""

    def add(self, fd: int, on_readable: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(fd, on_readable)

    def remove(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)


class Progress:
    """One answer of a language model."""

    __slots__ = ("_workload", "arrived_s", "has_begun", "model", "n_prompt_tokens", "seen_s", "tpot_s")

    def __init__(self, workload: Workload, model: str, arrived_s: float, n_prompt_tokens: int) -> None:
        self._workload, self.model = workload, model
        self.arrived_s, self.n_prompt_tokens = arrived_s, n_prompt_tokens
        self.has_begun = False
        self.seen_s: float | None = None  # of the last token
        self.tpot_s: float | None = None

    def begin(self) -> None:
        """Take note that it has its place and its model is in memory."""
        self.has_begun = True
        self._workload.changed()

    def found(self, n_prompt_tokens: int) -> None:
        """Take the number of the prompt's tokens that are computed, as the engine begins with them."""
        self.n_prompt_tokens = max(n_prompt_tokens, 1)
        if self.seen_s is None:
            self._workload.changed()

    def came(self, n_tokens: int) -> None:
        """Count tokens that have come; the first ones end the prefill."""
        if n_tokens <= 0:
            return
        now_s, seen_s = asyncio.get_running_loop().time(), self.seen_s
        self.seen_s = now_s
        if seen_s is None:
            self._workload.changed()
            return
        tpot_s = (now_s - seen_s) / n_tokens
        self.tpot_s = tpot_s if self.tpot_s is None else self.tpot_s + _TPOT_WEIGHT * (tpot_s - self.tpot_s)


class Workload:
    """All requests that this device works on. Belongs to one event loop, whose time() is the clock.

    sender     None: nobody is told, and nothing is scheduled
    n_threads  gives how many compute now
    """

    def __init__(self, sender: Sender | None, *, ttft_slo_s: float, n_threads: Callable[[], int] = lambda: 0) -> None:
        self.n_threads = n_threads
        self._sender, self.ttft_slo_s = sender, ttft_slo_s
        self._queues: dict[str, tuple[int, int]] = {}  # running and waiting, by model
        self._answers: dict[Progress, None] = {}  # in the order of their arrival
        self._n_answers: Counter[str] = Counter()  # by model
        self._said: Hint = Hint(work="idle")
        self._said_s = -math.inf
        self._seen_s = -math.inf  # when a request came or ended last
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._told_problem = ""

    @property
    def is_heard(self) -> bool:
        """Tell whether powerd took the last hint."""
        return self._sender is not None and math.isfinite(self._said_s) and not self._sender.problem

    def queue_changed(self, model: str, *, running: int, waiting: int) -> None:
        """Take in how many of a model's requests run and wait; those that are no answers of a language model count."""
        before, self._queues[model] = self._queues.get(model, (0, 0)), (running, waiting)
        if self._sender is None:
            return
        self._seen_s = asyncio.get_running_loop().time()
        if sum(before) == 0 and self._said.work == "idle":
            self.changed()  # a request after a pause
        elif waiting and not self._said.n_waiting:
            self.changed()
        else:
            self._within(_IDLE_S if not running else _SETTLE_S)

    @contextmanager
    def answer(self, request: GenerateRequest) -> Iterator[Progress]:
        """Follow one answer of a language model, from its arrival to its end."""
        model, n_prompt_tokens = request.model, estimated_tokens(request)
        progress = Progress(self, model, asyncio.get_running_loop().time(), n_prompt_tokens)
        self._answers[progress] = None
        self._n_answers[model] += 1
        self.changed()
        try:
            yield progress
        finally:
            del self._answers[progress]
            self._n_answers[model] -= 1
            if self._sender is not None:
                self._seen_s = asyncio.get_running_loop().time()
                self._within(_IDLE_S if not self._answers else _SETTLE_S)

    def hint(self, now_s: float) -> Hint:
        """Tell what is to be done, as of now_s."""
        n_running, n_waiting = self._tensors()
        has_tensors = n_running + n_waiting > 0
        begun = sum(answer.has_begun for answer in self._answers)
        silent = [answer for answer in self._answers if answer.seen_s is None]
        speeds = [answer.tpot_s for answer in self._answers if answer.tpot_s is not None]
        work: Work = "prefill" if silent or has_tensors else "decode" if self._answers else "idle"
        return Hint(
            work=work,
            n_waiting=n_waiting + len(self._answers) - begun,
            n_running=n_running + begun,
            n_prompt_tokens=silent[0].n_prompt_tokens if silent else 0,
            ttft_left_s=silent[0].arrived_s + self.ttft_slo_s - now_s if silent else None,
            tpot_s=max(speeds, default=None),
            n_threads=self.n_threads(),
            sent_s=now_s,
        )

    def changed(self) -> None:
        """Tell as soon as the event loop has done what it is at, unless something was told a moment ago."""
        if self._sender is not None:
            self._within(max(0.0, self._said_s + _URGENT_S - asyncio.get_running_loop().time()))

    def _tensors(self) -> tuple[int, int]:
        """Count requests that run and wait and are no answers of a language model."""
        n_running = n_waiting = 0
        for model, (running, waiting) in self._queues.items():
            n_text = self._n_answers.get(model, 0)
            n_running += max(0, running - n_text)
            n_waiting += max(0, waiting - max(0, n_text - running))
        return n_running, n_waiting

    def close(self) -> None:
        """Tell nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        # Not in the context of the request that happens to come: what is logged of powerd has no request's id.
        self._timer, self._due_s = loop.call_later(seconds, self._tell, context=Context()), due_s

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sender is None:
            return
        now_s = asyncio.get_running_loop().time()
        found = self.hint(now_s)
        if found.work == "idle" and now_s - self._seen_s < _IDLE_S and self._said.work != "idle":
            self._within(self._seen_s + _IDLE_S - now_s)
            return
        self._said, self._said_s = found, now_s
        self._sender.send(self._said)
        if self._sender.problem != self._told_problem:
            self._told_problem = self._sender.problem
            if self._told_problem:
                _log.debug("powerd gets no hints: %s", self._told_problem)
        if self._said.work != "idle":
            self._within(REPEAT_S)
