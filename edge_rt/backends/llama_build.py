"""Which instruction sets the installed llama.cpp was compiled for, asked in a child process.

A build for another CPU dies of an illegal instruction as soon as it is used; in a child that is an answer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from edge_rt.same_package import command

# Our feature name -> llama.cpp's, for those its kernels are compiled differently for.
_LLAMA_NAMES = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_vbmi": "AVX512_VBMI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "neon": "NEON",
    "dotprod": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
}
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An installed llama.cpp. compiled holds our feature names."""

    version: str
    compiled: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """llama.cpp cannot be used; crashed tells a build for another CPU from one that is not installed."""

    reason: str
    crashed: bool


def parse(system_info: str) -> frozenset[str]:
    """Read llama_print_system_info: "CPU : SSE3 = 1 | AVX2 = 1 | …"."""
    names = {
        name.rpartition(":")[2].strip()
        for name, _, value in (part.partition("=") for part in system_info.split("|"))
        if value.strip() == "1"
    }
    return frozenset(ours for ours, theirs in _LLAMA_NAMES.items() if theirs in names)


def missing(build: Build, features: frozenset[str]) -> tuple[str, ...]:
    """List what the CPU has and the build does not use."""
    return tuple(sorted((features & frozenset(_LLAMA_NAMES)) - build.compiled))


def inspect(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Build | Broken:
    """Load llama.cpp in a child and ask it."""
    try:
        done = run(
            command("edge_rt.backends.llama_build"),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Broken(reason=f"did not load within {_TIMEOUT_S:g} s", crashed=True)
    if done.returncode < 0:
        return Broken(reason=f"loading it ended with {signal.Signals(-done.returncode).name}", crashed=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Broken(reason=last, crashed=False)
    answer = json.loads(done.stdout)
    return Build(version=answer["version"], compiled=parse(answer["system_info"]))


def _main() -> None:
    from edge_rt.backends.llama_library import system_info, version

    sys.stdout.write(json.dumps({"version": version(), "system_info": system_info()}))


if __name__ == "__main__":
    _main()
