"""How many threads the next step runs on, by measured step time.

llama.cpp's threads wait for each other after every operator, so one busy neighbour can make two threads three times
slower than one. No reading foretells that: a thread count is tried out in a short trial while real work runs, and the
faster one stays. A trial that loses costs the user time, so it needs a reason: nothing has been tried yet, the step
time has changed of its own accord (a neighbour came), a core has fallen idle (one left), or a long time has passed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_COST_SHARE = 0.03  # of all step time may be lost to trials that have a reason
_IDLE_COST_SHARE = 0.005  # and to those that only make sure
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 300.0
_MAX_POSTPONED_S = 20.0
_FOLLOW_S = 10.0
_IDLE_CORES = 0.5  # so much idle time makes one more thread worth a try
_BETTER = 0.95  # a trial must beat the current count by this to replace it
_CHANGED = 1.3  # the step time moved by this factor: the machine is another one
_STALLED = 4.0  # a step this much slower stood at a barrier: it counts double
_LOST = 1.2  # the best of two trial steps is slower by this: the trial is over
_N_OFF = 3  # so many changed steps in a row are a change
_N_LEARN = 4
_N_TRIAL_STEPS = 6  # one short step is mostly noise; a prefill chunk is long enough to need only two
_N_TRIAL_CHUNKS = 2
_CHUNK_ROWS = 16


def candidates(n_cores: int) -> tuple[int, ...]:
    """List the thread counts worth trying: each up to four, then steps of half as many again."""
    counts = [1]
    while counts[-1] < n_cores:
        counts.append(min(n_cores, max(counts[-1] + 1, counts[-1] * 3 // 2)))
    return tuple(counts)


def bucket(n_rows: int) -> int:
    """Group steps whose rows cost alike: each count below 16 by itself, then 16-31, 32-63, …, 512 and more.

    A decode step costs nearly the same for 2 and for 3 rows, so a row of it does not.
    """
    return n_rows if n_rows < _CHUNK_ROWS else _CHUNK_ROWS + min(n_rows, 512).bit_length()


_CHUNK_BUCKET = bucket(_CHUNK_ROWS)


@dataclass(slots=True)
class _Trial:
    index: int
    n_left: int
    n_discard: int
    seconds: float = 0.0
    best_s: float = math.inf
    n_done: int = 0


@dataclass(slots=True)
class _Bucket:
    """What is known of one kind of step; times are seconds per row, those ending in at_s are the caller's clock."""

    index: int
    is_chunk: bool
    untried: list[int]
    mean_s: float = 0.0
    settled_s: float = 0.0
    n_seen: int = 0
    n_off: int = 0
    trial: _Trial | None = None
    due_at_s: float = 0.0
    earliest_at_s: float = 0.0
    wait_s: float = _FIRST_WAIT_S
    upward: bool = False
    postponed: bool = False

    def hasten(self, now_s: float, *, upward: bool) -> None:
        """Make a trial due: there is a reason for it, and this is the direction to begin with."""
        self.upward, self.postponed = not upward, False  # the next trial turns round
        self.wait_s = _FIRST_WAIT_S
        self.due_at_s = max(now_s, self.earliest_at_s)


