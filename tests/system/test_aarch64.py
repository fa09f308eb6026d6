"""The native engine on 64-bit ARM: cross-compiled with the flags of the package, run by an emulator (qemu-user).

No ARM hardware takes part. The emulator shows that results are right and that no CPU gets an instruction it lacks. It
does not reorder memory accesses as ARM hardware may, and says nothing about speed.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-gcc"
PACKAGES = {COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "qemu-aarch64-static": "qemu-user-static"}
# What each CPU can run, best last.
CPUS = {
    "cortex-a72": ["portable", "neon"],
    "neoverse-n1": ["portable", "neon", "neon_dotprod"],
    "max": ["portable", "neon", "neon_dotprod", "neon_i8mm"],
}

pytestmark = pytest.mark.slow


@cache
def missing_tools() -> str:
    """Why the compiler or the emulator is not here; they are installed where that is allowed."""
    packages = [names for program, names in PACKAGES.items() if shutil.which(program) is None]
    if not packages:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"needs {' '.join(packages)}; only root can install them, with apt-get"
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *" ".join(packages).split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return f"apt-get could not install {' '.join(packages)}: {done.stderr.strip()[-200:]}" if done.returncode else ""


def package_flags() -> list[str]:
    """The compiler's flags in setup.py, which must not ask for more than every ARMv8 CPU has."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "extra_compile_args":
            flags: list[str] = ast.literal_eval(node.value)
            return flags
    raise AssertionError("setup.py has no extra_compile_args")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program of native/tests, static, for any 64-bit ARM CPU."""
    if reason := missing_tools():
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("aarch64")
    native = ROOT / "native"
    compile_one = [COMPILER, *package_flags(), "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-c"]
    compile_one += [f"-I{native / name}" for name in ("include", "kernels", "src")]
    sources = sorted([*native.glob("src/*.c"), *native.glob("kernels/*.c"), native / "tests/check.c"])
    objects = [str(out / f"{source.stem}.o") for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*compile_one, str(source), "-o", name] for source, name in zip(sources, objects, strict=True)]
        for job in pool.map(partial(subprocess.run, capture_output=True, text=True, timeout=300), commands):
            assert job.returncode == 0, job.stderr
    subprocess.run(
        [COMPILER, "-static", "-o", str(out / "check"), *objects, "-lm", "-lpthread"], check=True, timeout=60
    )
    return out / "check"


@pytest.mark.parametrize("cpu", CPUS)
def test_emulated_cpu_gets_its_kernels_and_they_are_right(program: Path, cpu: str) -> None:
    run = subprocess.run(
        ["qemu-aarch64-static", "-cpu", cpu, str(program), "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, f"exit {run.returncode} on an emulated {cpu}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
    lines = run.stdout.splitlines()
    assert [line.removesuffix(": usable") for line in lines if line.endswith(": usable")] == CPUS[cpu]
    assert f"best: {CPUS[cpu][-1]}" in lines
    assert lines[-1] == "all good"
