"""Small ONNX models with the faults and the shapes that the quantising tools look for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

SIDE = 6
Feeds = list[dict[str, NDArray[Any]]]


def model_of(
    nodes: list[Any], constants: dict[str, NDArray[Any]], x: list[Any], outputs: dict[str, list[Any]]
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def detector() -> ModelProto:
    """Boxes of 0 to 320 pixels and a score of 0 to 1 for each of 36 places, joined into [1, 5, 36]."""
    rng = np.random.default_rng(3)
    constants = {
        "w": rng.normal(0, 0.4, (8, 3, 3, 3)).astype("f"),
        "wb": rng.normal(0, 0.5, (4, 8, 1, 1)).astype("f"),
        "ws": rng.normal(0, 0.8, (1, 8, 1, 1)).astype("f"),
        "side": np.array(320, "f"),
        "flat_b": np.array([1, 4, -1]),
        "flat_s": np.array([1, 1, -1]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "wb"], ["cb"], "box_conv"),
        helper.make_node("Sigmoid", ["cb"], ["sb"], "box_sigmoid"),
        helper.make_node("Mul", ["sb", "side"], ["pb"], "box_scale"),
        helper.make_node("Reshape", ["pb", "flat_b"], ["boxes"], "box_flat"),
        helper.make_node("Conv", ["r", "ws"], ["cs"], "score_conv"),
        helper.make_node("Sigmoid", ["cs"], ["ss"], "score_sigmoid"),
        helper.make_node("Reshape", ["ss", "flat_s"], ["scores"], "score_flat"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], "join", axis=1),
    ]
    return model_of(nodes, constants, [1, 3, SIDE, SIDE], {"y": [1, 5, SIDE * SIDE]})


def classifier(seed: int = 0) -> ModelProto:
    """Two matrices of 64 × 64 with a Relu between, then 64 × 10; the middle one has a few weights far out."""
    rng = np.random.default_rng(seed)
    middle = rng.normal(0, 0.05, (64, 64))
    middle[rng.integers(0, 64, 40), rng.integers(0, 64, 40)] = 3.0
    constants = {
        "w0": rng.normal(0, 0.15, (64, 64)).astype("f"),
        "b0": rng.normal(0, 0.1, 64).astype("f"),
        "w1": middle.astype("f"),
        "w2": rng.normal(0, 0.15, (64, 10)).astype("f"),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "b0"], ["a"], "first", transB=1),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w1"], ["m"], "middle"),
        helper.make_node("Relu", ["m"], ["s"], "relu2"),
        helper.make_node("MatMul", ["s", "w2"], ["y"], "last"),
    ]
    return model_of(nodes, constants, ["n", 64], {"y": ["n", 10]})


def pictures(n: int = 12, seed: int = 0, *, scale: float = 1.0) -> Feeds:
    rng = np.random.default_rng(seed)
    return [{"x": (rng.normal(size=(1, 3, SIDE, SIDE)) * scale).astype("f")} for _ in range(n)]


def vectors(n: int = 40, seed: int = 0, *, scale: float = 1.0) -> Feeds:
    rng = np.random.default_rng(seed)
    return [{"x": (rng.normal(size=(1, 64)) * scale).astype("f")} for _ in range(n)]


def run(model: ModelProto, feeds: Feeds) -> NDArray[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return np.stack([session.run(None, feed)[0] for feed in feeds])
