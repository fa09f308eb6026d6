"""Whose turn it is: priorities and tenants share by what was done for them, not by how often they ask.

Start-time fair queueing on two levels. The priorities share by weight: while all of them have work, background requests
still get a twentieth. Within a priority the tenants share alike. Who comes after a pause begins where the others are,
so that nothing is saved up by not asking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeVar, get_args

from edge_rt.types import Priority

PRIORITIES: Final[tuple[Priority, ...]] = get_args(Priority)  # the most urgent first
WEIGHTS: Final[Mapping[Priority, float]] = {"interactive": 16.0, "normal": 4.0, "background": 1.0}
_MAX_TENANTS = 1024  # whose shares are remembered while they have nothing to do

Flow = tuple[Priority, str]  # whose requests: of which priority, of which tenant
T = TypeVar("T")


def rank(priority: Priority) -> int:
    """Give 0 for the most urgent."""
    return PRIORITIES.index(priority)


class Turns:
    """Counts what was done, in rows or another unit of work, and tells who comes next."""

    def __init__(self) -> None:
        self._done = dict.fromkeys(PRIORITIES, 0.0)  # by weight
        self._tenants: dict[Flow, float] = {}
        self._now = 0.0  # where the priority stands that was served last
        self._tenant_now = dict.fromkeys(PRIORITIES, 0.0)
        self._served: dict[Flow, int] = {}  # in which turn last: the longest ago is the first of equals
        self._n_turns = 0

    def join(self, priority: Priority, tenant: str, here: Collection[Flow]) -> None:
        """Let a tenant's request in; here: whose requests wait or run already."""
        if not any(other == priority for other, _ in here):
            self._done[priority] = max(self._done[priority], self._now)
        if (priority, tenant) not in here:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget()
            done = self._tenants.get((priority, tenant), 0.0)
            self._tenants[priority, tenant] = max(done, self._tenant_now[priority])

    def charge(self, priority: Priority, tenant: str, n: float) -> None:
        """Count work that was done; less than 0 takes back what was counted too much."""
        # Where who is served stood before: nobody waits behind it.
        self._now = max(self._now, self._done[priority])
        done = self._tenants.get((priority, tenant), self._tenant_now[priority])
        self._tenant_now[priority] = max(self._tenant_now[priority], done)
        self._done[priority] += n / WEIGHTS[priority]
        self._tenants[priority, tenant] = done + n
        self._n_turns += 1
        self._served[priority, tenant] = self._n_turns

    def key(self, priority: Priority, tenant: str) -> tuple[float, int, float, int]:
        """Give what turns are ordered by: the least comes first."""
        done = self._tenants.get((priority, tenant), self._tenant_now[priority])
        return self._done[priority], rank(priority), done, self._served.get((priority, tenant), 0)

    def may_displace(self, priority: Priority, other: Priority) -> bool:
        """Say whether a request may take the place of one of another priority: a less urgent one, beyond its share."""
        return rank(priority) < rank(other) and self._done[priority] <= self._done[other]

    def _forget(self) -> None:
        """Drop the tenants who would begin where the others are anyway."""
        self._tenants = {flow: done for flow, done in self._tenants.items() if done > self._tenant_now[flow[0]]}
        self._served = {flow: turn for flow, turn in self._served.items() if flow in self._tenants}


def in_turn(turns: Turns, items: Iterable[tuple[Priority, str, T]]) -> list[T]:
    """Order requests by whose turn it is; those of one tenant stay in the order they come in."""
    return [item for _, _, item in sorted(items, key=lambda entry: turns.key(entry[0], entry[1]))]
