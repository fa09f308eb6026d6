"""The serial NPU's model file: layers of integers, written and read. hw/npu/serial/MODEL.md describes it.

Activations are int8 with channels last. Weights have 8 or 4 bits and a scale for each output channel; sums are 32 bits
and become int8 again by q = clamp(zero + floor((sum × multiplier + 2^(shift - 1)) / 2^shift), low, high).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONV: Final = 1
DEPTHWISE: Final = 2
MAXPOOL: Final = 3
AVGPOOL: Final = 4
ADD: Final = 5
RESCALE: Final = 6
RESIZE: Final = 7
NAMES: Final = {
    CONV: "conv",
    DEPTHWISE: "depthwise",
    MAXPOOL: "maxpool",
    AVGPOOL: "avgpool",
    ADD: "add",
    RESCALE: "rescale",
    RESIZE: "resize",
}
MAX_COLUMN: Final = 16_384
MAX_CHANNELS: Final = 8_192

_HEADER: Final = struct.Struct("<4sHHHBBII12x")
_TENSOR: Final = struct.Struct("<HHHbxI4x")
_LAYER: Final = struct.Struct("<BBbbHHHHHBBBBBxHxxIIIIIii12x")
_NO_TENSOR: Final = 0xFFFF
_MAX_SHIFT: Final = 62


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation: height, width, channels and the value that stands for 0."""

    h: int
    w: int
    c: int
    zero: int

    @property
    def n_bytes(self) -> int:
        return self.h * self.w * self.c


@dataclass(slots=True, kw_only=True)
class Layer:
    """One step. What its kind does not use keeps its default.

    weights     CONV (out, kernel h, kernel w, in); DEPTHWISE (kernel h, kernel w, channels); values of weight_bits
    bias        int32 a channel, - zero × the sum of the channel's weights already in it
    multiplier  int32 a channel, with shifts; multipliers, shift: of a layer without channels
    channel     where in the output's channels RESCALE writes
    """

    kind: int
    inputs: tuple[int, ...]
    output: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    low: int = -128
    high: int = 127
    weight_bits: int = 8
    weights: NDArray[np.int8] | None = None
    bias: NDArray[np.int32] | None = None
    multiplier: NDArray[np.int32] | None = None
    shifts: NDArray[np.uint8] | None = None
    multipliers: tuple[int, int] = (0, 0)
    shift: int = 1
    channel: int = 0


@dataclass(slots=True)
class Model:
    """A graph: layers in the order in which they run, on tensors by number."""

    tensors: list[Tensor] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def scale_parts(scale: float) -> tuple[int, int]:
    """Give multiplier and shift, multiplier / 2^shift next to scale. Raises ValueError for a scale out of range."""
    if not 0 < scale < 2**29:
        raise ValueError(f"a scale of {scale:g} is out of range")
    fraction, exponent = math.frexp(scale)
    shift = 31 - exponent
    multiplier = round(fraction * 2**31)
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift - 1
    if shift > _MAX_SHIFT:
        multiplier, shift = multiplier >> (shift - _MAX_SHIFT), _MAX_SHIFT
    return multiplier, shift


def pack_int4(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack rows of 4-bit values, a multiple of 32 long: byte j of 16 holds values j and, in its upper half, j + 16."""
    blocks = values.reshape(values.shape[0], -1, 2, 16).view(np.uint8)
    packed: NDArray[Any] = (blocks[:, :, 0] & 15) | (blocks[:, :, 1] << 4)
    return packed.astype(np.uint8).reshape(values.shape[0], -1)


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Undo pack_int4."""
    blocks = packed.reshape(packed.shape[0], -1, 1, 16)
    values = np.concatenate([(blocks << 4).view(np.int8) >> 4, blocks.view(np.int8) >> 4], axis=2)
    return values.reshape(packed.shape[0], -1)


def _rows(layer: Layer) -> NDArray[np.int8]:
    """Give a layer's weights as rows, padded to what kernels read at a time."""
    assert layer.weights is not None
    n_rows = layer.weights.shape[0] if layer.kind == CONV else layer.kernel[0] * layer.kernel[1]
    rows = np.ascontiguousarray(layer.weights.reshape(n_rows, -1))
    step = 16 if layer.weight_bits == 8 else 32
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % step)))


