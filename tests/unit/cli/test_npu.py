from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.backends.npu import environments
from edge_rt.backends.npu.stacks import STACKS
from edge_rt.cli import main


def run(tmp_path: Path, *args: str) -> Result:
    environ = {"STATE_DIRECTORY": str(tmp_path), "HOME": str(tmp_path)}
    return CliRunner(env=environ).invoke(main, ["npu", *args])


def plant(tmp_path: Path, digest: str) -> Path:
    """Put an environment there as `setup` leaves one."""
    folder = tmp_path / "npu" / f"rknn-{digest}"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    (folder / "bin" / "python").chmod(0o755)
    record = {"vendor": "rknn", "digest": digest, "python": "3.11.7", "packages": [], "size_bytes": 5 * 10**8}
    (folder / environments.RECORD).write_text(json.dumps(record | {"made_unix_s": 0.0}))
    (tmp_path / "npu" / "rknn").symlink_to(folder)
    return folder


@pytest.mark.parametrize("state", ["ready", "out of date"])
def test_list_shows_what_is_there(tmp_path: Path, state: str) -> None:
    folder = plant(tmp_path, STACKS["rknn"].digest if state == "ready" else "0")
    (row,) = [r for r in json.loads(run(tmp_path, "list", "--json").stdout)["environments"] if r["vendor"] == "rknn"]
    assert row["state"] == state
    assert row["folder"] == str(folder)
    assert row["size_bytes"] == 5 * 10**8
    assert re.search(rf"^rknn +{state}", run(tmp_path, "list").stdout, re.MULTILINE)


def test_setup_leaves_a_current_one_as_it_is(tmp_path: Path) -> None:
    folder = plant(tmp_path, STACKS["rknn"].digest)
    done = run(tmp_path, "setup", "rknn")
    assert done.exit_code == 0
    assert done.stdout == f"rknn is there: {folder}, 500 MB\n"


def test_remove_says_what_that_freed(tmp_path: Path) -> None:
    folder = plant(tmp_path, STACKS["rknn"].digest)
    assert run(tmp_path, "remove", "rknn").stdout == "removed 500 MB\n"
    assert not folder.exists()
    assert run(tmp_path, "remove", "rknn").stdout == "rknn is not installed for this user\n"


def test_a_vendor_without_one_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "setup", "nobody")
    assert done.exit_code == 1
    assert "there are: " in done.stderr
