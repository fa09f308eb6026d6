"""Serial NPUs for tests that load several models: a board with the firmware's host build for each, and small models."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.serial_ports import NAME, PortSpec
from edge_rt.backends.npu.serial_vendor import SerialVendor
from tests.npu.serial_firmware import FirmwareDevice
from tests.npu.serial_wire import Bench, FakeWire
from tests.tensor_models import ELEM_TYPES, make

UNIT = 2.0**-6  # the scale of all values and weights: small numbers are whole steps


class SerialBoards(NpuBackend):
    """The back end npu_serial whose port leads to another board each time that it is opened."""

    name = NAME

    def __init__(self) -> None:
        clock = Bench(FirmwareDevice())

        def open_wire(_: PortSpec) -> FakeWire:
            wire = Bench(FirmwareDevice()).open(None)
            wire.now_us = clock.wire.now_us
            wire.clock = clock.clock  # type: ignore[method-assign]
            return wire

        super().__init__(SerialVendor(lambda: (PortSpec("/dev/ttyNPU0"),), open_wire, clock.clock, clock.pause))


def rows() -> ModelProto:
    """x FP32 [n, 4] to y FP32 [n, 4] and z FP32 [n, 1], as tests.tensor_models.rows, by two products of integers."""
    nodes, weights = _read("x")
    for name, w in (("y", np.diag([1, 2, 3, 4])), ("z", np.array([[1], [-1], [2], [1]]))):
        some, arrays = _product(name, 16 * w)
        nodes, weights = nodes + some, weights | arrays
    outputs = [("y", TensorProto.FLOAT, ["n", 4]), ("z", TensorProto.FLOAT, ["n", 1])]
    return make(nodes, [("x", TensorProto.FLOAT, ["n", 4])], outputs, weights)


def identity(datatype: str) -> ModelProto:
    """x [n, 2] to y [n, 2] as it is, through a product by one; floats are rounded to 1/64 and end at 2."""
    elem_type, is_float = ELEM_TYPES[datatype], datatype == "FP32"
    nodes, weights = _read("x", is_float=is_float, zero_type=np.int8 if datatype == "INT8" else np.uint8)
    some, arrays = _product("y", 64 * np.eye(2), is_float=is_float)
    value = [(name, elem_type, ["n", 2]) for name in ("x", "y")]
    return make(nodes + some, value[:1], value[1:], weights | arrays)


def _read(name: str, *, is_float: bool = True, zero_type: type = np.uint8) -> tuple[list[NodeProto], dict[str, Any]]:
    weights: dict[str, NDArray[Any]] = {"s": np.array(UNIT, np.float32), "zero": np.array(0, zero_type)}
    if is_float:
        weights["zero"] = np.array(128, np.uint8)
    nodes = [helper.make_node("QuantizeLinear", [name, "s", "zero"], ["xq"])] if is_float else []
    nodes += [helper.make_node("DequantizeLinear", ["xq" if is_float else name, "s", "zero"], ["xd"])]
    return nodes, weights


def _product(name: str, w: NDArray[Any], *, is_float: bool = True) -> tuple[list[NodeProto], dict[str, NDArray[Any]]]:
    nodes = [
        helper.make_node("DequantizeLinear", [f"{name}_w", f"{name}_s"], [f"{name}_d"], axis=1),
        helper.make_node("MatMul", ["xd", f"{name}_d"], [f"{name}_m"]),
        helper.make_node("QuantizeLinear", [f"{name}_m", "s", "zero"], [f"{name}_q" if is_float else name]),
    ]
    if is_float:
        nodes += [helper.make_node("DequantizeLinear", [f"{name}_q", "s", "zero"], [name])]
    return nodes, {f"{name}_w": w.astype(np.int8), f"{name}_s": np.full(w.shape[1], UNIT, np.float32)}
