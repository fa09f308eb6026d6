from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from onnx import TensorProto, numpy_helper

from edge_rt.convert.qdq import Range
from tests.unit.tools.small_models import classifier, detector, pictures, run, vectors
from tools.activations import Statistics
from tools.int4 import pack_blocks, quantize_int4
from tools.layers import Form, Judge, build, find_layers, measure, search


@pytest.fixture(scope="module")
def ranges() -> dict[str, Range]:
    return Statistics.collect(classifier(), vectors()).ranges()


def test_layers_and_their_forms() -> None:
    found = {layer.name: (layer.op, layer.n_weights, layer.forms) for layer in find_layers(classifier())}
    all_forms = ("float", "int8", "int4")
    assert found == {
        "first": ("Gemm", 4096, all_forms),
        "middle": ("MatMul", 4096, all_forms),
        "last": ("MatMul", 640, all_forms),
    }


def test_blocks_are_packed_as_matmulnbits_reads_them() -> None:
    """Unpacked by hand: the first of two values in the lower half, as many zero points as blocks, padding last."""
    rows = np.random.default_rng(0).normal(size=(3, 80))
    packed, scales, zeros = pack_blocks(rows, 32)
    assert (packed.shape, scales.shape, zeros.shape) == ((3, 3, 16), (9,), (6,))
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 3, 32).astype(float)
    zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(3, 4)[:, :3, None].astype(float)
    restored = ((values - zero) * scales.reshape(3, 3, 1)).reshape(3, 96)[:, :80]
    spread = scales.reshape(3, 3).repeat(32, axis=1)[:, :80]
    assert (np.abs(restored - rows) <= spread * 0.501 + spread * 0.5).all()
    assert np.abs(restored - rows).mean() < 0.3 * spread.mean()


def test_four_bit_matrices_and_their_bias_compute() -> None:
    model, feeds = classifier(), vectors()
    made = quantize_int4(model, ["first", "last"])
    nodes = {node.name: node for node in made.graph.node}
    assert [nodes[name].op_type for name in ("first", "first/bias", "middle", "last")] == [
        "MatMulNBits",
        "Add",
        "MatMul",
        "MatMulNBits",
    ]
    assert {a.name: a.i for a in nodes["first"].attribute}["accuracy_level"] == 4
    assert not {"w0", "w2"} & {tensor.name for tensor in made.graph.initializer}
    expected = run(model, feeds)
    error = np.linalg.norm(run(made, feeds) - expected) / np.linalg.norm(expected)
    assert 0.001 < error < 0.2


def test_a_convolutions_weights_are_stored_in_four_bit() -> None:
    model = detector()
    made = quantize_int4(model, ["stem"])
    stored = {tensor.name: tensor for tensor in made.graph.initializer}
    assert "w" not in stored
    assert stored["w/int4"].data_type == TensorProto.INT4
    assert len(stored["w/int4"].raw_data) == 8 * 3 * 3 * 3 // 2
    weights = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w")
    scales = numpy_helper.to_array(stored["w/int4_scale"])[:, None, None, None]
    restored = numpy_helper.to_array(stored["w/int4"]).astype(float) * scales
    assert np.abs(restored - weights).mean() < 0.3 * scales.mean()
    boxes, expected = run(made, pictures())[:, 0, :4], run(model, pictures())[:, 0, :4]
    assert np.abs(boxes - expected).mean() < 16  # of 320


def test_the_layer_with_weights_far_out_suffers_most_from_four_bit(ranges: dict[str, Range]) -> None:
    model = classifier()
    steps = measure(model, ranges, Judge(model, vectors(seed=5)), ("int8", "int4"))
    assert len(steps) == 6
    errors = {(step.layer.name, step.form): step.error for step in steps}
    assert all(0 < errors[name, "int8"] < errors[name, "int4"] for name in ("first", "middle", "last"))


def test_the_search_meets_an_error_and_gives_more_bits_to_what_needs_them(ranges: dict[str, Range]) -> None:
    model = classifier()
    judge = Judge(model, vectors(seed=5))
    steps = measure(model, ranges, judge, ("int8", "int4"))
    uniform: dict[Form, float] = {}
    for form in ("int8", "int4"):
        made = build(model, ranges, {layer.name: form for layer in find_layers(model)})
        uniform[form] = judge.error(made)
    assert uniform["int8"] < uniform["int4"]
    budget = (uniform["int8"] + uniform["int4"]) / 2
    found = search(model, ranges, judge, steps, max_error=budget)
    assert found.error <= budget
    assert found.error == judge.error(found.model)
    sizes = {form: build(model, ranges, {n.name: form for n in find_layers(model)}).ByteSize() for form in uniform}
    assert found.n_bytes < model.ByteSize()
    tight = search(model, ranges, judge, steps, max_error=uniform["int8"] / 100)
    assert tight.n_bytes > found.n_bytes
    assert tight.error < found.error
    assert min(sizes.values()) <= found.n_bytes


def test_the_search_meets_a_size(ranges: dict[str, Range]) -> None:
    model = classifier()
    judge = Judge(model, vectors(seed=5))
    steps = measure(model, ranges, judge, ("int8", "int4"))
    large = search(model, ranges, judge, steps, max_bytes=model.ByteSize() - 1)
    small = search(model, ranges, judge, steps, max_bytes=model.ByteSize() // 3)
    assert small.n_bytes <= model.ByteSize() // 3 < large.n_bytes < model.ByteSize()
    assert large.error < small.error
    with pytest.raises(ValueError, match="smallest form has"):
        search(model, ranges, judge, steps, max_bytes=100)
    with pytest.raises(ValueError, match="one budget"):
        search(model, ranges, judge, steps)


def test_a_node_that_is_to_stay_float_does(ranges: dict[str, Range]) -> None:
    made = build(classifier(), ranges, {"first": "int8", "middle": "float", "last": "int8"})
    stored = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert stored["w1"] == TensorProto.FLOAT
    assert (stored["w0_quantized"], stored["w2_quantized"]) == (TensorProto.INT8, TensorProto.INT8)
