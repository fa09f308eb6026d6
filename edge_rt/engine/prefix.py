"""Which KV slot a new prompt takes, and how much of it is computed already.

A finished sequence stays in its slot until another request comes. Where attention reads every cell in use, whoever's
it is, it must leave the KV then: 512 idle cells make a small model's decode 8 % slower, a full pool of 4,096 a
fifth. So it is copied out (prefix_tree.py) as soon as the engine has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SHARED_TOKENS = 32  # fewer are computed twice in less time than another step takes
_MIN_COPIED_TOKENS = 16  # fewer cost next to nothing in the prompt's own step, and a copy may be one of all its source


@dataclass(slots=True)
class Slot:
    """One back-end sequence: the tokens its KV holds, who uses it, when it was last used, whether all of it is kept.

    owner  whose prompts may begin with what it holds; "" where tenants share
    n_hot  how many of the tokens another request has begun with too
    """

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    busy: bool = False
    last_used_s: float = 0.0
    is_saved: bool = False
    owner: str = ""
    n_hot: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Take slot; its first n_reused tokens come from source, which may be slot itself. None: from what is kept."""

    slot: Slot
    source: Slot | None
    n_reused: int


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading tokens, or bytes, that two share."""
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
    slots: Sequence[Slot],
    n_kept: int,
    token_ids: list[int],
    *,
    owner: str = "",
    can_trim: bool,
    can_copy: bool,
) -> Placement | None:
    """Pick a free slot for a prompt; None while all are busy.

    n_kept  tokens of it that are kept outside the KV

    Token ids are compared, never hashes: a reused row is the same row. At least one token stays to be computed,
    because only a computed row has logits. The longest prefix wins, wherever it is; of equal ones a free slot's, which
    is used where it is, before a busy slot's and a kept one, which are copied into the free slot unused longest; a few
    tokens are not worth a copy.
    """
    free = [slot for slot in slots if not slot.busy]
    if not free:
        return None
    oldest = min(free, key=lambda slot: (len(slot.token_ids) > 0, slot.last_used_s, slot.seq_id))
    if not can_trim:
        return Placement(oldest, oldest, 0)
    n_max = len(token_ids) - 1

    def reused(slot: Slot) -> int:
        return min(common_prefix(slot.token_ids, token_ids), n_max) if slot.owner == owner else 0

    best = max(free, key=lambda slot: (reused(slot), -len(slot.token_ids), -slot.last_used_s))
    n_best = reused(best)
    for slot in slots:
        if slot.busy and can_copy and (n_reused := reused(slot)) > max(n_best, _MIN_COPIED_TOKENS - 1):
            best, n_best = slot, n_reused
    if (n_kept := min(n_kept, n_max)) > n_best:
        return Placement(oldest, None, n_kept)
    if n_best == 0:
        return Placement(oldest, oldest, 0)
    # Trimming a much longer idle conversation for a short common prefix would throw its KV away: copy instead.
    if best.busy or (can_copy and n_best < len(best.token_ids) // 2 and oldest is not best):
        return Placement(oldest, best, n_best) if n_best >= _MIN_COPIED_TOKENS else Placement(oldest, oldest, 0)
    return Placement(best, best, n_best)


def shared_ahead(token_ids: list[int], others: Sequence[tuple[list[int], int]], n_have: int) -> int:
    """Tell how far a prompt should wait for others that are computing its beginning right now; 0: not at all.

    others  tokens of each running sequence of the same owner, and how many of them are computed
    n_have  tokens of the prompt that need not be computed as it is
    """
    n_max = len(token_ids) - 1
    best = 0
    for ids, n_computed in others:
        if n_computed < len(ids):
            n_shared = min(common_prefix(ids, token_ids), n_max)
            if n_shared > n_computed and n_shared - max(n_have, n_computed) >= MIN_SHARED_TOKENS:
                best = max(best, n_shared)
    return best
