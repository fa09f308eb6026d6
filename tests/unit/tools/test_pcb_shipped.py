"""The detector that comes with edge_rt finds flaws on boards that it was not trained on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnxruntime")

from edge_rt import config
from edge_rt.library import load_tensors
from tools.pcb.average_precision import mean_average_precision
from tools.pcb.boards import KINDS, Picture
from tools.pcb.drawn import draw_boards
from tools.pcb.exit_graph import CLASSES, crops_of


def png(picture: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_it_finds_drawn_flaws(tmp_path: Path, form: str) -> None:
    settings = config.load(flags={"catalog.store_dir": str(tmp_path / "store")}, environ={})
    boards = draw_boards(6, 77_777)
    found = []
    with load_tensors(f"pcb-defect:{form}", settings=settings, pull=True) as model:
        for board in boards:
            answer = model.look(png(board.picture), reference=png(board.golden), min_score=0.05)
            rows = [(b.x, b.y, b.x + b.width, b.y + b.height, b.score, KINDS.index(b.label)) for b in answer.boxes]
            found.append(np.array(rows, np.float32).reshape(-1, 6))
    assert mean_average_precision(found, [board.marks for board in boards]).mean > 0.75


def test_the_classifier_stops_early_where_it_is_sure(tmp_path: Path) -> None:
    settings = config.load(flags={"catalog.store_dir": str(tmp_path / "store")}, environ={})
    crops, labels = crops_of(draw_boards(10, 77_777), 0)
    right: dict[str, list[bool]] = {"early": [], "full": []}
    with load_tensors("pcb-kind", settings=settings, pull=True) as model:
        for (crop, golden), label in zip(crops, labels, strict=True):
            answer = model.look(png(crop), reference=png(golden), top_k=1)
            right[answer.stage].append(answer.labels[0].label == CLASSES[label])
    assert 0.35 < len(right["early"]) / len(labels) < 0.7
    assert (sum(right["early"]) + sum(right["full"])) / len(labels) > 0.85
    assert np.mean(right["early"]) > np.mean(right["full"])
