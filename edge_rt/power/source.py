"""One thing that is read again and again: in the control loop, or beside it once it has shown to be slow.

Nearly all sensors answer in microseconds, and a thread for each would cost more than they do. Some lie behind a slow
bus or a firmware that takes its time, 200 ms and more: read in the loop they would hold up the cap. Such a one gets a
thread of its own, and the loop takes what it has found when it has found it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, Protocol, TypeVar

from edge_rt import held_signals

SLOW_S: Final = 0.02  # of a look's 50 ms; longer than a process that is ready waits for its turn, mostly
_N_SLOW: Final = 2  # such readings in a row: one may be chance
_N_QUICK: Final = 20  # of a quarter of that in a row, until it is read in the loop again

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Took(Generic[T]):
    """A reading, and when it began and ended."""

    value: T
    begun_s: float
    ended_s: float

    @property
    def read_s(self) -> float:
        return self.ended_s - self.begun_s


class Beside(Protocol[T]):
    """Reads somewhere else than in the loop; Thread is one."""

    def ask(self) -> None:
        """Let it read once; not before the last reading was collected."""
        ...

    def collect(self) -> Took[T] | None:
        """Give what was read since it was asked, None as long as that lasts. Raises what reading raised."""
        ...

    def leave(self) -> None:
        """Let it end and leave what it reads to others; what was asked has been collected."""
        ...

    def close(self) -> None:
        """Let it end, and close what it reads, when it can. Never waits."""
        ...


class Thread(Generic[T]):
    """Reads in a thread of its own, which alone uses read and close from now on."""

    def __init__(self, read: Callable[[float], T], close: Callable[[], None], clock: Callable[[], float]) -> None:
        import threading  # what few machines need takes no memory on others
        from queue import SimpleQueue

        self._read, self._close, self._clock = read, close, clock
        self._asked: SimpleQueue[Literal["read", "leave", "close"]] = SimpleQueue()
        self._found: SimpleQueue[Took[T] | BaseException] = SimpleQueue()
        # Not waited for at the end: a driver may never come back.
        threading.Thread(target=self._run, name="slow sensor", daemon=True).start()

    def ask(self) -> None:
        self._asked.put("read")

    def collect(self) -> Took[T] | None:
        if self._found.empty():
            return None
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def leave(self) -> None:
        self._asked.put("leave")

    def close(self) -> None:
        self._asked.put("close")

    def _run(self) -> None:
        held_signals.hold()  # they are the loop's
        while (asked := self._asked.get()) == "read":
            try:
                begun_s = self._clock()
                value = self._read(begun_s)
                self._found.put(Took(value, begun_s, self._clock()))
            except BaseException as exc:  # noqa: BLE001  told in the loop
                self._found.put(exc)
        if asked == "close":
            self._close()


class Source(Generic[T]):
    """Reads one thing as often as it has news. Belongs to one thread.

    read    is called with the time; close with nothing, at the end
    beside  makes the reader for what is slow, of read, close and clock
    clock   None: no reading takes any time
    read_s  how long the last reading took
    """

    def __init__(
        self,
        read: Callable[[float], T],
        interval_s: float,
        clock: Callable[[], float] | None,
        *,
        close: Callable[[], None] = lambda: None,
        beside: Callable[[Callable[[float], T], Callable[[], None], Callable[[], float]], Beside[T]] = Thread,
    ) -> None:
        self._read, self._close, self._interval_s, self._clock = read, close, interval_s, clock
        self._make_beside = beside
        self._beside: Beside[T] | None = None
        self._asked_s: float | None = None  # when it was asked last, as long as it has not answered
        self._n_slow = self._n_quick = 0  # in a row
        self._due_s = -math.inf
        self.read_s = 0.0

    @property
    def is_slow(self) -> bool:
        """Tell whether it has shown to be slow, and is read beside the loop."""
        return self._beside is not None

    def is_late(self, now_s: float, n_intervals: int) -> bool:
        """Tell whether a reading beside the loop lasts that many times as long as it should."""
        if self._asked_s is None:
            return False
        return now_s - self._asked_s > n_intervals * max(self._interval_s, self.read_s)

    def poll(self, now_s: float) -> Took[T] | None:
        """Read if it is due; None where there is nothing new. Raises what read raises."""
        if self._beside is not None:
            return self._poll_beside(self._beside, now_s)
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._interval_s
        begun_s = self._clock() if self._clock is not None else now_s
        value = self._read(begun_s)
        took = Took(value, begun_s, self._clock() if self._clock is not None else now_s)
        self.read_s = took.read_s
        self._n_slow = self._n_slow + 1 if took.read_s > SLOW_S else 0
        if self._n_slow >= _N_SLOW and self._clock is not None:
            self._beside = self._make_beside(self._read, self._close, self._clock)
        return took

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
        else:
            self._close()

    def _poll_beside(self, beside: Beside[T], now_s: float) -> Took[T] | None:
        took = None
        if self._asked_s is not None:
            try:
                took = beside.collect()
            except BaseException:
                self._asked_s = None  # it has answered, if with an error: it is asked again when it is due
                raise
            if took is not None:
                self._asked_s, self.read_s = None, took.read_s
                self._n_quick = self._n_quick + 1 if took.read_s < SLOW_S / 4 else 0
                if self._n_quick >= _N_QUICK:
                    beside.leave()
                    self._beside, self._n_slow, self._n_quick = None, 0, 0
                    return took
        if self._asked_s is None and now_s >= self._due_s:
            self._due_s = now_s + self._interval_s
            self._asked_s = now_s
            beside.ask()
        return took
