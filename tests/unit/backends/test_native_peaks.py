"""What roofline figures are measured with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_rt.backends.native_library import load_native
from edge_rt.errors import BackendUnavailableError


@pytest.fixture(scope="module")
def lib() -> Any:
    try:
        return load_native()
    except BackendUnavailableError as exc:
        pytest.skip(exc.reason)


def test_every_instruction_set_but_the_portable_one_has_a_peak(lib: Any) -> None:
    for isa in range(lib.en_isa_count()):
        n_ops = lib.en_peak_dots(isa, 3)
        if lib.en_isa_name(isa) == b"portable" or not lib.en_isa_usable(isa):
            assert n_ops == 0
        else:
            assert n_ops > 0
            assert n_ops == 3 * lib.en_peak_dots(isa, 1)
    assert lib.en_peak_dots(lib.en_isa_count(), 1) == 0


def test_memory_is_read_through(lib: Any) -> None:
    words = np.arange(100_003, dtype=np.uint64)
    assert lib.en_peak_read(words.ctypes.data, words.size) == words.sum()
