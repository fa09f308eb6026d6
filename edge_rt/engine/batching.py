"""What goes into the next step: a pure decision over the running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeqView:
    """What the decision needs of a sequence: how many tokens it has and how many of them the KV holds."""

    key: int
    n_tokens: int
    n_computed: int

    @property
    def n_missing(self) -> int:
        return self.n_tokens - self.n_computed


@dataclass(frozen=True, slots=True)
class Share:
    """n_rows of a sequence's missing tokens go into this step."""

    key: int
    n_rows: int


def pick(running: Sequence[SeqView], *, n_batch: int, n_prefill: int) -> tuple[Share, ...]:
    """Choose the rows of the next step, oldest sequence first.

    Every decoding sequence gets its row before any prompt gets one, so a long prompt delays the running streams by no
    more than n_prefill rows. Prompts share what is left in order of arrival; without streams to delay, a prompt's
    small remainder is not left to a step of its own, whose rows would cost several times as much. At least one row is
    chosen if any is missing, because a step without rows would spin.
    """
    shares = [Share(seq.key, 1) for seq in running if seq.n_missing == 1][:n_batch]
    is_free = not shares
    room = min(n_batch - len(shares), max(n_prefill, 1))
    for seq in running:
        if seq.n_missing > 1 and room > 0:
            n_rows = min(seq.n_missing, room)
            if is_free and seq.n_missing - n_rows <= n_rows // 4:
                n_rows = min(seq.n_missing, n_batch - sum(share.n_rows for share in shares))
            shares.append(Share(seq.key, n_rows))
            room -= n_rows
    return tuple(shares)


def prefill_rows(*, row_s: float, n_decoding: int, max_stall_s: float, max_step_s: float, n_batch: int) -> int:
    """Size the prompt part of a step by the measured time a row takes.

    While streams run the step's prompt part lasts about max_stall_s, otherwise max_step_s (which bounds how long a
    cancelled prompt is still computed). Never below 16 rows: smaller matrices waste most of the machine.
    """
    limit_s = max_stall_s if n_decoding else max_step_s
    if row_s <= 0:
        return n_batch
    return max(16, min(n_batch, int(limit_s / row_s)))
