from __future__ import annotations

import asyncio
import gc
import logging
import sys

import pytest

from edge_rt.worker.spawn import is_logged, level, spawn


def test_a_process_that_cannot_be_started_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        asyncio.run(spawn())
    gc.collect()  # a socket left open would warn, and warnings are errors


def test_what_a_worker_tells_is_no_warning_and_all_else_is() -> None:
    assert level("INFO edge_rt.backends.npu.session: event=npu_back backend=npu_qnn model=m lost_s=1.0") == logging.INFO
    for line in (
        "WARNING edge_rt.backends.npu.session: event=npu_lost",
        "INFO of a library",
        "Killed",
        "ERROR edge_rt.x: y",
    ):
        assert level(line) == logging.WARNING


def test_last_words_are_what_broke_out_and_not_what_was_logged() -> None:
    assert is_logged("ERROR edge_rt.engine.tokens: a step of 1 sequences failed: no cells")
    assert is_logged("WARNING root: x")
    assert not any(map(is_logged, ("KeyError: 3", "ERROR: no memory", "GGML_ASSERT(n > 0) failed", "")))
