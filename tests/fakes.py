"""Test doubles that more than one test package uses: `from tests.fakes import FakeClock`."""

from __future__ import annotations


class FakeClock:
    """A monotonic clock that stands still until it is told to move; pass it where time.monotonic goes."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {-seconds} s")
        self.now_s += seconds
