"""Calls to a tensor engine that wait for their answer: for pipelines on clerk threads, and for the library."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_rt.engine.calls import Arrays, Call, Sink
from edge_rt.engine.infer import Inferred
from edge_rt.errors import DeadlineError, EdgeRtError, OverloadedError
from edge_rt.tensor_types import TensorTimings


class Engine(Protocol):
    """What waiting needs of a TensorEngine."""

    def submit(self, call: Call, sink: Sink) -> None: ...

    def call(self, call: Call, sink: Sink, *, max_s: float = math.inf) -> None: ...

    def cancel(self, call_id: str) -> None: ...

    def forget(self, tenant: str, stream: str) -> None: ...


class AbandonedError(Exception):
    """The caller has given its request up. Never leaves the engine's users."""


class Answer:
    """A sink that one thread waits at, once; the first end counts."""

    __slots__ = ("_end", "_lock", "n_stream_calls")

    def __init__(self) -> None:
        # A lock that is held until the end: an Event would take three, which shows at 10,000 calls a second.
        self._lock = threading.Lock()
        self._lock.acquire()
        self._end: Inferred | Exception | None = None
        self.n_stream_calls = 0

    def answered(self, outputs: Arrays, timings: TensorTimings, *, n_stream_calls: int) -> None:
        self.n_stream_calls = n_stream_calls
        self._finish(Inferred(outputs=outputs, timings=timings))

    def failed(self, error: Exception) -> None:
        self._finish(error)

    def wait(self) -> Inferred:
        """Wait for the answer. Raises what the call failed with."""
        self._lock.acquire()
        assert self._end is not None
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    def _finish(self, end: Inferred | Exception) -> None:
        if self._end is None:
            self._end = end
            self._lock.release()


class WaitingInfer:
    """The Infer of one media request. Close it when the pipeline has ended, however it has.

    Its streams are its own: no other request's stream of the same name is meant.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        request_id: str,
        tenant: str = "",
        deadline_s: float | None = None,
        begun_s: float | None = None,
        max_streams: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        # No tenant's name holds a NUL: they come from the kernel and the configuration.
        self._tenant = f"{tenant}\0{request_id}"
        self._deadline_s = deadline_s
        self._max_streams = max_streams
        self._clock = clock
        self._begun_s = clock() if begun_s is None else begun_s
        self._ids = count()
        self._n_calls: dict[str, int] = {}  # of each stream
        self._lock = threading.Lock()
        self._open: dict[str, Answer] = {}
        self._is_abandoned = False

    def __call__(self, feeds: Mapping[str, NDArray[Any]], *, stream: str = "", is_last: bool = False) -> Inferred:
        """Compute and wait for it.

        Raises what the engine fails the call with, OverloadedError where the stream's state was lost to others, and
        AbandonedError after abandon.
        """
        left_s = self.check_deadline()
        answer = Answer()
        call = Call(
            id=f"{self._request_id}/{next(self._ids)}",
            feeds=feeds,
            stream=stream,
            is_last=is_last,
            tenant=self._tenant,
            deadline_s=left_s,
        )
        with self._lock:
            if self._is_abandoned:
                raise AbandonedError
            self._open[call.id] = answer
        try:
            self._engine.submit(call, answer)
            inferred = answer.wait()
        except DeadlineError as exc:
            raise DeadlineError(deadline_s=self._deadline_s or exc.deadline_s) from exc
        finally:
            with self._lock:
                self._open.pop(call.id, None)
        if stream:
            self._follow(stream, answer.n_stream_calls, is_last=is_last)
        return inferred

    def check_deadline(self) -> float | None:
        """Give the time left, None if there is no limit. Raises DeadlineError."""
        if self._deadline_s is None:
            return None
        left_s = self._begun_s + self._deadline_s - self._clock()
        if left_s <= 0:
            raise DeadlineError(deadline_s=self._deadline_s)
        return left_s

    def abandon(self) -> None:
        """Give the request up, from any thread: a call that waits ends, and the next one does not begin."""
        with self._lock:
            self._is_abandoned = True
            waiting = dict(self._open)
        for call_id, answer in waiting.items():
            self._engine.cancel(call_id)
            answer.failed(AbandonedError())

    def close(self) -> None:
        """Forget the streams that were not ended."""
        for stream in self._n_calls:
            self._engine.forget(self._tenant, stream)

    def _follow(self, stream: str, n_calls: int, *, is_last: bool) -> None:
        """See that a stream's state is that of its last call."""
        expected = self._n_calls.pop(stream, 0) + 1
        if not is_last:
            self._n_calls[stream] = expected
        if n_calls != expected:
            raise OverloadedError(resource="streams", limit=self._max_streams, setting="tensor.max_streams")


def infer_once(engine: Engine, call: Call) -> tuple[Inferred, int]:
    """Compute one call and wait for it; with the answer the number of its stream's calls.

    An interrupt of the waiting thread gives the call up. Raises what the call fails with.
    """
    answer = Answer()
    engine.call(call, answer)
    try:
        return answer.wait(), answer.n_stream_calls
    except EdgeRtError:
        raise
    except BaseException:
        engine.cancel(call.id)
        raise
