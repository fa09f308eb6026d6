"""How forms of a model are compared: each judge's figures for answers whose differences are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")

from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest
from edge_rt.tensor_types import NodePlacement
from tools.npu_accuracy import Report, elsewhere, run_all, table
from tools.npu_inputs import halves, judge_boards, paragraphs, plates, text_feed
from tools.npu_judges import Boards, Figure, Plates, cosine_figures


def figures(found: list[Figure]) -> dict[tuple[str, str], float]:
    return {(figure.measure, figure.of): figure.value for figure in found}


def test_cosines_are_of_whole_answers() -> None:
    a, b = {"y": np.array([[3.0, 0.0]]), "z": np.array([4.0])}, {"y": np.array([[3.0, 4.0]]), "z": np.array([0.0])}
    found = figures(cosine_figures({"npu": [a, a], "cpu": [a, b]}, "data"))
    assert found["cosine, mean", "npu to cpu"] == pytest.approx((1 + 9 / 25) / 2)
    assert found["cosine, least", "npu to cpu"] == pytest.approx(9 / 25)
    assert ("cosine, mean", "npu to float") not in found


def board_answer(marks: NDArray[Any], *, wide: float = 0.0) -> dict[str, NDArray[Any]]:
    """A detector's outputs that box the marks exactly, or as much wider."""
    heat = np.full((1, 6, 80, 80), -20.0, np.float32)
    offset, size = np.zeros((1, 2, 80, 80), np.float32), np.zeros((1, 2, 80, 80), np.float32)
    for x1, y1, x2, y2, kind in marks:
        column, row = int((x1 + x2) / 16), int((y1 + y2) / 16)
        heat[0, int(kind), row, column] = 5
        offset[0, :, row, column] = ((x1 + x2) / 16 - column, (y1 + y2) / 16 - row)
        size[0, :, row, column] = np.log(((x2 - x1 + wide) / 8, (y2 - y1 + wide) / 8))
    return {"heat": heat, "offset": offset, "size": size}


def test_boards_are_judged_by_their_marks() -> None:
    boards = judge_boards(2)
    judge = Boards(boards, "drawn boards")
    assert judge.feeds[0]["image"].shape == (1, 1, 640, 640)
    right = [board_answer(board.marks) for board in boards]
    wrong = [board_answer(board.marks, wide=200) for board in boards]
    found = figures(judge.figures({"npu": wrong, "cpu": right, "float": right}))
    assert found["mAP@0.33", "float"] > 0.9  # two flaws whose middles share a cell are one
    assert found["mAP@0.33", "npu"] < 0.1
    assert found["cosine, mean", "cpu to float"] == pytest.approx(1)


def test_plates_are_judged_by_where_their_lines_stand() -> None:
    manifest = load_manifest(SHIPPED_DIR / "pp-ocrv4-det.toml")
    judge = Plates(manifest, 3)
    right, none = [], []
    for _, boxes in plates(3):
        likely = np.zeros((1, 1, 480, 640), np.float32)
        for x1, y1, x2, y2 in boxes:
            inset = (y2 - y1) // 4  # the model marks the core of a line
            likely[0, 0, y1 + inset : y2 - inset, x1 + inset : x2 - inset] = 0.9
        right.append({"y": likely})
        none.append({"y": np.zeros_like(likely)})
    found = figures(judge.figures({"npu": none, "cpu": right}))
    assert found["lines found", "cpu"] > 0.9
    assert found["boxes that are lines", "cpu"] > 0.9
    assert found["lines found", "npu"] == 0


def test_texts_for_calibrating_and_for_judging_are_others() -> None:
    first, second = paragraphs()
    assert not set(first) & set(second)
    pairs = halves(second)
    # Figures in the documentation are of these.
    assert (len(first), len(second), len(pairs)) == (189, 149, 139)
    assert all(a + b in second for a, b in pairs)
    feed = text_feed([5, 6, 7], 8)
    assert feed["input_ids"].tolist() == [[5, 6, 7, 0, 0, 0, 0, 0]]
    assert int(feed["attention_mask"].sum()) == 3


class Doubling:
    """A session that doubles x."""

    def run(self, feeds: Any, outputs: Any = ()) -> dict[str, NDArray[Any]]:
        return {"y": feeds["x"] * 2}


def test_every_input_is_run_and_told() -> None:
    feeds = [{"x": np.full((1, 2), float(i))} for i in range(3)]
    answers, run_s = run_all(Doubling(), feeds)  # type: ignore[arg-type]
    assert [float(answer["y"][0, 0]) for answer in answers] == [0, 2, 4]
    assert run_s >= 0
    placement = (
        NodePlacement(provider="QNN", n_nodes=9),
        NodePlacement(provider="CPU", n_nodes=1, reason="it does not take them"),
    )
    assert elsewhere(placement) == 1
    report = Report(
        model="m:npu-w8a8",
        backend="npu_qnn",
        device="htp",
        evidence="simulator",
        load_s=1,
        run_s=run_s,
        n_nodes=10,
        n_nodes_elsewhere=elsewhere(placement),
        figures=(Figure(measure="top-1", of="npu", value=0.5, n=2, data="pictures"),),
    )
    text = table(report)
    assert "npu_qnn:htp (simulator): 9 of 10 nodes" in text
    assert "0.5000" in text
