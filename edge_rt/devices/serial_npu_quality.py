"""How many errors a serial NPU's line makes, and so how long a segment should be. Integers only, as in quality.c."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

from edge_rt.devices.serial_npu_frames import LONG_OVERHEAD, MAX_SHORT, SHORT_OVERHEAD, allowed

MAX_SEGMENT: Final = 2048
MIN_SEGMENT: Final = 16
_MEMORY_BYTES: Final = 8192  # on the wire, after which what was seen of the line counts half
_UNKNOWN_LINE: Final = (32, 1024)  # an error in 8 kB: segments of 192 bytes, until more is known

# Errors in 2^20 bytes, and the segment that carries the most up to there: with the most
# n / (n + h) × exp(-rate × (n + h)) × (1 + rate × (n + h - 2)), since frames with one error are mended; h is what a
# frame has beside its payload, of which two bytes must be right. Below the first a long one carries more, unmended.
_RATES: Final = (
    48, 1364, 1852, 2428, 3015, 3879, 4816, 5687, 6852, 8472, 10841, 13380, 15719, 18819, 23078, 29204, 38587,
)  # fmt: skip
_SEGMENTS: Final = (0, 192, 160, 128, 112, 96, 80, 72, 64, 56, 48, 40, 36, 32, 28, 24, 20, MIN_SEGMENT)


class LineQuality:
    """Errors a byte, as far as it is known from what was acknowledged and what was lost; decides the segments' size.

    A lost frame of size s tells of about rate × s errors: of one at least, and of two if it would have been mended.
    """

    def __init__(self, max_segment: int) -> None:
        self.max_segment = max_segment
        self._errors, self._bytes = _UNKNOWN_LINE  # errors × 256

    def arrived(self, n_bytes: int) -> None:
        self._count(n_bytes, 0)

    def mended(self, n_frames: int) -> None:
        self._errors = min(self._errors + 256 * n_frames, 256 * self._bytes)

    def lost(self, n_bytes: int) -> None:
        least = 512 if n_bytes <= MAX_SHORT + SHORT_OVERHEAD else 256
        likely = self._errors * n_bytes // self._bytes
        self._count(n_bytes, min(max(least, likely), 16 * n_bytes))

    def _count(self, n_bytes: int, errors: int) -> None:
        self._bytes += n_bytes
        self._errors += errors
        if self._bytes > _MEMORY_BYTES:
            self._bytes //= 2
            self._errors //= 2

    @property
    def segment(self) -> int:
        """Give the payload with which most gets through."""
        if self._errors == 0:
            return self.max_segment
        rate = bisect_left(_RATES, self._errors * 4096 // self._bytes)
        h = LONG_OVERHEAD
        best = _SEGMENTS[rate] or (math.isqrt(h * h + 4 * h * 256 * self._bytes // self._errors) - h) // 2
        return allowed(min(best, self.max_segment))

    def cut(self, n_bytes: int) -> int:
        """Give how many of n_bytes the next frame takes; a little more than usual rather than a tiny one after it."""
        usual = self.segment
        return allowed(n_bytes if n_bytes <= min(usual + usual // 2, self.max_segment) else usual)
