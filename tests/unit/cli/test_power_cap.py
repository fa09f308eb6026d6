from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt.cli import main
from tests.unit.power.process import started
from tests.unit.power.tree import machine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets a cap")
def test_a_cap_is_set_and_taken_away(socket_dir: Path) -> None:
    machine(socket_dir)
    said = []
    with started(socket_dir, enabled=False, max_w=20.0) as powerd:
        powerd.heard("READY=1")
        for words in ("12.5", "30", "off"):
            done = CliRunner().invoke(main, ["power", "cap", words, "--socket", powerd.socket])
            assert done.exit_code == 0, done.output
            said.append(done.stdout)
    assert said == [
        f"capped at {max_w} W; powerd sets nothing before power.enabled is true\n" for max_w in ("12.5", "20", "20")
    ]


@pytest.mark.parametrize("words", ["0", "-1", "nan", "inf", "12 W", "10001", ""])
def test_what_is_no_cap_is_refused(words: str) -> None:
    done = CliRunner().invoke(main, ["power", "cap", "--socket", "/nonexistent", "--", words])
    assert done.exit_code == 2
    assert "neither a number of watts" in done.output


def test_without_powerd_it_fails_and_says_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["power", "cap", "5", "--socket", str(tmp_path / "p")])
    assert done.exit_code == 1
    assert "start edge_rt-powerd.service" in done.stderr
    (tmp_path / "c.toml").write_text('[power]\nsocket_path = ""\n')
    done = CliRunner().invoke(main, ["--config", str(tmp_path / "c.toml"), "power", "cap", "5"])
    assert done.exit_code == 78
