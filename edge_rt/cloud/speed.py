"""How fast an endpoint answers, measured on its answers. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Final

_WINDOW: Final = 128  # answers remembered


class Recent:
    """The last values of a quantity, with their quantiles."""

    __slots__ = ("_order", "_sorted")

    def __init__(self, size: int = _WINDOW) -> None:
        self._order: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        if len(self._order) == self._order.maxlen:
            del self._sorted[bisect_left(self._sorted, self._order[0])]
        self._order.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float | None:
        """Give the value that this share of the last ones does not exceed; None before the first."""
        if not self._sorted:
            return None
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]


class Speed:
    """First bytes in seconds, tokens per second after them."""

    __slots__ = ("first_byte", "tokens")

    def __init__(self) -> None:
        self.first_byte, self.tokens = Recent(), Recent()

    def answered(self, *, first_byte_s: float, n_tokens: int, decode_s: float) -> None:
        self.first_byte.add(first_byte_s)
        if n_tokens > 1 and decode_s > 0:
            self.tokens.add((n_tokens - 1) / decode_s)
