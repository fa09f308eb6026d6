"""Models on what only stands in for a device: said beforehand, and shown while it computes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from edge_rt.tensor_types import TensorModelInfo
from edge_rt.types import ModelInfo

_SHOW_EVERY_S = 1.0  # on a terminal, in place
_LINE_EVERY_S = 10.0  # in a log


def announce(info: ModelInfo | TensorModelInfo, stream: TextIO | None = None) -> None:
    """Say that a model runs on a stand-in, which may take long; nothing of a real device."""
    if info.evidence == "device":
        return
    stream = stream or sys.stderr
    slow = ": a token may take many seconds" if isinstance(info, ModelInfo) else ""
    stream.write(f"edge_rt: {info.backend} on {info.device} is a {info.evidence}{slow}, and no figure is a speed\n")
    stream.flush()


@contextmanager
def shown(model: Any, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Show how many products a stand-in has computed, as long as the answer takes."""
    if model.info.evidence == "device":
        yield
        return
    stream = stream or sys.stderr
    is_over, started_s = threading.Event(), clock()
    before = model.stats().device_products_total
    is_terminal = stream.isatty()

    def show() -> None:
        while not is_over.wait(_SHOW_EVERY_S if is_terminal else _LINE_EVERY_S):
            n_products = model.stats().device_products_total - before
            line = f"{model.info.evidence}: {n_products} products in {clock() - started_s:.0f} s"
            stream.write(f"\r\x1b[K{line}" if is_terminal else f"edge_rt: {line}\n")
            stream.flush()

    thread = threading.Thread(target=show, name="stand-in", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if is_terminal:
            stream.write("\r\x1b[K")
