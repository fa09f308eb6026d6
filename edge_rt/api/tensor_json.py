"""Tensors' elements between JSON and bytes, without numpy: the front process must not load it.

All functions are pure and may run on any thread. Numbers go through in pieces, so that no call into C holds the
interpreter for long and a tensor never stands in memory as a list of objects.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.tensor_types import ITEM_BYTES, Datatype, Tensor

MAX_JSON_BYTES: Final = 4 * 2**20  # of a request's JSON, and of a tensor that is answered in JSON
_PIECE_BYTES: Final = 64 * 1024
_PIECE_ITEMS: Final = 8192
_LENGTH: Final = struct.Struct("<I")
_AT: Final = re.compile(r" - at `\$\[(\d+)\]`$")
_NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b"[],"))

_CODES: Final[dict[str, str]] = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


def _item_type(datatype: str) -> Any:
    if datatype == "BOOL":
        return bool
    if datatype.startswith("FP"):
        return float
    n_bits = 8 * ITEM_BYTES[datatype]
    if n_bits == 64:  # wider than msgspec's bounds may be; struct checks these
        return int
    low, high = (0, 2**n_bits - 1) if datatype.startswith("U") else (-(2 ** (n_bits - 1)), 2 ** (n_bits - 1) - 1)
    return Annotated[int, Meta(ge=low, le=high)]


_DECODERS: Final = {datatype: msgspec.json.Decoder(list[_item_type(datatype)]) for datatype in _CODES}  # type: ignore[misc]


def from_json(param: str, datatype: Datatype, shape: Sequence[int], data: bytes) -> bytes:
    """Turn a JSON array, flat or nested as its shape, into a tensor's bytes.

    data must be one whole JSON value; param names it in errors. Raises InvalidRequestError for elements that the
    datatype does not hold, and where their number or nesting is not the shape's.
    """
    if not data.startswith(b"["):
        raise InvalidRequestError(param=param, problem="must be an array")
    if math.prod(shape) > len(data):  # a number takes a character
        raise _misshapen(param, shape, "holds fewer elements than")
    if datatype == "BYTES":
        return _from_strings(param, shape, data)
    skeleton = data.translate(None, _NOT_STRUCTURE)
    if skeleton not in (_flat(shape), _nested(shape, len(skeleton))):
        if skeleton.count(b"[") == 1:
            raise _misshapen(param, shape, f"holds {skeleton.count(b',') + 1} elements, not those of")
        raise _misshapen(param, shape, "is not nested as")
    if 0 in shape:
        if data.translate(None, b"[], \t\r\n"):
            raise _misshapen(param, shape, "holds elements, not those of")
        return b""
    packed = bytearray()
    n_items = 0
    for n_before, values in _pieces(param, datatype, data.translate(None, b"[]")):
        packed += _pack_piece(param, datatype, values, n_before)
        n_items = n_before + len(values)
    if n_items != math.prod(shape):
        raise _misshapen(param, shape, f"holds {n_items} elements, not those of")
    return bytes(packed)


def _pieces(param: str, datatype: Datatype, text: bytes) -> Iterator[tuple[int, list[Any]]]:
    """Decode numbers that stand between commas, some thousands at a time, each with the number of those before it."""
    decoder = _DECODERS[datatype]
    start = n_before = 0
    while start <= len(text):
        end = text.find(b",", start + _PIECE_BYTES)
        end = len(text) if end < 0 else end
        try:
            values = decoder.decode(b"[%b]" % text[start:end])
        except msgspec.ValidationError as exc:
            place = _AT.search(str(exc))
            problem = _AT.sub("", str(exc)).lower()
            at = f"[{n_before + int(place[1])}]" if place else ""
            raise InvalidRequestError(param=f"{param}{at}", problem=f"{problem} for {datatype}") from exc
        except msgspec.DecodeError as exc:
            raise InvalidRequestError(param=param, problem=f"is not an array of {datatype}: {exc}") from exc
        except ValueError as exc:  # an integer of more than 4300 digits
            raise InvalidRequestError(param=param, problem=f"holds a number far outside {datatype}") from exc
        if not values and end < len(text):
            raise InvalidRequestError(param=param, problem="has a comma too many")
        yield n_before, values
        n_before += len(values)
        start = end + 1


def pack(param: str, datatype: Datatype, values: Sequence[Any]) -> bytes:
    """Turn numbers, or bytes for BYTES, into a tensor's bytes. Raises InvalidRequestError for what does not fit."""
    if datatype == "BYTES":
        return _join(values)
    packed = bytearray()
    for start in range(0, len(values), _PIECE_ITEMS):
        packed += _pack_piece(param, datatype, values[start : start + _PIECE_ITEMS], start)
    return bytes(packed)