def _arena(model: Model) -> tuple[list[int], int]:
    """Place tensors so that those alive at the same time do not overlap; give offsets and the bytes in all."""
    n_layers = len(model.layers)
    first = [n_layers] * len(model.tensors)
    last = [-1] * len(model.tensors)
    for at in model.inputs:
        first[at], last[at] = -1, max(last[at], -1)
    for n, layer in enumerate(model.layers):
        first[layer.output] = min(first[layer.output], n)
        for at in (*layer.inputs, layer.output):
            last[at] = max(last[at], n)
    for at in model.outputs:
        last[at] = n_layers
    offsets = [0] * len(model.tensors)
    placed: list[int] = []
    for at in sorted(range(len(model.tensors)), key=lambda at: -model.tensors[at].n_bytes):
        begin = 0
        for other in sorted(placed, key=lambda other: offsets[other]):
            is_apart = last[other] < first[at] or last[at] < first[other]
            if not is_apart and offsets[other] < begin + model.tensors[at].n_bytes:
                begin = max(begin, -(-(offsets[other] + model.tensors[other].n_bytes) // 16) * 16)
        offsets[at] = begin
        placed.append(at)
    ends = [offset + tensor.n_bytes for offset, tensor in zip(offsets, model.tensors, strict=True)]
    return offsets, max(ends, default=0)


def pack(model: Model) -> bytes:
    """Write a model's file."""
    offsets, arena_bytes = _arena(model)
    n_ports = len(model.inputs) + len(model.outputs)
    at = _HEADER.size + _TENSOR.size * len(model.tensors) + _LAYER.size * len(model.layers) + 2 * n_ports
    blob = bytearray(-at % 16)

    def put(array: NDArray[Any]) -> int:
        blob.extend(bytes(-(at + len(blob)) % 16))
        offset = at + len(blob)
        blob.extend(array.tobytes())
        return offset

    layers = bytearray()
    for layer in model.layers:
        weights = row_bytes = bias = multiplier = shifts = 0
        if layer.weights is not None:
            rows: NDArray[Any] = _rows(layer)
            if layer.weight_bits == 4:
                rows = pack_int4(rows)
            assert layer.bias is not None
            assert layer.multiplier is not None
            assert layer.shifts is not None
            weights, row_bytes, bias = put(rows), rows.shape[1], put(layer.bias)
            multiplier, shifts = put(layer.multiplier), put(layer.shifts)
        second = layer.inputs[1] if len(layer.inputs) > 1 else _NO_TENSOR
        layers += _LAYER.pack(
            layer.kind,
            layer.weight_bits if layer.weights is not None else 0,
            layer.low,
            layer.high,
            layer.inputs[0],
            second,
            layer.output,
            *layer.kernel,
            *layer.stride,
            *layer.pad,
            layer.shift,
            layer.channel,
            weights,
            row_bytes,
            bias,
            multiplier,
            shifts,
            *layer.multipliers,
        )
    tensors = b"".join(
        _TENSOR.pack(tensor.h, tensor.w, tensor.c, tensor.zero, offset)
        for tensor, offset in zip(model.tensors, offsets, strict=True)
    )
    counts = (len(model.tensors), len(model.layers), len(model.inputs), len(model.outputs))
    header = _HEADER.pack(b"ERN1", 1, *counts, arena_bytes, at + len(blob))
    ports = struct.pack(f"<{n_ports}H", *model.inputs, *model.outputs)
    return header + tensors + bytes(layers) + ports + bytes(blob)


def unpack(data: bytes) -> Model:
    """Read a file that pack has written. Raises ValueError for what is none."""
    if len(data) < _HEADER.size or data[:4] != b"ERN1":
        raise ValueError("no model file of a serial NPU")
    _, version, n_tensors, n_layers, n_inputs, n_outputs, _, n_bytes = _HEADER.unpack_from(data)
    if version != 1 or n_bytes != len(data):
        raise ValueError(f"version {version} of the model file, {len(data)} of {n_bytes} bytes")
    model = Model()
    at = _HEADER.size
    for _ in range(n_tensors):
        h, w, c, zero, _ = _TENSOR.unpack_from(data, at)
        model.tensors.append(Tensor(h, w, c, zero))
        at += _TENSOR.size
    for _ in range(n_layers):
        model.layers.append(_unpack_layer(data, at, model.tensors))
        at += _LAYER.size
    ports = struct.unpack_from(f"<{n_inputs + n_outputs}H", data, at)
    model.inputs, model.outputs = list(ports[:n_inputs]), list(ports[n_inputs:])
    return model


def _unpack_layer(data: bytes, at: int, tensors: list[Tensor]) -> Layer:
    (
        kind, bits, low, high, first, second, output, kernel_h, kernel_w, stride_h, stride_w, top, left, shift, channel,
        weights, row_bytes, bias, multiplier, shifts, *multipliers,
    ) = _LAYER.unpack_from(data, at)  # fmt: skip
    layer = Layer(
        kind=kind,
        inputs=(first,) if second == _NO_TENSOR else (first, second),
        output=output,
        kernel=(kernel_h, kernel_w),
        stride=(stride_h, stride_w),
        pad=(top, left),
        low=low,
        high=high,
        multipliers=(multipliers[0], multipliers[1]),
        shift=shift,
        channel=channel,
    )
    if kind in {CONV, DEPTHWISE}:
        n_in, n_out = tensors[first].c, tensors[output].c
        n_places = kernel_h * kernel_w
        n_rows, n_columns = (n_out, n_places * n_in) if kind == CONV else (n_places, n_in)
        rows: NDArray[Any] = np.frombuffer(data, np.uint8, n_rows * row_bytes, weights).reshape(n_rows, row_bytes)
        rows = (unpack_int4(rows) if bits == 4 else rows.view(np.int8))[:, :n_columns]
        shape = (n_out, kernel_h, kernel_w, n_in) if kind == CONV else (kernel_h, kernel_w, n_in)
        layer.weight_bits, layer.weights = bits, rows.reshape(shape)
        layer.bias = np.frombuffer(data, np.int32, n_out, bias)
        layer.multiplier = np.frombuffer(data, np.int32, n_out, multiplier)
        layer.shifts = np.frombuffer(data, np.uint8, n_out, shifts)
    return layer
