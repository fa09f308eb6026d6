"""The detector as an ONNX file: two 8-bit pictures in; a logit for each kind, a middle and a size for each cell out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tools.pcb.boards import KINDS, SIDE
from tools.pcb.samples import SIZE_UNIT, STRIDE
from tools.pcb.shape import Conv, Shape

INPUTS = ("image", "golden")  # uint8 [1, 1, side, side]
OUTPUTS = ("heat", "offset", "size")  # float [1, kinds | 2 | 2, side / 8, side / 8]; offset and log size in cells
OPSET = 17
IR_VERSION = 8

Weights = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]

_HEAD = "head.0"
# The head learns offsets from a cell's middle and sizes in SIZE_UNIT pixels; the file has its corner, and cells.
_HEAD_SHIFT = {"heat": 0.0, "offset": 0.5, "size": log(SIZE_UNIT / STRIDE)}
_HEAD_ROWS = {
    "heat": slice(0, len(KINDS)),
    "offset": slice(len(KINDS), len(KINDS) + 2),
    "size": slice(len(KINDS) + 2, len(KINDS) + 4),
}


def detector_graph(shape: Shape, weights: Weights, *, side: int = SIDE) -> onnx.ModelProto:
    """Write the trained layers as a model that has been checked.

    weights: [out, in, k, k] and [out] of each layer of shape.named(). Raises ValueError for others.
    """
    graph = GraphWriter(shape.named(), weights)
    fine = graph.convs("fine", shape.fine, graph.pixels())
    coarse = graph.convs("coarse", shape.coarse, fine)
    graph.constant("double", np.array([1, 1, 2, 2], np.float32))
    graph.add("Resize", (coarse, "", "double"), "coarse.wide", mode="nearest", nearest_mode="floor",
              coordinate_transformation_mode="asymmetric")  # fmt: skip
    graph.add("Add", (fine, "coarse.wide"), "merged.sum")
    graph.add("Relu", ("merged.sum",), "merged")
    neck = graph.convs("neck", shape.neck, "merged")
    for output in OUTPUTS:
        weight, bias = weights[_HEAD]
        rows = _HEAD_ROWS[output]
        graph.conv(output, shape.head, neck, weight[rows], bias[rows] + np.float32(_HEAD_SHIFT[output]), output)
    cells = side // STRIDE
    return graph.model(
        "pcb-defect",
        [helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, (1, 1, side, side)) for name in INPUTS],
        [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, n, cells, cells))
            for name, n in zip(OUTPUTS, (len(KINDS), 2, 2), strict=True)
        ],
    )


def weights_of(model: onnx.ModelProto, shape: Shape) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Read back what detector_graph wrote into a float file. Raises KeyError naming what another file does not have."""
    constants = {c.name: c for c in model.graph.initializer}

    def pair(name: str, shift: float = 0.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        weight, bias = (numpy_helper.to_array(constants[f"{name}.{part}"]) for part in ("weight", "bias"))
        return weight, bias - np.float32(shift)

    found = {name: pair(name) for name in shape.named() if name != _HEAD}
    heads = [pair(output, _HEAD_SHIFT[output]) for output in OUTPUTS]
    found[_HEAD] = (np.concatenate([w for w, _ in heads]), np.concatenate([b for _, b in heads]))
    return found


class GraphWriter:
    """The nodes and constants of a model in the making."""

    def __init__(self, convs: Mapping[str, Conv], weights: Weights) -> None:
        wanted = {name: (c.n_out, c.n_in, c.kernel, c.kernel) for name, c in convs.items()}
        given = {name: weight.shape for name, (weight, _) in weights.items()}
        if wanted != given:
            raise ValueError(f"weights {given} for a detector with {wanted}")
        self._weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))

    def constant(self, name: str, value: NDArray[np.generic]) -> None:
        self.constants.append(numpy_helper.from_array(value, name))

    def pixels(self) -> str:
        """Lay the two pictures on one another, as 0..1."""
        self.add("Concat", INPUTS, "pair", axis=1)
        self.constant("pixel.scale", np.array(1 / 255, np.float32))
        self.constant("pixel.zero", np.array(0, np.uint8))
        self.add("DequantizeLinear", ("pair", "pixel.scale", "pixel.zero"), "pixels")
        return "pixels"

    def convs(self, part: str, convs: Sequence[Conv], x: str) -> str:
        """Add a part's layers one after another; gives the last one's output."""
        for i, conv in enumerate(convs):
            name = f"{part}.{i}"
            tail = [*(["Add"] if conv.is_residual else []), *(["Relu"] if conv.has_relu else [])]
            outputs = [*(f"{name}.{op.lower()}" for op in ("Conv", *tail)[:-1]), name]
            self.conv(name, conv, x, *self._weights[name], outputs[0])
            for op, before, after in zip(tail, outputs, outputs[1:], strict=False):
                self.add(op, (before, x) if op == "Add" else (before,), after)
            x = name
        return x

    def conv(
        self, name: str, conv: Conv, x: str, weight: NDArray[np.float32], bias: NDArray[np.float32], output: str
    ) -> None:
        self.constant(f"{name}.weight", weight)
        self.constant(f"{name}.bias", bias.astype(np.float32))
        self.add("Conv", (x, f"{name}.weight", f"{name}.bias"), output, kernel_shape=[conv.kernel] * 2,
                 strides=[conv.stride] * 2, pads=[conv.pad] * 4)  # fmt: skip

    def model(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        made = helper.make_graph(self.nodes, name, inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(made, opset_imports=opsets, producer_name="edge_rt tools.pcb")
        model.ir_version = IR_VERSION
        onnx.checker.check_model(model, full_check=True)
        return model
