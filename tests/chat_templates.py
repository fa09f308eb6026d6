"""Public models' chat templates, as llama.cpp's sources have them inside llama-cpp-python's source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_PACKAGE: Final = "llama-cpp-python==0.3.36"
_PART: Final = "/vendor/llama.cpp/models/templates/"
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "chat-templates"
_DOWNLOAD: Final = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python")


def all_templates() -> Iterator[tuple[str, str]]:
    """Give each template's name and source; fetch them once (77 MB, of which 0.4 are kept), or skip the test."""
    folder = _CACHE / _PACKAGE.replace("==", "-")
    if not folder.is_dir():
        _fetch(folder)
    for file in sorted(folder.glob("*.jinja")):
        yield file.stem, file.read_text(encoding="utf-8")


def _fetch(folder: Path) -> None:
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
        command = [*_DOWNLOAD, _PACKAGE, "-d", scratch]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            pytest.skip(f"{_PACKAGE} cannot be fetched: {done.stderr.strip()[-200:]}")
        found = Path(scratch) / "templates"
        found.mkdir()
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                if _PART in member.name and member.name.endswith(".jinja") and (file := archive.extractfile(member)):
                    (found / Path(member.name).name).write_bytes(file.read())
        found.rename(folder)
