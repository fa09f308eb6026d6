"""Which waiting requests a tensor model computes together, and when. Pure: time comes in as an argument.

Requests with one key (the shapes of their rows, datatypes and wanted outputs) are joined, oldest first, up to
max_batch rows. While the model computes, requests gather by themselves; what is left to decide is whether a model
that has nothing to do shall wait for more. Waiting for a companion that does not come costs the whole delay, and the
time between requests does not tell: a lone client that asks again as soon as it has its answer looks like a crowd. So
each key remembers its crowd: how many requests were inside together, waiting or computing. Clients that come back
after an answered batch are waited for until the crowd is complete again, or max_delay_s is over; then the crowd is
those that came. A wait in vain is thus paid at most once for each time that requests really met, and a lone client
never waits. Nor does anyone where joining.py has measured that a larger batch would not make good the wait, and no more
rows are joined than it finds to pay.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from edge_rt.engine.joining import Joining

T = TypeVar("T")

_MAX_KEYS = 64  # remembered beyond those that wait: 10,000 different shapes must not grow memory


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """One request in the queue. key None is never joined; due_at_s is how long it waits for others to join."""

    item: T
    key: Hashable | None
    n_rows: int
    since_s: float
    due_at_s: float


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Requests to be computed together, oldest first."""

    key: Hashable | None
    items: list[T]
    n_rows: int


class _Kind:
    """What is remembered of a key: its crowd, and what joining brings."""

    __slots__ = ("crowd", "joining")

    def __init__(self, max_batch: int) -> None:
        self.crowd = 0
        self.joining = Joining(max_batch)


class Batcher(Generic[T]):
    """The queue of one model. A request larger than max_batch is computed alone."""

    def __init__(self, *, max_batch: int, max_delay_s: float) -> None:
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._queues: OrderedDict[Hashable, deque[Waiting[T]]] = OrderedDict()  # by key, none empty
        self._alone: deque[Waiting[T]] = deque()
        self._computing: Counter[Hashable] = Counter()
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._n_waiting = 0
        self._free_s = -math.inf  # since when nothing of what was taken last is computed

    def __len__(self) -> int:
        return self._n_waiting

    def add(self, item: T, *, key: Hashable | None, n_rows: int, now_s: float, patience_s: float | None = None) -> None:
        """Queue a request of n_rows rows; requests with an equal key may be joined with it.

        patience_s  how long it may wait for them, where that is less than max_delay_s
        """
        joins = key is not None and n_rows < self._max_batch
        delay_s = self._max_delay_s if patience_s is None else min(patience_s, self._max_delay_s)
        waiting = Waiting(item, key if joins else None, n_rows, now_s, now_s + delay_s)
        self._n_waiting += 1
        if waiting.key is None:
            self._alone.append(waiting)
            return
        queue = self._queues.setdefault(key, deque())
        queue.append(waiting)
        kind = self._kind(key)
        kind.crowd = max(kind.crowd, len(queue) + self._computing[key])

    def let_through(self, item: T, *, key: Hashable | None, n_rows: int) -> Batch[T] | None:
        """Give a request's own batch at once if nothing waits and nobody is expected; None: it must be added.

        The short way of a lone client: it leaves what adding and taking would leave.
        """
        if self._n_waiting:
            return None
        if key is None or n_rows >= self._max_batch:
            return Batch(None, [item], n_rows)
        kind = self._kind(key)
        if kind.crowd > 1 or self._computing[key]:
            return None
        kind.crowd = 1
        self._computing[key] += 1
        return Batch(key, [item], n_rows)

    def remove(self, is_meant: Callable[[T], bool]) -> list[T]:
        """Take out the requests that are meant, and give them; nobody waits for their clients."""
        removed: list[T] = []
        for key, queue in ((None, self._alone), *self._queues.items()):
            gone = [waiting for waiting in queue if is_meant(waiting.item)]
            for waiting in gone:
                queue.remove(waiting)
            if gone and key in self._kinds:
                self._kinds[key].crowd -= len(gone)
            removed += [waiting.item for waiting in gone]
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]
        self._n_waiting -= len(removed)
        return removed

    def take(self, now_s: float) -> Batch[T] | None:
        """Take what a model that has nothing to do shall compute now; None: nothing, or wait for wait_s.

        Of the batches that wait for nobody, the one whose first request is oldest. So no key is passed over for long:
        its first request is ready max_delay_s after it came, and older then than what comes later.
        """
        ready = [queue for queue in self._queues.values() if self._due_at_s(queue) <= now_s]
        if self._alone:
            ready.append(self._alone)
        if not ready:
            return None
        queue = min(ready, key=lambda queue: queue[0].since_s)
        if queue is self._alone:
            first = queue.popleft()
            self._n_waiting -= 1
            return Batch(None, [first.item], first.n_rows)
        return self._cut(queue, now_s)

    def wait_s(self, now_s: float) -> float | None:
        """Give how long until take gives a batch if nothing else comes; None if nothing waits."""
        if self._alone:
            return 0.0
        return min((max(0.0, self._due_at_s(queue) - now_s) for queue in self._queues.values()), default=None)

    def finished(self, batch: Batch[T], now_s: float, *, compute_s: float | None = None) -> None:
        """Hear that a batch that take gave is computed, and how long that took; None where it tells nothing."""
        self._free_s = now_s
        if batch.key is not None:
            self._computing[batch.key] -= len(batch.items)
            if self._computing[batch.key] <= 0:
                del self._computing[batch.key]
            if compute_s is not None and (kind := self._kinds.get(batch.key)) is not None:
                kind.joining.observe(batch.n_rows, compute_s)

    def _due_at_s(self, queue: deque[Waiting[T]]) -> float:
        """Tell from when on a key's requests are computed, whoever else may come."""
        first, kind = queue[0], self._kind(queue[0].key)
        n_missing = kind.crowd - len(queue) - self._computing[first.key]
        n_rows = sum([waiting.n_rows for waiting in queue])
        # Who is missing is expected to bring as many rows as those that are here.
        if n_missing <= 0 or not kind.joining.is_worth_waiting(n_rows, n_rows + n_missing * n_rows // len(queue)):
            return first.since_s
        return min([waiting.due_at_s for waiting in queue])

    def _cut(self, queue: deque[Waiting[T]], now_s: float) -> Batch[T]:
        """Take from the front of a queue as much as one batch shall hold. Order is kept: no small request overtakes."""
        key, n_rows = queue[0].key, 0
        kind = self._kind(key)
        begun_s = max(queue[0].since_s, self._free_s)
        if begun_s < now_s < math.inf and kind.crowd > 1 and not self._computing[key]:
            kind.joining.waited(now_s - begun_s)
        if now_s >= queue[0].due_at_s:
            kind.crowd = len(queue) + self._computing[key]  # who has not come by now is not waited for again
        n_chosen = kind.joining.choose(sum([waiting.n_rows for waiting in queue]))
        items: list[T] = []
        while queue and (not items or n_rows + queue[0].n_rows <= n_chosen):
            waiting = queue.popleft()
            items.append(waiting.item)
            n_rows += waiting.n_rows
        if not queue:
            del self._queues[key]
        self._n_waiting -= len(items)
        self._computing[key] += len(items)
        return Batch(key, items, n_rows)

    def _kind(self, key: Hashable) -> _Kind:
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(self._max_batch)
            while len(self._kinds) > _MAX_KEYS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        return kind
