"""The early exit as files: the whole one computes the first part's answer or the rest's, and says which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from tools.calibrate_cascade import confidence  # noqa: E402
from tools.pcb.boards import KINDS, Board  # noqa: E402
from tools.pcb.drawn import draw_boards  # noqa: E402
from tools.pcb.exit_graph import (  # noqa: E402
    CLASSES,
    CROP,
    crops_of,
    first_graph,
    named,
    part_of,
    rest_graph,
    whole_graph,
)

N = 12
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def weights() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.normal(0, 1.5 / np.sqrt(c.n_in * c.kernel**2), (c.n_out, c.n_in, c.kernel, c.kernel)).astype(
                np.float32
            ),
            rng.normal(0, 0.2, c.n_out).astype(np.float32),
        )
        for name, c in named().items()
    }


@pytest.fixture(scope="module")
def feeds() -> dict[str, np.ndarray]:
    crops, _ = crops_of(draw_boards(2, 3, side=320), 0)
    return {"image": crops[:N, :1], "golden": crops[:N, 1:]}


def run(model: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_each_row_stops_where_it_is_sure(weights: Any, feeds: dict[str, np.ndarray]) -> None:
    first = run(first_graph(part_of(weights, "first")), feeds)
    rest = run(rest_graph(part_of(weights, "rest")), {"features": first["features"]})
    assert not np.allclose(first["logits"], rest["logits"], atol=0.1)
    sure = confidence(first["logits"].astype(float), TEMPERATURE)
    threshold = float(np.median(sure))
    whole = whole_graph(weights, TEMPERATURE, threshold)
    for row in range(N):
        answer = run(whole, {name: picture[row : row + 1] for name, picture in feeds.items()})
        assert bool(answer["stopped"]) == (sure[row] >= threshold)
        wanted = first if sure[row] >= threshold else rest
        assert answer["logits"][0] == pytest.approx(wanted["logits"][row], abs=1e-4)
    together = run(whole, feeds)
    assert not together["stopped"]
    assert together["logits"] == pytest.approx(rest["logits"], abs=1e-4)


@pytest.mark.parametrize(("threshold", "stopped"), [(0.0, True), (2.0, False)])
def test_the_ends_of_the_threshold(weights: Any, feeds: dict[str, np.ndarray], threshold: float, stopped: bool) -> None:
    assert bool(run(whole_graph(weights, 1.0, threshold), feeds)["stopped"]) == stopped


def test_crops_show_their_marks_in_the_middle() -> None:
    picture = np.full((200, 200), 255, np.uint8)
    picture[80:120, 60:80] = 0
    picture[0:100, 150:200] = 0
    marks = np.array([(60, 80, 80, 120, 2), (100, 0, 200, 100, 1)], np.float32)
    board = Board(name="b", picture=picture, golden=255 - picture, marks=marks)
    crops, label = crops_of([board], 0)
    assert crops.shape == (3, 2, CROP, CROP)
    assert label.tolist() == [2, 1, len(KINDS)]
    small = crops[0, 0]  # 50 pixels a side, for the mark's 40, fitted into 48
    rows, columns = np.nonzero(small < 128)
    assert (columns.min() + columns.max()) / 2 == pytest.approx(CROP / 2, abs=1.5)
    assert (rows.min() + rows.max()) / 2 == pytest.approx(CROP / 2, abs=1.5)
    assert np.array_equal(crops[0, 1] < 128, small >= 128)
    assert crops[1, 0].mean() < 255  # 125 pixels a side: shrunk, not cut
    assert len(CLASSES) == 7


def test_places_without_a_mark_show_none() -> None:
    for board in draw_boards(2, 8, side=320):
        bare = Board(name="b", picture=board.golden, golden=board.golden, marks=board.marks)
        crops, label = crops_of([bare], 1)
        assert (label == len(KINDS)).sum() == round(len(board.marks) / 2)
        changed, _ = crops_of([board], 1)
        for plain, with_flaws in zip(crops[label == len(KINDS)], changed[label == len(KINDS)], strict=True):
            # edges fray by a pixel or two; a flaw would be a patch that survives shrinking
            both = (plain[0] < 128) != (with_flaws[0] < 128)
            patch = both[:-3, :-3] & both[3:, 3:] & both[3:, :-3] & both[:-3, 3:]
            assert patch.sum() < 12
