"""Damaged ONNX files end in errors of ours, whatever they are damaged by, and never in a crash."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

ROOT = Path(__file__).parents[3]
N_FILES = 250


@pytest.mark.parametrize(("seed", "backend"), [(1, ""), (2, ""), (3, "fpga"), (4, "fpga")])
def test_damaged_files_are_refused_or_run(seed: int, backend: str) -> None:
    command = [sys.executable, "-m", "tests.onnx_fuzz", str(seed), str(N_FILES), *filter(None, [backend])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"ended by {done.returncode} at {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == N_FILES
    ends = Counter(line.split(" ", 2)[2] for line in lines)
    refused = {"ModelFormatError", "BackendLoadError", "BackendStepError", "InvalidRequestError"}
    assert set(ends) <= {*refused, "answered", "too large to run"}
    assert min(ends["ModelFormatError"], ends["BackendLoadError"], ends["answered"]) > 10  # it went through all of it
