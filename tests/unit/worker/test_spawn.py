from __future__ import annotations

import asyncio
import gc
import sys

import pytest

from edge_rt.worker.spawn import spawn


def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        asyncio.run(spawn())
    gc.collect()  # a socket left open would warn, and warnings are errors
