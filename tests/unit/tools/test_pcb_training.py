"""The chain from drawn boards to files that find flaws. Needs PyTorch, which is no dependency of edge_rt."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: docs/pcb.md says how to train")

from tools.pcb.__main__ import main  # noqa: E402
from tools.pcb.boards import BoardDataError  # noqa: E402
from tools.pcb.detect import run, session  # noqa: E402
from tools.pcb.drawn import draw_boards  # noqa: E402
from tools.pcb.early_exit import make_early_exit  # noqa: E402
from tools.pcb.graph import detector_graph  # noqa: E402
from tools.pcb.make import _teacher  # noqa: E402
from tools.pcb.net import Detector, detector_loss, on_grid  # noqa: E402
from tools.pcb.quantise import int4_levels  # noqa: E402
from tools.pcb.register import RESULTS, Result  # noqa: E402
from tools.pcb.samples import STRIDE, cropped, targets  # noqa: E402
from tools.pcb.shape import SHAPES  # noqa: E402
from tools.pcb.train import Recipe, train  # noqa: E402

SHAPE = SHAPES["tiny"]


def silent(_: str) -> None:
    pass


def test_the_file_answers_as_the_trained_model(tmp_path: Path) -> None:
    boards = draw_boards(2, 0, side=320)
    model = Detector(SHAPE)
    train(model, boards, Recipe(n_steps=4, batch=2, side=128), silent)
    onnx = pytest.importorskip("onnx")
    onnx.save(detector_graph(SHAPE, model.weights(), side=320), tmp_path / "m.onnx")
    heat, offset, size = run(session(tmp_path / "m.onnx"), boards[0].picture, boards[0].golden)
    pair = torch.from_numpy(np.stack([boards[0].picture, boards[0].golden]))[None].float() / 255
    with torch.no_grad():
        wanted = model(pair).numpy()
    assert heat == pytest.approx(wanted[:, :6], abs=1e-4)
    assert offset - 0.5 == pytest.approx(wanted[:, 6:8], abs=1e-4)
    assert size - np.log(4) == pytest.approx(wanted[:, 8:], abs=1e-4)


def test_a_teacher_is_what_its_file_is() -> None:
    boards = draw_boards(1, 0, side=320)
    model, again = Detector(SHAPE), Detector(SHAPE)
    train(model, boards, Recipe(n_steps=2, batch=2, side=128), silent)
    again.take(model.weights())
    pair = torch.rand(2, 2, 64, 64)
    with torch.no_grad():
        assert again(pair).numpy() == pytest.approx(model(pair).numpy(), abs=1e-5)


def test_a_seed_gives_the_same_weights() -> None:
    boards = draw_boards(2, 0, side=320)

    def trained(seed: int) -> np.ndarray:
        torch.manual_seed(seed)
        model = Detector(SHAPE)
        train(model, boards, Recipe(n_steps=3, batch=2, side=128, seed=seed), silent)
        return model.weights()["neck.0"][0]

    first, again, other = trained(1), trained(1), trained(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_held_weights_are_on_the_grid_of_the_file() -> None:
    model = Detector(SHAPE)
    train(model, draw_boards(1, 0, side=320), Recipe(n_steps=2, batch=2, side=128), silent, n_levels={"neck.0": 7})
    weight, _ = model.weights()["neck.0"]
    step, levels = int4_levels(weight)
    assert levels * step[:, None, None, None] == pytest.approx(weight, abs=1e-6)
    free, _ = model.weights()["fine.1"]
    step, levels = int4_levels(free)
    assert np.abs(levels * step[:, None, None, None] - free).max() > 1e-3


def test_the_gradient_passes_the_grid() -> None:
    weight = torch.randn(3, 2, 1, 1, requires_grad=True)
    (on_grid(weight, 7) * torch.arange(6.0).reshape(3, 2, 1, 1)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_loss_is_least_for_the_right_answer() -> None:
    board = draw_boards(1, 2, side=320)[0]
    wanted = targets(cropped(board, 0, 0, 320).marks, 40, 40)
    heat, box, is_near = (torch.from_numpy(v)[None] for v in (wanted.heat, wanted.box, wanted.is_near))
    right = torch.cat([torch.where(heat == 1, 8.0, -8.0), box], dim=1)
    quiet = torch.cat([torch.full_like(heat, -8.0), box], dim=1)
    shifted = torch.cat([right[:, :6], box + 0.5], dim=1)
    loss, missed, off = (float(detector_loss(answer, heat, box, is_near, None)) for answer in (right, quiet, shifted))
    assert loss < 0.01
    assert missed > 5
    assert off > loss + 1


def test_a_short_training_finds_flaws_through_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "pcb-defect", "--shape", "tiny", "--drawn", "4", "--steps", "160"]
    assert main(["train", "--out", str(tmp_path), *arguments]) == 0
    assert "step 160/160" in capsys.readouterr().out
    assert main(["evaluate", "--drawn", "4", str(tmp_path)]) == 0
    results = msgspec.json.decode((tmp_path / RESULTS).read_bytes(), type=list[Result])
    assert [r.file for r in results] == [f"pcb-defect.{form}.onnx" for form in ("fp32", "int4", "int8")]
    assert not list(tmp_path.glob(".*"))
    boards = draw_boards(3, 99)
    for result in results:
        opened = session(tmp_path / result.file)
        ranks = []
        for board in boards:
            heat, _, _ = run(opened, board.picture, board.golden)
            highest = heat[0].max(axis=0)
            for x1, y1, x2, y2, _ in board.marks:
                here = highest[int((y1 + y2) / 2) // STRIDE, int((x1 + x2) / 2) // STRIDE]
                ranks.append((highest < here).mean())
        assert np.mean(ranks) > 0.9, result.file  # 0.5 if it knew nothing


def test_an_early_exit_is_trained_and_calibrated(tmp_path: Path) -> None:
    boards = draw_boards(8, 0, side=320)
    told = make_early_exit(boards[:6], boards[6:], Recipe(n_steps=20, batch=16), 0.05, tmp_path, silent)
    assert set(told) == {"temperature", "threshold", "max_loss", "held_out", "test"}
    assert {p.name for p in tmp_path.iterdir()} == {
        "pcb-kind.fp32.onnx",
        "pcb-kind-first.fp32.onnx",
        "pcb-kind-rest.fp32.onnx",
    }


def test_a_file_that_is_no_large_detector_cannot_teach(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    small = Detector(SHAPES["small"])
    onnx.save(detector_graph(small.shape, small.weights()), tmp_path / "small.onnx")
    (tmp_path / "torn.onnx").write_bytes(b"\xff\xff")
    for name in ("small.onnx", "torn.onnx"):
        with pytest.raises(BoardDataError, match=r"no pcb-defect\.fp32\.onnx"):
            _teacher(tmp_path / name)
