"""Taking trained files into the store: the manifest is one, and the pipeline that it asks for is there."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edge_rt import config  # noqa: E402
from edge_rt.catalog.chains import Cascade  # noqa: E402
from edge_rt.catalog.pipelines import Centers, Detect  # noqa: E402
from edge_rt.catalog.store import Store  # noqa: E402
from edge_rt.library import load_tensors  # noqa: E402
from tools.calibrate_cascade import Share  # noqa: E402
from tools.pcb.__main__ import main, measure  # noqa: E402
from tools.pcb.boards import KINDS  # noqa: E402
from tools.pcb.cascade import BoardsOutcome  # noqa: E402
from tools.pcb.detect import MIN_SCORE, detect  # noqa: E402
from tools.pcb.drawn import draw_boards  # noqa: E402
from tools.pcb.graph import detector_graph  # noqa: E402
from tools.pcb.register import (  # noqa: E402
    CASCADE,
    RESULTS,
    Origin,
    Result,
    cascade_text,
    register,
    register_cascade,
)
from tools.pcb.shape import SHAPES  # noqa: E402

ORIGIN = Origin(license_id="Apache-2.0", note="made up")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = {
        name: (
            rng.normal(0, 0.1, (c.n_out, c.n_in, c.kernel, c.kernel)).astype(np.float32),
            np.zeros(c.n_out, np.float32),
        )
        for name, c in SHAPES["tiny"].named().items()
    }
    folder = tmp_path / "trained"
    folder.mkdir()
    onnx.save(detector_graph(SHAPES["tiny"], weights), folder / "pcb-defect.fp32.onnx")
    return folder


def test_the_store_has_the_model_afterwards(folder: Path, tmp_path: Path) -> None:
    catalog = config.Catalog(store_dir=str(tmp_path / "store"))
    board = draw_boards(1, 1)[0]
    result = measure(folder / "pcb-defect.fp32.onnx", [board], "drawn boards")
    (folder / RESULTS).write_bytes(msgspec.json.encode([result]))
    (path,) = register(folder, "pcb-defect", ORIGIN, catalog)
    assert path.read_bytes() == (folder / "pcb-defect.fp32.onnx").read_bytes()

    store = Store.open(catalog)
    manifest = store.get("pcb-defect")
    (variant,) = manifest.variants
    assert store.path(manifest, variant) == path
    assert variant.accuracy is not None
    assert variant.accuracy.value == pytest.approx(result.mean, abs=1e-4)
    assert manifest.license == "Apache-2.0"
    assert manifest.n_params == SHAPES["tiny"].n_params
    assert isinstance(manifest.pipeline, Detect)
    assert manifest.pipeline.labels == KINDS
    assert isinstance(manifest.pipeline.decode, Centers)


def test_edge_rt_finds_the_boxes_that_are_measured(folder: Path, tmp_path: Path) -> None:
    settings = config.load(flags={"catalog.store_dir": str(tmp_path / "store")}, environ={})
    register(folder, "pcb-defect", ORIGIN, settings.config.catalog)
    board = draw_boards(1, 2)[0]
    (measured,) = detect(folder / "pcb-defect.fp32.onnx", [board]).found
    files = [io.BytesIO() for _ in range(2)]
    for file, picture in zip(files, (board.picture, board.golden), strict=True):
        Image.fromarray(picture).save(file, "PNG")
    with load_tensors("pcb-defect", settings=settings) as model:
        answer = model.look(files[0].getvalue(), reference=files[1].getvalue(), min_score=MIN_SCORE)
    assert len(measured) > 20
    for box, (x1, y1, x2, y2, score, kind) in zip(answer.boxes[:20], measured, strict=False):
        left, top, right, bottom = np.clip((x1, y1, x2, y2), 0, 640)  # a box ends where the picture does
        assert (box.label, box.score) == (KINDS[int(kind)], pytest.approx(score, abs=1e-5))
        assert (box.x, box.y) == pytest.approx((left, top), abs=1e-3)
        assert (box.x + box.width, box.y + box.height) == pytest.approx((right, bottom), abs=1e-3)


def test_registering_again_replaces(folder: Path, tmp_path: Path) -> None:
    catalog = config.Catalog(store_dir=str(tmp_path / "store"))
    register(folder, "pcb-defect", ORIGIN, catalog)
    model = onnx.load(folder / "pcb-defect.fp32.onnx")
    model.doc_string = "another"
    onnx.save(model, folder / "pcb-defect.fp32.onnx")
    (path,) = register(folder, "pcb-defect", ORIGIN, catalog)
    assert onnx.load(path).doc_string == "another"


def test_evaluate_leaves_its_figures_beside_the_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--drawn", "3", str(folder)]) == 0
    (result,) = msgspec.json.decode((folder / RESULTS).read_bytes(), type=list[Result])
    assert result.n_boards == 3
    assert result.file == "pcb-defect.fp32.onnx"
    assert set(result.by_kind) == set(KINDS)
    assert f"{result.mean:.4f}" in capsys.readouterr().out


def test_the_cascade_comes_along(folder: Path, tmp_path: Path) -> None:
    catalog = config.Catalog(store_dir=str(tmp_path / "store"))
    assert register_cascade(folder, catalog) is None
    share = Share(value=0.7, low=0.6, high=0.8)
    outcome = BoardsOutcome(
        n_boards=50, n_marks=400, thresholds=(0.6, 0.75), stopped=share, small=0.8, large=0.9, cascade=0.89, cost=share
    )
    (folder / CASCADE).write_text(cascade_text("pcb-defect-small", "pcb-defect", outcome, "drawn boards"))
    assert register_cascade(folder, catalog) is not None
    chain = next(c for c in Store.open(catalog).chains() if c.id == "pcb-defect-cascade")
    assert isinstance(chain, Cascade)
    assert (chain.first, chain.then) == ("pcb-defect-small", "pcb-defect")
    assert (chain.min_score, chain.confidence, chain.n, chain.stops_early) == (0.75, "least", 50, 0.7)


def test_drawn_boards_become_pictures(tmp_path: Path) -> None:
    assert main(["draw", "--seed", "4", "1", str(tmp_path)]) == 0
    board = draw_boards(1, 4)[0]
    with Image.open(tmp_path / "board-1.png") as picture, Image.open(tmp_path / "board-1.golden.png") as golden:
        assert np.array_equal(np.asarray(picture), board.picture)
        assert np.array_equal(np.asarray(golden), board.golden)


def test_an_empty_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("evaluate", "register"):
        assert main([command, str(tmp_path)]) == 1
        assert "train writes" in capsys.readouterr().err


def test_training_on_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "nothing to train on" in told or "needs PyTorch" in told
