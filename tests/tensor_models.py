"""Small ONNX models of every kind that onnx_cpu runs: `from tests.tensor_models import conv`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge_rt.backends.base import ModelFile

ELEM_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}

Value = tuple[str, int, Sequence[int | str | None] | None]


def make(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: dict[str, NDArray[Any]] | None = None,
    *,
    opset: int = 17,
    microsoft: bool = False,
) -> ModelProto:
    """Make a model; a shape of None is left out."""
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid("com.microsoft", 1)] if microsoft else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def rows() -> ModelProto:
    """x FP32 [n, 4] to y FP32 [n, 4] and z FP32 [n, 1], each row by itself."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("Mul", ["t", "w"], ["y"]),
        helper.make_node("ReduceMax", ["y"], ["z"], axes=[1]),
    ]
    weights = {"w": np.array([1, 2, 3, 4], np.float32)}
    outputs = [("y", TensorProto.FLOAT, ["n", 4]), ("z", TensorProto.FLOAT, ["n", 1])]
    return make(nodes, [("x", TensorProto.FLOAT, ["n", 4])], outputs, weights)


def conv(seed: int = 0) -> ModelProto:
    """x FP32 [n, 3, h, w] through two convolutions to y FP32 [n, 8, h, w]."""
    noise = np.random.default_rng(seed)
    weights = {
        "a": noise.standard_normal((8, 3, 3, 3), np.float32),
        "b": noise.standard_normal((8, 8, 1, 1), np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["c"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Conv", ["r", "b"], ["y"], name="second"),
    ]
    return make(
        nodes, [("x", TensorProto.FLOAT, ["n", 3, "h", "w"])], [("y", TensorProto.FLOAT, ["n", 8, "h", "w"])], weights
    )


def identity(elem_type: int, shape: Sequence[int | str | None] | None = ("n", 2)) -> ModelProto:
    return make([helper.make_node("Identity", ["x"], ["y"])], [("x", elem_type, shape)], [("y", elem_type, shape)])


def int8(seed: int = 0) -> ModelProto:
    """x FP32 [n, 16] through a MatMul in QDQ form to y FP32 [n, 8]."""
    noise = np.random.default_rng(seed)
    weights = {
        "xs": np.float32(0.05),
        "xz": np.uint8(128),
        "ws": np.float32(0.02),
        "wz": np.int8(0),
        "ys": np.float32(0.1),
        "w": noise.integers(-127, 128, (16, 8)).astype(np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "ys", "xz"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "xz"], ["y"]),
    ]
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    return make(nodes, [("x", TensorProto.FLOAT, ["n", 16])], [("y", TensorProto.FLOAT, ["n", 8])], arrays)


def int4(accuracy_level: int | None, *, k: int = 64, n: int = 32, seed: int = 0) -> ModelProto:
    """x FP32 [n, k] through a MatMulNBits of 4 bits to y FP32 [n, n]; accuracy_level None is left out."""
    noise = np.random.default_rng(seed)
    weights: dict[str, NDArray[Any]] = {
        "q": noise.integers(0, 256, (n, k // 32, 16)).astype(np.uint8),
        "s": noise.random((n, k // 32), np.float32) + np.float32(0.1),
    }
    facts = {} if accuracy_level is None else {"accuracy_level": accuracy_level}
    node = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=32, **facts
    )
    return make(
        [node], [("x", TensorProto.FLOAT, ["m", k])], [("y", TensorProto.FLOAT, ["m", n])], weights, microsoft=True
    )


def quantised_conv(
    random: np.random.Generator,
    weights: NDArray[np.int8],
    *,
    signed: bool = False,
    opset: int = 17,
    shape: tuple[int | str, ...] | None = None,
    half: bool = False,
    **facts: Any,
) -> ModelProto:
    """x UINT8 or INT8 [n, c, ...] dequantised and convolved to y FP32."""
    n, kind = len(weights), np.int8 if signed else np.uint8
    floats = np.float16 if half else np.float32
    arrays = {
        "xs": floats(0.02),
        "xz": kind(random.integers(-128, 128) if signed else random.integers(0, 256)),
        "w": weights,
        "ws": random.uniform(0.001, 0.02, n).astype(floats),
        "wz": np.zeros(n, np.int8),
        "b": random.integers(-1000, 1000, n).astype(np.int32),
        "bs": np.full(n, 1e-3, floats),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["bd"], axis=0),
        helper.make_node("Conv", ["xd", "wd", "bd"], ["y"], name="the one", **facts),
    ]
    rank = weights.ndim
    dims = shape or ("n", weights.shape[1] * facts.get("group", 1), *(f"d{i}" for i in range(rank - 2)))
    elements = TensorProto.INT8 if signed else TensorProto.UINT8
    out = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    given_arrays = {name: np.asarray(value) for name, value in arrays.items()}
    return make(nodes, [("x", elements, dims)], [("y", out, [None] * rank)], given_arrays, opset=opset)


def rows_with_product() -> ModelProto:
    """As rows, with a MatMulNBits for the FPGA's engine: x FP32 [n, 4] to y FP32 [n, 4] and z FP32 [n, 1]."""
    noise = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {
        "pads": np.array([0, 0, 0, 28], np.int64),
        "q": noise.integers(0, 256, (4, 1, 16)).astype(np.uint8),
        "s": noise.random((4, 1), np.float32) + np.float32(0.1),
    }
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("Pad", ["t", "pads"], ["wide"]),
        helper.make_node(
            "MatMulNBits", ["wide", "q", "s"], ["y"], domain="com.microsoft", K=32, N=4, bits=4, block_size=32
        ),
        helper.make_node("ReduceMax", ["y"], ["z"], axes=[1]),
    ]
    outputs = [("y", TensorProto.FLOAT, ["n", 4]), ("z", TensorProto.FLOAT, ["n", 1])]
    return make(nodes, [("x", TensorProto.FLOAT, ["n", 4])], outputs, weights, microsoft=True)


def identity_beside_product(elem_type: int, shape: Sequence[int | str | None] = ("n", 2)) -> ModelProto:
    """x to y as it is; and p FP32 [1, 4], a MatMulNBits of x's shape."""
    weights: dict[str, NDArray[Any]] = {
        "pads": np.array([0, 30], np.int64),
        "row": np.array([1, 32], np.int64),
        "q": np.zeros((4, 1, 16), np.uint8),
        "s": np.ones((4, 1), np.float32),
    }
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Cast", ["sizes"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Pad", ["floats", "pads"], ["wide"]),
        helper.make_node("Reshape", ["wide", "row"], ["vector"]),
        helper.make_node(
            "MatMulNBits", ["vector", "q", "s"], ["p"], domain="com.microsoft", K=32, N=4, bits=4, block_size=32
        ),
    ]
    outputs = [("y", elem_type, shape), ("p", TensorProto.FLOAT, [1, 4])]
    return make(nodes, [("x", elem_type, shape)], outputs, weights, microsoft=True)


