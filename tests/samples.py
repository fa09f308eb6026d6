"""Recordings and pictures that packages ship, as tools/samples.py fetches them; tests skip where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import samples as fetched

SPEECH = ("useful-moonshine-onnx", "20251121", "moonshine_onnx/assets/beckett.wav")  # MIT
IMAGENET = fetched.IMAGENET


def wheel(name: str, version: str) -> Path:
    """Give a package's wheel; skips the test that asks where it is not cached and pip cannot bring it."""
    try:
        return fetched.wheel(name, version)
    except fetched.SamplesAbsentError as exc:
        pytest.skip(str(exc))


def sample(name: str, version: str, member: str) -> bytes:
    wheel(name, version)
    return fetched.sample(name, version, member)


def samples(name: str, version: str, prefix: str) -> dict[str, bytes]:
    """Give all files whose names begin so."""
    wheel(name, version)
    return fetched.samples(name, version, prefix)
