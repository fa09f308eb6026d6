from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_rt.catalog.pipelines import ReadText
from edge_rt.engine.images import straightened
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.engine.read_text import ctc_text
from edge_rt.errors import BackendStepError, ModelFormatError
from edge_rt.tensor_types import Box, MediaRequest, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer, encoded, noise

CHARACTERS = ("a", "b", "c")
SPEC = ReadText(
    characters="c", height=8, width_step=16, max_width=64, color="gray", mean=(0.0,), std=(1.0,), max_rows=2
)


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return make(tmp_path)


def make(tmp_path: Path, spec: ReadText = SPEC, n_classes: int = 5) -> Pipeline:
    path = tmp_path / "characters.txt"
    path.write_text("\n".join(CHARACTERS) + "\n")
    made = make_pipeline(
        TensorLoad(pipeline=spec, assets={"c": str(path)}),
        (TensorSpec(name="x", datatype="FP32", shape=(-1, 1, 8, -1)),),
        (TensorSpec(name="y", datatype="FP32", shape=(-1, -1, n_classes)),),
    )
    assert made is not None
    return made


def by_brightness(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """A model that reads each line's first pixel: its brightness is the class of the only step."""
    classes = feeds["x"][:, 0, 4, 2].round().astype(int)
    return {"y": np.eye(5, dtype=np.float32)[classes][:, np.newaxis]}


def steps(text: str, scores: float = 1.0) -> NDArray[np.float32]:
    """Write steps as CTC gives them, _ for the blank."""
    return np.eye(5, dtype=np.float32)[["_abc ".index(mark) for mark in text]] * np.float32(scores)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("aab", "ab"),
        ("a_ab", "aab"),
        ("____", ""),
        ("_a__b b_", "ab b"),
        ("abc", "abc"),
        ("a", "a"),
        ("bbbb__bbbb", "bb"),
    ],
)
def test_repeats_are_one_and_blanks_are_none(marks: str, expected: str) -> None:
    text, score = ctc_text(steps(marks, 0.5), (*CHARACTERS, " "))
    assert text == expected
    assert score == (0.5 if expected else 0.0)


def test_lines_keep_their_order_whatever_their_widths(pipeline: Pipeline) -> None:
    pixels = np.zeros((40, 64), np.uint8)
    regions, expected = [], []
    for i, (width, value) in enumerate([(60, 1), (8, 2), (60, 3), (9, 1), (30, 2)]):
        pixels[8 * i : 8 * i + 8] = value
        regions.append(Box(x=0, y=8 * i, width=width, height=8))
        expected.append("abc"[value - 1])
    infer = FakeInfer(by_brightness)
    answer = pipeline.run(MediaRequest(id="r", model="m", data=encoded(pixels), regions=tuple(regions)), infer)
    assert [text.label for text in answer.texts] == expected
    assert [text.index for text in answer.texts] == [0, 1, 2, 3, 4]
    assert [call[0]["x"].shape for call in infer.calls] == [(2, 1, 8, 16), (1, 1, 8, 32), (2, 1, 8, 64)]


def test_short_line_is_filled_up_with_zeros_and_a_long_one_squeezed(pipeline: Pipeline) -> None:
    infer = FakeInfer(by_brightness)
    pipeline.run(MediaRequest(id="r", model="m", data=encoded(np.full((8, 10), 1, np.uint8))), infer)
    assert infer.calls[0][0]["x"][0, 0, 0].tolist() == [1.0] * 10 + [0.0] * 6
    pipeline.run(MediaRequest(id="r", model="m", data=encoded(np.full((8, 200), 1, np.uint8))), infer)
    assert infer.calls[1][0]["x"].shape == (1, 1, 8, 64)
    assert (infer.calls[1][0]["x"] == 1).all()


def test_what_is_read_badly_is_empty(pipeline: Pipeline) -> None:
    infer = FakeInfer(lambda _: {"y": steps("ab", 0.4)[np.newaxis]})
    data = encoded(np.zeros((8, 10), np.uint8))
    (text,) = pipeline.run(MediaRequest(id="r", model="m", data=data), infer).texts
    assert (text.label, text.score) == ("", pytest.approx(0.4))
    (text,) = pipeline.run(MediaRequest(id="r", model="m", data=data, min_score=0.3), infer).texts
    assert text.label == "ab"


@pytest.mark.parametrize("is_line", [True, False])
def test_standing_region_is_read_both_ways_and_the_surer_counts(pipeline: Pipeline, is_line: bool) -> None:
    pixels = np.zeros((40, 8), np.uint8)
    pixels[20:] = 3  # the lower half: a line that runs up the picture begins there

    def read(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        (strip,) = feeds["x"][:, 0]
        if strip.shape[1] == 16:  # upright it is narrow
            return {"y": steps("a", 0.7)[np.newaxis]}
        assert (strip[4, 2], strip[4, 30]) == (3, 0)
        return {"y": steps("c", 0.9 if is_line else 0.6)[np.newaxis]}

    infer = FakeInfer(read)
    (text,) = pipeline.run(MediaRequest(id="r", model="m", data=encoded(pixels)), infer).texts
    assert text.label == ("c" if is_line else "a")
    assert [call[0]["x"].shape for call in infer.calls] == [(1, 1, 8, 16), (1, 1, 8, 48)]


def test_turned_region_is_straightened() -> None:
    pixels = noise(60, 60)
    image = Image.fromarray(pixels)
    part = np.asarray(straightened(image, Box(x=10, y=20, width=30, height=10, turn_deg=90)))
    # turned about its middle (25, 25) it covers columns 20..30 and rows 10..40, and begins at the top right
    assert np.abs(part.astype(int) - np.rot90(pixels[10:40, 20:30])).max() <= 1


def test_characters_that_the_model_does_not_have_fail_the_load(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="has 4 with its space, the model tells 6 apart"):
        make(tmp_path, n_classes=7)


def test_answer_of_another_size_is_an_error(pipeline: Pipeline) -> None:
    with pytest.raises(BackendStepError, match=r"y is \(1, 3, 4\), not \(1, steps, 5\)"):
        pipeline.run(
            MediaRequest(id="r", model="m", data=encoded(np.zeros((8, 10), np.uint8))),
            FakeInfer(lambda _: {"y": np.zeros((1, 3, 4), np.float32)}),
        )
