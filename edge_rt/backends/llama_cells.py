"""How llama.cpp lays out its KV cells: one pool for all sequences, or an equal part for each.

In the pool a row's attention passes over the cells of every sequence and skips those that are not its own one by one,
so that a step's time grows with the square of the number of sequences: at 16 of them a third of it. With parts a row
sees its own part alone. But no sequence may be longer than its part then, and llama.cpp computes together only those
sequences whose parts lie side by side; each further run of parts is a batch of its own, which reads all weights again.

So the cells are laid out in parts where that is possible, and in the pool where a sequence outgrows its part, or
sequences are copied over and over, which share cells in the pool alone. A beam search is in the pool from its prompt
on: copies that were made in parts would share nothing there, and take more cells than there are. What is decided is
decided here, by pure functions and counts of steps; llama_context carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_ALIGNED_TOKENS = 256  # llama.cpp rounds a part up to these
# Laying out anew takes about as long as four steps. Behind these many steps that would have fitted it is worth it, and
# a sequence of at most half a part will not outgrow it at once.
_N_CALM = 128
_CALM_SHARE = 0.5
MIN_ROWS = 3  # sequences in a step, from which on parts are worth it


def part_tokens(n_ctx: int, n_seq_max: int) -> int:
    """Count the tokens of a sequence's part if n_ctx cells are laid out in parts; 0 if they cannot be."""
    return n_ctx // n_seq_max // _ALIGNED_TOKENS * _ALIGNED_TOKENS if n_seq_max > 1 else 0


class LayoutChoice:
    """Chooses between parts and the pool, step by step. n_part is part_tokens' answer."""

    def __init__(self, n_part: int) -> None:
        self.n_part = n_part
        self._n_calm = 0

    def in_parts(self, longest: int, n_rows: int, *, is_in_parts: bool, shares: bool = False) -> bool:
        """Say how the cells shall lie in a step, after which the longest of all sequences has so many tokens.

        longest in the pool of those in the step alone, where there are fewer than MIN_ROWS: it makes no difference then
        n_rows  sequences in the step; with few there is nothing to gain
        shares  copies of one of them must share its cells
        """
        if shares or longest > self.n_part:
            self._n_calm = 0
            return False
        if is_in_parts:
            return True
        self._n_calm = self._n_calm + 1 if n_rows >= MIN_ROWS and longest <= self.n_part * _CALM_SHARE else 0
        return self._n_calm >= _N_CALM


class Parts:
    """Which part each sequence has. A sequence gets one with its first row, and keeps it while it holds cells."""

    def __init__(self, n_parts: int) -> None:
        self._n_parts = n_parts
        self._part_of: dict[int, int] = {}
        self._last: frozenset[int] = frozenset()

    def part(self, seq_id: int) -> int | None:
        return self._part_of.get(seq_id)

    def give(self, seq_id: int) -> int:
        """Give a sequence's part, the lowest free one if it has none yet."""
        part = self._part_of.get(seq_id)
        if part is None:
            taken = set(self._part_of.values())
            part = self._part_of[seq_id] = next(i for i in range(self._n_parts) if i not in taken)
        return part

    def free(self, seq_id: int) -> None:
        self._part_of.pop(seq_id, None)

    def to_join(self, seq_ids: Collection[int]) -> dict[int, int]:
        """Say which sequences must change parts so that those of a step lie side by side: their new parts.

        Moving takes longer than one step in several batches, so nothing moves before the same sequences come again.
        """
        asked = frozenset(seq_ids)
        is_again, self._last = asked == self._last, asked
        parts = sorted(self.give(seq_id) for seq_id in asked)
        if not is_again or n_runs(parts) == 1:
            return {}
        return moves(self._part_of, asked, self._n_parts)

    def moved(self, new: Mapping[int, int]) -> None:
        self._part_of.update(new)


def n_runs(parts: Sequence[int]) -> int:
    """Count the runs of neighbours among rising numbers."""
    return sum(b != a + 1 for a, b in zip((-2, *parts), parts, strict=False))


def moves(part_of: Mapping[int, int], seq_ids: Collection[int], n_parts: int) -> dict[int, int]:
    """Give the fewest new parts that put seq_ids side by side; whoever is in the way goes where one of them was."""
    holder = {part: seq_id for seq_id, part in part_of.items()}
    asked, n = set(seq_ids), len(seq_ids)

    def n_moved(first: int) -> int:
        own = sum(holder.get(part) in asked for part in range(first, first + n))
        in_the_way = sum(part in holder and holder[part] not in asked for part in range(first, first + n))
        return n - own + in_the_way

    first = min(range(n_parts - n + 1), key=n_moved)
    window = range(first, first + n)
    left = [part_of[seq_id] for seq_id in sorted(asked) if part_of[seq_id] not in window]
    free = [part for part in window if holder.get(part) not in asked]
    new: dict[int, int] = {}
    for source, target in zip(left, free, strict=True):
        new[holder[source]] = target
        if target in holder:
            new[holder[target]] = source
    return new