def _pack_piece(param: str, datatype: Datatype, values: Sequence[Any], n_before: int) -> bytes:
    code = _CODES[datatype]
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError):
        at = n_before + next(i for i, value in enumerate(values) if not _fits(code, value))
        raise InvalidRequestError(param=f"{param}[{at}]", problem=f"is outside the range of {datatype}") from None


def _fits(code: str, value: Any) -> bool:
    try:
        struct.pack(f"<{code}", value)
    except (struct.error, OverflowError):
        return False
    return True


def _flat(shape: Sequence[int]) -> bytes:
    return b"[" + b"," * (math.prod(shape) - 1) + b"]"


def _nested(shape: Sequence[int], size_bytes: int) -> bytes | None:
    """Give the brackets and commas of an array nested as the shape; None where they take more than size_bytes."""
    sizes = list(shape[: shape.index(0) + 1]) if 0 in shape else list(shape)  # nothing stands inside what is empty
    inner = b""
    for size in reversed(sizes):
        if (len(inner) + 1) * size > size_bytes:
            return None
        inner = b"[" + (b",".join([inner] * size) if inner else b"," * (size - 1)) + b"]"
    return inner


def _misshapen(param: str, shape: Sequence[int], problem: str) -> InvalidRequestError:
    sizes = ",".join(map(str, shape))
    return InvalidRequestError(param=param, problem=f"{problem} its shape [{sizes}]")


# BYTES: an array of strings


@cache
def _strings(depth: int) -> msgspec.json.Decoder[list[Any]]:
    kind: Any = str
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _from_strings(param: str, shape: Sequence[int], data: bytes) -> bytes:
    is_nested = data[1:].lstrip().startswith(b"[")
    try:
        values = _strings(len(shape) if is_nested else 1).decode(data)
        items = list(_flattened(param, shape, values)) if is_nested else values
        encoded = [item.encode() for item in items]
    except msgspec.ValidationError as exc:
        raise InvalidRequestError(param=param, problem=f"must hold strings, in BYTES: {exc}"[:300]) from exc
    except (msgspec.DecodeError, UnicodeError) as exc:
        problem = "must hold strings of sound UTF-8; send other bytes as binary data"
        raise InvalidRequestError(param=param, problem=problem) from exc
    if len(encoded) != math.prod(shape):
        raise _misshapen(param, shape, f"holds {len(encoded)} elements, not those of")
    return _join(encoded)


def _join(items: Sequence[bytes]) -> bytes:
    return b"".join(chain.from_iterable((_LENGTH.pack(len(item)), item) for item in items))


def _flattened(param: str, shape: Sequence[int], values: list[Any]) -> Iterator[str]:
    if len(values) != shape[0]:
        raise _misshapen(param, shape, "is not nested as")
    if len(shape) == 1:
        yield from values
    else:
        for inner in values:
            yield from _flattened(param, shape[1:], inner)


# Answers


def to_json(tensor: Tensor) -> bytes:
    """Write a tensor as a flat JSON array.

    Raises UnsupportedFeatureError for what JSON cannot hold: NaN and infinity, BYTES that are not UTF-8, and tensors
    of more than MAX_JSON_BYTES.
    """
    if len(tensor.data) > MAX_JSON_BYTES:
        raise _only_binary(tensor, f"{len(tensor.data)} bytes, where JSON takes up to {MAX_JSON_BYTES}")
    if tensor.datatype == "BYTES":
        try:
            return msgspec.json.encode([item.decode() for item in items(bytes(tensor.data))])
        except UnicodeDecodeError:
            raise _only_binary(tensor, "bytes that are not UTF-8") from None
    code, item_bytes = _CODES[tensor.datatype], ITEM_BYTES[tensor.datatype]
    is_float = tensor.datatype.startswith("FP")
    pieces = []
    for start in range(0, len(tensor.data), _PIECE_ITEMS * item_bytes):
        data = tensor.data[start : start + _PIECE_ITEMS * item_bytes]
        values = struct.unpack(f"<{len(data) // item_bytes}{code}", data)
        if is_float and not all(map(math.isfinite, values)):
            raise _only_binary(tensor, "NaN or infinity")
        pieces.append(msgspec.json.encode(values)[1:-1])
    return b"[" + b",".join(pieces) + b"]"


def items(data: bytes) -> Iterator[bytes]:
    """Cut BYTES elements apart. Raises InvalidRequestError where a length leads past the end."""
    start = 0
    while start < len(data):
        end = start + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            raise InvalidRequestError(param="", problem="a BYTES element's length leads past the tensor's end")
        yield data[start + _LENGTH.size : end]
        start = end


def _only_binary(tensor: Tensor, what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        feature=f"a JSON answer for output {tensor.name[:80]}, which holds {what},",
        remedy='ask for it with the parameter "binary_data": true',
    )
