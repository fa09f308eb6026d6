from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import Centers, Detect, ImageInput, Rows
from edge_rt.engine.detect import Found, from_centers, from_rows, suppress
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.errors import BackendStepError, InvalidRequestError, ModelFormatError
from edge_rt.tensor_types import Box, MediaRequest, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer, encoded, noise

IMAGE = ImageInput(width=64, height=64, color="gray", datatype="UINT8", resize="letterbox", input="a")
ROWS = Detect(image=IMAGE, labels=("hole", "crack"), decode=Rows())
GRAY = (1, 1, 64, 64)


def pipeline(spec: Detect, *inputs: TensorSpec, shape: tuple[int, ...] = (1, -1, 6)) -> Pipeline:
    takes = inputs or (TensorSpec(name="a", datatype="UINT8", shape=GRAY),)
    made = make_pipeline(TensorLoad(pipeline=spec), takes, (TensorSpec(name="y", datatype="FP32", shape=shape),))
    assert made is not None
    return made


def rows(*values: tuple[float, ...]) -> FakeInfer:
    table = np.array([values], np.float32).reshape(1, -1, 6)
    return FakeInfer(lambda _: {"y": table})


def ask(data: bytes, **options: Any) -> MediaRequest:
    return MediaRequest(id="r", model="m", data=data, **options)


