from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.convert.torch_file import read_state_dict
from edge_rt.errors import ModelFormatError
from tests.torch_files import file_of, op_global, op_int, op_tensor, op_text, state_dict_pickle, torch_file

FOUR = struct.pack("<q", 4) + np.arange(4, dtype="<f4").tobytes()


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "m.pth"
    path.write_bytes(raw)
    return path


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, n_items: int = 4) -> bytes:
    return op_tensor("0", shape, strides, offset=offset, n_items=n_items, storage="FloatStorage")


def test_tensors_come_back_with_their_types_and_strides(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 5, 5, 3)).astype("<f4").transpose(0, 3, 1, 2)  # as "channels last" weights stand
    arrays = {"w": images, "n": np.array(7, "<i8"), "h": rng.normal(size=3).astype("<f2"), "d": np.ones((2, 2), "<f8")}
    found = read_state_dict(write(tmp_path, torch_file(arrays)))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_two_tensors_may_share_a_storage(tmp_path: Path) -> None:
    state = state_dict_pickle({"a": tensor((2,), (1,)), "b": tensor((2,), (1,), offset=2)})
    found = read_state_dict(write(tmp_path, file_of(state, {"0": FOUR})))
    assert (found["a"].tolist(), found["b"].tolist()) == ([0, 1], [2, 3])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_parameter"),
        ("collections", "Counter"),
        ("collections", "OrderedDict.__class__"),
    ],
)
def test_nothing_else_is_called(module: str, name: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    call = op_global(module, name) + b"(" + op_text(f"touch {touched}") + b"tR"
    with pytest.raises(ModelFormatError, match="not allowed"):
        read_state_dict(write(tmp_path, file_of(state_dict_pickle({"a": call}), {})))
    assert not touched.exists()


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "n_items"),
    [
        ((5,), (1,), 0, 4),
        ((2,), (1,), 3, 4),
        ((2,), (4,), 0, 4),
        ((2**20, 2**20), (0, 0), 0, 4),
        ((2,), (-1,), 3, 4),
        ((-1,), (1,), 0, 4),
        ((2**39,), (1,), 0, 2**39),
        ((2, 2), (1,), 0, 4),
        ((1,) * 9, (1,) * 9, 0, 4),
    ],
)
def test_tensors_that_reach_beyond_what_is_there(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, n_items: int, tmp_path: Path
) -> None:
    state = state_dict_pickle({"a": tensor(shape, strides, offset=offset, n_items=n_items)})
    with pytest.raises(ModelFormatError):
        read_state_dict(write(tmp_path, file_of(state, {"0": FOUR})))


def test_what_the_pickle_makes_takes_no_attributes(tmp_path: Path) -> None:
    """BUILD (b) sets attributes; on the function that rebuilds tensors it must not."""
    build = op_global("torch._utils", "_rebuild_tensor_v2") + b"N}" + op_text("x") + op_int(1) + b"s\x86b"
    with pytest.raises(ModelFormatError):
        read_state_dict(write(tmp_path, file_of(state_dict_pickle({"a": build}), {})))


@pytest.mark.parametrize("raw", [b"", b"PK\x03\x04", b"\x80\x02K\x01.", b"text", b"\x80\x02]q\x00h\x00a."])
def test_other_files(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError):
        read_state_dict(write(tmp_path, raw))


def test_a_zip_archive_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="zip archive"):
        read_state_dict(write(tmp_path, b"PK\x03\x04" + bytes(100)))


SOUND = torch_file({"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([1], "<i8")})


@given(at=st.integers(0, len(SOUND) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_damaged_files_end_in_one_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    raw = SOUND[:at] if cut else SOUND[:at] + bytes([byte]) + SOUND[at + 1 :]
    path = write(tmp_path_factory.getbasetemp(), raw)
    try:
        found = read_state_dict(path)
    except ModelFormatError:
        return
    assert not cut
    assert sum(array.size for array in found.values()) <= 14
