from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.errors import ConfigError
from edge_rt.power.calibration import CalibratedDomain, Calibration, Point, ThreadPoint, encode, parse, read, write

POINTS = tuple(
    Point(max_hz=hz, prefill_s_per_token=1e6 / hz, decode_s_per_token=3e7 / hz, prefill_w=3 + hz / 1e9, decode_w=4.0)
    for hz in (6e8, 1.5e9, 2.4e9)
)
FOUND = Calibration(
    board="Board 5",
    made_at="2026-11-30T08:00:00Z",
    boundary="board",
    quality="measured",
    idle_w=2.7,
    domains=(CalibratedDomain(name="policy0", points=POINTS),),
    model="tiny",
    meter="tc66 /dev/ttyACM0",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "state" / "power.json"
    write(file, FOUND)
    assert read(file) == FOUND
    assert [path.name for path in file.parent.iterdir()] == ["power.json"]


THREADS = tuple(
    ThreadPoint(phase=phase, max_hz=2.4e9, n_threads=n, n_streams=1, s_per_token=0.05 / n, power_w=watts)
    for phase in ("prefill", "decode")
    for n, watts in ((1, 3.1), (4, None))
)


def test_threads_are_written_and_read_as_version_2() -> None:
    found = replace(FOUND, threads=THREADS)
    assert json.loads(encode(found))["version"] == 2
    assert parse(encode(found), origin="here") == found


def test_without_threads_an_older_edge_rt_can_read_what_is_written() -> None:
    table = json.loads(encode(FOUND))
    assert table["version"] == 1
    assert "threads" not in table


@pytest.mark.parametrize(
    ("place", "value", "names"),
    [
        ("phase", "idle", "phase"),
        ("n_threads", 0, "n_threads"),
        ("n_threads", 2.0, "n_threads"),
        ("n_threads", True, "n_threads"),
        ("n_streams", 10**9, "n_streams"),
        ("s_per_token", 0, "s_per_token"),
        ("power_w", 2.6, "idle"),
        ("power_w", "3", "power_w"),
        ("max_hz", 2400, "max_hz"),
        ("n_cores", 4, "n_cores"),
    ],
)
def test_a_bad_thread_point_is_refused_by_its_place(place: str, value: Any, names: str) -> None:
    table = json.loads(encode(replace(FOUND, threads=THREADS)))
    table["threads"][1][place] = value
    with pytest.raises(ConfigError, match=names) as caught:
        parse(json.dumps(table).encode(), origin="here")
    assert "threads[1]" in str(caught.value)


def test_no_file_is_no_calibration(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") is None


def test_a_point_is_the_highest_not_above_a_clock() -> None:
    domain = FOUND.domains[0]
    assert domain.at(None).max_hz == 2.4e9
    assert domain.at(1.6e9).max_hz == 1.5e9
    assert domain.at(1.4999e9).max_hz == 1.5e9  # the kernel rounds to kHz
    assert domain.at(1e8).max_hz == 6e8
    assert FOUND.domain("policy0") == domain
    assert FOUND.domain("policy4") is None


def _changed(place: list[str | int], value: Any) -> bytes:
    table = json.loads(encode(FOUND))
    at: Any = table
    for key in place[:-1]:
        at = at[key]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return json.dumps(table).encode()


@pytest.mark.parametrize(
    ("place", "value", "key"),
    [
        (["version"], 3, "version"),
        (["version"], ..., "version"),
        (["board"], 5, "board"),
        (["board"], "\x1b[2J", "board"),
        (["board"], "x" * 201, "board"),
        (["boundary"], "socket", "boundary"),
        (["boundary"], ["soc"], "boundary"),
        (["quality"], "good", "quality"),
        (["idle_w"], -1, "idle_w"),
        (["idle_w"], True, "idle_w"),
        (["idle_w"], "2.7", "idle_w"),
        (["idle_w"], float("nan"), "idle_w"),
        (["idle_w"], 10**400, "idle_w"),
        (["version"], 10**400, "version"),
        (["idle_w"], 5.0, "domains[0].points[0]"),
        (["utilisation"], 0, "utilisation"),
        (["domains"], [], "domains"),
        (["domains"], {}, "domains"),
        (["domains", 0, "name"], ..., "domains[0].name"),
        (["domains", 0, "points"], [], "domains[0].points"),
        (["domains", 0, "points", 1, "max_hz"], 1_500_000, "domains[0].points"),
        (["domains", 0, "points", 1, "max_hz"], 1500, "domains[0].points[1].max_hz"),
        (["domains", 0, "points", 2, "decode_w"], 1e9, "domains[0].points[2].decode_w"),
        (["domains", 0, "points", 2, "decode_w"], 0.0, "domains[0].points[2].decode_w"),
        (["domains", 0, "points", 2, "decode_w"], ..., "domains[0].points[2].decode_w"),
        (["domains", 0, "points", 2, "volts"], 1.0, "domains[0].points[2].volts"),
        (["speed"], 1, "speed"),
    ],
)
def test_what_is_wrong_is_named(place: list[str | int], value: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(_changed(place, value), origin="file")
    assert (caught.value.key, caught.value.origin) == (key, "file")


def test_a_name_may_not_come_twice() -> None:
    table = json.loads(encode(FOUND))
    table["domains"] *= 2
    with pytest.raises(ConfigError, match="twice"):
        parse(json.dumps(table).encode(), origin="file")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_table_is_refused(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        parse(raw, origin="file")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "power.json"
    file.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read(file)


def test_what_cannot_be_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write(tmp_path / "power.json", replace(FOUND, idle_w=9.0))
    assert not (tmp_path / "power.json").exists()


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda kids: st.lists(kids) | st.dictionaries(st.text(), kids),
    )
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        parse(json.dumps(value).encode(), origin="file")
