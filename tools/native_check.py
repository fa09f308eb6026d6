"""Compile the C engine's own test program (native/tests/check.c) as a static one, with the flags of the package."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILE_TIMEOUT_S = 600


class CheckBuildError(Exception):
    """The program does not compile; the message is the compiler's."""


def package_flags() -> list[str]:
    """The compiler's flags in setup.py, which must not ask for more than every CPU of the kind has."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "extra_compile_args":
            flags: list[str] = ast.literal_eval(node.value)
            return flags
    raise AssertionError("setup.py has no extra_compile_args")


def build_check(compiler: Sequence[str], out: Path) -> Path:
    """Give out/check, for the machine the compiler compiles for. Raises CheckBuildError."""
    native = ROOT / "native"
    compile_one = [*compiler, *package_flags(), "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-c"]
    compile_one += [f"-I{native / name}" for name in ("include", "kernels", "src")]
    sources = sorted([*native.glob("src/*.c"), *native.glob("kernels/*.c"), native / "tests/check.c"])
    objects = [str(out / f"{source.stem}.o") for source in sources]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    commands = [[*compile_one, str(source), "-o", name] for source, name in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = list(pool.map(run, commands))
    jobs.append(run([*compiler, "-static", "-o", str(out / "check"), *objects, "-lm", "-lpthread"]))
    for job in jobs:
        if job.returncode:
            raise CheckBuildError(job.stderr)
    return out / "check"
