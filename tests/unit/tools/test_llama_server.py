"""How llama-server is built and found; pip and CMake are stand-ins, the archive is one of our own."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from tools.build_llama import BuildError
from tools.llama_server import FLAGS, ensure, find

_CMAKE = """#!/bin/sh
echo "$@" >> {calls}
case "$1" in
-S) test -e "$2/CMakeLists.txt" || exit 9 ;;
--build) mkdir -p "$2/bin" && echo '#!/bin/sh' > "$2/bin/llama-server" && chmod +x "$2/bin/llama-server" ;;
esac
"""
_PIP = """#!/bin/sh
while [ "$1" != --dest ]; do shift; done
cp {archive} "$2/llama_cpp_python-1.tar.gz"
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a compiler and a CMake that compile nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("c++", '#!/bin/sh\necho "#define __AVX2__ 1"\n'), ("cmake", _CMAKE)):
        (folder / name).write_text(script.format(calls=tmp_path / "calls"))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for the venv's Python, whose pip gives an archive with llama.cpp's and other sources in it."""
    source = tmp_path / "llama_cpp_python-1" / "vendor" / "llama.cpp" / "CMakeLists.txt"
    source.parent.mkdir(parents=True)
    source.write_text("project(x)")
    (tmp_path / "llama_cpp_python-1" / "setup.py").write_text("not needed")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "llama_cpp_python-1", "llama_cpp_python-1")
    script = tmp_path / "python"
    script.write_text(_PIP.format(archive=tmp_path / "archive.tar.gz"))
    script.chmod(0o755)
    return script


def test_it_is_compiled_once_and_found_after_that(tmp_path: Path, environ: dict[str, str], python: Path) -> None:
    assert find(environ) is None
    program = ensure(python, environ)
    assert os.access(program, os.X_OK)
    assert program.is_relative_to(tmp_path / "cache" / "edge_rt")
    assert ensure(python, environ) == find(environ) == program
    configured, built = (tmp_path / "calls").read_text().splitlines()
    assert configured.split()[4:] == list(FLAGS)
    assert "--target llama-server" in built
    assert [path for path in program.parent.parent.iterdir() if path.name.startswith("building-")] == []


def test_one_on_path_needs_no_build(tmp_path: Path, environ: dict[str, str]) -> None:
    own = tmp_path / "bin" / "llama-server"
    shutil.copy(tmp_path / "bin" / "cmake", own)
    assert ensure(tmp_path / "no-python", environ) == find(environ) == own


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path, environ: dict[str, str], python: Path) -> None:
    (tmp_path / "bin" / "cmake").write_text('#!/bin/sh\necho "No space left on device"\nexit 1\n')
    with pytest.raises(BuildError, match="XDG_CACHE_HOME chooses where"):
        ensure(python, environ)
    assert find(environ) is None


def test_an_archive_without_the_sources_is_told(tmp_path: Path, environ: dict[str, str], python: Path) -> None:
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "llama_cpp_python-1" / "setup.py", "llama_cpp_python-1/setup.py")
    with pytest.raises(BuildError, match="is not as it was"):
        ensure(python, environ)


def test_without_a_compiler_there_is_none(tmp_path: Path) -> None:
    assert find({"PATH": str(tmp_path), "HOME": str(tmp_path)}) is None
