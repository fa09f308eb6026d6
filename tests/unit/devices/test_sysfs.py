from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.sysfs import SysfsRoot, parse_cpu_list
from tests.faulty_root import FaultyRoot


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


HOSTILE = [
    b"",
    b"\x00" * 100,
    b"\xff\xfe\x00garbage",
    b"nan",
    b"inf",
    b"-",
    b"1_000",
    "١٢".encode(),
    b"9" * 5_000_000,
    b"0x" + b"f" * 5_000_000,
    b"1 2",
    b"1e3",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: repr(raw[:12]))
def test_hostile_contents_are_no_number(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "value").write_bytes(raw)
    reading = SysfsRoot(tmp_path).scaled("value", 1e-6)
    assert reading.value is None
    assert len(reading.reason) < 200


@pytest.mark.parametrize("raw", [b"", b"a\nb", b"x" * 81, b"\x1b[2J", b"\xff\xff", b"a\x00b"])
def test_hostile_contents_are_no_name(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "name").write_bytes(raw)
    reading = SysfsRoot(tmp_path).name("name")
    # Bytes that are no text become U+FFFD, which a terminal can show.
    assert reading.value is None or reading.value == "\ufffd\ufffd"


def test_five_megabytes_are_read_as_four(tmp_path: Path) -> None:
    (tmp_path / "value").write_bytes(b"7" * 5 * 2**20)
    assert len(SysfsRoot(tmp_path).read_bytes("value")) == 4 * 2**20


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (errno.ENODEV, "No such device"),
        (errno.EAGAIN, "Resource temporarily unavailable"),
        (errno.ENODATA, "No data available"),
        (errno.EIO, "Input/output error"),
        (errno.ENOTCONN, "Transport endpoint is not connected"),
        (errno.EACCES, "only root may read it"),
        (errno.EPERM, "only root may read it"),
        (errno.ENOENT, "no such file"),
    ],
)
def test_an_errno_at_read_is_a_reason(tmp_path: Path, fault: int, words: str) -> None:
    reading = FaultyRoot(tmp_path, {"sys/value": fault}).integer("sys/value")
    assert reading.value is None
    assert words in reading.reason


def test_a_link_is_named_by_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("../../i2c-1/1-0040")
    root = SysfsRoot(tmp_path)
    assert (root.link_name("device"), root.link_name("none")) == ("1-0040", "")


@pytest.mark.parametrize("text", ["0-99999999999", "0-65536", "a", "3-x"])
def test_a_cpu_list_of_nonsense_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_cpu_list(text)


@given(st.integers(-(2**63), 2**64 - 1), st.sampled_from([1e-6, 1e-3, 1.0, 1e3]))
def test_every_number_a_kernel_can_write_is_converted(number: int, factor: float) -> None:
    class Text(SysfsRoot):
        def read_bytes(self, path: str) -> bytes:
            return f"{number}\n".encode()

    assert Text().scaled("x", factor).value == number * factor


@given(st.binary(max_size=200))
def test_any_bytes_are_a_number_or_a_reason(raw: bytes) -> None:
    class Bytes(SysfsRoot):
        def read_bytes(self, path: str) -> bytes:
            return raw

    root = Bytes()
    for reading in (root.integer("x"), root.name("x"), root.scaled("x", 1e-6)):
        assert (reading.value is None) == bool(reading.reason)
