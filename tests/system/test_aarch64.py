"""The native engine on 64-bit ARM: cross-compiled with the flags of the package, run by an emulator (qemu-user).

No ARM hardware takes part. The emulator shows that results are right and that no CPU gets an instruction it lacks. It
does not reorder memory accesses as ARM hardware may, and says nothing about speed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.native_check import build_check

COMPILER = "aarch64-linux-gnu-gcc"
PACKAGES = {COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "qemu-aarch64-static": "qemu-user-static"}
_MISSING = " ".join(names for program, names in PACKAGES.items() if shutil.which(program) is None)
# What each CPU can run, best last.
CPUS = {
    "cortex-a72": ["portable", "neon"],
    "neoverse-n1": ["portable", "neon", "neon_dotprod"],
    "max": ["portable", "neon", "neon_dotprod", "neon_i8mm"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}: apt-get install {_MISSING}"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program of native/tests, static, for any 64-bit ARM CPU."""
    return build_check([COMPILER], tmp_path_factory.mktemp("aarch64"))


@pytest.mark.parametrize("cpu", CPUS)
def test_emulated_cpu_gets_its_kernels_and_they_are_right(program: Path, cpu: str) -> None:
    n_rounds = 2 if cpu == "max" else 1  # it runs the others' kernels too
    command = ["qemu-aarch64-static", "-cpu", cpu, str(program), str(n_rounds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, f"exit {run.returncode} on an emulated {cpu}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
    lines = run.stdout.splitlines()
    assert [line.removesuffix(": usable") for line in lines if line.endswith(": usable")] == CPUS[cpu]
    assert f"best: {CPUS[cpu][-1]}" in lines
    assert lines[-1] == "all good"
