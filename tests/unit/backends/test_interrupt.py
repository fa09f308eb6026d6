from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path

import pytest

from edge_rt.backends import llama_cpu
from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.interrupt import interrupt_held
from edge_rt.errors import BackendLoadError

Compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def sort_and_interrupt() -> bool:
    """Let C call back into Python with a Ctrl-C under way; True if C came to its end."""

    @Compare
    def compare(_a: int | None, _b: int | None) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    ctypes.CDLL(None).qsort((ctypes.c_int * 2)(), 2, ctypes.sizeof(ctypes.c_int), compare)
    return True


def interrupt_a_call(known: list[bool], error: Exception | None = None) -> None:
    """Note what is known of the interrupt before and after the native call, then raise what the call made of it."""
    with interrupt_held() as has_come:
        known.append(has_come())
        sort_and_interrupt()
        known.append(has_come())
        if error is not None:
            raise error


def test_an_interrupt_in_a_callback_is_raised_after_the_native_call() -> None:
    known: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_call(known)
    assert known == [False, True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_wins_over_the_error_it_caused() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt_a_call([], ValueError("aborted"))


def test_without_an_interrupt_nothing_is_raised() -> None:
    with interrupt_held() as has_come:
        pass
    assert not has_come()


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_held() as has_come:
            assert sort_and_interrupt()
            assert not has_come()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone() -> None:
    handlers: list[object] = []

    def work() -> None:
        with interrupt_held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@pytest.mark.model
def test_an_interrupted_load_is_given_up(model_store: Path) -> None:
    file = ModelFile(model="m", variant="", path=model_store, quant="")
    options = LoadOptions(n_ctx=64, n_seq_max=1, n_batch=32)
    with pytest.raises(BackendLoadError):
        llama_cpu.open_session(file, options, is_interrupted=lambda: True)
