"""A small model of pictures for tests of NPUs."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def picture_model(*, n_channels: int = 16) -> onnx.ModelProto:
    """Two convolutions on pixels as they are: uint8 [n, 16, 16, 3] to floats [n, 10]."""
    rng = np.random.default_rng(1)
    constants = {
        "scale": np.array(1 / 128, np.float32),
        "zero": np.array(127, np.uint8),
        "w1": rng.standard_normal((n_channels, 3, 3, 3)).astype(np.float32) / 4,
        "w2": rng.standard_normal((10, n_channels, 1, 1)).astype(np.float32) / 4,
    }
    nodes = [
        helper.make_node("Transpose", ["image"], ["moved"], perm=[0, 3, 1, 2]),
        helper.make_node("DequantizeLinear", ["moved", "scale", "zero"], ["pixels"]),
        helper.make_node("Conv", ["pixels", "w1"], ["first"], "first", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["first"], ["rectified"]),
        helper.make_node("Conv", ["rectified", "w2"], ["second"], "second"),
        helper.make_node("GlobalAveragePool", ["second"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", 16, 16, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
