from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_rt.devices.kernel_files import MAX_BYTES, DryFiles, KernelFiles


@pytest.fixture
def files(tmp_path: Path) -> KernelFiles:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys/a").write_text("2400000\n")
    return KernelFiles(str(tmp_path))


def test_values_come_without_whitespace_and_nuls(files: KernelFiles, tmp_path: Path) -> None:
    (tmp_path / "sys/b").write_bytes(b" on\0 \n")
    assert files.read("sys/a") == "2400000"
    assert files.read("sys/b") == "on"


def test_no_more_than_a_page_is_read(files: KernelFiles, tmp_path: Path) -> None:
    (tmp_path / "sys/b").write_bytes(b"x" * (3 * MAX_BYTES))
    assert len(files.read("sys/b")) == MAX_BYTES
    assert len(files.watch("sys/b")) == MAX_BYTES


def test_bytes_that_are_no_text_do_not_fail(files: KernelFiles, tmp_path: Path) -> None:
    (tmp_path / "sys/b").write_bytes(b"\xff\xfe1")
    assert files.read("sys/b") == "\ufffd\ufffd1"


def test_a_shorter_value_replaces_a_longer_one(files: KernelFiles, tmp_path: Path) -> None:
    files.write("sys/a", "600000")
    assert (tmp_path / "sys/a").read_text() == "600000\n"


def test_a_kept_descriptor_sees_what_is_new(files: KernelFiles, tmp_path: Path) -> None:
    assert files.watch("sys/a") == "2400000"
    files.write("sys/a", "600000")
    assert files.watch("sys/a") == "600000"
    assert files.watch("sys/a") is files.watch("sys/a")  # callers compare what has not changed by identity


def test_a_write_makes_no_file(files: KernelFiles, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write("sys/none", "1")
    assert not (tmp_path / "sys/none").exists()


def test_errors_have_their_number(files: KernelFiles, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        files.read("sys")
    # The kernel's own refusal, which open().write() without close would lose; of a file that anybody may write.
    with pytest.raises(OSError, match="Invalid argument") as caught:
        KernelFiles().write("proc/self/timerslack_ns", "nonsense")
    assert caught.value.errno == errno.EINVAL


def test_a_value_that_is_not_ascii_is_refused_before_anything_is_opened(files: KernelFiles) -> None:
    with pytest.raises(UnicodeEncodeError):
        files.write("sys/a", "2400000\u2009")
    assert files.read("sys/a") == "2400000"


def test_a_pipe_in_the_tree_does_not_hang(files: KernelFiles, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sys/pipe")
    with pytest.raises(OSError, match="Illegal seek"):
        files.read("sys/pipe")


def test_names_come_in_the_order_of_their_numbers(files: KernelFiles, tmp_path: Path) -> None:
    for name in ("policy10", "policy2", "boost"):
        (tmp_path / "sys" / name).mkdir()
    assert files.names("sys") == ["a", "boost", "policy2", "policy10"]


def n_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_nothing_stays_open_after_close(files: KernelFiles, tmp_path: Path) -> None:
    before = n_open()
    for _ in range(3):
        files.watch("sys/a")
    assert n_open() == before + 1
    files.close()
    assert n_open() == before


def test_dry_files_write_nothing_and_tell_what_they_would(files: KernelFiles, tmp_path: Path) -> None:
    dry = DryFiles(files)
    dry.write("sys/a", "600000")
    dry.write("sys/a", "1000000")
    assert (tmp_path / "sys/a").read_text() == "2400000\n"
    assert dry.read("sys/a") == dry.watch("sys/a") == "1000000"
    assert dry.written == {"sys/a": ("2400000", "1000000")}
    with pytest.raises(FileNotFoundError):
        dry.write("sys/none", "1")
