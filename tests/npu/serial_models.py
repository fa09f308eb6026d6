"""Random layers for serial NPUs, of any kind and shape that fits, with their inputs."""

from __future__ import annotations

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
    scale_parts,
)

KINDS = (CONV, CONV, CONV, DEPTHWISE, DEPTHWISE, MAXPOOL, AVGPOOL, ADD, RESCALE, RESIZE)
Values = NDArray[np.int8]


def _zero(rng: np.random.Generator) -> int:
    return int(rng.integers(-128, 128))


def _values(rng: np.random.Generator, tensor: Tensor) -> Values:
    return rng.integers(-128, 128, (tensor.h, tensor.w, tensor.c)).astype(np.int8)


def _scaled(rng: np.random.Generator, n: int, spread: float) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Give multipliers and shifts that bring sums of such a spread to about 8 bits, saturation now and then."""
    parts = [scale_parts(40.0 / spread * float(2.0 ** rng.uniform(-2, 2))) for _ in range(n)]
    return np.array([part[0] for part in parts], np.int32), np.array([part[1] for part in parts], np.uint8)


def random_model(rng: np.random.Generator, n_layers: int, max_side: int = 9, max_channels: int = 40) -> Model:
    """Give a model of layers beside one another, each with inputs and an output of its own where it has any."""
    model = Model()
    for _ in range(n_layers):
        kind = int(rng.choice(KINDS))
        kernel_h, kernel_w = (int(side) for side in rng.integers(1, 5, 2))
        h, w = int(rng.integers(1, max_side)), int(rng.integers(1, max_side))
        c = int(rng.integers(1, max_channels)) if rng.random() < 0.8 else int(rng.integers(max_channels, 150))
        stride = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        pad = (int(rng.integers(0, kernel_h)), int(rng.integers(0, kernel_w)))
        first = Tensor(h, w, c, _zero(rng))
        model.tensors.append(first)
        inputs = [len(model.tensors) - 1]
        out_h = max(1, (h + 2 * pad[0] - kernel_h) // stride[0] + 1)
        out_w = max(1, (w + 2 * pad[1] - kernel_w) // stride[1] + 1)
        low, high = (-128, 127) if rng.random() < 0.7 else tuple(sorted(int(v) for v in rng.integers(-128, 128, 2)))
        layer = Layer(kind=kind, inputs=(), output=0, low=low, high=high)
        if kind in {CONV, DEPTHWISE, MAXPOOL, AVGPOOL}:
            layer.kernel, layer.stride, layer.pad = (kernel_h, kernel_w), stride, pad
        if kind in {CONV, DEPTHWISE}:
            bits = int(rng.choice([4, 8]))
            n_out = int(rng.integers(1, 24)) if kind == CONV else c
            shape = (n_out, kernel_h, kernel_w, c) if kind == CONV else (kernel_h, kernel_w, c)
            limit = 2 ** (bits - 1)
            layer.weight_bits = bits
            layer.weights = rng.integers(-limit, limit, shape).astype(np.int8)
            n_summed = kernel_h * kernel_w * (c if kind == CONV else 1)
            spread = 74.0 * limit / 2 * float(np.sqrt(n_summed))
            layer.bias = rng.integers(-int(spread) - 1, int(spread) + 1, n_out).astype(np.int32)
            layer.multiplier, layer.shifts = _scaled(rng, n_out, spread)
            out = Tensor(out_h, out_w, n_out, _zero(rng))
        elif kind in {MAXPOOL, AVGPOOL}:
            out = Tensor(out_h, out_w, c, first.zero if kind == MAXPOOL else _zero(rng))
            multiplier, layer.shift = scale_parts(float(2.0 ** rng.uniform(-2, 2)))
            layer.multipliers = (multiplier, 0)
        elif kind == ADD:
            model.tensors.append(Tensor(h, w, c, _zero(rng)))
            inputs.append(len(model.tensors) - 1)
            out = Tensor(h, w, c, _zero(rng))
            multiplier, layer.shift = scale_parts(float(2.0 ** rng.uniform(-2, 1)))
            layer.multipliers = (multiplier, int(rng.integers(0, 2**31)))
        elif kind == RESCALE:
            layer.channel = int(rng.integers(0, 3))
            out = Tensor(h, w, c + layer.channel, _zero(rng))
            multiplier, layer.shift = scale_parts(float(2.0 ** rng.uniform(-2, 2)))
            layer.multipliers = (multiplier, 0)
            if layer.channel:  # the channels before it come from elsewhere
                before = Tensor(h, w, layer.channel, _zero(rng))
                model.tensors += [before, out]
                layer.output = len(model.tensors) - 1
                model.inputs.append(len(model.tensors) - 2)
                model.layers.append(
                    Layer(
                        kind=RESCALE,
                        inputs=(len(model.tensors) - 2,),
                        output=layer.output,
                        multipliers=(2**30, 0),
                        shift=30,
                    )
                )
        else:
            out = Tensor(h * int(rng.integers(1, 4)), w * int(rng.integers(1, 4)), c, first.zero)
        if not layer.output:
            model.tensors.append(out)
            layer.output = len(model.tensors) - 1
        layer.inputs = tuple(inputs)
        model.inputs += inputs
        model.layers.append(layer)
        model.outputs.append(layer.output)
    return model


def random_inputs(rng: np.random.Generator, model: Model) -> list[Values]:
    return [_values(rng, model.tensors[at]) for at in model.inputs]
