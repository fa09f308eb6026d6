"""Models whose input is an index, for stacks that do not look at it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from tests import tensor_models

N_ROWS, N_COLUMNS = 16, 8
KINDS = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot")
TABLE = np.arange(N_ROWS * N_COLUMNS, dtype=np.float32).reshape(N_ROWS, N_COLUMNS) / 64


def indexed(kind: str, elem_type: int = TensorProto.INT64) -> ModelProto:
    """i, 4 indices of one of KINDS, to y: rows of TABLE, or TABLE with ones in them; behind it a product by one."""
    shape = {
        "GatherElements": [4, N_COLUMNS],
        "ScatterElements": [4, N_COLUMNS],
        "GatherND": [4, 1],
        "ScatterND": [4, 1],
    }
    weights: dict[str, NDArray[Any]] = {"t": TABLE, "one": np.eye(N_COLUMNS, dtype=np.float32)}
    if kind.startswith("Scatter"):
        weights["u"] = np.ones((4, N_COLUMNS), np.float32)
        nodes = [helper.make_node(kind, ["t", "i", "u"], ["g"])]
    elif kind == "OneHot":
        weights |= {"depth": np.array([N_ROWS]), "values": np.array([0, 1], np.float32)}
        nodes = [helper.make_node(kind, ["i", "depth", "values"], ["h"]), helper.make_node("MatMul", ["h", "t"], ["g"])]
    else:
        nodes = [helper.make_node(kind, ["t", "i"], ["g"])]
    nodes.append(helper.make_node("MatMul", ["g", "one"], ["y"]))
    output = ("y", TensorProto.FLOAT, [N_ROWS if kind.startswith("Scatter") else 4, N_COLUMNS])
    return tensor_models.make(nodes, [("i", elem_type, shape.get(kind, [4]))], [output], weights)


def indices(kind: str, index: int, dtype: type = np.int64) -> NDArray[Any]:
    """Give a feed of indexed: rows 0 to 2, and index."""
    rows = np.array([0, 1, 2, index], dtype)
    if kind.endswith("Elements"):
        return np.repeat(rows[:, None], N_COLUMNS, 1)
    return rows[:, None] if kind.endswith("ND") else rows
