"""Every benchmark must start: nothing else in the tests imports them as they are run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
_SCRIPTS = [path.name for path in sorted(_FOLDER.glob("*.py")) if "harness.parse(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", [name for name in _SCRIPTS if name != "harness.py"])
def test_it_starts(name: str) -> None:
    done = subprocess.run([sys.executable, str(_FOLDER / name), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout


def test_a_claim_against_llama_cpp_is_of_both_sides_settings() -> None:
    """The processes that benchmarks start take the settings that benchmarks give them."""
    program = (
        "import subjects, native_vs_llamacpp as n, inspect\n"
        "known = set(inspect.signature(subjects.Process.__init__).parameters)\n"
        "given = {k for group in (n._RIVALS, n._STREAM_RIVALS, n._BUSY_RIVALS) for s in group.values() for k in s}\n"
        "assert given and given <= known, given - known\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=_FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
