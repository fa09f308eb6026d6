from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from edge_rt.catalog.pipelines import DetectText
from edge_rt.engine.images import check_region
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.engine.text_boxes import components, in_reading_order, smallest_rectangle, text_rectangles
from edge_rt.errors import BackendStepError, InvalidRequestError, ModelFormatError
from edge_rt.tensor_types import Box, MediaRequest, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer, encoded

SPEC = DetectText(max_side=64, side_step=16, color="gray", mean=(0.0,), std=(255.0,), unclip=0.0)
INPUT = TensorSpec(name="x", datatype="FP32", shape=(-1, 1, -1, -1))
OUTPUT = TensorSpec(name="y", datatype="FP32", shape=(-1, 1, -1, -1))


def pipeline(spec: DetectText = SPEC, output: TensorSpec = OUTPUT) -> Pipeline:
    made = make_pipeline(TensorLoad(pipeline=spec), (INPUT,), (output,))
    assert made is not None
    return made


def echo(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """A model that takes bright pixels for text."""
    return {"y": feeds["x"]}


def flooded(mask: NDArray[np.bool_]) -> set[frozenset[tuple[int, int]]]:
    """Find components by flooding, pixel by pixel."""
    left = {(int(y), int(x)) for y, x in np.argwhere(mask)}
    found = set()
    while left:
        queue, part = deque([left.pop()]), set()
        while queue:
            y, x = queue.popleft()
            part.add((y, x))
            for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
                if near in left:
                    left.remove(near)
                    queue.append(near)
        found.add(frozenset(part))
    return found


@pytest.mark.parametrize("density", [0.1, 0.3, 0.45, 0.7, 0.95])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (30, 50)])
def test_components_are_those_that_flooding_finds(density: float, shape: tuple[int, int]) -> None:
    mask = np.random.default_rng(0).random(shape) < density
    expected = sorted(
        (min(x for _, x in part), min(y for y, _ in part), max(x for _, x in part) + 1, max(y for y, _ in part) + 1)
        for part in flooded(mask)
    )
    found = [(*points.min(axis=0).tolist(), *points.max(axis=0).tolist()) for points in components(mask)]
    assert sorted(found) == expected


def test_spiral_is_one_component() -> None:
    mask = np.zeros((41, 41), bool)
    for i in range(0, 20, 4):  # rings …
        mask[i, i : 41 - i] = mask[40 - i, i : 41 - i] = mask[i : 41 - i, i] = mask[i : 41 - i, 40 - i] = True
    for i in range(0, 16, 4):  # … and a bridge between each two
        mask[20, i : i + 5] = True
    assert len(components(mask)) == len(flooded(mask)) == 1


@pytest.mark.parametrize("turn_deg", [-40, -12, 0, 5, 30, 44])
def test_smallest_rectangle_of_a_turned_one(turn_deg: float) -> None:
    width, height, angle = 80, 20, np.radians(turn_deg)
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 60), np.linspace(-1, 1, 30)), axis=-1).reshape(-1, 2)
    points = grid * [width / 2, height / 2]
    turned = points @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) + [200, 100]
    x, y, w, h, found_deg = smallest_rectangle((turned * 1000).astype(np.intp))
    assert np.allclose([x / 1000, y / 1000, w / 1000, h / 1000, found_deg], [200, 100, 80, 20, turn_deg], atol=0.1)


def test_small_tilt_is_none() -> None:
    assert smallest_rectangle(np.array([[0, 0], [100, 2], [100, 22], [0, 20]])) == (50, 11, 100, 22, 0)


def test_rectangles_grow_by_their_area_over_their_perimeter() -> None:
    likely = np.zeros((64, 64), np.float32)
    likely[20:30, 10:50] = 0.8
    spec = DetectText(threshold=0.3, min_score=0.6, unclip=2.0)
    rectangles, scores = text_rectangles(likely, spec)
    grow = 2 * (2.0 * 10 * 40 / (2 * (10 + 40)))
    assert np.allclose(rectangles, [[30, 25, 40 + grow, 10 + grow, 0]])
    assert np.allclose(scores, [0.8])


def test_faint_and_tiny_spots_are_left_out() -> None:
    likely = np.zeros((64, 64), np.float32)
    likely[4:10, 4:30] = 0.4
    likely[20:22, 4:30] = 0.9
    likely[40:50, 4:30] = 0.9
    assert len(text_rectangles(likely, DetectText())[0]) == 1
    assert len(text_rectangles(likely, DetectText(), 0.2)[0]) == 2
    assert len(text_rectangles(likely, DetectText(min_side=2.0))[0]) == 2
    assert len(text_rectangles(np.zeros((8, 8), np.float32), DetectText())[0]) == 0


def test_large_picture_is_scaled_and_its_boxes_come_back() -> None:
    pixels = np.zeros((100, 200), np.uint8)
    pixels[20:40, 40:160] = 255
    infer = FakeInfer(echo)
    answer = pipeline().run(MediaRequest(id="r", model="m", data=encoded(pixels)), infer)
    assert infer.calls[0][0]["x"].shape == (1, 1, 32, 64)
    (box,) = answer.boxes
    assert np.allclose([box.x, box.y, box.width, box.height], [40, 20, 120, 20], atol=3.5)
    assert (answer.task, answer.width, answer.height) == ("detect-text", 200, 100)


