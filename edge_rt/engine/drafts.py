"""Guess how a sequence goes on from what it holds: answers often repeat their prompt, or themselves, word for word.

A draft is what followed when the sequence's last tokens came before. How often that was right is counted for each new
token, whether a draft was computed or not, so drafts that are not worth it cost nothing to rule out.
"""

from __future__ import annotations

from array import array

import numpy as np

_SIZES = (2, 3, 4)  # n-grams that are looked up; the longest that is found wins
_MIN_BITS, _MAX_BITS = 8, 15  # places of a table, as a power of two: four bytes each
_M64 = 2**64 - 1
_FOLD = 0x9E3779B97F4A7C15  # odd, its bits without a pattern: makes one number of several tokens
_SPREAD = 0xD6E8FEB86659FD93  # likewise: its product's highest bits choose the place

# How many guesses were right, by how many tokens had matched before: 2, 3, 4-7, 8-15, 16 and more. Begun with what text
# generally shows, which weighs as much as this many guesses; what is older than the last _MEMORY fades.
_FIRST_RATES = (0.3, 0.45, 0.6, 0.75, 0.9)
_FIRST_WEIGHT = 4
_MEMORY = 32
_MIN_CHANCE = 0.02


class PromptLookup:
    """Drafts for one sequence, from its own tokens.

    token_ids  the sequence's list, at least one token; push is called after each that is appended
    n_max      how long the list may get, which sizes the tables

    A table maps an n-gram's hash to the place after its latest occurrence. Two n-grams may meet in one place, where the
    later one stays; what is found is compared token by token before it is believed.
    """

    def __init__(self, token_ids: list[int], n_max: int) -> None:
        self._ids = token_ids
        bits = min(max((2 * n_max - 1).bit_length(), _MIN_BITS), _MAX_BITS)
        self._shift = 64 - bits
        self._tables = [self._indexed(n, 1 << bits) for n in _SIZES]
        self._next = 0  # where the token stands that is guessed next; 0 for no guess
        self._n_matched = 0  # tokens before it that equal the sequence's last
        self._rates = list(_FIRST_RATES)
        self._weights = [_FIRST_WEIGHT] * len(_FIRST_RATES)
        self._look_up()

    def push(self) -> None:
        """Take in the token that was appended, and count whether it had been guessed."""
        if self._next:
            is_right = self._ids[self._next] == self._ids[-1]
            kind = _kind(self._n_matched)
            self._weights[kind] = min(self._weights[kind] + 1, _MEMORY)
            self._rates[kind] += (is_right - self._rates[kind]) / self._weights[kind]
            self._next, self._n_matched = (self._next + 1, self._n_matched + 1) if is_right else (0, 0)
        self._look_up()

    def chances(self, n_max: int) -> list[float]:
        """Give the chance that each of the next tokens, at most n_max, comes as guessed with all before it.

        Falls from token to token and ends where it is next to nothing; empty if there is no guess.
        """
        chances: list[float] = []
        if not self._next:
            return chances
        chance = 1.0
        for n_matched in range(self._n_matched, self._n_matched + n_max):
            chance *= self._rates[_kind(n_matched)]
            if chance < _MIN_CHANCE:
                break
            chances.append(chance)
        return chances

    def draft(self, n: int) -> list[int]:
        """Give the next n tokens as guessed. A guess that reaches the end of what is there goes on with itself."""
        draft = self._ids[self._next : self._next + n]
        while len(draft) < n:
            draft.append(draft[len(draft) - (len(self._ids) - self._next)])
        return draft

    def _look_up(self) -> None:
        """Find the longest n-gram that ends the sequence and came before, and note that it came again.

        A guess that has come true for longer than that goes on.
        """
        ids, end = self._ids, len(self._ids)
        key, factor = ids[-1], 1
        for n, table in zip(_SIZES, self._tables, strict=True):
            if n > end:
                return
            factor = factor * _FOLD & _M64
            key += ids[-n] * factor
            place = (key * _SPREAD & _M64) >> self._shift
            found = table[place]
            table[place] = end
            if found and n > self._n_matched and ids[found - n : found] == ids[end - n :]:
                self._next, self._n_matched = found, n

    def _indexed(self, n: int, n_places: int) -> array[int]:
        """Enter all n-grams but the one at the end, which is looked up first."""
        places = np.zeros(n_places, dtype=np.int32)
        ids = np.asarray(self._ids, dtype=np.uint64)
        n_known = len(ids) - n
        if n_known > 0:
            keys, factor = ids[n - 1 : -1].copy(), 1
            for back in range(1, n):
                factor = factor * _FOLD & _M64
                keys += ids[n - 1 - back : len(ids) - 1 - back] * np.uint64(factor)
            # Of several n-grams in one place the last is kept.
            places[keys * np.uint64(_SPREAD) >> np.uint64(self._shift)] = np.arange(n, len(ids), dtype=np.int32)
        return array("i", places.tobytes())


def _kind(n_matched: int) -> int:
    return 0 if n_matched <= 2 else min(n_matched.bit_length() - 1, len(_FIRST_RATES) - 1)
