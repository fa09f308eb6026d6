"""Compile llama-server, which tests ask as a cloud, once, and keep it beside the wheel of llama.cpp.

Its sources come with those of llama-cpp-python, in the version that is pinned. It is built without web pages and TLS,
as one file; that takes some minutes on two cores. `make test-peer` builds it and runs the tests.

Standard library only. `python -m tools.llama_server` prints the program's path; that Python needs pip.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.build_llama import (
    BuildError,
    cache_dir,
    failed,
    find_compiler,
    n_jobs,
    one_at_a_time,
    wanted_version,
    wheel_key,
)
from tools.progress import CommandError, compile_stage, pip_stage, run

NAME = "llama-server"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be fetched
    "-DLLAMA_OPENSSL=OFF",
)
_SOURCES = "vendor/llama.cpp/"


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Give the llama-server on PATH, or the one that was compiled for this machine; None where there is neither."""
    if (named := shutil.which(NAME, path=environ.get("PATH", os.defpath))) is not None:
        return Path(named)
    try:
        program = _folder(environ) / NAME
    except BuildError:  # without a compiler nothing was compiled here
        return None
    return program if program.exists() else None


def ensure(python: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Give find's llama-server, compiling it with sources from python's pip if there is none yet. Raises BuildError."""
    if (found := find(environ)) is not None:
        return found
    folder = _folder(environ)
    with one_at_a_time(folder.with_name(folder.name + ".lock")):
        return find(environ) or _build(python, folder, environ)


def _folder(environ: Mapping[str, str]) -> Path:
    return cache_dir(NAME, environ) / wheel_key(wanted_version(), find_compiler(environ), FLAGS, environ)


def _build(python: Path, folder: Path, environ: Mapping[str, str]) -> Path:
    log, version = folder.with_name(folder.name + ".log"), wanted_version()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
        env = {**environ, "TMPDIR": scratch}  # /tmp is often a small part of memory on a board
        env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(n_jobs()))

        def step(title: str, command: list[str], stage: Callable[[str], str | None]) -> None:
            try:
                run(title, command, stage=stage, log=log, env=env)
            except CommandError as exc:
                raise failed(exc) from exc

        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        fetch = [*pip, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", scratch]
        step(f"fetching llama.cpp {version}", [*fetch, f"llama-cpp-python=={version}"], pip_stage)
        sources = _unpacked(Path(scratch))
        cmake = shutil.which("cmake", path=environ.get("PATH", os.defpath))
        if cmake is None:
            step("fetching CMake", [*pip, "install", "--target", f"{scratch}/cmake", "cmake"], pip_stage)
            cmake = f"{scratch}/cmake/bin/cmake"
            env["PYTHONPATH"] = f"{scratch}/cmake"
        build = f"{scratch}/build"
        step("configuring llama-server", [cmake, "-S", str(sources), "-B", build, *FLAGS], compile_stage)
        step(f"compiling llama-server {version}", [cmake, "--build", build, "--target", NAME], compile_stage)
        made = Path(scratch, "made")
        made.mkdir()
        shutil.move(Path(build, "bin", NAME), made / NAME)
        made.rename(folder)
    log.unlink()
    return folder / NAME


def _unpacked(scratch: Path) -> Path:
    """Unpack llama.cpp's own sources from the one archive that is there."""
    try:
        (archive,) = scratch.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            members = [member for member in tar if f"/{_SOURCES}" in member.name]
            tar.extractall(scratch, members, filter="data")
        (root,) = scratch.glob(f"llama_cpp_python-*/{_SOURCES}")
    except (ValueError, tarfile.TarError) as exc:
        raise BuildError(f"the archive of llama-cpp-python is not as it was: {exc}") from exc
    return root


if __name__ == "__main__":
    try:
        print(ensure(Path(sys.executable)))
    except BuildError as exc:
        sys.exit(f"edge_rt: {exc}")
