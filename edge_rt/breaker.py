"""Leaves a device alone that fails, and lets one request at a time find out whether it works again. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

BreakerState = Literal["closed", "open", "half_open"]

MAX_PAUSE_FACTOR = 5.0  # of retry_s: even a device that stays broken is tried this often …
LOST_FACTOR = 20.0  # … unless a failure takes long: of the time that goes by, tries may lose a twentieth
EARLY_SHARE = 0.1  # of retry_s: the least pause before a try by a copy, which costs no client its answer


class Ticket(NamedTuple):
    """A request's, from begin to its end. role beside: it began although the breaker did not allow it."""

    generation: int
    role: Literal["plain", "probe", "beside"]


class Breaker:
    """closed: requests pass. open: none until retry_s is over. half_open: one passes, whose end decides.

    Each request takes a ticket from begin and ends it by exactly one of succeeded, failed and abandoned. What began
    before the breaker last opened says nothing of the device's state since then and is not counted. While it is open a
    copy of a request may try early, where the request itself waits longer elsewhere than a try costs.
    """

    __slots__ = (
        "_early_at_s",
        "_generation",
        "_max_failures",
        "_n_failures",
        "_pause_s",
        "_probe",
        "_retry_s",
        "retry_at_s",
    )

    def __init__(self, *, max_failures: int, retry_s: float) -> None:
        if max_failures < 1 or retry_s <= 0:
            raise ValueError(f"max_failures {max_failures} must be at least 1 and retry_s {retry_s} above 0")
        self.retry_at_s: float | None = None  # None: closed
        self._max_failures, self._retry_s = max_failures, retry_s
        self._pause_s = retry_s  # of the next opening
        self._early_at_s = 0.0  # from when on a copy may try
        self._n_failures = 0  # one after the other
        self._generation = 0  # how often it has opened
        self._probe: Ticket | None = None  # of the request that tries

    def limit(self, *, max_failures: int, retry_s: float) -> None:
        """Go by other limits from the next failure on; a pause that has begun lasts as long as it was to."""
        if self._pause_s == self._retry_s:
            self._pause_s = retry_s
        self._max_failures, self._retry_s = max_failures, retry_s

    def state(self, now_s: float) -> BreakerState:
        if self.retry_at_s is None:
            return "closed"
        return "open" if now_s < self.retry_at_s else "half_open"

    def allows(self, now_s: float) -> bool:
        """Say whether a request shall begin now; one that has no other device may all the same."""
        state = self.state(now_s)
        return state == "closed" or (state == "half_open" and self._probe is None)

    def allows_copy(self, now_s: float) -> bool:
        """Say whether a copy of a request may try an open device before its pause is over."""
        return self.retry_at_s is not None and self._probe is None and now_s >= self._early_at_s

    def begin(self, now_s: float, *, is_copy: bool = False) -> Ticket:
        """Take a ticket; is_copy: another device answers the request, this one shall show whether it works."""
        if not (self.allows(now_s) or (is_copy and self.allows_copy(now_s))):
            return Ticket(self._generation, "beside")
        if self.retry_at_s is None:
            return Ticket(self._generation, "plain")
        self._probe = Ticket(self._generation, "probe")
        return self._probe

    def succeeded(self, ticket: Ticket) -> None:
        if ticket.generation == self._generation:
            self.retry_at_s, self._probe, self._n_failures, self._pause_s = None, None, 0, self._retry_s

    def failed(self, ticket: Ticket, now_s: float, *, lost_s: float = 0.0) -> None:
        """Count a failure that took lost_s to show. One beside an open breaker does not lengthen its pause."""
        if ticket.generation != self._generation or ticket.role == "beside":
            return
        self._n_failures += 1
        if self._n_failures >= self._max_failures or ticket is self._probe:
            self.trip(now_s, lost_s=lost_s)

    def abandoned(self, ticket: Ticket) -> None:
        """Take note that a request ended without telling anything of the device: its client left."""
        if ticket is self._probe:
            self._probe = None

    def trip(self, now_s: float, *, lost_s: float = 0.0) -> None:
        """Open at once, for twice as long as the last time unless it worked in between."""
        self.retry_at_s = now_s + max(self._pause_s, lost_s * LOST_FACTOR)
        self._early_at_s = now_s + max(self._retry_s * EARLY_SHARE, lost_s * LOST_FACTOR)
        self._pause_s = min(self._pause_s * 2, self._retry_s * MAX_PAUSE_FACTOR)
        self._generation += 1
        self._probe, self._n_failures = None, 0

    def retry_now(self, now_s: float) -> None:
        """Let the next request try, the pause notwithstanding: the reason for which it opened is gone."""
        if self.retry_at_s is not None:
            self.retry_at_s = min(self.retry_at_s, now_s)
