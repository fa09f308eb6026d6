"""When the memory that a large input has taken is given back.

onnxruntime's arena keeps what the largest run has needed. That makes runs fast, a third faster than without it, and
stays flat over any number of shapes; but after one large picture a small device would miss that memory for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

_MUCH = 8  # memory for inputs so many times larger than those of all recent shapes is given back


class RecentShapes:
    """The last max_shapes different shapes that a session was run with."""

    def __init__(self, max_shapes: int) -> None:
        self._max = max_shapes
        self._bytes: OrderedDict[tuple[tuple[int, ...], ...], int] = OrderedDict()
        self._kept_bytes = 0
        self._last: tuple[tuple[int, ...], ...] | None = None

    def note(self, feeds: Mapping[str, NDArray[Any]]) -> bool:
        """Note a run that is about to be; tell whether it shall give memory back that no recent shape needs."""
        key = tuple([array.shape for array in feeds.values()])
        if key == self._last:  # nothing is new since it was looked at
            return False
        self._last = key
        self._bytes[key] = sum(array.nbytes for array in feeds.values())
        self._bytes.move_to_end(key)
        if len(self._bytes) > self._max:
            self._bytes.popitem(last=False)
        needed = max(self._bytes.values())
        if self._kept_bytes > _MUCH * needed:
            self._kept_bytes = needed
            return True
        self._kept_bytes = max(self._kept_bytes, needed)
        return False
