"""Layers of the serial NPU's model file from operators of a quantised ONNX graph: scales to integers, shapes, limits.

A layer is made when the scale of its output is known, which is when the graph quantises it; until then it is a Pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.npu.serial_format import (
    ADD,
    AVGPOOL,
    CONV,
    DEPTHWISE,
    MAX_CHANNELS,
    MAX_COLUMN,
    MAXPOOL,
    RESCALE,
    RESIZE,
    Layer,
    Model,
    Tensor,
    scale_parts,
)

_MAX_BIAS = 2**30
_MAX_POOL_SHIFT = 40


class UnsupportedError(Exception):
    """Why a node is nothing for the device. Never leaves the compiler."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """An activation on the device.

    tensor  its number in the model
    scale   of a step; None while the graph has not said it
    zero    that stands for 0, as ONNX has it; is_signed: int8 and not uint8
    shape   that ONNX sees: the same values in (1, c, h, w) order
    """

    tensor: int
    scale: float | None
    zero: int
    is_signed: bool
    shape: tuple[int, ...]

    @property
    def device_zero(self) -> int:
        return self.zero if self.is_signed else self.zero - 128


@dataclass(frozen=True, slots=True)
class Weights:
    """A constant: integers with their scale for each channel along an axis, or for all of them (one value)."""

    values: NDArray[Any]
    scale: NDArray[np.float64]
    axis: int
    bits: int


@dataclass(frozen=True, slots=True)
class Pending:
    """What an operator gives, before the graph has said with what scale.

    make    adds the layer to a model: (model, scale, device's zero, low, high) → number of the tensor
    kept    the scale and device's zero that the layer keeps, where it has none of its own
    low, high  that an activation function leaves of it
    """

    make: Callable[[Model, float, int, int, int], int]
    shape: tuple[int, ...]
    kept: tuple[float, int] | None = None
    low: float = -np.inf
    high: float = np.inf

    def clipped(self, low: float, high: float) -> Pending:
        return replace(self, low=max(self.low, low), high=min(self.high, high))

    def finish(self, model: Model, scale: float, zero: int, *, is_signed: bool) -> Quantised:
        """Make the layer with this scale and ONNX's zero."""
        device_zero = zero if is_signed else zero - 128
        low = max(-128, _step(self.low, scale, device_zero))
        high = min(127, _step(self.high, scale, device_zero))
        low, high = min(low, 127), max(high, -128)
        if self.kept is not None and self.kept != (scale, device_zero):
            tensor = self.make(model, *self.kept, -128, 127)
            tensor = rescale(model, tensor, self.kept[0], scale, device_zero, low, high)
        else:
            tensor = self.make(model, scale, device_zero, low, high)
        return Quantised(tensor, scale, zero, is_signed, self.shape)


def _step(value: float, scale: float, zero: int) -> int:
    if np.isinf(value):
        return -128 if value < 0 else 127
    return int(np.clip(np.rint(value / scale) + zero, -128, 127))


def add_tensor(model: Model, h: int, w: int, c: int, zero: int) -> int:
    if not (0 < h < 65_536 and 0 < w < 65_536 and 0 < c <= MAX_CHANNELS):
        raise UnsupportedError(f"{h} × {w} × {c} values; there may be {MAX_CHANNELS} channels")
    model.tensors.append(Tensor(h, w, c, zero))
    return len(model.tensors) - 1


def parts(scale: float) -> tuple[int, int]:
    try:
        return scale_parts(scale)
    except ValueError as exc:
        raise UnsupportedError(str(exc)) from exc


def known(value: Quantised) -> float:
    if value.scale is None:
        raise UnsupportedError("nothing says the scale of its input")
    return value.scale


def rescale(model: Model, tensor: int, old: float, new: float, zero: int, low: int = -128, high: int = 127) -> int:
    """Add a layer that gives a tensor another scale; give the new tensor."""
    source = model.tensors[tensor]
    out = add_tensor(model, source.h, source.w, source.c, zero)
    multiplier, shift = parts(old / new)
    model.layers.append(
        Layer(
            kind=RESCALE,
            inputs=(tensor,),
            output=out,
            multipliers=(multiplier, 0),
            shift=shift,
            low=low,
            high=high,
        )
    )
    return out


@dataclass(frozen=True, slots=True)
class Window:
    """A kernel's size, steps and padding (top, left, bottom, right)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)

    def outputs(self, h: int, w: int) -> tuple[int, int]:
        top, left, bottom, right = self.pad
        if max(*self.stride, top, left) > 255:
            raise UnsupportedError("a stride or padding of more than 255")
        out_h = (h + top + bottom - self.kernel[0]) // self.stride[0] + 1
        out_w = (w + left + right - self.kernel[1]) // self.stride[1] + 1
        if out_h < 1 or out_w < 1:
            raise UnsupportedError("its kernel is larger than its input")
        return out_h, out_w


def weighted(
    model: Model, value: Quantised, weights: NDArray[Any], scale: NDArray[np.float64], bits: int,
    bias: NDArray[np.float64], window: Window, *, is_depthwise: bool, shape: tuple[int, ...] | None = None,
) -> Pending:  # fmt: skip
    """Give a convolution: weights (out, kernel h, kernel w, in), or (kernel h, kernel w, channels) if depthwise.

    scale   of the weights, and bias, for each output channel; shape that ONNX sees, if it is not the image's
    """
    source = model.tensors[value.tensor]
    if np.prod(weights.shape[:2] if is_depthwise else weights.shape[1:]) > MAX_COLUMN:
        raise UnsupportedError(f"an output sums over more than {MAX_COLUMN} inputs")
    out_h, out_w = window.outputs(source.h, source.w)
    n_out = weights.shape[2] if is_depthwise else weights.shape[0]
    summed = weights.astype(np.int64).sum(axis=(0, 1) if is_depthwise else (1, 2, 3))
    steps = known(value) * scale
    whole = np.rint(bias / steps) - value.device_zero * summed
    if np.abs(whole).max(initial=0) > _MAX_BIAS:
        raise UnsupportedError(f"a bias of {np.abs(whole).max():.3g} steps, the limit is {_MAX_BIAS}")

    def make(model: Model, out_scale: float, zero: int, low: int, high: int) -> int:
        scaled = [parts(step / out_scale) for step in steps]
        out = add_tensor(model, out_h, out_w, n_out, zero)
        model.layers.append(
            Layer(
                kind=DEPTHWISE if is_depthwise else CONV,
                inputs=(value.tensor,),
                output=out,
                kernel=window.kernel,
                stride=window.stride,
                pad=window.pad[:2],
                low=low,
                high=high,
                weight_bits=bits,
                weights=weights.astype(np.int8),
                bias=whole.astype(np.int32),
                multiplier=np.array([multiplier for multiplier, _ in scaled], np.int32),
                shifts=np.array([shift for _, shift in scaled], np.uint8),
            )
        )
        return out

    return Pending(make, shape or (1, n_out, out_h, out_w))


def pooled(model: Model, value: Quantised, window: Window, *, is_max: bool, shape: tuple[int, ...] | None) -> Pending:
    """Give the largest or the mean of what a kernel sees; shape that ONNX sees, if it is not the image's."""
    source = model.tensors[value.tensor]
    out_h, out_w = window.outputs(source.h, source.w)
    if window.kernel[0] * window.kernel[1] > 65_536:
        raise UnsupportedError("a pool over more than 65536 places")
    scale = known(value)

    def make(model: Model, out_scale: float, zero: int, low: int, high: int) -> int:
        multiplier, shift = (0, 1) if is_max else parts(scale / out_scale)
        if shift > _MAX_POOL_SHIFT:
            multiplier, shift = multiplier >> (shift - _MAX_POOL_SHIFT), _MAX_POOL_SHIFT
        out = add_tensor(model, out_h, out_w, source.c, zero)
        model.layers.append(
            Layer(
                kind=MAXPOOL if is_max else AVGPOOL,
                inputs=(value.tensor,),
                output=out,
                kernel=window.kernel,
                stride=window.stride,
                pad=window.pad[:2],
                low=low,
                high=high,
                multipliers=(multiplier, 0),
                shift=shift,
            )
        )
        return out

    kept = (scale, value.device_zero) if is_max else None
    return Pending(make, shape or (1, source.c, out_h, out_w), kept)


def added(model: Model, left: Quantised, right: Quantised) -> Pending:
    if model.tensors[left.tensor].n_bytes != model.tensors[right.tensor].n_bytes or left.shape != right.shape:
        raise UnsupportedError("a sum of tensors of two shapes")
    scales = (known(left), known(right))

    def make(model: Model, out_scale: float, zero: int, low: int, high: int) -> int:
        _, shift = parts(max(scales) / out_scale)
        source = model.tensors[left.tensor]
        out = add_tensor(model, source.h, source.w, source.c, zero)
        first, second = (round(scale / out_scale * 2**shift) for scale in scales)
        model.layers.append(
            Layer(
                kind=ADD,
                inputs=(left.tensor, right.tensor),
                output=out,
                multipliers=(min(first, 2**31 - 1), min(second, 2**31 - 1)),
                shift=shift,
                low=low,
                high=high,
            )
        )
        return out

    return Pending(make, left.shape)


def joined(model: Model, values: list[Quantised]) -> Pending:
    """Give channels one after the other."""
    sources = [model.tensors[value.tensor] for value in values]
    if len({(source.h, source.w) for source in sources}) != 1:
        raise UnsupportedError("it joins tensors of two sizes")
    h, w, n_channels = sources[0].h, sources[0].w, sum(source.c for source in sources)
    scales = [value.scale for value in values]
    if None in scales and len({(value.scale, value.device_zero) for value in values}) != 1:
        raise UnsupportedError("nothing says the scale of its inputs")

    def make(model: Model, out_scale: float, zero: int, low: int, high: int) -> int:
        out, channel = add_tensor(model, h, w, n_channels, zero), 0
        for value, source, scale in zip(values, sources, scales, strict=True):
            multiplier, shift = parts(1.0 if scale is None else scale / out_scale)
            model.layers.append(
                Layer(
                    kind=RESCALE,
                    inputs=(value.tensor,),
                    output=out,
                    multipliers=(multiplier, 0),
                    shift=shift,
                    channel=channel,
                    low=low,
                    high=high,
                )
            )
            channel += source.c
        return out

    return Pending(make, (1, n_channels, h, w))


def resized(model: Model, value: Quantised, by_h: int, by_w: int) -> Pending:
    """Give each value by_h × by_w times."""
    source = model.tensors[value.tensor]

    def make(model: Model, _scale: float, zero: int, _low: int, _high: int) -> int:  # all keep their scale
        out = add_tensor(model, source.h * by_h, source.w * by_w, source.c, zero)
        model.layers.append(Layer(kind=RESIZE, inputs=(value.tensor,), output=out))
        return out

    return Pending(make, (1, source.c, source.h * by_h, source.w * by_w), (known(value), value.device_zero))


def rectified(value: Quantised) -> Pending:
    """Give the value itself, for an activation function or another scale behind it."""
    scale = known(value)

    def make(model: Model, out_scale: float, zero: int, low: int, high: int) -> int:
        return rescale(model, value.tensor, scale, out_scale, zero, low, high)

    return Pending(make, value.shape)
