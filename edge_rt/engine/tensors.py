"""The loop of a tensor model: requests are checked as they come, joined as engine/batcher.py says, and computed.

Any thread may submit, cancel, stop and ask for figures. As many threads compute as the session takes at a time, which
is one unless it says otherwise; they call the sinks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_rt.backends.base import TensorSession, device_stats
from edge_rt.backends.tensor_feeds import FeedCheck, check_feeds, check_outputs
from edge_rt.catalog.pipelines import StateTensor
from edge_rt.engine.batcher import Batch, Batcher
from edge_rt.engine.calls import Arrays, Call, Job, Sink, check_rows, count_rows, has_rows, zeros
from edge_rt.engine.streams import Streams
from edge_rt.errors import BackendStepError, DeadlineError, EdgeRtError, InvalidRequestError, ShuttingDownError
from edge_rt.tensor_types import TensorTimings
from edge_rt.types import EngineStats

_log = logging.getLogger(__name__)

# Of a request's deadline, what it may spend waiting for others to join.
_PATIENCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSettings:
    """How requests are joined and streams kept; as in worker.channel.TensorLoad."""

    max_batch: int = 1
    max_delay_s: float = 0.0
    state: tuple[StateTensor, ...] = ()
    max_streams: int = 256
    max_state_bytes: int = 64 * 2**20


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    rows: int = 0
    step_rows: list[int] = field(default_factory=lambda: [0] * 11)  # EngineStats.step_rows
    cancelled: int = 0


class TensorEngine:
    """Runs one tensor model for many requests. Raises BackendLoadError for a state that is not the model's."""

    def __init__(
        self, session: TensorSession, settings: TensorSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._clock = clock
        self._streams = Streams(
            settings.state,
            session.inputs,
            session.outputs,
            model=session.info.model,
            max_streams=settings.max_streams,
            max_bytes=settings.max_state_bytes,
        )
        self._check_feeds = FeedCheck(session.inputs)
        # Where only the number of rows varies, requests differ in nothing else that keeps them apart.
        self._has_one_shape = all(min(spec.shape[1:], default=0) >= 0 for spec in session.inputs)
        # A state's calls are computed one after the other, each alone: whose rows a state's are is not in the model.
        self._is_stateful = bool(settings.state)
        self._n_runs = 1 if self._is_stateful else max(1, session.info.max_runs)
        can_join = not self._is_stateful and has_rows(session.inputs) and has_rows(session.outputs)
        self._max_batch = settings.max_batch if can_join else 1
        self._batcher: Batcher[Job] = Batcher(max_batch=self._max_batch, max_delay_s=settings.max_delay_s)
        self._running: list[Job] = []
        self._n_computing = 0
        self._recent_s = math.inf  # what the last batch took
        self._has_deadlines = False
        self._alarm_s = math.inf  # when a thread that sleeps looks by itself
        self._totals = _Totals()
        self._accepting = True
        self._stop_at_s: float | None = None
        self._changed = threading.Condition()

    @property
    def max_batch(self) -> int:
        """Rows that requests are joined to: 1 where the model cannot be joined, whatever the settings say."""
        return self._max_batch

    # -- any thread ------------------------------------------------------------------------------------------------

    def submit(self, call: Call, sink: Sink) -> None:
        """Queue a call. Every error, of the call too, goes to sink.failed; a bad call never meets the others."""
        try:
            job = self._checked(call, sink)
            with self._changed:
                self._add(job)
        except EdgeRtError as exc:
            sink.failed(exc)

    def call(self, call: Call, sink: Sink, *, max_s: float = math.inf) -> None:
        """Submit a call for a caller that waits for it: computed right here if nobody else is inside.

        A lone client so saves the way to another thread and back.
        max_s  for a caller that others depend on: what it may take, by the last batch
        """
        try:
            job = self._checked(call, sink)
            with self._changed:
                # A caller that others depend on does not compute where several could at a time.
                is_free = not self._n_computing and (
                    max_s == math.inf or (self._n_runs == 1 and self._recent_s <= max_s)
                )
                batch = self._let_through(job) if is_free else None
                if batch is None:
                    self._add(job)
                    return
                self._begin(batch)
        except EdgeRtError as exc:
            sink.failed(exc)
            return
        self._run_batch(batch)

    def cancel(self, call_id: str) -> None:
        """Forget a call that waits; its sink hears nothing more. One that computes already is computed to its end."""
        with self._changed:
            self._totals.cancelled += len(self._batcher.remove(lambda job: job.call.id == call_id))
            self._changed.notify_all()

    def forget(self, tenant: str, stream: str) -> None:
        """Forget a stream's state; no call of it may be inside."""
        self._streams.forget(tenant, stream)

    def stop(self, drain_s: float) -> None:
        """End the loop: new calls are refused, those inside have drain_s to be computed."""
        with self._changed:
            self._accepting = False
            self._stop_at_s = self._clock() + drain_s
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        totals = self._totals
        return EngineStats(
            waiting=len(self._batcher),
            running=len(self._running),
            n_threads=self._session.info.n_threads,
            steps_total=totals.steps,
            rows_total=totals.rows,
            step_rows=tuple(totals.step_rows),
            cancelled_total=totals.cancelled,
            **device_stats(self._session),
        )

    def _checked(self, call: Call, sink: Sink) -> Job:
        if self._streams.inputs:
            self._check_stateful(call.feeds)
        else:
            self._check_feeds(call.feeds)
        if call.outputs:
            check_outputs(self._session.outputs, call.outputs)
        if call.stream and not self._is_stateful:
            raise InvalidRequestError(param="stream", problem="this model keeps no state, so it has no streams")
        return Job(call, sink, self._clock(), count_rows(call.feeds))

    def _check_stateful(self, feeds: Arrays) -> None:
        """Check the feeds of a model with a state, some of which may be kept here."""
        if kept := self._streams.inputs - feeds.keys():
            check_feeds([spec for spec in self._session.inputs if spec.name not in kept], feeds)
        else:
            check_feeds(self._session.inputs, feeds)

    def _let_through(self, job: Job) -> Batch[Job] | None:
        """Give a call's batch if it need not wait for anybody. Holds the lock."""
        if not self._accepting:
            raise ShuttingDownError
        return self._batcher.let_through(job, key=self._key(job), n_rows=max(1, job.n_rows))

    def _add(self, job: Job) -> None:
        """Queue a call. Holds the lock."""
        if not self._accepting:
            raise ShuttingDownError
        deadline_s = job.call.deadline_s
        self._has_deadlines |= deadline_s is not None
        self._batcher.add(
            job,
            key=self._key(job),
            n_rows=max(1, job.n_rows),
            now_s=job.submitted_s,
            patience_s=None if deadline_s is None else deadline_s * _PATIENCE,
        )
        self._wake()

    def _wake(self) -> None:
        """Wake a computing thread if there is something to compute before it looks by itself. Holds the lock."""
        now_s = self._clock()
        wait_s = self._batcher.wait_s(now_s)
        if wait_s is not None and self._n_computing < self._n_runs and now_s + wait_s < self._alarm_s:
            self._changed.notify()

    # -- the computing threads -------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compute zeros once or twice, so that the first request finds memory and graph prepared; before any call.

        A model that does not take zeros, or a 1 where any size goes, is not warmed up.
        """
        try:
            feeds = {spec.name: zeros(spec) for spec in self._session.inputs} | self._streams.state("", "")
            for _ in range(2):  # the first one allocates
                self._session.run(feeds)
        except Exception as exc:  # noqa: BLE001 - a request that fails so will be told
            _log.info("%s is not warmed up: %s", self._session.info.model, exc)

    def run(self) -> None:
        """Compute until stop; then every call has been answered or refused."""
        others = [threading.Thread(target=self._run, name=f"runner-{i}", daemon=True) for i in range(1, self._n_runs)]
        for other in others:
            other.start()
        self._run()
        for other in others:
            other.join()

    def _run(self) -> None:
        try:
            while self.step(wait=True):
                pass
        except Exception as exc:  # a defect must not leave callers waiting for ever
            error = _unforeseen(exc)
            with self._changed:
                self._accepting, self._stop_at_s = False, self._clock()
                for job in [*self._running, *self._batcher.remove(lambda _: True)]:
                    job.sink.failed(error)
                self._changed.notify_all()
            raise

    def step(self, *, wait: bool = False) -> bool:
        """Compute one batch if one is ready; False once stopped. With wait, sleep until there is one."""
        with self._changed:
            batch = self._next(wait=wait)
            if batch is None:
                return self._stop_at_s is None
            self._begin(batch)
        self._run_batch(batch)
        return True

    def _begin(self, batch: Batch[Job]) -> None:
        self._running += batch.items
        self._n_computing += 1

    def _run_batch(self, batch: Batch[Job]) -> None:
        begun_s, is_computed = self._clock(), False
        try:
            is_computed = self._compute(batch.items, batch.n_rows)
        finally:
            now_s = self._clock()
            with self._changed:
                self._n_computing -= 1
                self._recent_s = now_s - begun_s
                self._batcher.finished(batch, now_s, compute_s=self._recent_s if is_computed else None)
                for job in batch.items:
                    self._running.remove(job)
                if len(self._batcher) or self._stop_at_s is not None:
                    self._changed.notify_all()  # with fewer inside, others may be due

    def _next(self, *, wait: bool) -> Batch[Job] | None:
        """Give what to compute now; None if there is nothing, or nothing any more. Holds the lock."""
        while True:
            now_s, stop_at_s = self._clock(), self._stop_at_s
            self._drop_late(now_s)
            if stop_at_s is not None and now_s >= stop_at_s:
                for job in self._batcher.remove(lambda _: True):
                    job.sink.failed(ShuttingDownError())
            batch = None
            if self._n_computing < self._n_runs:
                # Nobody comes any more while it stops, so nobody is waited for.
                batch = self._batcher.take(now_s if stop_at_s is None else math.inf)
            if batch is not None or not wait or (stop_at_s is not None and not len(self._batcher)):
                return batch
            self._sleep(now_s, stop_at_s)

    def _sleep(self, now_s: float, stop_at_s: float | None) -> None:
        """Let go of the lock until something changes, or what waits is due."""
        due_s = self._batcher.wait_s(now_s) if self._n_computing < self._n_runs else None
        times_s = [due_s] if due_s is not None else []
        if stop_at_s is not None:
            times_s.append(stop_at_s - now_s)
        timeout_s = min(times_s, default=None)
        self._alarm_s = min(self._alarm_s, math.inf if timeout_s is None else now_s + timeout_s)
        self._changed.wait(timeout_s)
        self._alarm_s = math.inf

    def _drop_late(self, now_s: float) -> None:
        if self._has_deadlines:
            for job in self._batcher.remove(lambda job: job.is_past_deadline(now_s)):
                job.sink.failed(DeadlineError(deadline_s=job.call.deadline_s or 0.0))
            self._has_deadlines = len(self._batcher) > 0

    def _key(self, job: Job) -> Hashable | None:
        """Name what two calls must have in common to be joined; None: it is computed alone."""
        if self._max_batch == 1 or job.n_rows == 0:
            return None
        if self._has_one_shape:
            return job.call.outputs
        feeds = job.call.feeds
        return job.call.outputs, tuple((name, feeds[name].dtype.str, feeds[name].shape[1:]) for name in sorted(feeds))

    def _compute(self, jobs: Sequence[Job], n_rows: int) -> bool:
        """Answer calls with one run of the model; if it fails, with one for each, so that only the culprit fails.

        False if it failed.
        """
        begun_s, n_runs = self._clock(), self._n_computing
        try:
            if len(jobs) == 1:
                self._answer(jobs[0], self._session_run(jobs[0].call), begun_s, n_rows, n_runs)
                return True
            names = jobs[0].call.feeds
            feeds = {name: np.concatenate([job.call.feeds[name] for job in jobs]) for name in names}
            outputs = self._session.run(feeds, jobs[0].call.outputs)
            check_rows(outputs, n_rows)
        except Exception as exc:  # noqa: BLE001 - whatever it is, its owner must hear of it and the others be computed
            error = exc if isinstance(exc, EdgeRtError) else _unforeseen(exc)
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return False
            _log.warning("a batch of %d requests failed, each is computed alone: %s", len(jobs), error)
            for job in jobs:
                self._compute([job], job.n_rows)
            return False
        self._count(n_rows)
        compute_s, start = self._clock() - begun_s, 0
        for job in jobs:
            rows = {name: array[start : start + job.n_rows] for name, array in outputs.items()}
            start += job.n_rows
            timings = TensorTimings(
                queue_s=begun_s - job.submitted_s,
                compute_s=compute_s,
                batch_size=n_rows,
                engine_s=self._engine_s(compute_s, n_runs) * job.n_rows / n_rows,
            )
            self._deliver(job, rows, timings, 0)
        return True

    def _session_run(self, call: Call) -> Arrays:
        if not self._is_stateful:
            return self._in_parts(call)
        if call.is_first:
            self._streams.forget(call.tenant, call.stream)
        feeds = self._streams.state(call.tenant, call.stream) | dict(call.feeds)
        names = tuple(dict.fromkeys((*call.outputs, *self._streams.outputs))) if call.outputs and call.stream else ()
        return self._session.run(feeds, names or call.outputs)

    def _in_parts(self, call: Call) -> Arrays:
        """Compute max_batch rows at a time: what more take at once is not in the memory that the load was granted."""
        n_rows, n_at_once = count_rows(call.feeds), self._max_batch
        if n_at_once == 1 or n_rows <= n_at_once:
            return self._session.run(call.feeds, call.outputs)
        parts = []
        for start in range(0, n_rows, n_at_once):
            part = {name: array[start : start + n_at_once] for name, array in call.feeds.items()}
            parts.append(self._session.run(part, call.outputs))
            check_rows(parts[-1], min(n_at_once, n_rows - start))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _answer(self, job: Job, outputs: Arrays, begun_s: float, n_rows: int, n_runs: int) -> None:
        """Keep the state of a call computed alone, and answer it."""
        call, n_calls = job.call, 0
        if call.stream:
            if call.is_last:
                n_calls = self._streams.n_calls(call.tenant, call.stream) + 1
                self._streams.forget(call.tenant, call.stream)
            else:
                n_calls = self._streams.keep(call.tenant, call.stream, outputs)
            if call.outputs:
                outputs = {name: outputs[name] for name in call.outputs}
        self._count(max(1, n_rows))
        compute_s = self._clock() - begun_s
        timings = TensorTimings(
            queue_s=begun_s - job.submitted_s,
            compute_s=compute_s,
            batch_size=max(1, min(n_rows, self._max_batch) if self._max_batch > 1 else n_rows),
            engine_s=self._engine_s(compute_s, n_runs),
        )
        self._deliver(job, outputs, timings, n_calls)

    def _engine_s(self, compute_s: float, n_runs: int) -> float:
        """Divide a run's time by the runs that were under way beside it: n_runs at its start, and those now."""
        return 2 * compute_s / (max(1, n_runs) + max(1, self._n_computing))

    def _fail(self, job: Job, error: EdgeRtError) -> None:
        """Fail a call. Its stream's state stays what it was before, unless that was to be its last call."""
        if job.call.is_last:
            self._streams.forget(job.call.tenant, job.call.stream)
        job.sink.failed(error)

    def _deliver(self, job: Job, outputs: Arrays, timings: TensorTimings, n_stream_calls: int) -> None:
        try:
            job.sink.answered(outputs, timings, n_stream_calls=n_stream_calls)
        except Exception as exc:  # noqa: BLE001 - one answer that cannot be given must not cost the others theirs
            job.sink.failed(exc if isinstance(exc, EdgeRtError) else _unforeseen(exc))

    def _count(self, n_rows: int) -> None:
        with self._changed:
            totals = self._totals
            totals.steps += 1
            totals.rows += n_rows
            totals.step_rows[min((n_rows - 1).bit_length(), len(totals.step_rows) - 1)] += 1


def _unforeseen(exc: Exception) -> BackendStepError:
    _log.error("a request failed", exc_info=exc)
    return BackendStepError(reason=f"{type(exc).__name__}: {exc}")
