"""Pairs of pictures, inspected and golden, with the flaws marked: the value types, and reading DeepPCB's folders."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

KINDS = ("open", "short", "mousebite", "spur", "copper", "pin-hole")  # DeepPCB's types 1 to 6
SIDE = 640

Picture = NDArray[np.uint8]  # [height, width]
Marks = NDArray[np.float32]  # [n, 5]: x1, y1, x2, y2 in pixels, and the index in KINDS


class BoardDataError(Exception):
    """Data that is not as DeepPCB has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    name: str
    picture: Picture
    golden: Picture
    marks: Marks


def read_boards(folder: Path, split: str) -> list[Board]:
    """Read the pairs that folder/SPLIT.lst names, in its order.

    Raises BoardDataError naming the file for whatever is missing or out of range.
    """
    listing = folder / f"{split}.lst"
    try:
        names = listing.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as exc:
        raise BoardDataError(f"{listing}: {exc}") from exc
    if not names:
        raise BoardDataError(f"{listing}: names no board")
    return [_read_board(folder / split, name) for name in names]


@contextmanager
def unpacked(data: Path) -> Iterator[Path]:
    """Give the folder with the .lst files: data itself, or for an archive a temporary copy of its one folder."""
    if data.is_dir():
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="pcb-") as scratch:
        try:
            with tarfile.open(data) as archive:
                archive.extractall(scratch, filter="data")
        except (OSError, tarfile.TarError) as exc:
            raise BoardDataError(f"{data}: neither a folder nor an archive that can be read: {exc}") from exc
        listings = sorted(Path(scratch).rglob("test.lst"))
        if len(listings) != 1:
            raise BoardDataError(f"{data}: has {len(listings)} files test.lst, and must have one")
        yield listings[0].parent


def _read_board(folder: Path, name: str) -> Board:
    if "/" in name or name.startswith("."):
        raise BoardDataError(f"{folder}: {name!r} is no board's name")
    pictures = [_read_picture(folder / f"{name}_{part}.jpg") for part in ("test", "temp")]
    if pictures[0].shape != pictures[1].shape:
        raise BoardDataError(
            f"{folder / name}: the pictures differ in size, {pictures[0].shape} and {pictures[1].shape}"
        )
    return Board(
        name=name, picture=pictures[0], golden=pictures[1], marks=_read_marks(folder / f"{name}.txt", pictures[0])
    )


def _read_picture(path: Path) -> Picture:
    try:
        with Image.open(path) as image:
            if max(image.size) > 4 * SIDE:
                raise BoardDataError(f"{path}: is {image.size[0]} × {image.size[1]} pixels, at most {4 * SIDE} a side")
            return np.asarray(image.convert("L"))
    except OSError as exc:
        raise BoardDataError(f"{path}: {exc}") from exc


def _read_marks(path: Path, picture: Picture) -> Marks:
    height, width = picture.shape
    rows: list[tuple[int, ...]] = []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise BoardDataError(f"{path}: {exc}") from exc
    for number, line in enumerate(lines, 1):
        try:
            x1, y1, x2, y2, kind = map(int, line.split())
        except ValueError as exc:
            raise BoardDataError(f"{path}:{number}: must be `x1 y1 x2 y2 type` and is {line!r}") from exc
        if not (0 <= x1 < x2 <= width and 0 <= y1 < y2 <= height and 1 <= kind <= len(KINDS)):
            raise BoardDataError(f"{path}:{number}: {line!r} is no box of type 1 to {len(KINDS)} in {width} × {height}")
        rows.append((x1, y1, x2, y2, kind - 1))
    return np.array(rows, np.float32).reshape(-1, 5)