def nested(depth: int) -> ModelProto:
    """x FP32 [1] to y FP32 [1] through as many If nodes, each in a branch of the one before."""
    inner, name = [helper.make_node("Identity", ["x"], ["y0"])], "y0"
    for i in range(1, depth + 1):
        then = helper.make_graph(inner, f"g{i}", [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])])
        plain = helper.make_node("Identity", ["x"], [f"e{i}"])
        other = helper.make_graph(
            [plain], f"h{i}", [], [helper.make_tensor_value_info(f"e{i}", TensorProto.FLOAT, [1])]
        )
        name = f"y{i}"
        inner = [helper.make_node("If", ["yes"], [name], then_branch=then, else_branch=other)]
    return make(inner, [("x", TensorProto.FLOAT, [1])], [(name, TensorProto.FLOAT, [1])], {"yes": np.array(True)})


def with_external_data(model: ModelProto, folder: Path, location: str = "weights.bin") -> ModelProto:
    """Move a model's weights into a file in folder; nothing else is written."""
    with (folder / location).open("wb") as file:
        for tensor in model.graph.initializer:
            start = file.tell()
            file.write(tensor.raw_data)
            onnx.external_data_helper.set_external_data(tensor, location, start, file.tell() - start)
            tensor.ClearField("raw_data")
    return model


def saved(model: ModelProto, path: Path) -> ModelFile:
    path.write_bytes(model.SerializeToString())
    return ModelFile(model="tiny", variant="", path=path, quant="")
