"""Calibration data: .npz files, read within bounds. Drivers import this too: standard library and numpy, Python 3.8."""

from __future__ import annotations

import zipfile
import zlib
from typing import Any, BinaryIO, Mapping, Sequence  # noqa: UP035 - Python 3.8 knows no others at run time

import numpy as np

MAX_BYTES = 2**30  # of a file's arrays as they are in memory; packed, they may be a thousandth of it
MAX_ARRAYS = 256
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class CalibrationDataError(Exception):
    """The file is none, or too large."""


def check(file: BinaryIO) -> None:
    """Raise CalibrationDataError unless it is an .npz file whose arrays have MAX_BYTES at most.

    A member gives no more bytes than the file says here: zipfile ends it there.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
        raise CalibrationDataError("it is no .npz file: {}".format(exc)) from exc  # noqa: UP032 - as in host.py
    if any(each.flag_bits & 1 or each.compress_type not in _PACKED for each in members):
        raise CalibrationDataError("its arrays are encrypted, or packed as numpy packs none")
    sizes = [member.file_size for member in members]
    if len(sizes) > MAX_ARRAYS:
        raise CalibrationDataError(f"it has {len(sizes)} arrays, the limit is {MAX_ARRAYS}")
    if sum(sizes) > MAX_BYTES:
        raise CalibrationDataError(f"its arrays have {sum(sizes)} bytes, the limit is {MAX_BYTES}")


def read(path: str, names: Sequence[str]) -> Mapping[str, Any]:
    """Read the arrays of these names. Raises CalibrationDataError, and OSError where the file cannot be opened."""
    with open(path, "rb") as file:  # noqa: PTH123 - it is a name here
        check(file)
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                if missing := [name for name in names if name not in arrays.files]:
                    raise CalibrationDataError(f"it has no array {missing[0]}, only {', '.join(arrays.files)}")
                return {name: arrays[name] for name in names}
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as exc:
            raise CalibrationDataError(f"it cannot be read: {exc}") from exc
