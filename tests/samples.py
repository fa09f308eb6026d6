"""Recordings and pictures that packages ship, fetched once by pip into a cache; tests skip where that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt-test-samples"
SPEECH = ("useful-moonshine-onnx", "20251121", "moonshine_onnx/assets/beckett.wav")  # MIT
# Twenty pictures of ImageNet's validation set, each with its class at the end of its name; used for measuring only.
IMAGENET = ("foolbox", "3.3.4", "foolbox/data/imagenet_")


@cache
def wheel(name: str, version: str) -> Path:
    """Give a package's wheel; skips the test that asks where it is not cached and pip cannot bring it."""
    found = list(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=10", "--dest", str(FOLDER)]
        pip = subprocess.run([*command, f"{name}=={version}"], capture_output=True, text=True, check=False)
        found = list(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if not found:
            pytest.skip(f"pip cannot fetch the samples of {name} {version}: {pip.stderr.strip().splitlines()[-1:]}")
    return found[0]


def sample(name: str, version: str, member: str) -> bytes:
    with zipfile.ZipFile(wheel(name, version)) as archive:
        return archive.read(member)


def samples(name: str, version: str, prefix: str) -> dict[str, bytes]:
    """Give all files whose names begin so."""
    with zipfile.ZipFile(wheel(name, version)) as archive:
        return {member: archive.read(member) for member in sorted(archive.namelist()) if member.startswith(prefix)}
