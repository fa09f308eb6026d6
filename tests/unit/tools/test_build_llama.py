from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tools.build_llama import CMAKE_FLAGS, BuildError, Compiler, cpu_features, ensure_wheel, find_compiler, wheel_key

ZEN4 = Compiler("c++", '#define __VERSION__ "12.2.0"\n#define __AVX512VNNI__ 1')

ARM = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd asimddp i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd0b

processor\t: 1
BogoMIPS\t: 108.00
Features\t: fp asimd asimddp i8mm
CPU implementer\t: 0x41
CPU part\t: 0xd05
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a compiler of our own, which tells macros and compiles nothing."""
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\necho "#define __AVX2__ 1"\n')
    compiler.chmod(0o755)
    return {"PATH": f"{compiler.parent}:{os.defpath}", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def pip(tmp_path: Path, script: str) -> Path:
    """A stand-in for the venv's Python: it is called as `python -m pip wheel … --wheel-dir DIR …`."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\n")
    python.chmod(0o755)
    return python


MAKES_A_WHEEL = """while [ "$1" != --wheel-dir ]; do shift; done
mkdir -p "$2" && echo "$CMAKE_ARGS" > "$2/llama_cpp_python-1-py3-none-any.whl" """


def test_everything_that_goes_into_the_build_is_in_the_key() -> None:
    key = wheel_key("0.3.36", ZEN4, CMAKE_FLAGS, {})
    assert key == wheel_key("0.3.36", ZEN4, CMAKE_FLAGS, {"PATH": "/bin"})
    others = {
        wheel_key("0.3.37", ZEN4, CMAKE_FLAGS, {}),
        wheel_key("0.3.36", dataclasses.replace(ZEN4, command="clang++"), CMAKE_FLAGS, {}),
        wheel_key("0.3.36", dataclasses.replace(ZEN4, macros="#define __AVX2__ 1"), CMAKE_FLAGS, {}),
        wheel_key("0.3.36", ZEN4, (*CMAKE_FLAGS, "-DGGML_OPENMP=OFF"), {}),
        wheel_key("0.3.36", ZEN4, CMAKE_FLAGS, {"CFLAGS": "-O1"}),
    }
    assert len(others) == 5
    assert key not in others


def test_all_kinds_of_arm_cores_count() -> None:
    assert cpu_features(ARM).splitlines() == [
        "Features\t: fp asimd asimddp i8mm",
        "CPU implementer\t: 0x41",
        "CPU part\t: 0xd05",
        "CPU part\t: 0xd0b",
    ]


def test_what_changes_by_itself_does_not_count() -> None:
    assert cpu_features("cpu MHz\t\t: 2445.4\nflags\t\t: fpu avx2\nbogomips\t: 4890\n") == "flags\t\t: fpu avx2"


def test_the_wheel_is_compiled_once(tmp_path: Path, environ: dict[str, str]) -> None:
    python = pip(tmp_path, MAKES_A_WHEEL)
    wheel = ensure_wheel(python, environ)
    assert wheel.read_text().split() == list(CMAKE_FLAGS)
    assert ensure_wheel(python, environ) == wheel
    assert (tmp_path / "calls").read_text() == "called\n"
    assert list(wheel.parent.parent.glob("building-*")) == []


def test_own_flags_are_added_and_kept_apart(tmp_path: Path, environ: dict[str, str]) -> None:
    python = pip(tmp_path, MAKES_A_WHEEL)
    plain = ensure_wheel(python, environ)
    own = ensure_wheel(python, {**environ, "CMAKE_ARGS": "-DGGML_OPENMP=OFF"})
    assert own.parent != plain.parent
    assert own.read_text().split() == [*CMAKE_FLAGS, "-DGGML_OPENMP=OFF"]


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("OSError: [Errno 28] No space left on device", "XDG_CACHE_HOME"),
        ("ERROR: No matching distribution found for llama-cpp-python", "needs the network"),
        ("CMake Error: No CMAKE_C_COMPILER could be found.", "build-essential"),
        ("error: expected ';'", "whole output is in"),
    ],
)
def test_a_failed_build_says_why_and_leaves_no_wheel(
    tmp_path: Path, environ: dict[str, str], output: str, remedy: str
) -> None:
    python = pip(tmp_path, f'echo "{output}"\nexit 1')
    with pytest.raises(BuildError) as caught:
        ensure_wheel(python, environ)
    assert output in str(caught.value)
    assert remedy in str(caught.value)
    wheels = tmp_path / "cache" / "edge_rt" / "wheels"
    assert [path.suffix for path in wheels.iterdir() if path.is_dir()] == []
    assert ensure_wheel(pip(tmp_path, MAKES_A_WHEEL), environ).exists()


def test_a_machine_without_a_compiler_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="apt install build-essential"):
        find_compiler({"PATH": str(tmp_path)})


def test_a_named_compiler_must_exist_and_work(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="CXX=no-such-c"):
        find_compiler({"PATH": str(tmp_path), "CXX": "no-such-c++"})
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho licence expired >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match="licence expired"):
        find_compiler({"PATH": str(tmp_path), "CXX": str(broken)})
