"""What goes into the next step: pure decisions over the running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from edge_rt.engine.row_costs import RowCosts


def pick(missing: Sequence[int], *, n_batch: int, n_prefill: int) -> list[int]:
    """Choose how many rows each running sequence gets in the next step.

    missing  tokens of each sequence that the KV does not hold yet, at least 1, in turn
    returns  rows of each, 0 for those that wait; at most n_batch in all

    Every decoding sequence gets its row before any prompt gets one, so a long prompt delays the running streams by no
    more than n_prefill rows. Prompts share what is left in this order; without streams to delay, a prompt's
    small remainder is not left to a step of its own, whose rows would cost several times as much. At least one row is
    chosen, because a step without rows would spin.
    """
    rows = [1 if n == 1 else 0 for n in missing]
    n_rows = sum(rows)
    if n_rows > n_batch:
        return [n if older + n <= n_batch else 0 for n, older in zip(rows, accumulate(rows, initial=0), strict=False)]
    if n_rows == len(rows):
        return rows
    is_free = n_rows == 0
    room = min(n_batch - n_rows, max(n_prefill, 1))
    for i, n_missing in enumerate(missing):
        if n_missing > 1 and room > 0:
            n = min(n_missing, room)
            if is_free and n_missing - n <= n // 4:
                n = min(n_missing, n_batch - n_rows)
            rows[i] = n
            n_rows += n
            room -= n
    return rows


def share_rows(
    parts: Sequence[tuple[int, int]],
    order: Sequence[int],
    costs: RowCosts,
    *,
    max_stall_s: float,
    max_step_s: float,
    n_batch: int,
) -> list[int]:
    """Choose how many rows each running sequence gets in the next step, by whose turn it is and by what rows take.

    parts  of each sequence: tokens that are computed, and tokens that are not yet, at least 1
    order  the sequences in turn; those that are not in it get none
    costs  says how many rows of the first prompt in turn take max_stall_s, which streams are held up by, or without
           streams max_step_s, which bounds how long a cancelled prompt is still computed
    """
    missing = [parts[i][1] for i in order]
    n_decoding, n_prefill = missing.count(1), 0
    if n_decoding < len(missing):
        start = next(parts[i][0] for i in order if parts[i][1] > 1)
        n_within = costs.rows_within(max_stall_s if n_decoding else max_step_s, start)
        n_prefill = prefill_rows(n_within, n_batch=n_batch)
    rows = [0] * len(parts)
    for i, n in zip(order, pick(missing, n_batch=n_batch, n_prefill=n_prefill), strict=True):
        rows[i] = n
    return rows


def prefill_rows(n_within: int | None, *, n_batch: int) -> int:
    """Size the prompt part of a step, of which n_within rows take as long as it may; None: not measured yet.

    Never below 16 rows: smaller matrices waste most of the machine.
    """
    return n_batch if n_within is None else max(16, min(n_batch, n_within))
