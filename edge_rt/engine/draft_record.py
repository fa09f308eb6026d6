"""How often a drafting model's guesses come true: by how far ahead they are, and by how sure the model was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from itertools import accumulate
from operator import mul

from edge_rt.engine.draft_model import Draft

# A guess's own probability is looked up by its range. The rates begin with what a well-trained model shows.
EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_FIRST_BY_CHANCE = (0.05, 0.15, 0.27, 0.42, 0.57, 0.72, 0.84, 0.92, 0.97)
_FIRST_BY_DEPTH = (0.6, 0.55, 0.5, 0.5)  # given that all before it came true; the last is for all further ones
_FIRST_WEIGHT = 4
_MEMORY = 16  # of one sequence, in guesses; older ones fade
_SHARED_MEMORY = 64  # of all sequences, which a new one begins with


class _Rates:
    """Shares of what came true, each with the weight of what it was counted from."""

    def __init__(self, rates: Iterable[float], memory: int) -> None:
        self.rates = list(rates)
        self._weights = [_FIRST_WEIGHT] * len(self.rates)
        self._memory = memory

    def count(self, place: int, *, is_right: bool) -> None:
        self._weights[place] = min(self._weights[place] + 1, self._memory)
        self.rates[place] += (is_right - self.rates[place]) / self._weights[place]


class SharedRates:
    """What all sequences of one model have shown, with which a new one begins."""

    def __init__(self) -> None:
        self.by_depth = _Rates(_FIRST_BY_DEPTH, _SHARED_MEMORY)
        self.by_chance = _Rates(_FIRST_BY_CHANCE, _SHARED_MEMORY)


class DraftRecord:
    """One sequence's guesses and what became of them.

    Every guess is compared with the token that came, also one that was not checked, so that what is counted does not
    depend on what was chosen to be checked. A draft that ended because the model was not sure counts as wrong there: by
    depth it is what drafting so far ahead brings.
    """

    def __init__(self, shared: SharedRates) -> None:
        self._shared = shared
        self._by_depth = _Rates(shared.by_depth.rates, _MEMORY)
        self._by_chance = _Rates(shared.by_chance.rates, _MEMORY)
        self._draft = Draft([], [])
        self._next = 0
        self._gave_up = False

    def expected(self, n_max: int) -> list[float]:
        """Give the chance that each of the next guesses is made and right with all before it. Falls."""
        rates = self._by_depth.rates
        return list(accumulate((rates[min(depth, len(rates) - 1)] for depth in range(n_max)), mul))

    def chances(self, draft: Draft) -> list[float]:
        """Give the chance that each token of a draft comes with all before it, by how sure the model was."""
        rates = self._by_chance.rates
        return list(accumulate((rates[bisect_right(EDGES, chance)] for chance in draft.chances), mul))

    def floor(self, worth: float) -> float:
        """Give the own probability from which on a guess comes true at least so often."""
        edges = (0.0, *EDGES)
        return next((edges[i] for i, rate in enumerate(self._by_chance.rates) if rate >= worth), EDGES[-1])

    def note(self, draft: Draft, *, gave_up: bool) -> None:
        """Take a new draft; gave_up says that it is shorter than was wanted because the model was not sure."""
        self._draft, self._next, self._gave_up = draft, 0, gave_up
        self._count_end()

    def push(self, token_id: int) -> None:
        """Compare the token that came with the guess for its place."""
        if self._next >= len(self._draft.token_ids):
            return
        is_right = self._draft.token_ids[self._next] == token_id
        kind = bisect_right(EDGES, self._draft.chances[self._next])
        for by_chance in (self._by_chance, self._shared.by_chance):
            by_chance.count(kind, is_right=is_right)
        self._count_depth(is_right=is_right)
        self._next = self._next + 1 if is_right else len(self._draft.token_ids)
        if is_right:
            self._count_end()

    def _count_end(self) -> None:
        if self._gave_up and self._next == len(self._draft.token_ids):
            self._count_depth(is_right=False)

    def _count_depth(self, *, is_right: bool) -> None:
        for by_depth in (self._by_depth, self._shared.by_depth):
            by_depth.count(min(self._next, len(by_depth.rates) - 1), is_right=is_right)


def n_expected(expected: ListOf[float], n_max: int) -> int:
    """Expect how many rows a draft of at most n_max guesses brings to be checked."""
    return min(n_max, len(expected), 1 + round(sum(expected[: n_max - 1])))
