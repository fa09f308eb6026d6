"""What a request must keep to so that no stack makes something else of it, found in the model."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from edge_rt.backends.npu.bounds import Bounds, check, index_bounds, unsafe_reason, wrapped
from edge_rt.errors import InvalidRequestError
from tests import tensor_models
from tests.npu.indexed import KINDS, N_ROWS, indexed


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_an_index_is_bounded_by_its_table(kind: str) -> None:
    found = index_bounds(indexed(kind))
    bounds = {} if kind == "OneHot" else {"i": (-N_ROWS, N_ROWS - 1)}
    assert found == Bounds(numbers=bounds, wraps={"i": N_ROWS})
    assert unsafe_reason(indexed(kind)) is None


@pytest.mark.parametrize("kind", ["GatherND", "ScatterElements", "ScatterND"])
def test_what_may_go_beyond_its_data_by_indices_that_are_computed_is_refused(kind: str) -> None:
    model = indexed(kind)
    (node,) = [node for node in model.graph.node if node.op_type == kind]
    node.name, node.input[1] = "rows", "j"
    model.graph.node.insert(0, helper.make_node("Add", ["i", "i"], ["j"]))
    assert "rows takes indices from what a request holds" in (unsafe_reason(model) or "")
    assert index_bounds(model) == Bounds()


def test_what_only_shapes_tell_is_safe_and_what_is_inside_of_a_body_is_not_seen() -> None:
    model = indexed("GatherND")
    model.graph.node[0].input[1] = "j"
    model.graph.node.insert(0, helper.make_node("Shape", ["i"], ["j"]))
    assert unsafe_reason(model) is None
    inner = helper.make_node("If", ["c"], ["z"], then_branch=model.graph, else_branch=model.graph)
    outer = helper.make_graph([inner], "g", [helper.make_tensor_value_info("c", TensorProto.BOOL, [])], [])
    assert "has a GatherND inside" in (unsafe_reason(helper.make_model(outer)) or "")


def two_uses(second: str) -> ModelProto:
    model = indexed("Gather")
    graph = model.graph
    if second == "another table":
        graph.initializer.append(helper.make_tensor("t2", TensorProto.FLOAT, [5, 1], [0.0] * 5))
        graph.node.append(helper.make_node("Gather", ["t2", "i"], ["z"]))
    elif second == "a value":
        graph.node.append(helper.make_node("Add", ["i", "i"], ["z"]))
    else:
        graph.node.append(helper.make_node("Identity", ["i"], ["z"]))
        graph.output.append(helper.make_tensor_value_info("z", TensorProto.INT64, [4]))
    return model


@pytest.mark.parametrize("second", ["another table", "a value", "an output"])
def test_what_is_more_than_an_index_is_given_as_it_came(second: str) -> None:
    found = index_bounds(two_uses(second))
    assert found.wraps == {}
    assert found.numbers == {"i": (-5, 4) if second == "another table" else (-N_ROWS, N_ROWS - 1)}


def test_tuples_of_several_indices_are_not_known() -> None:
    weights = {"t": np.zeros((5, 7), np.float32)}
    node = helper.make_node("GatherND", ["t", "i"], ["y"])
    model = tensor_models.make([node], [("i", TensorProto.INT64, [3, 2])], [("y", TensorProto.FLOAT, [3])], weights)
    assert index_bounds(model) == Bounds()
    assert "takes indices from what a request holds" in (unsafe_reason(model) or "")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_indices_from_the_end_are_counted_from_the_beginning(dtype: type) -> None:
    feed = np.array([0, 15, -1, -16, -17, 99], dtype)
    (given,) = wrapped({"i": feed}, Bounds(wraps={"i": 16})).values()
    assert (given.tolist(), given.dtype) == ([0, 15, 15, 0, -17, 99], feed.dtype)
    assert feed[2] == -1, "the caller's array stays as it is"
    for unchanged in (np.zeros(0, dtype), np.array([1], dtype), np.array([1], np.uint8), np.array([-1.0], np.float32)):
        assert wrapped({"i": unchanged}, Bounds(wraps={"i": 16}))["i"] is unchanged


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 16.0])
def test_floats_that_become_indices_must_be_numbers(wrong: float) -> None:
    feed: NDArray[np.float32] = np.array([1.0, wrong], np.float32)
    with pytest.raises(InvalidRequestError, match="may hold -16 to 15"):
        check({"i": feed}, Bounds(numbers={"i": (-16, 15)}))
