from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from onnx import helper

from edge_rt.convert.npu import W8A16, quantize
from edge_rt.convert.qdq import quantize_int8
from tests.unit.tools.small_models import SIDE, classifier, detector, model_of, pictures, run, vectors
from tools.activations import Statistics
from tools.lint_ranges import MIN_LEVELS, lint
from tools.lint_scales import lint_scales


def test_a_detector_head_whose_scores_die_in_one_scale_is_found_and_remedied() -> None:
    model, feeds = detector(), pictures()
    ranges = Statistics.collect(model, feeds).ranges("minmax")
    exact = run(model, feeds)[:, 0]
    whole = run(quantize_int8(model, ranges), feeds)[:, 0]
    # The fault: a score is nothing or more than 1, while the boxes look right.
    assert set(np.unique(whole[:, 4].round(2))) <= {0.0, 1.25, 1.24}
    assert np.abs(whole[:, :4] - exact[:, :4]).max() < 12

    (finding,) = lint(model, feeds)
    assert (finding.tensor, finding.part) == ("y", "input scores")
    assert finding.levels < 1
    assert finding.step == pytest.approx(320 / 255, rel=0.05)
    assert finding.float_nodes == ("box_sigmoid", "box_scale", "box_flat", "score_sigmoid", "score_flat", "join")
    assert "Leave float: box_sigmoid" in str(finding)

    remedied = run(quantize_int8(model, ranges, float_nodes=finding.float_nodes), feeds)[:, 0]
    assert np.abs(remedied[:, 4] - exact[:, 4]).max() < 0.05
    assert np.abs(remedied[:, :4] - exact[:, :4]).max() < 12


def test_one_convolution_of_boxes_and_scores_is_found_too() -> None:
    weights = np.random.default_rng(0).normal(size=(5, 3, 1, 1)).astype("f")
    weights[:4] *= 100
    weights[4] *= 0.3
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "head")]
    model = model_of(nodes, {"w": weights}, [1, 3, SIDE, SIDE], {"y": [1, 5, SIDE, SIDE]})
    (finding,) = lint(model, pictures())
    assert (finding.part, finding.float_nodes) == ("channel 4", ("head",))


def test_a_classifier_has_nothing_to_find() -> None:
    assert lint(classifier(), vectors()) == []


def test_like_ranges_may_be_joined() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("Sigmoid", ["x"], ["s"], "sigmoid"),
        helper.make_node("Concat", ["r", "s"], ["y"], "join", axis=1),
    ]
    model = model_of(nodes, {}, [1, 3, SIDE, SIDE], {"y": [1, 6, SIDE, SIDE]})
    assert lint(model, pictures()) == []
    assert len(lint(model, pictures(), min_levels=200)) == 1


def test_a_file_that_is_quantised_already_tells_it_by_its_scales() -> None:
    """No inputs: boxes and scores have scales of their own, and one after the Concat."""
    model, feeds = detector(), pictures()
    ranges = Statistics.collect(model, feeds).ranges("minmax")
    (finding,) = lint_scales(quantize_int8(model, ranges), MIN_LEVELS)
    assert (finding.tensor, finding.part) == ("y_QuantizeLinear_Input", "input scores")
    assert finding.levels < 1
    assert finding.step == pytest.approx(320 / 255, rel=0.05)
    assert "levels are left" in str(finding)
    # In 16 bit the same scores have levels enough.
    assert lint_scales(quantize(model, ranges, W8A16), MIN_LEVELS) == []
    float_tail = [node.name for node in model.graph.node if node.name in lint(model, feeds)[0].float_nodes]
    assert lint_scales(quantize_int8(model, ranges, float_nodes=float_tail), MIN_LEVELS) == []