def iou(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Overlap counted on a fine grid, by nothing that the code under test uses."""
    y, x = np.mgrid[0:400, 0:400]
    inside = [(x >= p[0]) & (x < p[2]) & (y >= p[1]) & (y < p[3]) for p in (a, b)]
    return float((inside[0] & inside[1]).sum() / (inside[0] | inside[1]).sum())


def test_boxes_come_back_in_the_pictures_pixels() -> None:
    # 128 x 64 into 64 x 64: halved, with 16 rows of pad above
    answer = pipeline(ROWS).run(ask(encoded(noise(64, 128))), rows((32, 32, 20, 10, 0.1, 0.9)))
    assert answer.boxes == (Box(x=44, y=22, width=40, height=20, label="crack", score=pytest.approx(0.9)),)
    assert (answer.task, answer.width, answer.height) == ("detect", 128, 64)


def test_scores_below_the_least_are_left_out_and_the_best_is_first() -> None:
    infer = rows((8, 8, 4, 4, 0.3, 0), (32, 32, 4, 4, 0, 0.8), (50, 50, 4, 4, 0.2, 0.1))
    assert [box.label for box in pipeline(ROWS).run(ask(encoded(noise(64, 64))), infer).boxes] == ["crack", "hole"]
    assert len(pipeline(ROWS).run(ask(encoded(noise(64, 64)), min_score=0.5), infer).boxes) == 1
    assert len(pipeline(ROWS).run(ask(encoded(noise(64, 64)), min_score=0.0), infer).boxes) == 3
    assert len(pipeline(ROWS).run(ask(encoded(noise(64, 64)), top_k=1), infer).boxes) == 1


def test_boxes_are_cut_at_the_pictures_edge_and_those_outside_are_left_out() -> None:
    infer = rows((0, 0, 20, 20, 0.9, 0), (-50, -50, 8, 8, 0.9, 0))
    assert [(b.x, b.y, b.width, b.height) for b in pipeline(ROWS).run(ask(encoded(noise(64, 64))), infer).boxes] == [
        (0, 0, 10, 10)
    ]


def test_region_alone_is_looked_at() -> None:
    pixels = noise(64, 64)
    infer = rows((32, 32, 16, 16, 0.9, 0))
    answer = pipeline(ROWS).run(ask(encoded(pixels), regions=(Box(x=16, y=32, width=32, height=32),)), infer)
    assert [(b.x, b.y, b.width, b.height) for b in answer.boxes] == [(28, 44, 8, 8)]


def test_overlaps_of_one_class_are_suppressed_as_the_plain_rule_says() -> None:
    random = np.random.default_rng(3)
    start = random.integers(0, 300, (60, 2))
    corners = np.concatenate((start, start + random.integers(5, 100, (60, 2))), axis=1).astype(np.float32)
    found = Found(corners, np.linspace(1, 0, 60, dtype=np.float32), random.integers(0, 2, 60))
    expected: list[int] = []
    for i in range(60):
        rivals = [j for j in expected if found.classes[j] == found.classes[i]]
        if all(iou(corners[i], corners[j]) <= 0.4 for j in rivals):
            expected.append(i)
    assert suppress(found, 0.4).tolist() == expected
    assert len(expected) < 60


@pytest.mark.parametrize(
    ("spec", "table"),
    [
        (Rows(), [[20, 30, 8, 6, 0.1, 0.7]]),
        (Rows(boxes="corners"), [[16, 27, 24, 33, 0.1, 0.7]]),
        (Rows(is_relative=True), [[20 / 64, 30 / 64, 8 / 64, 6 / 64, 0.1, 0.7]]),
        (Rows(objectness=True), [[20, 30, 8, 6, 0.875, 0.1, 0.8]]),
        (Rows(sigmoid=True), [[20, 30, 8, 6, -3, float(np.log(0.7 / 0.3))]]),
    ],
)
def test_all_kinds_of_rows_mean_the_same(spec: Rows, table: list[list[float]]) -> None:
    found = from_rows(np.array([table], np.float32), spec, 64, 64)
    assert np.allclose(found.corners, [[16, 27, 24, 33]])
    assert np.allclose(found.scores, [0.7])
    assert found.classes.tolist() == [1]


def test_transposed_rows() -> None:
    table = np.array([[[20, 30, 8, 6, 0.1, 0.7], [1, 2, 3, 4, 0.5, 0.6]]], np.float32)
    plain, turned = from_rows(table, Rows(), 64, 64), from_rows(table.transpose(0, 2, 1), Rows(transposed=True), 64, 64)
    assert np.array_equal(plain.corners, turned.corners)
    assert np.array_equal(plain.scores, turned.scores)


def test_peaks_become_boxes() -> None:
    heat = np.full((1, 2, 8, 8), -9, np.float32)
    heat[0, 1, 3, 5] = 0.0  # a peak …
    heat[0, 1, 3, 6] = -0.5  # … and its slope
    heat[0, 0, 0, 0] = 2.0
    sizes = np.full((1, 2, 8, 8), np.log(2), np.float32)
    sizes[0, 0, 3, 5] = np.log(3)
    offsets = np.full((1, 2, 8, 8), 0.25, np.float32)
    spec = Centers(heatmap="h", sizes="s", offsets="o", sigmoid=True, log_sizes=True)
    found = from_centers({"h": heat, "s": sizes, "o": offsets}, spec, 64, 64)
    best = np.flatnonzero(found.scores > 0.1)
    assert np.allclose(found.corners[best], [[-6, -6, 10, 10], [30, 18, 54, 34]])
    assert np.allclose(found.scores[best], [1 / (1 + np.exp(-2)), 0.5])
    assert found.classes[best].tolist() == [0, 1]


def test_peaks_without_offsets_are_in_the_middle_of_their_cells() -> None:
    heat = np.zeros((1, 1, 4, 4), np.float32)
    heat[0, 0, 1, 2] = 0.9
    found = from_centers({"h": heat, "s": np.ones((1, 2, 4, 4), np.float32)}, Centers(heatmap="h", sizes="s"), 32, 64)
    assert found.corners[0].tolist() == [16, 16, 24, 32]


def compares(kind: str) -> tuple[Pipeline, FakeInfer]:
    infer = rows((32, 32, 16, 16, 0.9, 0))
    inputs = [TensorSpec(name="a", datatype="UINT8", shape=(1, 2 if kind == "channels" else 1, 64, 64))]
    options: dict[str, Any] = {"reference": kind}
    if kind == "input":
        inputs.append(TensorSpec(name="b", datatype="UINT8", shape=GRAY))
        options["reference_input"] = "b"
    made = pipeline(Detect(image=IMAGE, labels=("hole", "crack"), decode=Rows(), **options), *inputs)
    return made, infer


@pytest.mark.parametrize("kind", ["channels", "input"])
def test_reference_reaches_the_model(kind: str) -> None:
    made, infer = compares(kind)
    board, golden = noise(64, 64, 1, seed=1), noise(64, 64, 1, seed=2)
    assert len(made.run(ask(encoded(board), reference=encoded(golden)), infer).boxes) == 1
    feeds = infer.calls[0][0]
    if kind == "channels":
        assert np.array_equal(feeds["a"], np.stack((board, golden))[np.newaxis])
    else:
        assert np.array_equal(feeds["a"][0, 0], board)
        assert np.array_equal(feeds["b"][0, 0], golden)


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        (b"", "reference: is missing"),
        (b"text", "reference: is neither a JPEG nor a PNG"),
        (encoded(noise(64, 65, 1)), "reference: has 65 x 64 pixels, the picture has 64 x 64"),
    ],
)
def test_bad_reference_is_refused(reference: bytes, problem: str) -> None:
    made, infer = compares("input")
    with pytest.raises(InvalidRequestError, match=problem):
        made.run(ask(encoded(noise(64, 64, 1)), reference=reference), infer)


def test_reference_that_nothing_is_done_with_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="reference: is not taken"):
        pipeline(ROWS).run(ask(encoded(noise(64, 64)), reference=b"x"), rows())


def test_nothing_found() -> None:
    assert pipeline(ROWS).run(ask(encoded(noise(64, 64))), rows()).boxes == ()


def test_model_that_gives_no_numbers_is_an_error() -> None:
    with pytest.raises(BackendStepError, match="not finite"):
        pipeline(ROWS).run(ask(encoded(noise(64, 64))), rows((float("inf"), 0, 1, 1, 0.5, 0)))


@pytest.mark.parametrize(
    ("spec", "shape", "problem"),
    [
        (ROWS, (1, -1, 7), r"pipeline.decode: makes FP32 \? x \? x 6, the model's y is FP32 1 x \? x 7"),
        (Detect(image=IMAGE, labels=("a",), decode=Rows(output="z")), (1, -1, 5), "pipeline.decode.output: 'z'"),
        (Detect(image=IMAGE, labels=("a",), decode=Centers(heatmap="y", sizes="s")), (1, 1, 8, 8), "decode.sizes"),
        (Detect(image=IMAGE, labels=("a",), decode=Rows(), reference="input"), (1, -1, 5), "reference_input"),
        (Detect(image=IMAGE, labels=("a",), decode=Rows(), reference="channels"), (1, -1, 5), "UINT8 . x 2 x 64 x 64"),
    ],
)
def test_manifest_that_does_not_fit_the_model_fails_the_load(
    spec: Detect, shape: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ModelFormatError, match=problem):
        pipeline(spec, shape=shape)
