"""`python -m tools.quantize` from end to end, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from PIL import Image  # noqa: E402

from edge_rt.convert.qdq import read_ranges  # noqa: E402
from tests.unit.tools.small_models import classifier, detector, pictures, vectors  # noqa: E402
from tools.quantize import main  # noqa: E402


class Desk:
    """A folder with a model, its inputs as arrays, and the tool."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "m.onnx").write_bytes(classifier().SerializeToString())
        np.savez(folder / "x.npz", x=np.concatenate([feed["x"] for feed in vectors(20)]))
        (folder / "d.onnx").write_bytes(detector().SerializeToString())
        np.savez(folder / "p.npz", x=np.concatenate([feed["x"] for feed in pictures(5)]))

    def __call__(self, command: str) -> Result:
        names = {path.name: str(path) for path in self.folder.iterdir()}
        arguments = [names.get(word, word) for word in command.split()]
        arguments = [str(self.folder / word) if word.startswith("new.") else word for word in arguments]
        return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_from_inputs_to_a_model_in_eight_bit(desk: Desk) -> None:
    result = desk("calibrate m.onnx x.npz --stats new.stats --ranges new.ranges --note mine")
    assert (result.exit_code, result.stderr.split(": ", 1)[1]) == (0, "6 activations over 20 inputs\n")
    assert read_ranges(desk.folder / "new.ranges").note == "mine"
    result = desk("int8 m.onnx new.int8 --stats new.stats --float middle")
    assert result.exit_code == 0
    types = {t.name: t.data_type for t in onnx.load(desk.folder / "new.int8").graph.initializer}
    assert types["w1"] == onnx.TensorProto.FLOAT
    assert types["w0_quantized"] == onnx.TensorProto.INT8
    assert desk("calibrate m.onnx x.npz --stats new.stats --half-life 20").exit_code == 0
    saved = json.loads((desk.folder / "new.stats").read_text())
    assert saved["activations"]["x"]["n_inputs"] == 30


def test_layers_and_a_mixed_model(desk: Desk) -> None:
    desk("calibrate m.onnx x.npz --stats new.stats")
    result = desk("layers m.onnx x.npz --stats new.stats --form int8")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["LAYER", "OPERATOR", "WEIGHTS", "FORM", "ERROR"]
    assert {row[0] for row in rows[1:]} == {"first", "middle", "last"}
    errors = [float(row[4]) for row in rows[1:]]
    assert errors == sorted(errors, reverse=True)
    result = desk("mixed m.onnx new.mixed x.npz --stats new.stats --max-error 0.01")
    assert result.exit_code == 0
    assert (desk.folder / "new.mixed").stat().st_size < (desk.folder / "m.onnx").stat().st_size / 2
    assert {line.split()[0] for line in result.stdout.splitlines()[1:]} == {"first", "middle", "last"}
    assert "give --max-error or --max-bytes" in desk("mixed m.onnx new.x x.npz --stats new.stats").stderr


def test_lint_ends_with_one_where_it_finds_something(desk: Desk) -> None:
    result = desk("lint d.onnx p.npz")
    assert result.exit_code == 1
    assert "Leave float: box_sigmoid box_scale" in result.stdout
    assert desk("lint m.onnx x.npz").exit_code == 0


def test_pictures_are_prepared_as_the_manifest_says(tmp_path: Path, desk: Desk) -> None:
    Image.new("RGB", (20, 10), (255, 0, 0)).save(tmp_path / "red.png")
    (tmp_path / "m.toml").write_text(
        f"""
        id = "d"
        name = "D"
        license = "MIT"
        kind = "tensor"
        n_params = 1
        [[variants]]
        id = "v"
        quant = "FP32"
        file = "d.onnx"
        source = "file:/d.onnx"
        size_bytes = 1
        sha256 = "{"0" * 64}"
        [pipeline]
        task = "classify"
        labels = ["a", "b"]
        [pipeline.image]
        width = 6
        height = 6
        mean = [127.5]
        std = [127.5]
        """
    )
    assert "pictures need --manifest" in desk("calibrate d.onnx red.png --stats new.s").stderr
    assert desk("calibrate d.onnx red.png --manifest m.toml --stats new.s").exit_code == 0
    seen = json.loads((tmp_path / "new.s").read_text())["activations"]["x"]
    assert (seen["low"], seen["high"]) == (-1, 1)


def test_what_is_wrong_is_said_in_one_line(desk: Desk) -> None:
    np.savez(desk.folder / "z.npz", z=np.zeros((1, 64)))
    assert "has no array named x, only z" in desk("calibrate m.onnx z.npz --stats new.s").stderr
    desk("calibrate m.onnx x.npz --stats new.s")
    assert "no node is named 'nose'" in desk("int8 m.onnx new.y --stats new.s --float nose").stderr
    assert "has no range" in desk("int8 d.onnx new.y --stats new.s").stderr
