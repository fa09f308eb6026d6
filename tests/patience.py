"""Waiting for what another process or thread does. No speed is judged by it: only what hangs fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
POWERD_S = 0.05  # between two looks at powerd, which refuses who connects more often in the long run


def until(look: Callable[[], T], *, told: Callable[[], object] = str, every_s: float = 0.01) -> T:
    """Look until there is something, and give it; told says what there is to know when nothing comes."""
    due_s = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < due_s, f"it did not come within {PATIENCE_S:g} s: {told()}"
        time.sleep(every_s)  # what others do has no clock of ours to move
    return found
