"""Whether and when a failed request is sent again. Pure: the time and chance are arguments.

Retries make an outage worse for whom they hit, so their share of all requests is bounded; and they happen only before
the caller has got anything, because an answer that has begun cannot be begun again unseen.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

MAX_TRIES: Final = 3  # of one request at one endpoint
FIRST_PAUSE_S: Final = 0.2  # the longest one before the first retry; doubles
MAX_PAUSE_S: Final = 2.0
MAX_RETRY_AFTER_S: Final = 3.0  # a request waits this long for a server that names a time; else it goes elsewhere
MAX_REST_S: Final = 600.0  # an endpoint is left alone for as long as it asks for, up to this
RETRYABLE_STATUS: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

_RESERVE: Final = 3.0  # retries that a quiet endpoint may make in a row


class RetryBudget:
    """share of requests that may be retries, saved up to a few; a new budget holds these few."""

    __slots__ = ("_left", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._left = _RESERVE if share > 0 else 0.0

    def request(self) -> None:
        """Count a request, each of which pays for a share of a retry."""
        self._left = min(_RESERVE, self._left + self._share)

    @property
    def has_any(self) -> bool:
        return self._left >= 1.0 - 1e-9

    def take(self) -> bool:
        """Spend one retry if there is one."""
        if not self.has_any:
            return False
        self._left -= 1.0
        return True


def pause_s(n_failed: int, chance: float, retry_after_s: float) -> float | None:
    """Say how long to wait before try number n_failed + 1; None: not at all.

    chance         uniform in 0..1: full jitter, so that many clients do not come back at once
    retry_after_s  what the server asked for, 0 if it did not
    """
    if n_failed >= MAX_TRIES:
        return None
    jittered_s = chance * min(FIRST_PAUSE_S * 2.0 ** (n_failed - 1), MAX_PAUSE_S)
    # Not before the named time, and not all at the same moment after it.
    return retry_after_s + jittered_s if retry_after_s <= MAX_RETRY_AFTER_S else None


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """Read a Retry-After header: seconds or an HTTP date; None for a missing or unreadable one."""
    if value is None:
        return None
    value = value.strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value, re.ASCII):
        return float(value)
    try:
        due = parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if due.tzinfo is None:
        due = due.replace(tzinfo=UTC)
    return max(0.0, (due - (now or datetime.now(UTC))).total_seconds())
