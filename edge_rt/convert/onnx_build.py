"""Put an ONNX graph together, node by node; each node is named as what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET = 17
_IR_VERSION = 8
_IR_VERSION_21 = 10  # of opset 21, the first with values of 4 and 16 bit
Shape = Sequence[str | int | None]


class OnnxBuilder:
    """The nodes and constants so far; state holds the weights by their names."""

    def __init__(self, state: Mapping[str, NDArray[Any]]):
        self.state = state
        self._nodes: list[NodeProto] = []
        self._constants: list[TensorProto] = []

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: NDArray[Any]) -> None:
        self._constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))

    def floats(self, name: str, rank: int) -> NDArray[np.float32]:
        """Give one of the weights. Raises KeyError, and ValueError unless it is of this rank and of finite floats."""
        array = self.state[name]
        if array.dtype != np.float32 or array.ndim != rank or not np.isfinite(array).all():
            raise ValueError(f"{name} is not {rank}-dimensional of finite 32-bit floats")
        return array

    def model(
        self, name: str, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto], *, opset: int = OPSET
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, name, inputs, outputs, self._constants)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=_IR_VERSION if opset == OPSET else _IR_VERSION_21,
            producer_name="edge_rt",
        )
        onnx.checker.check_model(model, full_check=True)
        return model
