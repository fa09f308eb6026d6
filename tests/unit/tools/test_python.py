"""tools/python.sh finds a Python that is new enough."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "python.sh"


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    path = tmp_path / "bin"
    path.mkdir()
    return path


def interpreter(path: Path, *, new_enough: bool) -> Path:
    """A stand-in that answers the version check and says its name."""
    check = 0 if new_enough else 1
    path.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exit {check};; --version) echo Python 3.9.2;; *) echo {path.name} "$@";; esac\n'
    )
    path.chmod(0o755)
    return path


def run(bin_dir: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(SCRIPT), "-m", "x"]
    return subprocess.run(command, env={"PATH": str(bin_dir), **environ}, capture_output=True, text=True, check=False)


def test_python3_is_taken_where_it_is_new_enough(bin_dir: Path) -> None:
    interpreter(bin_dir / "python3", new_enough=True)
    interpreter(bin_dir / "python3.12", new_enough=True)
    assert run(bin_dir).stdout == "python3 -m x\n"


def test_a_newer_one_is_taken_where_python3_is_old(bin_dir: Path) -> None:
    interpreter(bin_dir / "python3", new_enough=False)
    interpreter(bin_dir / "python3.12", new_enough=True)
    assert run(bin_dir).stdout == "python3.12 -m x\n"


def test_an_old_machine_is_told_what_it_has_and_needs(bin_dir: Path) -> None:
    interpreter(bin_dir / "python3", new_enough=False)
    done = run(bin_dir)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, this machine's PATH has: Python 3.9.2" in done.stderr


def test_a_machine_without_python_is_told(bin_dir: Path) -> None:
    done = run(bin_dir)
    assert done.returncode == 1
    assert "PATH has: no python3" in done.stderr


def test_the_named_one_is_taken_or_refused(bin_dir: Path) -> None:
    interpreter(bin_dir / "python3", new_enough=True)
    mine = interpreter(bin_dir / "mine", new_enough=True)
    assert run(bin_dir, PYTHON=str(mine)).stdout == "mine -m x\n"
    old = interpreter(bin_dir / "old", new_enough=False)
    assert f"PYTHON={old} is not a Python 3.11" in run(bin_dir, PYTHON=str(old)).stderr
