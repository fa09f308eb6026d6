"""What a serial NPU's model file computes, in numpy: the yardstick that firmware must meet in every bit.

Its sums go through float64 products, which are exact below 2^53; nothing else here is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.npu.serial_format import (
    ADD,
    AVGPOOL,
    CONV,
    DEPTHWISE,
    MAXPOOL,
    RESCALE,
    RESIZE,
    Layer,
    Model,
    Tensor,
)

Values = NDArray[np.int8]  # (h, w, c)


def run(model: Model, inputs: Sequence[Values]) -> list[Values]:
    """Compute a model's outputs from its inputs, each (h, w, c)."""
    values: dict[int, Values] = dict(zip(model.inputs, inputs, strict=True))
    for layer in model.layers:
        out = model.tensors[layer.output]
        operands = [(values[at], model.tensors[at]) for at in layer.inputs]
        if layer.kind == RESCALE:
            target = values.setdefault(layer.output, np.zeros((out.h, out.w, out.c), np.int8))
            source, tensor = operands[0]
            scaled = _scaled(source.astype(np.int64) - tensor.zero, layer.multipliers[0], layer.shift, out.zero, layer)
            target[:, :, layer.channel : layer.channel + tensor.c] = scaled
        else:
            values[layer.output] = _compute(layer, operands, out)
    return [values[at] for at in model.outputs]


def _scaled(sums: NDArray[Any], multiplier: Any, shift: Any, zero: int, layer: Layer) -> Values:
    sums, multiplier, shift = sums.astype(np.int64), np.int64(multiplier), np.int64(shift)
    rounded = (sums * multiplier + (np.int64(1) << (shift - 1))) >> shift
    return _clamped(rounded + zero, layer)


def _clamped(values: NDArray[Any], layer: Layer) -> Values:
    clamped: Values = np.clip(values, layer.low, layer.high).astype(np.int8)
    return clamped


def _seen(values: NDArray[Any], layer: Layer, out: Tensor, outside: int) -> NDArray[Any]:
    """Give what the kernel sees at each place of the output: (out h, out w, c, kernel h, kernel w)."""
    (kernel_h, kernel_w), (stride_h, stride_w), (top, left) = layer.kernel, layer.stride, layer.pad
    bottom = max(0, (out.h - 1) * stride_h + kernel_h - top - values.shape[0])
    right = max(0, (out.w - 1) * stride_w + kernel_w - left - values.shape[1])
    padded = np.pad(values, ((top, bottom), (left, right), (0, 0)), constant_values=outside)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel_h, kernel_w), axis=(0, 1))
    return windows[::stride_h, ::stride_w][: out.h, : out.w]


def _compute(layer: Layer, operands: list[tuple[Values, Tensor]], out: Tensor) -> Values:
    values, tensor = operands[0]
    if layer.kind == RESIZE:
        return np.repeat(np.repeat(values, out.h // tensor.h, axis=0), out.w // tensor.w, axis=1)
    if layer.kind == ADD:
        other, second = operands[1]
        left = (values.astype(np.int64) - tensor.zero) * layer.multipliers[0]
        right = (other.astype(np.int64) - second.zero) * layer.multipliers[1]
        return _scaled(left + right, 1, layer.shift, out.zero, layer)
    if layer.kind == MAXPOOL:
        return _clamped(_seen(values, layer, out, -128).max(axis=(3, 4)), layer)
    if layer.kind == AVGPOOL:
        return _average(layer, values, tensor, out)
    if layer.kind not in {CONV, DEPTHWISE}:
        raise ValueError(f"a layer of unknown kind {layer.kind}")
    assert layer.weights is not None
    seen = _seen(values, layer, out, tensor.zero).astype(np.float64)
    if layer.kind == CONV:
        columns = seen.transpose(0, 1, 3, 4, 2).reshape(out.h, out.w, -1)
        sums = columns @ layer.weights.reshape(out.c, -1).T.astype(np.float64)
    else:
        sums = np.einsum("yxcij,ijc->yxc", seen, layer.weights.astype(np.float64))
    return _scaled_by_channel(sums.astype(np.int64), layer, out)


def _scaled_by_channel(sums: NDArray[Any], layer: Layer, out: Tensor) -> Values:
    assert layer.bias is not None
    assert layer.multiplier is not None
    assert layer.shifts is not None
    shifts = layer.shifts.astype(np.int64)
    sums = (sums + layer.bias) * layer.multiplier.astype(np.int64)
    return _clamped(((sums + (np.int64(1) << (shifts - 1))) >> shifts) + out.zero, layer)


def _average(layer: Layer, values: Values, tensor: Tensor, out: Tensor) -> Values:
    """Average over what lies inside the input: floor((sum × multiplier + n × 2^(shift - 1)) / (n × 2^shift))."""
    sums = _seen(values.astype(np.int64) - tensor.zero, layer, out, 0).sum(axis=(3, 4))
    n = _seen(np.ones((tensor.h, tensor.w, 1), np.int64), layer, out, 0).sum(axis=(3, 4))
    scaled = (sums * layer.multipliers[0] + (n << (layer.shift - 1))) // np.maximum(n << layer.shift, 1)
    return _clamped(np.where(n > 0, scaled, 0) + out.zero, layer)
