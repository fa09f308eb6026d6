"""Whether a model fits, decided before the back end allocates anything."""

from __future__ import annotations

from edge_rt.backends.base import MemoryNeed
from edge_rt.devices.base import Reading
from edge_rt.errors import ModelTooLargeError


def check(model: str, need: MemoryNeed, available: Reading[int], margin_bytes: int) -> None:
    """Raise ModelTooLargeError if a load would leave less than margin_bytes for everybody else.

    A kernel that does not tell its memory is no reason to refuse.
    """
    if available.value is None:
        return
    have = max(0, available.value - margin_bytes)
    if need.total_bytes > have:
        raise ModelTooLargeError(model=model, need_bytes=need.total_bytes, have_bytes=have)
