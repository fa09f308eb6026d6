"""The nearest stored questions: brute force over unit vectors, each partition in a block of its own.

A search reads one partition's block and nothing of another's. An edge device's cache is small: 20,000 vectors are 20 MB
and a millisecond, less than what an approximate index spends on one insertion. The products are made by einsum, which
calls no BLAS: its threads, woken on a busy machine, took fifty times as long as the work. Loads numpy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Id = TypeVar("Id", bound=Hashable)


@dataclass(slots=True)
class _Block(Generic[Id]):
    rows: NDArray[np.float32]
    ids: list[Id] = field(default_factory=list)


class VectorIndex(Generic[Id]):
    """Up to max_entries vectors; beyond, the one that was longest neither added nor touched goes."""

    def __init__(self, max_entries: int, n_dimensions: int) -> None:
        self._max_entries = max_entries
        self._n_dimensions = n_dimensions
        self._blocks: dict[bytes, _Block[Id]] = {}
        self._places: OrderedDict[Id, tuple[bytes, int]] = OrderedDict()  # oldest use first

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: Id) -> bool:
        return entry in self._places

    @property
    def n_bytes(self) -> int:
        """Memory of the vectors, with the room that blocks have to grow."""
        return sum(block.rows.nbytes for block in self._blocks.values())

    def add(self, partition: bytes, entry: Id, vector: NDArray[np.float32]) -> list[Id]:
        """Add an entry, or put it in another place; gives those that had to go for it."""
        self.remove(entry)
        gone: list[Id] = []
        while len(self._places) >= self._max_entries:
            oldest = next(iter(self._places))
            self.remove(oldest)
            gone.append(oldest)
        block = self._blocks.get(partition)
        if block is None:
            block = self._blocks[partition] = _Block(np.empty((2, self._n_dimensions), np.float32))
        at = len(block.ids)
        if at == len(block.rows):
            grown = np.empty((min(2 * at, at + 4096), self._n_dimensions), np.float32)
            grown[:at] = block.rows
            block.rows = grown
        block.rows[at] = vector
        block.ids.append(entry)
        self._places[entry] = (partition, at)
        return gone

    def nearest(self, partition: bytes, vector: NDArray[np.float32], k: int) -> list[tuple[Id, float]]:
        """Give up to k entries of the partition with their cosines, nearest first."""
        block = self._blocks.get(partition)
        if block is None:
            return []
        n = len(block.ids)
        cosines = np.einsum("ij,j->i", block.rows[:n], vector)
        top = np.argpartition(-cosines, k - 1)[:k] if n > k else np.arange(n)
        ranked = sorted(((float(cosines[at]), int(at)) for at in top), key=lambda pair: (-pair[0], pair[1]))
        return [(block.ids[at], cosine) for cosine, at in ranked]

    def touch(self, entry: Id) -> None:
        """Count an entry as used just now."""
        self._places.move_to_end(entry)

    def remove(self, entry: Id) -> bool:
        """Take an entry out; False if it is not there."""
        place = self._places.pop(entry, None)
        if place is None:
            return False
        partition, at = place
        block = self._blocks[partition]
        last = block.ids.pop()
        if last != entry:  # the last row fills the gap
            block.ids[at] = last
            block.rows[at] = block.rows[len(block.ids)]
            self._places[last] = (partition, at)
        if not block.ids:
            del self._blocks[partition]
        return True

    def clear(self) -> None:
        self._blocks.clear()
        self._places.clear()
