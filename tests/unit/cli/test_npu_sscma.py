"""`edge_rt npu sscma` against a stub of a board."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import main
from tests.sscma_board import JPEG, Board, Firmware

pytestmark = pytest.mark.stub


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(Firmware())
    yield made
    made.unplug()


def run(board: Board, *args: str) -> Result:
    return CliRunner().invoke(main, ["npu", "sscma", "--port", board.path, *args])


def test_info_shows_the_board_and_its_models(board: Board) -> None:
    shown = run(board, "info").stdout
    assert "Grove Vision AI (WE2) 7e2d02cf, firmware 2023.10.10" in shown
    assert "YOLO" in shown
    assert "classes: person, forklift" in shown
    said = json.loads(run(board, "info", "--json").stdout)
    assert said["running"] == 2
    assert [model["id"] for model in said["models"]] == [2, 5]


def test_use_changes_the_model(board: Board) -> None:
    assert run(board, "use", "5").stdout == "model 5 runs\n"
    assert run(board, "use", "7").exit_code == 1


def test_invoke_prints_what_it_sees(board: Board, tmp_path: Path) -> None:
    done = run(board, "invoke", "-n", "2")
    assert done.stdout.splitlines() == ["person  0.70  48,50 77×65"] * 2
    assert "365 ms in the board's model" in done.stderr
    (line,) = run(board, "invoke", "--json", "--picture", str(tmp_path / "seen.jpg")).stdout.splitlines()
    assert json.loads(line)["boxes"][0]["label"] == "person"
    assert (tmp_path / "seen.jpg").read_bytes() == JPEG


def test_an_empty_picture_is_nothing(board: Board) -> None:
    board.firmware.result = {"boxes": []}
    assert run(board, "invoke").stdout == "nothing\n"


def test_a_port_without_a_board_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["npu", "sscma", "--port", str(tmp_path / "ttyNONE0"), "info"])
    assert done.exit_code == 1
    assert "is not plugged in" in done.stderr
