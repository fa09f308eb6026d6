"""What goes into the next step: pure decisions over the running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def pick(missing: Sequence[int], *, n_batch: int, n_prefill: int) -> list[int]:
    """Choose how many rows each running sequence gets in the next step.

    missing  tokens of each sequence that the KV does not hold yet, at least 1, the oldest sequence first
    returns  rows of each, 0 for those that wait; at most n_batch in all

    Every decoding sequence gets its row before any prompt gets one, so a long prompt delays the running streams by no
    more than n_prefill rows. Prompts share what is left in order of arrival; without streams to delay, a prompt's
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


def prefill_rows(*, row_s: float, n_decoding: int, max_stall_s: float, max_step_s: float, n_batch: int) -> int:
    """Size the prompt part of a step by the measured time a row takes.

    While streams run the step's prompt part lasts about max_stall_s, otherwise max_step_s (which bounds how long a
    cancelled prompt is still computed). Never below 16 rows: smaller matrices waste most of the machine.
    """
    limit_s = max_stall_s if n_decoding else max_step_s
    if row_s <= 0:
        return n_batch
    return max(16, min(n_batch, int(limit_s / row_s)))
