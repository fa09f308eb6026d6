from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_rt.catalog.pipelines import Classify, ImageInput
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.errors import BackendStepError, InvalidRequestError, ModelFormatError
from edge_rt.tensor_types import Box, MediaRequest, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer, encoded, noise

LABELS = ("cat", "dog", "part")
INPUT = TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 8, 8))
OUTPUT = TensorSpec(name="y", datatype="FP32", shape=(-1, 3))
SPEC = Classify(image=ImageInput(width=8, height=8), labels=LABELS)


def pipeline(
    spec: Classify = SPEC, *, takes: TensorSpec = INPUT, gives: TensorSpec = OUTPUT, **load: object
) -> Pipeline:
    made = make_pipeline(TensorLoad(pipeline=spec, **load), (takes,), (gives,))  # type: ignore[arg-type]
    assert made is not None
    return made


def request(data: bytes, **options: object) -> MediaRequest:
    return MediaRequest(id="r", model="m", data=data, **options)  # type: ignore[arg-type]


def scores(*values: float) -> FakeInfer:
    return FakeInfer(lambda _: {"y": np.array([values], np.float32)})


def test_labels_are_the_softmax_best_first() -> None:
    answer = pipeline().run(request(encoded(noise(16, 20))), scores(1.0, 3.0, 2.0))
    expected = np.exp([3.0, 2.0, 1.0]) / np.exp([1.0, 2.0, 3.0]).sum()
    assert [(label.index, label.label) for label in answer.labels] == [(1, "dog"), (2, "part"), (0, "cat")]
    assert np.allclose([label.score for label in answer.labels], expected)
    assert (answer.task, answer.width, answer.height) == ("classify", 20, 16)
    assert answer.timings is not None
    assert answer.timings.compute_s == 0.25


def test_picture_reaches_the_model_in_its_layout() -> None:
    pixels, infer = noise(8, 8), scores(0, 0, 0)
    pipeline().run(request(encoded(pixels)), infer)
    assert np.array_equal(infer.calls[0][0]["x"], pixels.transpose(2, 0, 1)[np.newaxis].astype(np.float32))


def test_top_k_and_min_score_of_the_request_count() -> None:
    data = encoded(noise(8, 8))
    assert len(pipeline().run(request(data, top_k=1), scores(1, 3, 2)).labels) == 1
    assert [label.label for label in pipeline().run(request(data, min_score=0.5), scores(1, 3, 2)).labels] == ["dog"]


def test_equal_scores_are_in_the_order_of_their_labels() -> None:
    answer = pipeline().run(request(encoded(noise(8, 8))), scores(1, 1, 1))
    assert [label.index for label in answer.labels] == [0, 1, 2]


def test_each_region_gets_its_label() -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    infer = FakeInfer(lambda feeds: {"y": np.array([[5, 0, 0] if feeds["x"].mean() < 100 else [0, 5, 0]], np.float32)})
    regions = (Box(x=8, y=0, width=8, height=8), Box(x=0, y=0, width=8, height=8))
    answer = pipeline().run(request(encoded(pixels), regions=regions), infer)
    assert [(box.x, box.label) for box in answer.boxes] == [(8, "dog"), (0, "cat")]
    assert answer.labels[0].label == "dog"


def test_labels_come_from_the_asset(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("cat\ndog\r\npart\n")
    spec = Classify(image=SPEC.image, labels="names")
    answer = pipeline(spec, assets={"names": str(path)}).run(request(encoded(noise(8, 8))), scores(0, 9, 0))
    assert answer.labels[0].label == "dog"


@pytest.mark.parametrize(
    ("spec", "input_shape", "output_shape", "message"),
    [
        (SPEC, (-1, 3, 8, 9), (-1, 3), "pipeline.image: makes FP32 . x 3 x 8 x 8, the model's x is FP32 . x 3 x 8 x 9"),
        (SPEC, (-1, 3, 8, 8), (-1, 4), "pipeline.labels: has 3 labels"),
        (
            Classify(image=SPEC.image, labels="none"),
            (-1, 3, 8, 8),
            (-1, 3),
            "'none' is not among the manifest's assets",
        ),
        (Classify(image=ImageInput(width=8, height=8, input="z"), labels=LABELS), (-1, 3, 8, 8), (-1, 3), "'z' is not"),
        (Classify(image=ImageInput(width=8, height=8, std=(0.0,)), labels=LABELS), (-1, 3, 8, 8), (-1, 3), "not be 0"),
    ],
)
def test_manifest_that_does_not_fit_the_model_fails_the_load(
    spec: Classify, input_shape: tuple[int, ...], output_shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        pipeline(
            spec,
            takes=TensorSpec(name="x", datatype="FP32", shape=input_shape),
            gives=TensorSpec(name="y", datatype="FP32", shape=output_shape),
        )


def test_model_that_gives_no_numbers_is_an_error() -> None:
    with pytest.raises(BackendStepError, match="not finite"):
        pipeline().run(request(encoded(noise(8, 8))), scores(float("nan"), 0, 0))


def test_picture_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="data: has 9 x 8 pixels, the limit is 70"):
        pipeline(max_pixels=70).run(request(encoded(Image.new("RGB", (9, 8)))), scores(0, 0, 0))


def test_no_pipeline_is_none() -> None:
    assert make_pipeline(TensorLoad(), (INPUT,), (OUTPUT,)) is None


@pytest.mark.parametrize(("stopped", "stage"), [(True, "early"), (False, "full")])
def test_model_with_an_early_exit_says_whether_it_stopped(stopped: bool, stage: str) -> None:
    spec = Classify(image=SPEC.image, labels=LABELS, output="y", exit_output="stopped")
    exit_ = TensorSpec(name="stopped", datatype="BOOL", shape=())
    made = make_pipeline(TensorLoad(pipeline=spec), (INPUT,), (OUTPUT, exit_))
    assert made is not None
    infer = FakeInfer(lambda _: {"y": np.array([[0, 9, 0]], np.float32), "stopped": np.array(stopped)})
    answer = made.run(request(encoded(noise(8, 8))), infer)
    assert (answer.stage, answer.labels[0].label) == (stage, "dog")
    with pytest.raises(ModelFormatError, match="stopped must be BOOL"):
        make_pipeline(
            TensorLoad(pipeline=spec), (INPUT,), (OUTPUT, TensorSpec(name="stopped", datatype="FP32", shape=()))
        )


def test_two_pictures_are_classified_together() -> None:
    spec = Classify(
        image=ImageInput(width=8, height=8, input="x"), labels=LABELS, reference="input", reference_input="z"
    )
    made = make_pipeline(
        TensorLoad(pipeline=spec), (INPUT, TensorSpec(name="z", datatype="FP32", shape=(-1, 3, 8, 8))), (OUTPUT,)
    )
    assert made is not None
    infer, seen, golden = scores(0, 9, 0), noise(8, 8, seed=1), noise(8, 8, seed=2)
    made.run(request(encoded(seen), reference=encoded(golden)), infer)
    feeds = infer.calls[0][0]
    assert [np.array_equal(feeds[name][0], p.transpose(2, 0, 1)) for name, p in (("x", seen), ("z", golden))] == [
        True,
        True,
    ]
