"""Smaller forms of an exported detector: INT8 with onnxruntime's own tool, and 4-bit weights inside an INT8 graph.

The head stays float in both: its outputs are scores and sizes of quite different ranges, and it is 1 % of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from tools.pcb.boards import Board
from tools.pcb.graph import INPUTS, OUTPUTS

N_CALIBRATION = 32  # boards whose activations set the ranges
INT4_LEVELS = 7  # steps on either side of zero, symmetric
_INT4_OPSET = 21  # the first that has 4-bit integers
_INT4_IR_VERSION = 10


def to_int8(source: Path, target: Path, boards: Sequence[Board]) -> None:
    """Quantise weights by output channel, and activations by the ranges that they have on boards."""
    quantize_static(
        source,
        target,
        _Pairs(boards),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        # 7-bit weights: without VNNI, onnxruntime adds pairs of 8-bit products in 16 bits, and those of 8 bits overflow
        reduce_range=True,
        nodes_to_exclude=[*OUTPUTS, "pixels"],
    )


class _Pairs(CalibrationDataReader):
    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards: Iterator[Board] = iter(boards)

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        board = next(self._boards, None)
        if board is None:
            return None
        return {name: p[None, None] for name, p in zip(INPUTS, (board.picture, board.golden), strict=True)}


def to_int4(int8: Path, source: Path, target: Path, *, keep_int8: Sequence[str] = ()) -> None:
    """Store the weights of an INT8 graph in 4 bits, except for the layers in keep_int8 and those that are float.

    source is the float model that int8 was made of; its weights are rounded to 15 values by output channel, which
    changes nothing in a model that was trained on that grid. The file holds them packed, two a byte, and a Cast that
    onnxruntime computes once while loading; after that it runs the same INT8 kernels.
    """
    model = onnx.load(int8)
    weights = {c.name: numpy_helper.to_array(c) for c in onnx.load(source).graph.initializer}
    constants = {c.name: c for c in model.graph.initializer}
    casts = []
    for name in [n.removesuffix(".weight_quantized") for n in constants if n.endswith(".weight_quantized")]:
        if name in keep_int8:
            continue
        weight = weights[f"{name}.weight"]
        scale = constants[f"{name}.weight_scale"]
        step, levels = int4_levels(weight)
        # the bias is kept in steps of input scale × weight scale, so it moves with the latter
        bias_scale = constants[f"{name}.bias_quantized_scale"]
        input_scale = numpy_helper.to_array(bias_scale) / numpy_helper.to_array(scale)
        bias = np.rint(weights[f"{name}.bias"] / (input_scale * step)).astype(np.int32)
        _replace(scale, step.astype(np.float32))
        _replace(bias_scale, (input_scale * step).astype(np.float32))
        _replace(constants[f"{name}.bias_quantized"], bias)
        quantised = constants[f"{name}.weight_quantized"]
        packed = helper.make_tensor(
            f"{name}.weight_int4", onnx.TensorProto.INT4, levels.shape, packed_int4(levels).tobytes(), raw=True
        )
        quantised.CopyFrom(packed)
        casts.append(
            helper.make_node(
                "Cast", [packed.name], [f"{name}.weight_quantized"], name=f"{name}.unpack", to=onnx.TensorProto.INT8
            )
        )
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.opset_import[0].version = _INT4_OPSET
    model.ir_version = _INT4_IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)


def int4_levels(weight: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Give the step of each output channel, and the weights in steps, -7 to 7."""
    step = np.maximum(np.abs(weight).reshape(len(weight), -1).max(axis=1), 1e-8) / INT4_LEVELS
    levels = np.rint(weight / step[:, None, None, None])
    return step.astype(np.float32), np.clip(levels, -INT4_LEVELS, INT4_LEVELS).astype(np.int8)


def packed_int4(levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two values a byte, the first in the lower half, as ONNX lays INT4 out."""
    nibbles = (levels.reshape(-1) & 0x0F).astype(np.uint8)
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    packed: NDArray[np.uint8] = nibbles[0::2] | np.left_shift(nibbles[1::2], 4, dtype=np.uint8)
    return packed


def _replace(constant: onnx.TensorProto, value: NDArray[np.generic]) -> None:
    constant.CopyFrom(numpy_helper.from_array(value, constant.name))
