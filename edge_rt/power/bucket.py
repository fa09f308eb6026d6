"""So many a second in the long run, and so many at once: a token bucket. Plain state that takes the time."""

from __future__ import annotations


class Bucket:
    """Begins full."""

    __slots__ = ("_burst", "_filled_s", "_hz", "_tokens")

    def __init__(self, hz: float, burst: float, now_s: float) -> None:
        self._hz, self._burst = hz, burst
        self._tokens, self._filled_s = burst, now_s

    def take(self, now_s: float) -> bool:
        """Take one if there is one."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._hz)
        self._filled_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
