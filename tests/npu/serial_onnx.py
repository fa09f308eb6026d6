"""Small quantised ONNX models and crops of the shipped detector, for serial NPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_rt.backends.base import ModelFile
from edge_rt.worker.recipe import apply
from tools.pcb.drawn import draw_boards

MODELS = Path(__file__).parents[2] / "models"
CROP = 128


def crop_model(folder: Path, variant: str = "int4", side: int = CROP) -> ModelFile:
    """Give a form of pcb-defect for pictures of another size: its layers take any. Those for NPUs are derived first."""
    source = MODELS / f"pcb-defect.{variant}.onnx"
    if variant.startswith("npu-"):
        source = folder / source.name
        parent = "int4" if variant == "npu-w4a8" else "int8"  # as the manifest says
        apply(variant, MODELS / f"pcb-defect.{parent}.onnx", source, MODELS / "pcb-defect-npu-ranges.json")
    model = onnx.load(source)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim[2:]:
            dim.dim_value = side
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim[2:]:
            dim.dim_value = side // 8
    path = folder / f"crop.{variant}.onnx"
    onnx.save(model, path)
    return ModelFile(model="pcb-crop", variant=variant, path=path, quant=variant.upper())


def crops(n: int, seed: int = 3, side: int = CROP) -> list[tuple[dict[str, NDArray[np.uint8]], int]]:
    """Give pictures of drawn boards' flaws beside those of the good board, and which kind of flaw is in the middle."""
    found = []
    for board in draw_boards(n, seed):
        x0, y0, x1, y1, kind = board.marks[0]
        left, top = (int(np.clip((a + b) / 2 - side / 2, 0, 640 - side)) for a, b in ((x0, x1), (y0, y1)))
        feeds = {
            name: np.asarray(picture)[top : top + side, left : left + side].reshape(1, 1, side, side).astype(np.uint8)
            for name, picture in (("image", board.picture), ("golden", board.golden))
        }
        found.append((feeds, int(kind)))
    return found


def kind_found(heat: NDArray[np.float32]) -> int:
    """Give the kind of flaw with the highest peak."""
    return int(heat[0].max(axis=(1, 2)).argmax())


def whole_model(folder: Path) -> ModelFile:
    """Give a model of which everything is a layer of the device: a convolution and a mean, float in and out."""
    rng = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(np.float32(value), name)
        for name, value in {"x_scale": 0.03, "y_scale": 0.021, "z_scale": 0.0031}.items()
    ]
    constants += [
        numpy_helper.from_array(np.uint8(128), "zero"),
        numpy_helper.from_array(rng.integers(-127, 128, (8, 3, 3, 3)).astype(np.int8), "w"),
        numpy_helper.from_array(rng.uniform(0.001, 0.003, 8).astype(np.float32), "w_scale"),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "x_scale", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["wd"], axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["y"], kernel_shape=[3, 3]),
        helper.make_node("QuantizeLinear", ["y", "y_scale", "zero"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "y_scale", "zero"], ["yd"]),
        helper.make_node("GlobalAveragePool", ["yd"], ["z"]),
        helper.make_node("QuantizeLinear", ["z", "z_scale", "zero"], ["zq"]),
        helper.make_node("DequantizeLinear", ["zq", "z_scale", "zero"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "whole",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 8, 1, 1])],
        constants,
    )
    path = folder / "whole.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return ModelFile(model="whole", variant="int8", path=path, quant="INT8")
