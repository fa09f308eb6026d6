"""How much memory kept prefixes may take where nobody has said so: a part of what is free, as long as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edge_rt.devices.base import Reading

MAX_BYTES: Final = 2 * 2**30
_UNKNOWN_BYTES: Final = 128 * 2**20
_LOOK_S: Final = 0.5


def room_bytes(n_kept: int, available_bytes: int, margin_bytes: int) -> int:
    """Say how many bytes may be kept, when n_kept are: half of what would be free beyond the margin without them.

    Never more than MAX_BYTES. As little as nothing, where the margin is not free even so.
    """
    return max(0, min(MAX_BYTES, (n_kept + available_bytes - margin_bytes) // 2))


class PrefixRoom:
    """Watches the memory that is free; asked at each block, it looks twice a second."""

    def __init__(self, available: Callable[[], Reading[int]], margin_bytes: int, *, clock: Callable[[], float]) -> None:
        self._available, self._margin_bytes, self._clock = available, margin_bytes, clock
        self._looked_s = -_LOOK_S
        self._limit = 0

    def __call__(self, n_kept: int) -> int:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            available = self._available().value
            self._limit = _UNKNOWN_BYTES if available is None else room_bytes(n_kept, available, self._margin_bytes)
        return self._limit
