from __future__ import annotations

import pytest

from edge_rt.backends.base import MemoryNeed
from edge_rt.devices.base import known, unknown
from edge_rt.errors import ModelTooLargeError
from edge_rt.worker.memory import check

NEED = MemoryNeed(weights_bytes=600, kv_bytes=300, scratch_bytes=100)


def test_a_model_that_just_fits_is_loaded() -> None:
    check("m", NEED, known(1100, "meminfo"), margin_bytes=100)


def test_a_model_that_would_use_the_margin_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelTooLargeError) as caught:
        check("m", NEED, known(1099, "meminfo"), margin_bytes=100)
    assert (caught.value.need_bytes, caught.value.have_bytes) == (1000, 999)


def test_less_memory_than_the_margin_counts_as_none() -> None:
    with pytest.raises(ModelTooLargeError) as caught:
        check("m", NEED, known(50, "meminfo"), margin_bytes=100)
    assert caught.value.have_bytes == 0


def test_unknown_memory_refuses_nothing() -> None:
    check("m", NEED, unknown("meminfo", "not there"), margin_bytes=100)
