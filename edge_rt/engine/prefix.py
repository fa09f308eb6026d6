"""Which KV slot a new prompt takes, and how much of it is computed already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Slot:
    """One back-end sequence: the tokens its KV holds, who uses it, when it was last used."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    busy: bool = False
    last_used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Take slot; its first n_reused tokens are right already, copied from source if that is another slot."""

    slot: Slot
    source: Slot
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


def choose(slots: Sequence[Slot], token_ids: Sequence[int], *, can_trim: bool, can_copy: bool) -> Placement | None:
    """Pick a free slot for a prompt; None while all are busy.

    Token ids are compared, never hashes: a reused row is the same row. At least one token stays to be computed,
    because only a computed row has logits. A free slot that holds the longest prefix is used where it is; a prefix in
    a busy slot is copied into the free slot unused longest. Of equal prefixes the one that wastes least wins.
    """
    free = [slot for slot in slots if not slot.busy]
    if not free:
        return None
    oldest = min(free, key=lambda slot: (len(slot.token_ids) > 0, slot.last_used_s, slot.seq_id))
    if not can_trim:
        return Placement(oldest, oldest, 0)
    n_max = len(token_ids) - 1

    def reused(slot: Slot) -> int:
        return min(common_prefix(slot.token_ids, token_ids), n_max)

    best = max(free, key=lambda slot: (reused(slot), -len(slot.token_ids), -slot.last_used_s))
    n_best = reused(best)
    if can_copy:
        for slot in slots:
            if slot.busy and reused(slot) > n_best:
                best, n_best = slot, reused(slot)
    if n_best == 0:
        return Placement(oldest, oldest, 0)
    # Trimming a much longer idle conversation for a short common prefix would throw its KV away: copy instead.
    if can_copy and not best.busy and n_best < len(best.token_ids) // 2 and oldest is not best:
        return Placement(oldest, best, n_best)
    return Placement(oldest if best.busy else best, best, n_best)
