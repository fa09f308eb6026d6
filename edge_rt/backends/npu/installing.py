"""Make the environment of a vendor's packages: whole or not at all, and tried before it is used.

pip or uv installs what stacks.py names and nothing else. Interrupted or failed, nothing is left; an older environment
serves until the new one has imported its packages in a process of its own.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from edge_rt.backends.npu.environments import RECORD, Environment, Record, find, locked, usual_dir
from edge_rt.backends.npu.stacks import Stack
from edge_rt.catalog.store import SYSTEM_DIR
from edge_rt.errors import VendorSetupError

_INSTALL_S: Final = 3600.0
_TRY_S: Final = 300.0  # a first import compiles every module of it
_N_WORDS: Final = 3  # last lines of a command that failed
_SPARE_BYTES: Final = 100 * 10**6

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tools:
    """What an environment is made with: a Python for it, and uv or, "", this Python's pip."""

    python: str
    uv: str = ""

    def make(self, folder: Path) -> list[str]:
        if self.uv:
            return [self.uv, "venv", "--python", self.python, "--no-project", str(folder)]
        return [self.python, "-m", "venv", "--without-pip", str(folder)]

    def install(self, folder: Path, packages: Sequence[str]) -> list[str]:
        python = str(folder / "bin" / "python")
        same = ["--no-deps", "--only-binary", ":all:", *packages]
        if self.uv:
            return [self.uv, "pip", "install", "--python", python, *same]
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
        return [*pip, "install", "--no-compile", "--progress-bar", "off", *same]


def set_up(
    stack: Stack,
    report: Report,
    *,
    where: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    tools: Tools | None = None,
    machine: str = platform.machine(),
    system_dir: Path = SYSTEM_DIR,
    is_anew: bool = False,
) -> Environment:
    """Make a vendor's environment, or give the one that is there.

    report  is told in a few words what happens
    where   the folder it is made in; the usual place links to it
    is_anew  make it again where there is a current one
    Raises VendorSetupError.
    """
    found = find(stack, environ, system_dir)
    if found is not None and found.is_current and not is_anew:
        return found
    if machine not in stack.machines:
        raise VendorSetupError(
            vendor=stack.name,
            problem=f"the vendor has none for {machine}",
            remedy=f"there are for {' and '.join(stack.machines)}: compile models on such a machine",
        )
    tools = tools or choose_tools(stack, environ)
    root = usual_dir(environ)
    with locked(stack, root):
        link = root / stack.name
        old = link.resolve() if link.is_symlink() else None
        name = f"{stack.name}-{stack.digest}"
        parent = (where or root).resolve()
        folder = parent / name if parent / name != old else parent / f"{name}-again"
        _check_space(stack, folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
            folder.parent.mkdir(parents=True, exist_ok=True)
            _make(stack, folder, tools, environ, report)
        except OSError as exc:
            shutil.rmtree(folder, ignore_errors=True)
            raise VendorSetupError(
                vendor=stack.name,
                problem=f"{exc.filename or folder} cannot be written: {exc.strerror}",
                remedy="name another place with --dir",
            ) from exc
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        fresh = root / f".{stack.name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder)
        fresh.replace(link)
        if old is not None and old != folder and (old / RECORD).is_file():
            shutil.rmtree(old)
    made = find(stack, environ, system_dir)
    assert made is not None
    return made


def choose_tools(stack: Stack, environ: Mapping[str, str], version: tuple[int, int] = sys.version_info[:2]) -> Tools:
    """Find uv or pip, and a Python that the vendor has packages for. Raises VendorSetupError."""
    path = environ.get("PATH", os.defpath)
    uv = shutil.which("uv", path=path) or ""
    if not uv and find_spec("pip") is None:
        raise VendorSetupError(
            vendor=stack.name, problem="neither uv nor pip is here to install them", remedy="install one of the two"
        )
    if version in stack.pythons:
        return Tools(sys.executable, uv)
    for major, minor in stack.pythons:
        named = shutil.which(f"python{major}.{minor}", path=path)
        # A name on PATH may be a version manager's that leads nowhere.
        if named and subprocess.run([named, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return Tools(named, uv)
    wanted = " or ".join(f"{major}.{minor}" for major, minor in stack.pythons)
    raise VendorSetupError(
        vendor=stack.name,
        problem=f"they are there for Python {wanted}, this is {version[0]}.{version[1]}",
        remedy=f"install Python {wanted} so that it is on PATH",
    )


def _check_space(stack: Stack, folder: Path) -> None:
    there = next(parent for parent in folder.parents if parent.exists())
    free_bytes = shutil.disk_usage(there).free
    need_bytes = stack.installed_bytes + stack.download_bytes + _SPARE_BYTES
    if free_bytes < need_bytes:
        raise VendorSetupError(
            vendor=stack.name,
            problem=f"{there} has {free_bytes / 1e6:.0f} MB free, {need_bytes / 1e6:.0f} MB are needed",
            remedy="free space, or name another place with --dir",
        )


def _make(stack: Stack, folder: Path, tools: Tools, environ: Mapping[str, str], report: Report) -> None:
    env = {name: value for name, value in environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
    report("making the environment")
    _run(stack, "it could not be made", tools.make(folder), env, lambda _: None)
    begun: set[str] = set()

    def follow(line: str) -> None:
        if found := re.match(r"\s*(?:Collecting |Processing \S*/)([A-Za-z0-9_.]+(?:-[a-z]\w*)*)", line):
            begun.add(found[1])
            report(f"fetching {found[1]}, {len(begun)} of {len(stack.packages)}")
        elif line.lstrip().startswith("Installing collected"):
            report("installing")

    _run(stack, "they could not be installed", tools.install(folder, stack.packages), env, follow, _INSTALL_S)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    for name, source in stack.stand_ins.items():
        (site / name).mkdir()
        shutil.copyfile(source, site / name / "__init__.py")
    report("trying to import it")
    python = str(folder / "bin" / "python")
    imports = "".join(f"import {name}; " for name in ("platform", *stack.imports))
    code = f"{imports}print(platform.python_version())"
    version = _run(stack, "they do not import", [python, "-I", "-c", code], env, lambda _: None)
    size_bytes = sum(path.lstat().st_size for path in folder.rglob("*"))
    record = Record(
        vendor=stack.name,
        digest=stack.digest,
        python=version,
        packages=stack.packages,
        size_bytes=size_bytes,
        made_unix_s=time.time(),
    )
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))


def _run(
    stack: Stack,
    failure: str,
    command: Sequence[str],
    env: Mapping[str, str],
    follow: Report,
    timeout_s: float = _TRY_S,
) -> str:
    """Run a command to its end and give its last line; it ends with us, and where it takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    words: deque[str] = deque(maxlen=_N_WORDS)
    assert process.stdout is not None
    end = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        with process.stdout:
            for line in process.stdout:
                if line.strip() and not line.startswith("WARNING"):
                    words.append(line.strip()[:300])
                follow(line)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its id is nobody else's until end is called off
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        end.cancel()
        status = process.wait()
    if status == -signal.SIGKILL:
        words.append(f"it was killed, after {timeout_s:g} s by edge_rt or before by somebody else")
    if status:
        said = " | ".join(words) or f"exit status {status}"
        raise VendorSetupError(
            vendor=stack.name, problem=f"{failure}: {said}", remedy="mend what it names and run it again"
        )
    return words[-1] if words else ""
