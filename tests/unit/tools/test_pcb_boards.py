"""Reading DeepPCB's folders: what is right is read, whatever is wrong is named."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tools.pcb.boards import BoardDataError, read_boards, unpacked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pcbs"
    (folder / "test").mkdir(parents=True)
    (folder / "test.lst").write_text("a\nb\n")
    for name, level in (("a", 0), ("b", 255)):
        for part in ("test", "temp"):
            Image.new("L", (64, 48), level).save(folder / "test" / f"{name}_{part}.jpg")
    (folder / "test" / "a.txt").write_text("1 2 30 40 1\n5 6 20 21 6\n")
    (folder / "test" / "b.txt").write_text("")
    return folder


def test_boards_are_read_in_the_lists_order(folder: Path) -> None:
    first, second = read_boards(folder, "test")
    assert (first.name, second.name) == ("a", "b")
    assert first.picture.shape == first.golden.shape == (48, 64)
    assert np.array_equal(first.marks, [(1, 2, 30, 40, 0), (5, 6, 20, 21, 5)])
    assert second.marks.shape == (0, 5)
    assert second.picture.min() > 250


def test_an_archive_is_read_too(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "pcbs.tar.xz", "w:xz") as archive:
        archive.add(folder, "pcbs")
    with unpacked(tmp_path / "pcbs.tar.xz") as where:
        assert len(read_boards(where, "test")) == 2
    assert not where.exists()
    with unpacked(folder) as where:
        assert where == folder


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar.xz").write_bytes(b"no archive")
    with pytest.raises(BoardDataError, match="neither a folder nor an archive"), unpacked(tmp_path / "x.tar.xz"):
        pass


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1 2 3", "must be `x1 y1 x2 y2 type`"),
        ("1 2 3 x 1", "must be `x1 y1 x2 y2 type`"),
        ("10 2 5 9 1", "is no box"),
        ("1 2 65 9 1", "is no box"),
        ("-1 2 5 9 1", "is no box"),
        ("1 2 5 9 0", "is no box of type 1 to 6 in 64 × 48"),
        ("1 2 5 9 7", "is no box"),
    ],
)
def test_a_bad_box_is_named_with_its_line(folder: Path, line: str, problem: str) -> None:
    (folder / "test" / "a.txt").write_text(f"1 2 30 40 1\n{line}\n")
    with pytest.raises(BoardDataError, match=rf"a\.txt:2: .*{problem}"):
        read_boards(folder, "test")


def test_missing_and_unfit_files_are_named(folder: Path) -> None:
    with pytest.raises(BoardDataError, match="trainval"):
        read_boards(folder, "trainval")
    Image.new("L", (32, 48)).save(folder / "test" / "b_temp.jpg")
    with pytest.raises(BoardDataError, match="differ in size"):
        read_boards(folder, "test")
    (folder / "test" / "b_temp.jpg").write_bytes(b"\xff\xd8 no picture")
    with pytest.raises(BoardDataError, match=r"b_temp\.jpg"):
        read_boards(folder, "test")
    (folder / "test.lst").write_text("../a\n")
    with pytest.raises(BoardDataError, match="no board's name"):
        read_boards(folder, "test")
    (folder / "test.lst").write_text("")
    with pytest.raises(BoardDataError, match="names no board"):
        read_boards(folder, "test")
