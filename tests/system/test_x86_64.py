"""The native engine's check on x86-64 CPUs without AVX2: they get portable C, and no instruction they lack.

Run by an emulator (qemu-user), which ends a program at an instruction that the CPU does not have. What it cannot
emulate, AVX-512 and AVX-VNNI, is for `make emulate-x86`.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from pathlib import Path

import pytest

from tools.emulate_x86 import QEMU_CPUS, fault_in, run_in_qemu
from tools.native_check import build_check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64"),
    pytest.mark.skipif(
        shutil.which("qemu-x86_64-static") is None, reason="needs qemu-x86_64-static (qemu-user-static)"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_check(shlex.split(os.environ.get("CC", "cc")), tmp_path_factory.mktemp("x86_64"))


# What a Nehalem lacks qemu64 lacks too; `make emulate-x86` runs both.
@pytest.mark.parametrize("cpu", [cpu for cpu in QEMU_CPUS if cpu != "Nehalem"])
def test_a_cpu_without_avx2_gets_portable_kernels_and_nothing_it_lacks(program: Path, cpu: str) -> None:
    output = run_in_qemu(program, cpu)
    assert not (fault := fault_in(output, QEMU_CPUS[cpu])), f"{fault}\n{output[-2000:]}"
