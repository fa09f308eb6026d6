"""Tensors to arrays and back, and what is refused on the way."""

from __future__ import annotations

import struct
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from edge_rt.backends.base import DTYPES
from edge_rt.engine.arrays import datatype_of, to_array, to_tensor
from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.tensor_types import ITEM_BYTES, Datatype, Tensor

NUMERIC = [name for name in get_args(Datatype) if name != "BYTES"]


def tensor(datatype: Datatype, shape: tuple[int, ...], data: bytes) -> Tensor:
    return Tensor(name="x", datatype=datatype, shape=shape, data=data)


def bytes_data(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def test_every_datatype_has_an_array_type_of_its_size() -> None:
    assert set(DTYPES) == set(get_args(Datatype))
    assert all(DTYPES[name].itemsize == ITEM_BYTES[name] for name in NUMERIC)


@given(st.data(), st.sampled_from(NUMERIC))
def test_numbers_go_there_and_back(data: st.DataObject, datatype: Datatype) -> None:
    array = data.draw(arrays(DTYPES[datatype], array_shapes(min_dims=0, max_dims=4, min_side=0)))
    sent = to_tensor("x", array)
    assert (sent.datatype, sent.shape) == (datatype, array.shape)
    back = to_array(sent)
    assert back.tobytes() == array.tobytes()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_byte_strings_go_there_and_back(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    back = to_array(to_tensor("x", array))
    assert list(back) == elements


def test_text_is_written_as_utf_8() -> None:
    sent = to_tensor("x", np.array([["grüße", ""]]))
    assert (sent.datatype, sent.shape, sent.data) == ("BYTES", (1, 2), bytes_data("grüße".encode(), b""))
    assert to_tensor("x", np.array(["a"], object)).data == bytes_data(b"a")


def test_numbers_share_the_requests_memory_and_cannot_be_written_to() -> None:
    sent = tensor("FP32", (2,), np.arange(2, dtype="<f4").tobytes())
    array = to_array(sent)
    assert np.shares_memory(array, np.frombuffer(sent.data, np.uint8))
    assert not array.flags.writeable


def test_other_layouts_are_written_row_after_row_and_little_endian() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    assert to_tensor("x", array).data == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (tensor("FP32", (2,), b"1234567"), r"FP32 \[2\] takes 8 bytes, got 7"),
        (tensor("FP32", (2,), b"123456789"), "takes 8 bytes, got 9"),
        (tensor("FP32", (2**31, 2**31), b""), "takes 18446744073709551616 bytes, got 0"),
        (tensor("FP32", (-1, -1), b"1234"), "must not be negative"),
        (tensor("FP32", (1,) * 9, b"1234"), "9 dimensions, the limit is 8"),
        (tensor("BOOL", (3,), b"\x00\x01\xff"), "a BOOL is the byte 0 or 1, got 255"),
        (tensor("BYTES", (2**40,), bytes_data(b"a")), "take at least 4398046511104 bytes, got 5"),
        (tensor("BYTES", (1,), b"\x05\x00\x00\x00abc"), "element 0 is 5 bytes long, 3 are left"),
        (tensor("BYTES", (1,), b"\xff\xff\xff\xffabc"), "element 0 is 4294967295 bytes long, 3 are left"),
        (tensor("BYTES", (2,), bytes_data(b"abcd") + b"\x00\x00"), "ends in the length of element 1"),
        (tensor("BYTES", (1,), bytes_data(b"a", b"b")), "5 bytes after its last element"),
        (tensor("BYTES", (0,), b"a"), "1 bytes after its last element"),
    ],
)
def test_bytes_that_are_not_what_they_claim_are_refused(sent: Tensor, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        to_array(sent)
    assert caught.value.param.startswith("inputs.x")


@given(
    st.sampled_from(get_args(Datatype)), st.lists(st.integers(-2, 2**33), max_size=9).map(tuple), st.binary(max_size=64)
)
def test_lies_raise_nothing_but_typed_errors(datatype: Datatype, shape: tuple[int, ...], data: bytes) -> None:
    try:
        array = to_array(tensor(datatype, shape, data))
    except InvalidRequestError:
        return
    assert array.shape == shape


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "f16", "V3"])
def test_arrays_that_no_tensor_holds_are_an_error(dtype: str) -> None:
    assert datatype_of(np.dtype(dtype)) is None
    with pytest.raises(BackendStepError, match="no tensor datatype"):
        to_tensor("x", np.zeros(1, dtype))
