from __future__ import annotations

import platform

import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent
from edge_rt.backends.native_config import ARCHITECTURES
from edge_rt.backends.native_library import TYPES
from edge_rt.catalog.speed import NATIVE_ARCHITECTURES, NATIVE_FORMS, NATIVE_KERNELS, is_fast
from edge_rt.devices import cpu

AVX2 = frozenset({"avx2", "fma", "f16c"})


@pytest.mark.parametrize(
    ("arch", "quant", "features", "backend", "expected"),
    [
        ("llama", "Q4_1", AVX2, "auto", True),
        ("llama", "Q4_1", AVX2, "native", True),
        ("llama", "Q4_1", AVX2, "llama_cpu", False),  # llama.cpp does not repack it
        ("gru", "Q4_1", AVX2, "auto", False),
        ("llama", "Q8_0", AVX2, "auto", False),
        ("llama", "Q4_1", frozenset({"avx2"}), "auto", False),
        ("gru", "Q4_0", frozenset({"avx2"}), "auto", True),
        ("llama", "Q4_1", frozenset({"neon"}), "auto", True),
        ("gru", "Q4_0", frozenset({"neon"}), "auto", False),
    ],
)
def test_what_runs_fast_depends_on_who_runs_it(
    arch: str, quant: str, features: frozenset[str], backend: str, expected: bool
) -> None:
    assert is_fast(arch, quant, features, backend) is expected


def test_the_architectures_are_the_engines() -> None:
    assert set(ARCHITECTURES) == NATIVE_ARCHITECTURES


def test_the_forms_are_of_types_that_the_engine_has() -> None:
    assert {form.removesuffix("_S").removesuffix("_M") for form in NATIVE_FORMS} <= set(TYPES)


def test_the_features_are_those_for_which_the_engine_has_kernels() -> None:
    devices = registry.get("native").probe()
    if isinstance(devices, Absent):
        pytest.skip(f"native: {devices.reason}")
    has_kernels = any(need <= cpu.features() for need in NATIVE_KERNELS)
    assert has_kernels != all(device.reference for device in devices), platform.machine()
