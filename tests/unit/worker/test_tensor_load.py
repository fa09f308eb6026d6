from __future__ import annotations

import pytest

from edge_rt.backends.null import NullBackend
from edge_rt.devices.base import Reading, known, unknown
from edge_rt.errors import ModelTooLargeError
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.tensor_load import load_tensor_session


def load(script: str = "", **changes: object) -> Load:
    values = {"model": "m", "variant": script, "path": "", "quant": "none", "backend": "null", "n_ctx": 0}
    return Load(**{**values, "tensor": TensorLoad(max_batch=4), **changes})  # type: ignore[arg-type]


def memory(n_bytes: int | None) -> Reading[int]:
    return unknown("test", "not told") if n_bytes is None else known(n_bytes, "test")


def test_loads_on_the_back_end_named() -> None:
    session = load_tensor_session(load())
    assert (session.info.backend, session.info.max_batch, session.info.backend_reason) == ("null", 4, "")


def test_a_model_larger_than_what_is_left_is_refused_unless_forced() -> None:
    big = load("memory_bytes=1000", memory_margin_bytes=500)
    with pytest.raises(ModelTooLargeError) as refused:
        load_tensor_session(big, available=lambda: memory(1499))
    assert (refused.value.need_bytes, refused.value.have_bytes) == (1000, 999)
    for allowed, have in ((big, 1500), (big, None), (load("memory_bytes=1000", force=True), 0)):
        load_tensor_session(allowed, available=lambda have=have: memory(have)).close()


def test_the_forms_own_back_ends_are_asked_in_their_order() -> None:
    asked: list[str] = []

    def find(name: str) -> NullBackend:
        asked.append(name)
        return NullBackend()

    load_tensor_session(load(backend="auto", tensor=TensorLoad(backends=("npu", "null"))), find=find)
    assert asked == ["npu"]
