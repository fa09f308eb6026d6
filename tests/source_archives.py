"""Files out of packages' source distributions, which no wheel has; fetched by pip once and kept beside the wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tools.build_llama import cache_dir


def folder_of(package: str, part: str, kind: str) -> Path:
    """Give a folder of what stands below /part/ in a package's sources, or skip the test where they cannot be had.

    package  with its version, as pip takes it; kind: what the folder below the cache is called
    """
    cache = cache_dir(kind, os.environ)
    kept = cache / package.replace("==", "-")
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # whole or not at all
            found = _unpacked(package, part, Path(scratch))
            found.rename(kept)
    return kept


def _unpacked(package: str, part: str, scratch: Path) -> Path:
    name = package.partition("==")[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        name,
        package,
        "-d",
        str(scratch),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    archives = list(scratch.glob("*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"{package} cannot be fetched: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(scratch, [m for m in archive if f"/{part}/" in m.name], filter="data")
    (root,) = scratch.glob(f"*/{part}")
    return root
