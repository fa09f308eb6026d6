"""Which kept prefixes leave when memory is short, and whose: decisions alone."""

from __future__ import annotations

from collections.abc import Iterable

from edge_rt.engine.prefix_nodes import Account


def least_used(_floor: int, tick: int, _n_hits: int) -> int:
    """Say how long a block that was used at a tick stays: what was used longest ago leaves first."""
    return tick


def giver(accounts: Iterable[Account], own: Account, limit_bytes: int) -> Account | None:
    """Pick whose prefix leaves for one of own: the least worth among own and those with more than an equal share.

    So nobody's prefixes push another's below his share of limit_bytes. None where nobody may be made to give.
    """
    kept = [account for account in accounts if account.n_bytes or account is own]
    share_bytes = limit_bytes / max(1, len(kept))
    givers = [each for each in kept if each.ends and (each is own or each.n_bytes > share_bytes)]
    return min(givers, key=lambda each: each.ends[0][:2], default=None)
