"""Calibration data that anybody may have made."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends.base import Device, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu import calibration, rknn_driver
from edge_rt.backends.npu.calibration import CalibrationDataError
from edge_rt.backends.npu.rknn import RknnVendor
from edge_rt.errors import BackendLoadError


def bomb(path: Path) -> Path:
    """Write a small file whose array has more bytes than may be."""
    zeros = bytes(2**24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w", force_zip64=True) as x:
        np.lib.format.write_array_header_1_0(x, {"descr": "|u1", "fortran_order": False, "shape": (2**30 + 2**24,)})
        for _ in range(2**6 + 1):
            x.write(zeros)
    assert path.stat().st_size < 2**21
    return path


def liar(path: Path) -> Path:
    """Write an array whose header claims what no file holds."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**45,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    return path


def test_arrays_are_read_by_name(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(4), y=np.zeros(3))
    assert calibration.read(str(tmp_path / "a.npz"), ["x"])["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CalibrationDataError, match="no array z, only x, y"):
        calibration.read(str(tmp_path / "a.npz"), ["z"])


def test_what_is_large_once_unpacked_is_refused_before_it_is(tmp_path: Path) -> None:
    with pytest.raises(CalibrationDataError, match="have 1090519168 bytes, the limit is 1073741824"):
        calibration.read(str(bomb(tmp_path / "a.npz")), ["x"])
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        for number in range(calibration.MAX_ARRAYS + 1):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(CalibrationDataError, match="257 arrays, the limit is 256"):
        calibration.read(str(tmp_path / "many.npz"), ["0"])


@pytest.mark.parametrize("kind", ["text", "empty", "liar", "pickle", "cut", "corrupt", "encrypted", "bzip2"])
def test_what_is_no_array_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.npz"
    if kind == "liar":
        liar(path)
    elif kind == "pickle":
        np.savez(path, x=np.array([{}], object))
    elif kind == "corrupt":
        np.savez_compressed(path, x=np.arange(1000))
        raw = bytearray(path.read_bytes())
        raw[100:300] = b"\xff" * 200
        path.write_bytes(raw)
    elif kind == "encrypted":
        np.savez(path, x=np.zeros(100))
        raw = bytearray(path.read_bytes())
        raw[raw.index(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(raw)
    elif kind == "bzip2":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive, archive.open("x.npy", "w") as x:
            np.save(x, np.zeros(100))
    else:
        np.savez(path, x=np.zeros(100))
        path.write_bytes({"text": b"none", "empty": b"", "cut": path.read_bytes()[:-40]}[kind])
    with pytest.raises(CalibrationDataError):
        calibration.read(str(path), ["x"])


def test_the_back_end_and_its_driver_refuse_it(tmp_path: Path) -> None:
    path, device = bomb(tmp_path / "m.calibration.npz"), Device(id="sim", kind="npu", detail="")
    options = TensorOptions(npu=NpuOptions(options={"npu_rknn": {"dtype": "w8a8"}}))
    file = ModelFile(model="m", variant="", path=tmp_path / "m.onnx", quant="")
    with pytest.raises(BackendLoadError, match=r"m\.calibration\.npz: its arrays have"):
        RknnVendor().target(file, device, options)
    with pytest.raises(rknn_driver.RknnError, match="its arrays have"):
        rknn_driver.write_dataset(str(path), [{"name": "x", "layout": ""}])
