"""How many threads the next step runs on, by measured step time.

llama.cpp's threads wait for each other after every operator, so one busy neighbour can make two threads three times
slower than one. No reading foretells that: the thread count is tried out in short trials while real work runs, and
what was faster stays. A step-time change of its own accord (a neighbour came or went) starts a trial at once;
otherwise trials back off, and their cost is held to a few per cent of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_COST_SHARE = 0.03  # of all step time may be lost to trials
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 20.0
_IDLE_CORES = 0.5  # so much idle time makes one more thread worth a try
_BETTER = 0.95  # a trial must beat the current count by this to replace it
_CHANGED = 1.3  # the step time moved by this factor: the machine is another one
_STALLED = 4.0  # a step this much slower stood at a barrier: it counts double
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
    """Group steps that cost alike: 1 row, 2-3, 4-7, 8-15, and prefill chunks of 16 and more."""
    return min(n_rows, _CHUNK_ROWS).bit_length()


@dataclass(slots=True)
class _Trial:
    index: int
    n_left: int
    n_discard: int
    seconds: float = 0.0
    n_done: int = 0


@dataclass(slots=True)
class _Bucket:
    """What is known of one kind of step; times are seconds per row."""

    index: int
    mean_s: float = 0.0
    settled_s: float = 0.0
    n_seen: int = 0
    n_off: int = 0
    trial: _Trial | None = None
    next_trial_s: float = 0.0
    wait_s: float = _FIRST_WAIT_S
    upward: bool = False
    postponed: bool = False
    untried: list[int] = field(default_factory=list)


class ThreadChoice:
    """Chooses among thread counts for each kind of step; fixed if there is only one count."""

    def __init__(self, counts: Sequence[int], *, start: int | None = None) -> None:
        self._counts = tuple(counts)
        start = self._counts[-1] if start is None else start
        self._last = max(i for i, n in enumerate(self._counts) if n <= max(start, self._counts[0]))
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, n_rows: int, now_s: float, idle_cores: float | None = None) -> int:
        """Give the thread count for a step of n_rows.

        idle_cores is how many cores did nothing lately, None if unknown. Without an idle core more threads are tried
        only at the longest interval, for they would fight over what there is; once one falls idle they are tried at
        once, because the step time of fewer threads does not show that a neighbour has left.
        """
        key = bucket(n_rows)
        state = self._buckets.get(key)
        if state is None:
            # What another kind of step has learnt of the neighbours is the best guess for a new kind.
            state = self._buckets[key] = _Bucket(index=self._last)
            state.untried = [i for i in (self._last - 1, self._last + 1) if 0 <= i < len(self._counts)]
        if state.postponed and idle_cores is not None and idle_cores >= _IDLE_CORES:
            state.postponed, state.upward, state.next_trial_s, state.wait_s = False, False, now_s, _FIRST_WAIT_S
        if state.trial is None and state.n_seen >= 4 and now_s >= state.next_trial_s:
            self._begin_trial(state, key, now_s, idle_cores)
        self._last = state.index
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

    def _begin_trial(self, state: _Bucket, key: int, now_s: float, idle_cores: float | None) -> None:
        if state.untried:
            index = state.untried.pop(0)
        else:
            state.upward = not state.upward
            index = state.index + (1 if state.upward else -1)
            if not 0 <= index < len(self._counts):
                state.upward = not state.upward
                index = state.index + (1 if state.upward else -1)
        if not 0 <= index < len(self._counts):
            state.next_trial_s = float("inf")  # there is nothing else to try
            return
        is_idle = idle_cores is None or idle_cores >= _IDLE_CORES
        if index > state.index and not is_idle and state.wait_s < _MAX_WAIT_S:
            state.postponed = True
            state.wait_s = min(state.wait_s * 2, _MAX_WAIT_S)
            state.next_trial_s = now_s + state.wait_s
            return
        is_chunk = key == bucket(_CHUNK_ROWS)
        state.trial = _Trial(
            index=index,
            n_left=_N_TRIAL_CHUNKS if is_chunk else _N_TRIAL_STEPS,
            n_discard=0 if is_chunk else 1,  # the first step after a change wakes or parks threads
        )

    def _observe_trial(self, state: _Bucket, trial: _Trial, row_s: float, n_rows: int, now_s: float) -> None:
        if trial.n_discard and row_s < state.mean_s * 3:
            trial.n_discard -= 1
            return
        trial.seconds += row_s
        trial.n_done += 1
        trial.n_left -= 1
        # Four bad steps' worth of time in fewer steps settles it: a stalled barrier may take a second each.
        hopeless = trial.seconds > state.mean_s * (trial.n_done + 3)
        if trial.n_left > 0 and not hopeless:
            return
        state.trial = None
        cost_s = max(0.0, trial.seconds - trial.n_done * state.mean_s) * n_rows
        mean_s = trial.seconds / trial.n_done
        if mean_s < state.mean_s * _BETTER:
            step = 1 if trial.index > state.index else -1
            state.index, state.mean_s, state.settled_s, state.n_seen = trial.index, mean_s, mean_s, trial.n_done
            state.wait_s = _FIRST_WAIT_S
            onward = trial.index + step
            state.untried = [onward] if 0 <= onward < len(self._counts) else []
            state.next_trial_s = now_s if state.untried else now_s + state.wait_s
        else:
            state.wait_s = min(state.wait_s * 2, _MAX_WAIT_S)
            state.next_trial_s = now_s + max(state.wait_s, cost_s / _COST_SHARE)


def _observe_current(state: _Bucket, row_s: float, now_s: float) -> None:
    state.n_seen += 1
    weight = max(1 / state.n_seen, 0.1)
    state.mean_s += weight * (row_s - state.mean_s)
    if state.n_seen <= 4:
        state.settled_s = state.mean_s
        return
    ratio = state.mean_s / state.settled_s if state.settled_s > 0 else 1.0
    if 1 / _CHANGED < ratio < _CHANGED:
        state.n_off = 0
    else:
        state.n_off += 2 if row_s > _STALLED * state.settled_s else 1
    if state.n_off >= 3:
        state.n_off = 0
        state.settled_s = state.mean_s
        state.wait_s = _FIRST_WAIT_S
        state.next_trial_s = min(state.next_trial_s, now_s)
    else:
        state.settled_s += 0.01 * (state.mean_s - state.settled_s)
