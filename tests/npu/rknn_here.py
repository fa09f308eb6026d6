"""Where tests find Rockchip's environments, and 64-bit ARM's Python under an emulator. Both skip with a reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from edge_rt.backends.npu import environments
from edge_rt.backends.npu.stacks import stack

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt"
_DEBS: Final = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
_TIMEOUT_S: Final = 300


@contextmanager
def environment(name: str) -> Iterator[environments.Environment]:
    """Let back ends find a vendor's environment: the usual one, or the one that `make test-rknn` has made."""
    wanted = stack(name)
    before = os.environ.get("EDGE_RT_NPU_DIR")
    if environments.missing(wanted) is not None:
        os.environ["EDGE_RT_NPU_DIR"] = str(CACHE / "npu")
    try:
        if (reason := environments.missing(wanted)) is not None:
            pytest.skip(f"{name}: {reason}; `make test-rknn` makes one for tests")
        found = environments.find(wanted)
        assert found is not None
        yield found
    finally:
        os.environ.pop("EDGE_RT_NPU_DIR", None)
        if before is not None:
            os.environ["EDGE_RT_NPU_DIR"] = before


def aarch64_python(packages: Sequence[str]) -> tuple[list[str], Path]:
    """Give the command of Debian's arm64 CPython 3.11 under qemu, and the folder that packages were unpacked into.

    Nothing is installed and no root directory is changed to: apt-get resolves for arm64 with lists of its own, packages
    and wheels are unpacked into a cache.
    """
    if (qemu := shutil.which("qemu-aarch64-static")) is None:
        pytest.skip("needs qemu-aarch64-static (package qemu-user-static)")
    root, site = CACHE / "aarch64-python", CACHE / "aarch64-site" / "-".join(sorted(packages)).replace("==", "-")
    if not (root / "usr/bin/python3.11").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            pytest.skip("needs apt-get and dpkg-deb, which fetch and unpack arm64's Python")
        _unpack_python(root)
    if not site.is_dir():
        _unpack_wheels(packages, site)
    command = [qemu, "-cpu", "max", "-E", f"PYTHONPATH={site}", "-L", str(root), str(root / "usr/bin/python3.11")]
    return command, site


def _unpack_python(root: Path) -> None:
    scratch = root.with_name(f"{root.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in ("state/lists/partial", "cache/archives/partial", "root"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "state/status").touch()
    apt = ["apt-get", "-q", "-y", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"]
    apt += ["-o", f"Dir::State={scratch}/state", "-o", f"Dir::State::status={scratch}/state/status"]
    apt += ["-o", f"Dir::Cache={scratch}/cache", "-o", "Debug::NoLocking=1"]
    _fetch([*apt, "update"])
    _fetch([*apt, "install", "--no-install-recommends", "--download-only", *_DEBS])
    for deb in sorted((scratch / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(scratch / "root")], check=True, timeout=_TIMEOUT_S)
    (scratch / "root").replace(root)
    shutil.rmtree(scratch)


def _unpack_wheels(packages: Sequence[str], site: Path) -> None:
    scratch = site.with_name(f"{site.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    pip = ["python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_28")]
    kind = ["--python-version=3.11", "--implementation=cp", "--only-binary=:all:", "--target", str(scratch)]
    _fetch([*pip, *platforms, *kind, *packages])
    scratch.replace(site)


def _fetch(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"{command[0]} cannot fetch arm64's packages: {done.stderr.strip()[-200:]}")
