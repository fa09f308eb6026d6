"""Which KV slot a new prompt takes, and how much of it is computed already.

A finished sequence stays in its slot until another request comes. Then it must leave the KV, because attention reads
every cell in use, whoever's it is: 512 idle cells make a small model's decode 8 % slower, a full pool of 4,096 a
fifth. So it is copied to the shelf as soon as the engine has nothing else to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Slot:
    """One back-end sequence: the tokens its KV holds, who uses it, when it was last used, whether the shelf has it."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    busy: bool = False
    last_used_s: float = 0.0
    is_saved: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A sequence saved out of the KV: its tokens and the back end's bytes."""

    token_ids: tuple[int, ...]
    state: NDArray[np.uint8]


class Shelf:
    """Saved sequences, at most max_bytes of them; the one used least recently goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._saved: OrderedDict[int, Saved] = OrderedDict()
        self.n_bytes = 0

    def __iter__(self) -> Iterator[Saved]:
        return iter(self._saved.values())

    def put(self, saved: Saved) -> None:
        """Keep a sequence; what is only its beginning goes, as does what no longer fits."""
        for other in [o for o in self if saved.token_ids[: len(o.token_ids)] == o.token_ids]:
            self.drop(other)
        self._saved[id(saved)] = saved
        self.n_bytes += saved.state.nbytes
        while self.n_bytes > self._max_bytes:  # an item larger than all the room goes itself
            self.drop(next(iter(self)))

    def touch(self, saved: Saved) -> None:
        """Mark as used just now."""
        self._saved.move_to_end(id(saved))

    def drop(self, saved: Saved) -> None:
        """Forget a sequence, unless the shelf has already."""
        if self._saved.pop(id(saved), None) is not None:
            self.n_bytes -= saved.state.nbytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Take slot; its first n_reused tokens are right already, copied from source if that is not slot itself."""

    slot: Slot
    source: Slot | Saved
    n_reused: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading tokens two lists share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low] and a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def choose(
    slots: Sequence[Slot], saved: Iterable[Saved], token_ids: Sequence[int], *, can_trim: bool, can_copy: bool
) -> Placement | None:
    """Pick a free slot for a prompt; None while all are busy.

    Token ids are compared, never hashes: a reused row is the same row. At least one token stays to be computed,
    because only a computed row has logits. The longest prefix wins, wherever it is; of equal ones a free slot's, which
    is used where it is, before a busy slot's and a saved one, which are copied into the free slot unused longest.
    """
    free = [slot for slot in slots if not slot.busy]
    if not free:
        return None
    oldest = min(free, key=lambda slot: (len(slot.token_ids) > 0, slot.last_used_s, slot.seq_id))
    if not can_trim:
        return Placement(oldest, oldest, 0)
    n_max = len(token_ids) - 1
    prompt = tuple(token_ids)

    def reused(source: Slot | Saved) -> int:
        held = source.token_ids if isinstance(source, Saved) else tuple(source.token_ids)
        return min(common_prefix(held, prompt), n_max)

    best: Slot | Saved = max(free, key=lambda slot: (reused(slot), -len(slot.token_ids), -slot.last_used_s))
    n_best = reused(best)
    others: list[Slot | Saved] = [slot for slot in slots if slot.busy and can_copy]
    for source in [*others, *saved]:
        if (n_reused := reused(source)) > n_best:
            best, n_best = source, n_reused
    if n_best == 0:
        return Placement(oldest, oldest, 0)
    if not isinstance(best, Slot) or best.busy:
        return Placement(oldest, best, n_best)
    # Trimming a much longer idle conversation for a short common prefix would throw its KV away: copy instead.
    if can_copy and n_best < len(best.token_ids) // 2 and oldest is not best:
        return Placement(oldest, best, n_best)
    return Placement(best, best, n_best)
