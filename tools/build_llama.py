"""Compile llama-cpp-python for this machine, once, and keep the wheel.

The registry has no wheel with this CPU's instructions in it (AVX-512 VNNI, NEON dotprod and i8mm), and they decide the
speed. The wheel is kept under a key of everything that goes into it: version, platform, the compiler and what it
takes for this CPU, and the flags. So it is compiled once, and never used on another CPU.

Standard library only. `python -m tools.build_llama` prints the wheel's path; that Python needs pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.progress import CommandError, compile_stage, run

ROOT = Path(__file__).parents[1]

# LLAVA_BUILD=OFF leaves out the image tower, which edge_rt does not use. GGML_NATIVE is on by default, but an exported
# SOURCE_DATE_EPOCH turns it off.
CMAKE_FLAGS = ("-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF")
BYTES_PER_JOB = 1 << 30  # the largest source files take about this much to compile

NO_COMPILER = """no C++ compiler was found; llama.cpp is compiled for this machine.
Install one (Debian, Ubuntu: apt install build-essential · Fedora: dnf install gcc-c++ · Alpine: apk add build-base),
or name it in CC and CXX."""


class BuildError(Exception):
    """The wheel cannot be built; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler, and how it sees this machine: its version and the macros that native code has."""

    command: str
    macros: str


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """Find the compiler CMake will take. Raises BuildError."""
    named = environ.get("CXX")
    commands = [named] if named else ["c++", "g++", "clang++"]
    path = environ.get("PATH", os.defpath)
    command = next((c for c in commands if shutil.which(shlex.split(c)[0], path=path)), None)
    if command is None:
        raise BuildError(f"CXX={named} was not found." if named else NO_COMPILER)
    for native in ("-march=native", "-mcpu=native", ""):
        asked = [*shlex.split(command), *shlex.split(native), "-dM", "-E", "-x", "c++", os.devnull]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, env=environ)
        if answer.returncode == 0:
            return Compiler(command, "\n".join(sorted(answer.stdout.splitlines())))
    raise BuildError(f"{command} does not work:\n{answer.stderr.strip()}")


def cpu_features(cpuinfo: str) -> str:
    """Give what /proc/cpuinfo says the first core can do and, on Arm, which cores there are."""
    kept = re.findall(r"^(?:flags|Features|isa)\s*:.*$", cpuinfo, re.MULTILINE)[:1]
    kept += sorted(set(re.findall(r"^(?:CPU (?:implementer|part|variant)|uarch)\s*:.*$", cpuinfo, re.MULTILINE)))
    return "\n".join(kept)


def wheel_key(version: str, compiler: Compiler, flags: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Name the folder of one build, readable first: version, machine, hash.

    The Python version is not part of it: the package calls its library through ctypes, its wheel is tagged py3-none.
    On x86 the compiler's macros are the CPU's features; a kernel update changes cpuinfo's list. On Arm, ggml also
    tries instructions by itself, so what the kernel lists counts too.
    """
    features = "" if platform.machine() in ("x86_64", "AMD64", "i686") else cpu_features(_cpuinfo())
    parts = (
        version,
        sysconfig.get_platform(),
        str(struct.calcsize("P")),
        " ".join(platform.libc_ver()),
        compiler.command,
        compiler.macros,
        features,
        *flags,
        *(f"{name}={environ.get(name, '')}" for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")),
    )
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
    return f"{version}-{sysconfig.get_platform()}-{digest}"


def ensure_wheel(python: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Give the wheel for this machine, compiling it with python's pip if there is none yet. Raises BuildError."""
    version = wanted_version()
    flags = (*CMAKE_FLAGS, *shlex.split(environ.get("CMAKE_ARGS", "")))
    folder = cache_dir("wheels", environ) / wheel_key(version, find_compiler(environ), flags, environ)
    with one_at_a_time(folder.with_name(folder.name + ".lock")):
        if wheel := next(folder.glob("llama_cpp_python-*.whl"), None):
            return wheel
        return _build(python, version, flags, folder, environ)


def cache_dir(name: str, environ: Mapping[str, str]) -> Path:
    """Say where builds of one kind are kept, outside the tree."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / name


def wanted_version() -> str:
    """Read the pinned version from pyproject.toml's extra llama."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["llama"]
    return str(requirement.removeprefix("llama-cpp-python=="))


def _build(python: Path, version: str, flags: tuple[str, ...], folder: Path, environ: Mapping[str, str]) -> Path:
    env = {**environ, "CMAKE_ARGS": shlex.join(flags), "PYTHONUNBUFFERED": "1"}
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(n_jobs()))
    log = folder.with_name(folder.name + ".log")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
        env["TMPDIR"] = scratch  # /tmp is often a small part of memory on a board
        # Without its cache: pip would keep the wheel under a key that knows nothing of the CPU.
        command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-cache-dir", "--no-deps"]
        command += [
            "--no-binary",
            "llama-cpp-python",
            "--wheel-dir",
            f"{scratch}/wheel",
            f"llama-cpp-python=={version}",
        ]
        try:
            run(f"compiling llama.cpp {version}", command, stage=compile_stage, log=log, env=env)
        except CommandError as exc:
            raise failed(exc) from exc
        Path(scratch, "wheel").rename(folder)
    log.unlink()
    return next(folder.glob("*.whl"))


def failed(error: CommandError) -> BuildError:
    """Say how a command of a build ended, and what to do about it."""
    return BuildError(f"{error.tail}\n{_explain(error.tail)}The whole output is in {error.log}")


def _explain(tail: str) -> str:
    if re.search(r"Killed|fatal error: .*terminated|cc1plus.*signal", tail):
        return "The machine ran out of memory; try again with CMAKE_BUILD_PARALLEL_LEVEL=1.\n"
    if "No space left" in tail:
        return "The disk is full; the build takes about 1 GB, XDG_CACHE_HOME chooses where.\n"
    if "_COMPILER could be found" in tail:
        return f"edge_rt: {NO_COMPILER}\n"
    if re.search(r"No matching distribution|ConnectionError|Temporary failure in name|Network is unreachable", tail):
        return "The package could not be fetched; the first build needs the network.\n"
    return ""


def n_jobs() -> int:
    """Use every core, but no more than the free memory carries."""
    n_cores = len(os.sched_getaffinity(0))
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return max(1, min(n_cores, int(found[1]) * 1024 // BYTES_PER_JOB)) if found else n_cores


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other build holds this lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(ensure_wheel(Path(sys.executable)))
    except BuildError as exc:
        sys.exit(f"edge_rt: {exc}")