class ThreadChoice:
    """Chooses among thread counts for each kind of step; fixed if there is only one count."""

    def __init__(self, counts: Sequence[int], *, start: int | None = None) -> None:
        self._counts = tuple(counts)
        start = self._counts[-1] if start is None else start
        self._start = max(i for i, n in enumerate(self._counts) if n <= max(start, self._counts[0]))
        self._buckets: dict[int, _Bucket] = {}

    def within(self, most: int) -> ThreadChoice:
        """Give a choice of its own among no more than most threads; this one where that is no limit to it.

        A count that the configuration has fixed is only lowered, not tried.
        """
        if most >= self._counts[-1]:
            return self
        fewer = [n for n in self._counts if n < most] if len(self._counts) > 1 else []
        return ThreadChoice((*fewer, max(most, 1)))

    def choose(self, n_rows: int, now_s: float, idle_cores: float | None = None) -> int:
        """Give the thread count for a step of n_rows.

        idle_cores is how many cores did nothing lately, None if unknown. Without an idle core more threads are hardly
        ever tried, for they would fight over what there is; once one falls idle they are tried at once, because the
        step time of fewer threads does not show that a neighbour has left.
        """
        key = bucket(n_rows)
        state = self._buckets.get(key)
        if state is None:
            state = self._buckets[key] = self._new_bucket(key, now_s)
        is_idle = idle_cores is None or idle_cores >= _IDLE_CORES
        if state.postponed and is_idle:
            state.hasten(now_s, upward=True)
        n_learn = 1 if state.is_chunk else _N_LEARN
        if state.trial is None and state.n_seen >= n_learn and now_s >= state.due_at_s:
            self._begin_trial(state, now_s, is_idle=is_idle)
        return self._counts[state.index if state.trial is None else state.trial.index]

    def observe(self, n_rows: int, n_threads: int, seconds: float, now_s: float) -> None:
        """Take the measured time of a step that choose decided on."""
        state = self._buckets.get(bucket(n_rows))
        if state is None:
            return
        row_s = seconds / n_rows
        trial = state.trial
        if trial is not None and self._counts[trial.index] == n_threads:
            self._observe_trial(state, trial, row_s, n_rows, now_s)
        elif self._counts[state.index] == n_threads:
            _observe_current(state, row_s, now_s)

    def _new_bucket(self, key: int, now_s: float) -> _Bucket:
        """Begin where the most similar kind of step stands.

        Prefill is bound by arithmetic: all cores that are free are right, and finding that out on a long prompt would
        be dear, so chunks wait for a reason. Decode is bound by memory and may be faster with fewer: the first kind of
        decode step tries at once, the others follow it and make sure later; one of more rows tries more threads before.
        """
        nearest = min(self._buckets, key=lambda other: (abs(other - key), -other), default=None)
        index = self._start if nearest is None else self._buckets[nearest].index
        if key >= _CHUNK_BUCKET:
            return _Bucket(index, True, [], due_at_s=math.inf, postponed=index + 1 < len(self._counts))
        if nearest is not None and nearest < _CHUNK_BUCKET:
            if key > nearest and index + 1 < len(self._counts):  # more arithmetic for the same reading
                return _Bucket(index, False, [index + 1])
            return _Bucket(index, False, [], due_at_s=now_s + _FOLLOW_S)
        return _Bucket(index, False, [i for i in (index - 1, index + 1) if 0 <= i < len(self._counts)])

    def _begin_trial(self, state: _Bucket, now_s: float, *, is_idle: bool) -> None:
        index = state.untried.pop(0) if state.untried else self._neighbour(state)
        if index is None:
            state.due_at_s = math.inf  # there is nothing else to try
            return
        if index > state.index and not is_idle and state.wait_s < _MAX_POSTPONED_S:
            state.postponed = True
            state.wait_s *= 2
            state.due_at_s = now_s + state.wait_s
            return
        state.postponed = False
        state.trial = _Trial(
            index=index,
            n_left=_N_TRIAL_CHUNKS if state.is_chunk else _N_TRIAL_STEPS,
            n_discard=0 if state.is_chunk else 1,  # the first step after a change wakes or parks threads
        )

    def _neighbour(self, state: _Bucket) -> int | None:
        """Take turns between the next higher and the next lower count."""
        for _ in range(2):
            state.upward = not state.upward
            index = state.index + (1 if state.upward else -1)
            if 0 <= index < len(self._counts):
                return index
        return None

    def _observe_trial(self, state: _Bucket, trial: _Trial, row_s: float, n_rows: int, now_s: float) -> None:
        if trial.n_discard and row_s < state.mean_s * 3:
            trial.n_discard -= 1
            return
        trial.seconds += row_s
        trial.best_s = min(trial.best_s, row_s)
        trial.n_done += 1
        trial.n_left -= 1
        # Three steps' worth of lost time settles it: one stalled barrier may take a second.
        hopeless = trial.seconds > state.mean_s * (trial.n_done + 3)
        hopeless |= trial.n_done >= 2 and trial.best_s > state.mean_s * _LOST
        if trial.n_left > 0 and not hopeless:
            return
        state.trial = None
        mean_s = trial.seconds / trial.n_done
        if mean_s < state.mean_s * _BETTER:
            onward = trial.index + (1 if trial.index > state.index else -1)
            state.untried = [onward] if 0 <= onward < len(self._counts) else []
            state.index, state.mean_s, state.settled_s, state.n_seen = trial.index, mean_s, mean_s, trial.n_done
            state.wait_s = _FIRST_WAIT_S
            state.due_at_s = now_s if state.untried else now_s + state.wait_s
            if state.is_chunk and not state.untried:
                state.due_at_s = math.inf
            return
        cost_s = max(0.0, trial.seconds - trial.n_done * state.mean_s) * n_rows
        state.earliest_at_s = now_s + cost_s / _COST_SHARE
        if state.is_chunk:
            state.due_at_s = math.inf
        elif state.untried:
            state.due_at_s = state.earliest_at_s
        else:
            state.wait_s = min(state.wait_s * 4, _MAX_WAIT_S)
            state.due_at_s = now_s + max(state.wait_s, cost_s / _IDLE_COST_SHARE)


class AdvisedThreads:
    """A choice of threads that may be limited from outside, for prefill and for decode. Any thread may advise."""

    def __init__(self, own: ThreadChoice) -> None:
        self._own = own
        self._advice: tuple[int | None, int | None] = (None, None)
        self._within: dict[int, ThreadChoice] = {}  # what was learned within a limit is there when it comes back

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        """Allow no more than so many from now on; None ends that."""
        self._advice = n_prefill_threads, n_decode_threads

    def choice(self, *, is_prefill: bool) -> ThreadChoice:
        """Give the choice for a step, which chooses and observes."""
        prefill, decode = self._advice
        most = prefill if is_prefill else decode
        if most is None:
            return self._own
        if most not in self._within:
            self._within[most] = self._own.within(most)
        return self._within[most]


def _observe_current(state: _Bucket, row_s: float, now_s: float) -> None:
    state.n_seen += 1
    state.mean_s += max(1 / state.n_seen, 0.1) * (row_s - state.mean_s)
    if state.n_seen <= _N_LEARN or state.settled_s <= 0:
        state.settled_s = state.mean_s
        return
    ratio = state.mean_s / state.settled_s
    if 1 / _CHANGED < ratio < _CHANGED:
        state.n_off = 0
        state.settled_s += 0.01 * (state.mean_s - state.settled_s)
        return
    state.n_off += 2 if row_s > _STALLED * state.settled_s else 1
    if state.n_off >= _N_OFF:
        state.n_off = 0
        state.settled_s = state.mean_s
        state.hasten(now_s, upward=ratio < 1)
