"""The daemon's side of powerd's advice: taken within its own limits, over when powerd is gone or silent."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol, TypeVar

from edge_rt.config import Config
from edge_rt.devices import cpu
from edge_rt.power.state import NO_ADVICE, Advice
from edge_rt.power.wire import TakesAdvice

_log = logging.getLogger(__name__)

_SILENT_S: Final = 4.0  # powerd repeats its advice each second while there is work


def own_limits(config: Config) -> TakesAdvice:
    """Give what is configured, within which a daemon takes advice."""
    parallel = [settings.n_parallel for settings in config.models.values()]
    return TakesAdvice(
        max_threads=config.engine.n_threads or len(cpu.usable_cores()),
        max_batch=max(config.engine.n_parallel, *parallel, 1),
    )


class Worker(Protocol):
    """What computes; edge_rt.worker.supervisor.Worker is one."""

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None: ...


W = TypeVar("W", bound=Worker)
P = ParamSpec("P")


class AdviceTaker:
    """Keeps what is advised and hands it on. Belongs to one event loop.

    limits       the daemon's own, which no advice exceeds; a reload may change them
    told         the last advice, within them; in_force: the same, but the empty one in a dry run of powerd's
    """

    def __init__(self, limits: TakesAdvice) -> None:
        self.limits = limits
        self.told = self.in_force = NO_ADVICE
        self.run_at_most: Callable[[int | None], None] = lambda _: None  # set by who has the queues
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._unheard_s = 0.0  # of work since the last advice
        self._worked_s: float | None = None  # until when that is counted; None: nothing is worked at

    def add(self, worker: Worker) -> None:
        """Advise a worker from now on, as long as it is there."""
        self._workers.add(worker)
        if self.in_force != NO_ADVICE:
            worker.advise(self.in_force.n_prefill_threads, self.in_force.n_decode_threads)

    def take(self, advice: Advice, *, is_dry: bool, now_s: float) -> None:
        """Work by this from the next step on; in a dry run only remember it."""
        self._unheard_s = 0.0
        if self._worked_s is not None:
            self._worked_s = now_s
        most = self.limits
        self.told = Advice(
            n_prefill_threads=_within(advice.n_prefill_threads, most.max_threads),
            n_decode_threads=_within(advice.n_decode_threads, most.max_threads),
            max_batch=_within(advice.max_batch, most.max_batch),
        )
        self._apply(NO_ADVICE if is_dry else self.told)

    def check(self, now_s: float, *, works: bool) -> None:
        """End advice that has not been repeated for seconds of work. To be called every half second of it, and after.

        Rests count nothing, for nobody repeats it then, and forgive nothing: short answers are work too.
        """
        if self._worked_s is not None:
            self._unheard_s += now_s - self._worked_s
        self._worked_s = now_s if works else None
        if self.told != NO_ADVICE and self._unheard_s > _SILENT_S:
            self.end("powerd is silent")

    def end(self, reason: str) -> None:
        """Work as without advice."""
        if self.told != NO_ADVICE:
            _log.info("advice has ended: %s", reason)
        self.told = NO_ADVICE
        self._apply(NO_ADVICE)

    def _apply(self, advice: Advice) -> None:
        before, self.in_force = self.in_force, advice
        if advice == before:
            return
        _log.debug("works by advice: %s", advice)
        threads = (advice.n_prefill_threads, advice.n_decode_threads)
        if threads != (before.n_prefill_threads, before.n_decode_threads):
            for worker in list(self._workers):
                worker.advise(*threads)
        if advice.max_batch != before.max_batch:
            self.run_at_most(advice.max_batch)


def advised(make: Callable[P, W], taker: AdviceTaker) -> Callable[P, W]:
    """Give what makes workers that are advised."""

    def made(*args: P.args, **named: P.kwargs) -> W:
        worker = make(*args, **named)
        taker.add(worker)
        return worker

    return made


def _within(value: int | None, most: int) -> int | None:
    return None if value is None else min(value, most)
