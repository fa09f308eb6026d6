"""The JSON Schema Test Suite, as the source distribution of the package jsonschema has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

_PACKAGE: Final = "jsonschema==4.26.0"
_DOWNLOAD: Final = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema")
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "json-schema-suite"


class Case(NamedTuple):
    """One schema of the suite with its instances: (description, instance, whether it is valid)."""

    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]


def folder() -> Path:
    """Give the folder of draft 2020-12; fetch it once, or skip the test that asks."""
    found = _CACHE / _PACKAGE.replace("==", "-") / "json" / "tests" / "draft2020-12"
    if not found.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*_DOWNLOAD, _PACKAGE, "-d", str(_CACHE)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        archives = list(_CACHE.glob("jsonschema-*.tar.gz"))
        if done.returncode or not archives:
            pytest.skip(f"{_PACKAGE} cannot be fetched: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(_CACHE, filter="data")
    return found


def cases(*, optional: str = "") -> Iterator[Case]:
    """Give the suite's cases; optional names a folder of those that need not be met."""
    place = folder() / "optional" / optional if optional else folder()
    for file in sorted(place.glob("*.json")):
        for case in json.loads(file.read_text()):
            tests = [(test["description"], test["data"], test["valid"]) for test in case["tests"]]
            yield Case(f"{file.stem}: {case['description']}", case["schema"], tests)