def test_small_picture_is_filled_up_and_not_enlarged() -> None:
    pixels = np.zeros((20, 30), np.uint8)
    pixels[5:10, 5:25] = 255
    infer = FakeInfer(echo)
    answer = pipeline().run(MediaRequest(id="r", model="m", data=encoded(pixels)), infer)
    assert infer.calls[0][0]["x"].shape == (1, 1, 32, 32)
    assert [(b.x, b.y, b.width, b.height) for b in answer.boxes] == [(5, 5, 20, 5)]


def test_tilted_line_is_one_turned_box() -> None:
    image = Image.new("L", (64, 64))
    ImageDraw.Draw(image).line([(8, 20), (56, 40)], fill=255, width=8)
    (box,) = pipeline().run(MediaRequest(id="r", model="m", data=encoded(image)), FakeInfer(echo)).boxes
    assert box.turn_deg == pytest.approx(np.degrees(np.arctan2(20, 48)), abs=2)
    assert (box.x + box.width / 2, box.y + box.height / 2) == (pytest.approx(32, abs=1.5), pytest.approx(30, abs=1.5))
    assert box.width == pytest.approx(np.hypot(48, 20), abs=4)


def test_boxes_are_in_reading_order() -> None:
    spots = {"d": (5, 60), "b": (80, 12), "a": (5, 10), "c": (40, 30)}
    boxes = [Box(x=x, y=y, width=20, height=12, label=name) for name, (x, y) in spots.items()]
    assert [box.label for box in in_reading_order(boxes)] == ["a", "b", "c", "d"]


def test_best_boxes_are_kept_and_stand_in_reading_order() -> None:
    pixels = np.zeros((64, 64), np.uint8)
    pixels[4:12, 4:40], pixels[24:32, 4:40], pixels[44:52, 4:40] = 200, 180, 255
    answer = pipeline().run(MediaRequest(id="r", model="m", data=encoded(pixels), top_k=2), FakeInfer(echo))
    assert [box.y for box in answer.boxes] == [4, 44]


def test_noise_is_no_text() -> None:
    likely = (np.random.default_rng(0).random((480, 480)) > 0.65).astype(np.float32)
    assert len(text_rectangles(likely, DetectText(min_score=0.9, min_side=6.0))[0]) == 0


def test_what_is_found_beside_the_picture_is_left_out() -> None:
    beside = np.zeros((1, 1, 32, 32), np.float32)
    beside[..., 21:] = 1
    pixels = np.zeros((32, 20), np.uint8)
    infer = FakeInfer(lambda _: {"y": beside})
    assert pipeline().run(MediaRequest(id="r", model="m", data=encoded(pixels)), infer).boxes == ()


def test_every_box_can_be_read() -> None:
    """Whatever a map holds, its boxes are regions that the reader takes."""
    random = np.random.default_rng(0)
    n_turned = 0
    for i in range(60):
        image = Image.new("L", (64, 48))
        ends = [tuple(point) for point in random.integers(-10, 74, (2, 2)).tolist()]
        ImageDraw.Draw(image).line(ends, fill=255, width=int(random.integers(2, 40)))
        spec = DetectText(max_side=64, side_step=16, color="gray", mean=(0.0,), std=(255.0,), unclip=float(i % 4))
        for box in pipeline(spec).run(MediaRequest(id="r", model="m", data=encoded(image)), FakeInfer(echo)).boxes:
            check_region(box, image)
            n_turned += bool(box.turn_deg)
    assert n_turned > 5


def test_turned_region_is_refused() -> None:
    request = MediaRequest(
        id="r",
        model="m",
        data=encoded(np.zeros((20, 30), np.uint8)),
        regions=(Box(x=5, y=5, width=9, height=9, turn_deg=5),),
    )
    with pytest.raises(InvalidRequestError, match="must be upright"):
        pipeline().run(request, FakeInfer(echo))


def test_map_of_another_size_is_an_error() -> None:
    infer = FakeInfer(lambda feeds: {"y": feeds["x"][:, :, ::2]})
    with pytest.raises(BackendStepError, match="y is no map"):
        pipeline().run(MediaRequest(id="r", model="m", data=encoded(np.zeros((20, 30), np.uint8))), infer)


def test_model_that_gives_no_map_fails_the_load() -> None:
    with pytest.raises(ModelFormatError, match=r"pipeline.output: makes FP32 \? x 1 x \? x \?, the model's y"):
        pipeline(output=TensorSpec(name="y", datatype="FP32", shape=(-1, 10)))


@pytest.mark.parametrize(("width", "height"), [(40, 30), (200, 50), (50, 200)])
def test_model_of_one_size_gets_every_picture_filled_up_to_it(width: int, height: int) -> None:
    """As NPUs have them; boxes come back in the picture's own pixels."""
    picture = Image.new("L", (width, height))
    ImageDraw.Draw(picture).rectangle((width // 4, height // 4, width // 2, height // 2), fill=255)
    fixed = TensorSpec(name="x", datatype="FP32", shape=(1, 1, 48, 80))
    made = make_pipeline(
        TensorLoad(pipeline=SPEC), (fixed,), (TensorSpec(name="y", datatype="FP32", shape=(1, 1, 48, 80)),)
    )
    assert made is not None
    infer = FakeInfer(echo)
    (box,) = made.run(MediaRequest(id="r", model="m", data=encoded(picture)), infer).boxes
    assert infer.calls[0][0]["x"].shape == (1, 1, 48, 80)
    assert (box.x, box.y) == (pytest.approx(width / 4, abs=3), pytest.approx(height / 4, abs=3))
    assert (box.width, box.height) == (pytest.approx(width / 4, abs=5), pytest.approx(height / 4, abs=5))
