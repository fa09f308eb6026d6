"""Check a GGUF file's header before llama.cpp, which trusts it, sees the file.

Everything a load reads is bounded and cross-checked: counts, lengths, tensor shapes, offsets inside the file, the
per-layer lists and the tokenizer's parallel lists. What passes may still be a bad model; it is a well-formed file.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from edge_rt.catalog.ggml_types import GGML_TYPES
from edge_rt.catalog.gguf_reader import ArrayValue, GgufLimits, GgufReader, Value
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

_BUFFER_BYTES = 1 << 18
_VERSIONS = (2, 3)
_ARCH = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MAX_DIMS = 4
_MAX_LAYERS = 1024
# Tokenizer lists that llama.cpp walks in step with the tokens, or asserts the type of: key -> (types, same length).
_TOKENIZER_LISTS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "tokenizer.ggml.scores": (("f32",), True),
    "tokenizer.ggml.token_type": (("i32", "u32"), True),
    "tokenizer.ggml.merges": (("string",), False),
    "tokenizer.ggml.precompiled_charsmap": (("i8", "u8"), False),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor; shape has the row length first, offset counts from the file's data_offset."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A text model's file as its header describes it.

    metadata    every key; long arrays are there without their items
    quant       the tensor type most of the bytes have
    n_heads, n_kv_heads, n_ff  one number per layer; zeros where a layer has no attention or no feed-forward part
    """

    version: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    data_offset: int
    file_bytes: int
    n_params: int
    quant: str
    arch: str
    n_ctx_train: int
    n_layers: int
    embedding_length: int
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    n_ff: tuple[int, ...]
    key_dim: int
    value_dim: int
    n_vocab: int
    chat_template: str | None = field(repr=False)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token takes in all layers."""
        return sum(self.n_kv_heads) * (self.key_dim + self.value_dim)


def read_header(path: Path, limits: GgufLimits = GgufLimits()) -> GgufHeader:  # noqa: B008 - frozen
    """Read and check the header of a text model. Raises ModelFormatError naming the field; reads no weights."""
    keys = _Keys(str(path))
    version, tensors, data_offset, file_bytes = _read_file(path, keys, limits)
    return _describe(keys, version, tensors, data_offset, file_bytes)


def read_tensors(path: Path) -> tuple[Mapping[str, Value], tuple[TensorInfo, ...], int]:
    """Read and check a file's keys and tensors, whatever it holds, and the offset of its data.

    Raises ModelFormatError; reads no weights.
    """
    keys = _Keys(str(path))
    _, tensors, data_offset, _ = _read_file(path, keys, GgufLimits())
    return keys.values, tensors, data_offset


def _read_file(path: Path, keys: _Keys, limits: GgufLimits) -> tuple[int, tuple[TensorInfo, ...], int, int]:
    try:
        with open_regular(path, buffering=_BUFFER_BYTES) as file:
            reader = GgufReader(file, str(path), os.fstat(file.fileno()).st_size, limits)
            return _read(reader, keys)
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc


def _read(reader: GgufReader, keys: _Keys) -> tuple[int, tuple[TensorInfo, ...], int, int]:
    version = _read_version(reader)
    reader.field = "tensor count"
    n_tensors = reader.count("tensors", reader.limits.max_tensors, _MIN_TENSOR_BYTES)
    if n_tensors == 0:
        reader.fail("the file holds no tensors")
    reader.field = "key count"
    for index in range(reader.count("keys", reader.limits.max_pairs, _MIN_PAIR_BYTES)):
        reader.field = f"key {index}"
        key = reader.label(reader.limits.max_key_bytes)
        reader.field = key
        if key in keys.values:
            reader.fail("the key is there twice")
        keys.values[key] = reader.value()
    alignment = keys.integer("general.alignment", 1, reader.limits.max_alignment, default=32)
    if alignment & (alignment - 1):
        keys.fail("general.alignment", f"{alignment} is not a power of two")
    tensors = _read_tensors(reader, n_tensors, alignment)
    data_offset = -(-reader.position // alignment) * alignment
    _check_layout(reader, tensors, data_offset)
    return version, tensors, data_offset, reader.size


def _read_version(reader: GgufReader) -> int:
    magic = reader.take(4)
    if magic != b"GGUF":
        reader.fail(f"{magic!r} instead of b'GGUF'; this is not a GGUF file")
    reader.field = "version"
    version = reader.number("I")
    if version not in _VERSIONS:
        if version.to_bytes(4, "big") in [v.to_bytes(4, "little") for v in _VERSIONS]:
            reader.fail("the file is big-endian; convert it to little-endian")
        reader.fail(f"{version} is not supported, only {' and '.join(map(str, _VERSIONS))}")
    return version


def _read_tensors(reader: GgufReader, n_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        reader.field = f"tensor {index}"
        name = reader.label(reader.limits.max_name_bytes)
        reader.field = f"tensor {name}"
        if name in tensors:
            reader.fail("the name is there twice")
        tensors[name] = _read_tensor(reader, name, alignment)
    return tuple(tensors.values())


def _read_tensor(reader: GgufReader, name: str, alignment: int) -> TensorInfo:
    n_dims = reader.number("I")
    if not 1 <= n_dims <= _MAX_DIMS:
        reader.fail(f"{n_dims} dimensions, 1 to {_MAX_DIMS} are allowed")
    shape = tuple(reader.number("Q") for _ in range(n_dims))
    if min(shape) < 1:
        reader.fail(f"a dimension of 0 in {shape}")
    if math.prod(shape) >= 2**63:
        reader.fail(f"the shape {shape} overflows 63 bits")
    number = reader.number("I")
    if (kind := GGML_TYPES.get(number)) is None:
        reader.fail(f"unknown tensor type {number}")
    if shape[0] % kind.block_size:
        reader.fail(f"a row of {shape[0]} is not a multiple of {kind.name}'s block of {kind.block_size}")
    offset = reader.number("Q")
    if offset % alignment:
        reader.fail(f"its offset {offset} is not a multiple of the alignment {alignment}")
    size_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
    return TensorInfo(name, shape, kind.name, offset, size_bytes)


def _check_layout(reader: GgufReader, tensors: tuple[TensorInfo, ...], data_offset: int) -> None:
    end = 0
    for tensor in sorted(tensors, key=lambda t: t.offset):
        reader.field = f"tensor {tensor.name}"
        if tensor.offset < end:
            reader.fail(f"its data at {tensor.offset} overlap the tensor that ends at {end}")
        end = tensor.offset + tensor.size_bytes
        if data_offset + end > reader.size:
            reader.fail(f"its data end at byte {data_offset + end}, the file has {reader.size}; it is truncated")


def _describe(
    keys: _Keys, version: int, tensors: tuple[TensorInfo, ...], data_offset: int, file_bytes: int
) -> GgufHeader:
    """Check what a text model needs and put it together."""
    arch = keys.text("general.architecture")
    if not _ARCH.fullmatch(arch):
        keys.fail("general.architecture", f"{reprlib.repr(arch)} is not an architecture's name")
    if (n_parts := keys.integer("split.count", 0, 2**16, default=0)) > 1:
        keys.fail("split.count", f"this is one of {n_parts} parts; join them with llama-gguf-split --merge")
    n_layers = keys.integer(f"{arch}.block_count", 1, _MAX_LAYERS)
    embedding_length = keys.integer(f"{arch}.embedding_length", 1, 2**20)
    n_heads = keys.per_layer(f"{arch}.attention.head_count", n_layers, default=(0,) * n_layers)
    n_kv_heads = keys.per_layer(f"{arch}.attention.head_count_kv", n_layers, default=n_heads)
    for layer, (n, n_kv) in enumerate(zip(n_heads, n_kv_heads, strict=True)):
        if n_kv and n % n_kv:
            keys.fail(f"{arch}.attention.head_count_kv", f"{n} heads do not divide into {n_kv} (layer {layer})")
    keys.check_floats(arch)
    head_dim = embedding_length // max(n_heads) if max(n_heads) else 0
    n_ff = keys.per_layer(f"{arch}.feed_forward_length", n_layers, default=(0,) * n_layers)
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        n_bytes[tensor.type] += tensor.size_bytes
    template = keys.values.get("tokenizer.chat_template")
    return GgufHeader(
        version=version,
        metadata=keys.values,
        tensors=tensors,
        data_offset=data_offset,
        file_bytes=file_bytes,
        n_params=sum(math.prod(t.shape) for t in tensors),
        quant=n_bytes.most_common(1)[0][0],
        arch=arch,
        n_ctx_train=keys.integer(f"{arch}.context_length", 1, 2**27),
        n_layers=n_layers,
        embedding_length=embedding_length,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_ff=n_ff,
        key_dim=keys.integer(f"{arch}.attention.key_length", 1, 2**16, default=head_dim),
        value_dim=keys.integer(f"{arch}.attention.value_length", 1, 2**16, default=head_dim),
        n_vocab=_n_vocab(keys, tensors, embedding_length),
        chat_template=template if isinstance(template, str) else None,
    )


def _n_vocab(keys: _Keys, tensors: tuple[TensorInfo, ...], embedding_length: int) -> int:
    """Count the tokens, and check every list and tensor that must be as long."""
    tokens = keys.array("tokenizer.ggml.tokens", ("string",))
    if tokens is None or tokens.n_items == 0:
        keys.fail("tokenizer.ggml.tokens", "there is no vocabulary; a text model needs one")
    for key, (types, same_length) in _TOKENIZER_LISTS.items():
        items = keys.array(key, types)
        if items is not None and same_length and items.n_items != tokens.n_items:
            keys.fail(key, f"{items.n_items} items for {tokens.n_items} tokens")
    embedding = next((t for t in tensors if t.name == "token_embd.weight"), None)
    if embedding is not None and embedding.shape != (embedding_length, tokens.n_items):
        keys.fail(
            "tensor token_embd.weight",
            f"the shape is {embedding.shape}, embedding_length and vocabulary say {(embedding_length, tokens.n_items)}",
        )
    return tokens.n_items


class _Keys:
    """The metadata, asked for by type and range."""

    def __init__(self, path: str):
        self.values: dict[str, Value] = {}
        self._path = path

    def fail(self, key: str, problem: str) -> Never:
        raise ModelFormatError(path=self._path, field=key, problem=problem)

    def text(self, key: str) -> str:
        value = self._need(key)
        if not isinstance(value, str):
            self.fail(key, f"text is expected, it is {_show(value)}")
        return value

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        if default is not None and key not in self.values:
            return default
        return self._in_range(key, self._need(key), low, high)

    def check_floats(self, arch: str) -> None:
        """Check the architecture's numbers: all finite, and no epsilon below 0, on which ggml aborts."""
        for key, value in self.values.items():
            if isinstance(value, float) and key.startswith(f"{arch}."):
                if not math.isfinite(value):
                    self.fail(key, f"{value} is not a finite number")
                if key.endswith("epsilon") and value < 0:
                    self.fail(key, f"{value} is below 0")

    def per_layer(self, key: str, n_layers: int, *, default: tuple[int, ...]) -> tuple[int, ...]:
        """Read a number for all layers or a list with one for each."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, ArrayValue):
            return (self._in_range(key, value, 0, 2**20),) * n_layers
        if value.n_items != n_layers or value.items is None:
            self.fail(key, f"{value.n_items} items for {n_layers} layers")
        return tuple(self._in_range(key, item, 0, 2**20) for item in value.items)

    def array(self, key: str, types: tuple[str, ...]) -> ArrayValue | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, ArrayValue) or value.item_type not in types:
            self.fail(key, f"a list of {' or '.join(types)} is expected, it is {_show(value)}")
        return value

    def _need(self, key: str) -> Value:
        if key not in self.values:
            self.fail(key, "the key is missing")
        return self.values[key]

    def _in_range(self, key: str, value: Value, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"a whole number is expected, it is {_show(value)}")
        if not low <= value <= high:
            self.fail(key, f"{value} is not in {low}..{high}")
        return value


def _show(value: Value) -> str:
    if isinstance(value, ArrayValue):
        return f"a list of {value.n_items} {value.item_type}"
    return reprlib.repr(value)
