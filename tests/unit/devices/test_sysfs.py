from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.sysfs import SysfsRoot, parse_cpu_list


def test_a_missing_file_is_a_reason(tmp_path: Path) -> None:
    reading = SysfsRoot(tmp_path).integer("sys/nothing")
    assert reading.value is None
    assert reading.source == "/sys/nothing"
    assert "no such file" in reading.reason


def test_text_that_is_no_number_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("max\n")
    reading = SysfsRoot(tmp_path).integer("state")
    assert reading.value is None
    assert "'max'" in reading.reason


def test_a_directory_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    assert SysfsRoot(tmp_path).text("d").reason == "Is a directory"


def test_scaled_converts_the_kernels_unit(tmp_path: Path) -> None:
    (tmp_path / "temp").write_text("48312\n")
    assert SysfsRoot(tmp_path).scaled("temp", 1e-3).value == pytest.approx(48.312)


def test_paths_come_in_natural_order(tmp_path: Path) -> None:
    for i in (10, 2, 1):
        (tmp_path / f"cpu{i}").mkdir()
    assert SysfsRoot(tmp_path).paths("cpu*") == ("cpu1", "cpu2", "cpu10")


@pytest.mark.parametrize(("text", "ids"), [("0-3,8", (0, 1, 2, 3, 8)), ("", ()), ("5\n", (5,)), ("0,2-3", (0, 2, 3))])
def test_cpu_lists(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == ids


@given(st.sets(st.integers(0, 300)))
def test_a_cpu_list_written_out_parses_back(ids: set[int]) -> None:
    assert set(parse_cpu_list(",".join(map(str, sorted(ids))))) == ids
