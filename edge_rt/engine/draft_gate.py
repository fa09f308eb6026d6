"""Whether to draft now: by what drafting and checking take, by what comes true, and by what may still be lost.

Two things decide. A reckoning with measured times chooses who is drafted for and how far, and says whether that beats
doing without. And an account of what drafting has really gained and lost bounds what a wrong reckoning costs: it earns
a small share of the time, wins fill it up to a limit, and below nothing all is quiet. So whatever the text and the
neighbours do, any long stretch takes at most that share and that limit longer than without drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from math import exp, log
from statistics import median

from edge_rt.engine.draft_record import n_expected

BETTER = 1.03  # expected tokens per second must rise by this, or it is not worth the risk
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NOT_SLOWER = 0.99  # for every single stream
_NEW_SHARE = 0.2
MAX_JUMP = 2.0  # a call that was held up by something else counts as this many times the usual
_N_PLAIN = 5  # steps without guesses whose median is believed
_MIN_PLAIN = 2
_N_FRESH = 128  # steps with drafts, after which some without are measured again
_EARNED_SHARE = 0.015
_MAX_STEPS = 24.0  # of credit, in steps without drafts
_MAX_SAVED_STEPS = 192.0  # for prompts, out of what was won


class DraftCosts:
    """What drafting takes: by sequences and by guesses for each, and what a row takes of those that were missing."""

    def __init__(self) -> None:
        self.row_s = 0.0  # 0: unknown
        self._seconds: dict[tuple[int, int], float] = {}

    def observe(self, n_sequences: int, n_guesses: int, seconds: float) -> None:
        """Take the measured time of drafting at most n_guesses tokens for each of n_sequences."""
        key = n_sequences, n_guesses
        self._seconds[key] = blend(self._seconds.get(key, 0.0), seconds)

    def observe_rows(self, n_rows: int, seconds: float) -> None:
        """Take the measured time of a sequence's missing rows."""
        self.row_s = blend(self.row_s, seconds / n_rows)

    def seconds(self, n_sequences: int, n_guesses: int) -> float:
        """Estimate what drafting would take; 0 if nothing is known.

        What was not measured is taken from the nearest that was, in proportion: that it might be cheaper together is
        found out and not supposed.
        """
        known = self._seconds.get((n_sequences, n_guesses))
        if known is not None or not self._seconds:
            return known or 0.0
        key = min(self._seconds, key=lambda at: (abs(at[0] - n_sequences), abs(at[1] - n_guesses)))
        return self._seconds[key] * n_guesses / key[1] * max(1.0, n_sequences / key[0])


class PlainTimes:
    """The time of steps without guesses, by their number of rows: the median of the last few."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._n_since: dict[int, int] = {}

    def observe(self, n_rows: int, seconds: float) -> None:
        self._times.setdefault(n_rows, deque(maxlen=_N_PLAIN)).append(seconds)
        self._n_since[n_rows] = max(0, self._n_since.get(n_rows, 0) - _N_FRESH // 2)

    def count_drafted(self, n_rows: int) -> None:
        """Count a step of so many sequences with drafts."""
        self._n_since[n_rows] = self._n_since.get(n_rows, 0) + 1

    def seconds(self, n_rows: int) -> float | None:
        """Give what a step without guesses takes; None if it must be measured first, or again."""
        if len(self._times.get(n_rows, ())) < _MIN_PLAIN or self._n_since.get(n_rows, 0) >= _N_FRESH:
            return None
        return self.usual(n_rows)

    def usual(self, n_rows: int) -> float:
        """Give what such a step took, however long ago; 0 if none was measured."""
        times = self._times.get(n_rows)
        return median(times) if times else 0.0


class Credit:
    """What drafting may still lose, in seconds. Pure: it is told all times.

    held_s   falls with what is lost, rises with what is won and with the time, up to _MAX_STEPS steps
    saved_s  what was won beyond, which pays for prompts that the drafting model lacks
    """

    def __init__(self) -> None:
        self.held_s = self.saved_s = 0.0
        self._is_new = True

    def settle(self, taken_s: float, worth_s: float, step_s: float) -> None:
        """Take account of a step.

        taken_s  that it took, all drafting for it included
        worth_s  that what it brought would have taken without drafts
        step_s   that a step without drafts takes
        """
        if self._is_new:
            self.held_s, self._is_new = _MAX_STEPS / 2 * step_s, False
        held_s = self.held_s + _EARNED_SHARE * worth_s + worth_s - taken_s
        self.held_s = min(held_s, _MAX_STEPS * step_s)
        won_s = min(held_s - self.held_s, max(worth_s - taken_s, 0.0))  # the share of the time is not saved
        self.saved_s = min(self.saved_s + won_s, _MAX_SAVED_STEPS * step_s)

    def pay_for_rows(self, seconds: float) -> None:
        """Take account of a prompt's part that the drafting model computed."""
        saved_s = min(seconds, self.saved_s)
        self.saved_s -= saved_s
        self.held_s -= seconds - saved_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft at most n_guesses for each of the sequences in places.

    gain  factor by which the streams are expected to come faster than without, in their geometric mean
    """

    places: tuple[int, ...]
    n_guesses: int
    gain: float


def plan(
    expected: ListOf[ListOf[float]],
    others: ListOf[tuple[float, int]],
    *,
    n_rows: int,
    n_max_rows: int,
    base_s: float,
    draft_s: Callable[[int, int], float],
    step_s: Callable[[int], float],
) -> Plan | None:
    """Choose for whom to draft, and how far; None if nothing is known of the times, or somebody would lose by it.

    Drafting for one stream holds up all. So each must be expected to gain more tokens by its own guesses than the
    longer step costs it: one that cannot be drafted for keeps the others from it.

    expected    of each sequence: the chance that each further guess is right with all before it; empty for none
    others      of each: tokens that free guesses are expected to bring, and their rows
    n_rows      of the step without guesses
    n_max_rows  that a step may have
    base_s      what the step takes without drafts, with the free guesses
    draft_s     what drafting takes, by sequences and guesses for each; step_s a step by its rows; 0 if unknown
    """
    best: Plan | None = None
    deepest = max(map(len, expected), default=0)
    for depth in DEPTHS:
        if depth > deepest:
            break
        places: list[int] = []
        ratios: list[float] = []
        rows = n_rows
        for i, (chances, (free_tokens, free_rows)) in enumerate(zip(expected, others, strict=True)):
            tokens = sum(chances[:depth])
            if tokens > free_tokens:
                places.append(i)
                rows += n_expected(chances, depth)
            else:
                tokens = free_tokens
                rows += free_rows
            ratios.append((1.0 + tokens) / (1.0 + free_tokens))
        drafting_s, checking_s = draft_s(len(places), depth) if places else 0.0, step_s(rows)
        if rows > n_max_rows or drafting_s <= 0.0 or checking_s <= 0.0:
            continue
        faster = base_s / (drafting_s + checking_s)
        gain = faster * exp(sum(map(log, ratios)) / len(ratios))
        if faster * min(ratios) >= _NOT_SLOWER and (best is None or gain > best.gain):
            best = Plan(tuple(places), depth, gain)
    return best


def blend(known: float, seconds: float) -> float:
    """Take a measured time into what was known, 0 for nothing; the older fade."""
    return known + _NEW_SHARE * (min(seconds, MAX_JUMP * known) - known) if known else seconds
