"""Which entry leaves when the cache is full: S3-FIFO by bytes, with a small queue that adapts, weighted by worth.

New entries pass through a small queue; those that were asked for again there move on to the main queue, the others
leave and are remembered by their keys alone (ghosts). An entry of the main queue that was asked for since it came there
goes round once more. A key that comes back while it is a ghost goes to the main queue at once, and shows which queue
was too short: the small one grows when it let go what is wanted, and shrinks when the main one did, as in ARC. With the
fixed tenth of the S3-FIFO paper, conversations lose 3.6 points against LRU in a large cache; with its three rounds,
what was popular stays too long when the topics drift.

An entry's worth is the time it saves per byte. Of the WINDOW next to leave, the one of the least worth goes first, and
one that is worth twice the mean, or four times, goes round once more, or twice; half as much, once less. Where all are
worth the same, that is the oldest, and no more rounds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

WINDOW: Final = 16
_MAX_MORE_ROUNDS: Final = 3
_N_MEAN: Final = 1000  # entries, over which the mean worth is taken
_FIRST_SHARE: Final = 0.3  # of the bytes, that the small queue starts with
_LEAST_SHARE: Final = 0.05


class _Entry:
    __slots__ = ("n_rounds", "size_bytes", "worth")

    def __init__(self, size_bytes: int, worth: float) -> None:
        self.size_bytes = size_bytes
        self.worth = worth  # seconds saved per byte and hit
        self.n_rounds = 0  # that it may still go before it leaves its queue


class S3Fifo(Generic[K]):
    """Keeps keys, not values: tells which of them must go.

    max_bytes    of all entries together
    max_entries  None: as many as the bytes hold
    """

    def __init__(self, max_bytes: int, *, max_entries: int | None = None) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.n_evicted = 0
        self._n_added = 0
        self._mean_worth = 0.0
        self._small: OrderedDict[K, _Entry] = OrderedDict()
        self._main: OrderedDict[K, _Entry] = OrderedDict()
        self._small_bytes = self._main_bytes = 0
        self._wanted_small_bytes = max_bytes * _FIRST_SHARE
        self._small_ghosts: _Ghosts[K] = _Ghosts(max_bytes, max_entries)
        self._main_ghosts: _Ghosts[K] = _Ghosts(max_bytes, max_entries)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: K) -> bool:
        return key in self._small or key in self._main

    @property
    def size_bytes(self) -> int:
        return self._small_bytes + self._main_bytes

    def add(self, key: K, size_bytes: int, *, saved_s: float = 1.0, is_known: bool = False) -> list[K]:
        """Take in a new or changed entry; give the keys that had to go, which is key itself if it is too large.

        saved_s   time that a hit saves
        is_known  it was asked for before, as the store of an earlier run tells
        """
        self.remove(key)
        if size_bytes > self.max_bytes:
            return [key]
        entry = _Entry(size_bytes, saved_s / max(1, size_bytes))
        self._n_added += 1
        self._mean_worth += (entry.worth - self._mean_worth) / min(self._n_added, _N_MEAN)
        if self._comes_back(key, size_bytes) or is_known:
            self._main[key] = entry
            self._main_bytes += size_bytes
        else:
            self._small[key] = entry
            self._small_bytes += size_bytes
        gone = []
        while self.size_bytes > self.max_bytes or (self.max_entries is not None and len(self) > self.max_entries):
            gone.append(self._evict())
        self.n_evicted += len(gone)
        return gone

    def hit(self, key: K) -> None:
        """Note that an entry was asked for."""
        entry = self._small.get(key) or self._main.get(key)
        if entry is not None:
            entry.n_rounds = max(entry.n_rounds, self._earned(entry, 1))

    def remove(self, key: K) -> None:
        """Forget an entry that is no longer valid; one that is not here is none."""
        if (entry := self._small.pop(key, None)) is not None:
            self._small_bytes -= entry.size_bytes
        elif (entry := self._main.pop(key, None)) is not None:
            self._main_bytes -= entry.size_bytes

    def _comes_back(self, key: K, size_bytes: int) -> bool:
        n_small, n_main = len(self._small_ghosts), len(self._main_ghosts)
        if self._small_ghosts.pop(key):
            step_bytes = size_bytes * max(1.0, n_main / n_small)
            self._wanted_small_bytes = min(self.max_bytes * (1 - _LEAST_SHARE), self._wanted_small_bytes + step_bytes)
            return True
        if self._main_ghosts.pop(key):
            step_bytes = size_bytes * max(1.0, n_small / n_main)
            self._wanted_small_bytes = max(self.max_bytes * _LEAST_SHARE, self._wanted_small_bytes - step_bytes)
            return True
        return False

    def _earned(self, entry: _Entry, n_rounds: int) -> int:
        """Give how many rounds an entry earns that would earn n_rounds were all worth the same."""
        if entry.worth <= 0 or self._mean_worth <= 0:
            return n_rounds
        return max(0, n_rounds + min(_MAX_MORE_ROUNDS, int(math.log2(entry.worth / self._mean_worth))))

    def _evict(self) -> K:
        """Take the next to leave out; entries that earned it move on on the way."""
        while self._small and (self._small_bytes >= self._wanted_small_bytes or not self._main):
            key = _least(self._small)
            entry = self._small.pop(key)
            self._small_bytes -= entry.size_bytes
            if not entry.n_rounds:
                self._small_ghosts.add(key, entry.size_bytes)
                return key
            entry.n_rounds = self._earned(entry, 0)
            self._main[key] = entry
            self._main_bytes += entry.size_bytes
        while (oldest := next(iter(self._main.values()))).n_rounds:
            oldest.n_rounds -= 1
            self._main.move_to_end(next(iter(self._main)))
        key = _least(self._main)
        entry = self._main.pop(key)
        self._main_bytes -= entry.size_bytes
        self._main_ghosts.add(key, entry.size_bytes)
        return key


def _least(queue: OrderedDict[K, _Entry]) -> K:
    """Give the oldest entry if it has earned another place, else the least worth of the oldest that have not."""
    window = islice(queue.items(), WINDOW)
    least, entry = next(window)
    if entry.n_rounds:
        return least
    worth = entry.worth
    for key, entry in window:
        if not entry.n_rounds and entry.worth < worth:
            least, worth = key, entry.worth
    return least


class _Ghosts(Generic[K]):
    """Keys that have left, with the sizes they had, as many as the cache itself would hold."""

    def __init__(self, max_bytes: int, max_entries: int | None) -> None:
        self._sizes: OrderedDict[K, int] = OrderedDict()
        self._size_bytes = 0
        self._max_bytes = max_bytes
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: K, size_bytes: int) -> None:
        self.pop(key)
        self._sizes[key] = size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes or (
            self._max_entries is not None and len(self._sizes) > self._max_entries
        ):
            self._size_bytes -= self._sizes.popitem(last=False)[1]

    def pop(self, key: K) -> bool:
        size_bytes = self._sizes.pop(key, None)
        if size_bytes is None:
            return False
        self._size_bytes -= size_bytes
        return True
