"""Pictures and recordings inside packages, fetched once by pip or apt-get into a cache. None of them is given away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt-test-samples"
# Twenty pictures of ImageNet's validation set, each with its class at the end of its name; used for measuring only.
IMAGENET = ("foolbox", "3.3.4", "foolbox/data/imagenet_")
_TIMEOUT_S = 300


class SamplesAbsentError(Exception):
    """A package that is not in the cache and cannot be fetched."""


@cache
def wheel(name: str, version: str) -> Path:
    """Give a package's wheel. Raises SamplesAbsentError where it is not cached and pip cannot bring it."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (found := list(FOLDER.glob(pattern))):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=10", f"{name}=={version}"]
        _fetch([*command, "--dest", "."], f"{name} {version}")
        found = list(FOLDER.glob(pattern))
    if not found:
        raise SamplesAbsentError(f"pip brought no wheel of {name} {version}")
    return found[0]


@cache
def debian_package(name: str) -> Path:
    """Give a folder with what a Debian package holds; nothing is installed. Raises SamplesAbsentError."""
    folder = FOLDER / name
    if folder.is_dir():
        return folder
    if not list(FOLDER.glob(f"{name}_*.deb")):
        # No user of its own may write here; apt-get says so as a warning, and downloads all the same.
        _fetch(["apt-get", "download", "-q", name], name)
    if not (found := sorted(FOLDER.glob(f"{name}_*.deb"))):
        raise SamplesAbsentError(f"apt-get brought no {name}")
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        unpacked = Path(scratch) / "unpacked"
        _run(["dpkg-deb", "-x", str(found[-1]), str(unpacked)], name, Path(scratch))
        unpacked.rename(folder)
    return folder


def _fetch(command: Sequence[str], what: str) -> None:
    """Download into a folder beside the cache, so that a broken download leaves nothing in it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        _run(command, what, Path(scratch))
        for path in Path(scratch).iterdir():
            shutil.move(path, FOLDER / path.name)


def _run(command: Sequence[str], what: str, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SamplesAbsentError(f"{what}: {command[0]} cannot fetch or unpack it: {exc}") from exc
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise SamplesAbsentError(f"{what}: {command[0]} cannot fetch or unpack it: {' '.join(last)}")


def sample(name: str, version: str, member: str) -> bytes:
    """Give one file of a wheel."""
    with zipfile.ZipFile(wheel(name, version)) as archive:
        return archive.read(member)


def samples(name: str, version: str, prefix: str) -> dict[str, bytes]:
    """Give all files of a wheel whose names begin so, by their names."""
    with zipfile.ZipFile(wheel(name, version)) as archive:
        return {member: archive.read(member) for member in sorted(archive.namelist()) if member.startswith(prefix)}
