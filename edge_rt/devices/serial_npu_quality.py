"""How many errors a serial NPU's line makes, and so how long a segment should be. Integers only, as in link.c."""

from __future__ import annotations

import math
from typing import Final

from edge_rt.devices.serial_npu_frames import SHORT_OVERHEAD, allowed

MAX_SEGMENT: Final = 1024
MIN_SEGMENT: Final = 16
_MEMORY_BYTES: Final = 8192  # on the wire, after which what was seen of the line counts half
_UNKNOWN_LINE: Final = (32, 1024)  # an error in 8 kB: segments of 192 bytes, until more is known


class LineQuality:
    """Errors a byte, as far as it is known from what was acknowledged and what was lost; decides the segments' size.

    A lost frame of size s tells of one error at least, and of about rate × s where that is more.
    """

    def __init__(self, max_segment: int) -> None:
        self.max_segment = max_segment
        self._errors, self._bytes = _UNKNOWN_LINE  # errors × 256

    def arrived(self, n_bytes: int) -> None:
        self._count(n_bytes, 0)

    def lost(self, n_bytes: int) -> None:
        likely = self._errors * n_bytes // self._bytes if self._bytes else 0
        self._count(n_bytes, min(max(256, likely), 16 * n_bytes))

    def _count(self, n_bytes: int, errors: int) -> None:
        self._bytes += n_bytes
        self._errors += errors
        if self._bytes > _MEMORY_BYTES:
            self._bytes //= 2
            self._errors //= 2

    @property
    def segment(self) -> int:
        """Give the payload n with the most n / (n + h) × exp(-rate × (n + h)), h being a frame's other bytes."""
        if self._errors == 0:
            return self.max_segment
        h = SHORT_OVERHEAD
        best = (math.isqrt(h * h + 4 * h * 256 * self._bytes // self._errors) - h) // 2
        return allowed(min(max(best, MIN_SEGMENT), self.max_segment))
