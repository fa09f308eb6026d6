"""How pynq's environments are made and found; Python and pip are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build_llama import BuildError
from tools.pynq_venv import REQUIREMENTS, ensure, find

_PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*" install "*) {install} ;;
esac
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "BOARD": "Pynq-Z2"}


def stand_in(tmp_path: Path, install: str = "true") -> Path:
    python = tmp_path / "python"
    python.write_text(_PYTHON.format(calls=tmp_path / "calls", install=install))
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version", list(REQUIREMENTS))
def test_one_is_made_once_and_found_after_that(tmp_path: Path, environ: dict[str, str], version: str) -> None:
    python = stand_in(tmp_path, 'test -z "$BOARD"')  # pynq's installation would take it for that board
    assert find(version, environ) is None
    made = ensure(version, python, environ)
    assert made.is_relative_to(tmp_path / "cache" / "edge_rt" / "pynq")
    assert ensure(version, python, environ) == find(version, environ) == made
    venv, install = (tmp_path / "calls").read_text().splitlines()
    assert venv.startswith("-m venv ")
    assert install.endswith(" ".join(REQUIREMENTS[version]))
    assert [path for path in made.parents[2].iterdir() if path.name.startswith("building-")] == []


def test_one_that_could_not_be_made_is_not_found(tmp_path: Path, environ: dict[str, str]) -> None:
    python = stand_in(tmp_path, 'echo "No matching distribution found for pynq"; exit 1')
    with pytest.raises(BuildError, match="needs the network"):
        ensure("4.0.0", python, environ)
    assert find("4.0.0", environ) is None
    stand_in(tmp_path)
    assert ensure("4.0.0", python, environ) == find("4.0.0", environ)


def test_what_an_interrupted_run_left_is_made_again(tmp_path: Path, environ: dict[str, str]) -> None:
    made = ensure("4.0.0", stand_in(tmp_path), environ)
    (made.parent.parent / "made").unlink()
    assert find("4.0.0", environ) is None
    assert ensure("4.0.0", stand_in(tmp_path), environ) == made
