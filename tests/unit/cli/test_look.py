from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from PIL import Image

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edge_rt.cli import main
from tests.pictures import encoded
from tests.tiny_tensors import write_forms, write_models
from tests.unit.engine.test_audio import wav


class Command:
    """`edge_rt run` in a directory of its own, with the tiny models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models = folder / "models"
        models.mkdir()
        write_models(models)
        write_forms(models)
        self._config = folder / "config.toml"
        self._config.write_text(
            f'[catalog]\nstore_dir = "{folder / "store"}"\nmanifest_dirs = ["{models}"]\n'
            f'[server]\nsocket_path = "{folder / "s"}"\n'
        )

    def __call__(self, *args: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(main, ["--config", str(self._config), "run", "--local", *args], input=stdin)

    def models(self, *args: str) -> Result:
        return CliRunner().invoke(main, ["--config", str(self._config), "models", *args])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path)


def picture(path: Path, *color: int, side: int = 16) -> None:
    path.write_bytes(encoded(Image.new("RGB", (side, side), color)))


def board(path: Path, *, flaw: bool) -> NDArray[np.uint8]:
    pixels = np.full((64, 64), 100, np.uint8)
    if flaw:
        pixels[16:24, 40:48] = 255
    path.write_bytes(encoded(pixels))
    return pixels


def pixels_of(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image)


def test_labels_of_a_picture(run: Command) -> None:
    picture(run.folder / "part.png", 10, 90, 200)
    done = run("colors", "part.png", "-v")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows == [["SCORE", "LABEL"], ["0.675", "blue"], ["0.225", "green"], ["0.101", "red"]]
    assert "on this process: fp32 on onnx_cpu:cpu" in done.stderr


def test_options_of_a_picture(run: Command) -> None:
    picture(run.folder / "part.png", 10, 90, 200)
    one = json.loads(run("colors", "part.png", "--json", "--top-k", "1").stdout)
    assert [label["label"] for label in one["labels"]] == ["blue"]
    assert (one["object"], one["width"], one["asked"]) == ("vision.classification", 16, "this process")
    assert run("colors", "part.png", "--min-score", "0.99").stdout == ""


def test_picture_from_stdin(run: Command) -> None:
    data = encoded(Image.new("RGB", (8, 8), (200, 0, 0)))
    assert "red" in run("colors", "-", stdin=data).stdout.splitlines()[1]


def test_cascade_says_who_answered(run: Command) -> None:
    picture(run.folder / "sure.png", 250, 0, 0)
    picture(run.folder / "unsure.png", 100, 110, 100)
    stages = [json.loads(run("colors-both", name, "--json").stdout)["stage"] for name in ("sure.png", "unsure.png")]
    assert stages == ["colors", "colors-large"]


def test_boxes_are_printed_and_drawn(run: Command) -> None:
    pixels = board(run.folder / "board.png", flaw=True)
    board(run.folder / "golden.png", flaw=False)
    done = run("flaws", "board.png", "--reference", "golden.png")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split() == ["1", "0.608", "40", "16", "8", "8", "flaw"]
    assert "wrote board.found.png" in done.stderr
    drawn = pixels_of(run.folder / "board.found.png")
    changed = (drawn != pixels[:, :, np.newaxis]).any(axis=2)
    assert changed[16:24, 40].all()
    assert not changed[30:, :].any()
    assert np.array_equal(pixels_of(run.folder / "board.png"), pixels)


def test_nothing_found_is_said_and_the_picture_written(run: Command) -> None:
    board(run.folder / "golden.png", flaw=False)
    done = run("flaws", "golden.png", "--reference", "golden.png", "-o", "out.jpg")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "nothing found" in done.stderr
    with Image.open(run.folder / "out.jpg") as drawn:
        assert drawn.size == (64, 64)


def test_speech_in_a_recording(run: Command) -> None:
    samples = np.zeros(32_000, "<i2")
    samples[5120:16_384] = 8000
    (run.folder / "clip.wav").write_bytes(wav(samples.tobytes()))
    done = run("speech", "clip.wav")
    assert done.exit_code == 0, done.output
    start, end = done.stdout.splitlines()[1].split()[:2]
    assert float(start) == pytest.approx(0.29, abs=0.04)
    assert float(end) == pytest.approx(1.05, abs=0.05)


def test_lines_are_found_and_read(run: Command) -> None:
    pixels = np.zeros((96, 128), np.uint8)
    pixels[10:30, 10:100] = pixels[50:70, 20:60] = 255
    (run.folder / "label.png").write_bytes(encoded(pixels))
    done = run("page", "label.png", "-o", "label.found.png")
    assert done.exit_code == 0, done.output
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["TEXT", "x", "x"]
    assert (run.folder / "label.found.png").exists()
    assert run("reader", "label.png").stdout == "x\n"


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["colors", "none.png"], 2, "none.png: No such file or directory. colors takes a picture (JPEG or PNG)"),
        (["colors", "."], 2, "Is a directory. colors takes a picture"),
        (["colors", "text.txt"], 1, "text.txt: is neither a JPEG nor a PNG file"),
        (["speech", "golden.png"], 1, "golden.png: is not a WAV file"),
        (["flaws", "golden.png"], 1, "edge_rt: --reference: is missing"),
        (["flaws", "golden.png", "--reference", "small.png"], 1, "has 16 x 16 pixels, the picture has 64 x 64"),
        (["flaws", "golden.png", "--reference", "none.png"], 2, "none.png: No such file"),
        (["flaws", "golden.png", "-o", "golden.png"], 2, "golden.png is a file that is looked at"),
        (["flaws", "golden.png", "-o", "x.gif"], 2, "name a .png or .jpg file"),
        (["flaws", "golden.png", "-o", "nowhere/x.png"], 2, "the folder nowhere does not exist"),
        (["colors", "golden.png", "-o", "x.png"], 2, "--output is for boxes"),
        (["speech", "golden.png", "--reference", "golden.png"], 2, "--reference is for models that compare"),
        (["colors", "golden.png", "--temperature", "1"], 2, "the sampling options are for text"),
        (["model.onnx", "golden.png"], 2, "does not tell how a picture or a text becomes its tensors"),
        (["smollm2-135m-instruct", "hi", "--reference", "golden.png"], 2, "is a language model"),
        (["colors", "empty.png"], 2, "There is nothing to look at"),
    ],
)
def test_wrong_use_is_explained(run: Command, args: list[str], status: int, words: str) -> None:
    board(run.folder / "golden.png", flaw=False)
    picture(run.folder / "small.png", 0, 0, 0)
    (run.folder / "text.txt").write_text("hello")
    (run.folder / "empty.png").write_bytes(b"")
    done = run(*args)
    assert done.exit_code == status, done.output
    assert words in " ".join(done.stderr.split())


def test_models_of_a_chain_are_pulled_shown_and_verified_together(run: Command) -> None:
    pulled = run.models("pull", "page")
    assert [Path(line).name for line in pulled.stdout.splitlines()] == ["lines.onnx", "reader.onnx"], pulled.output
    assert "reader" in run.models("show", "page").stdout
    rows = [line.split() for line in run.models("list").stdout.splitlines()]
    assert ["page", "ocr", "lines", "+", "reader", "pulled", "MIT"] in rows
    assert run.models("verify", "page").stdout.count("ok ") >= 2
    refused = run.models("rm", "page")
    assert refused.exit_code == 2
    assert "its models are lines and reader" in refused.stderr


@pytest.mark.parametrize("harm", ["lost", "cut short"])
def test_another_form_than_the_best_says_so(run: Command, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    picture(run.folder / "part.png", 10, 90, 200)
    for form in ("int8", "fp32"):
        assert run.models("pull", f"colors-forms:{form}").exit_code == 0
    assert json.loads(run("colors-forms", "part.png", "--json").stdout)["variant"] == "int8"
    best = run.folder / "store" / "models" / "colors-forms" / "colors-forms.int8.onnx"
    best.write_bytes(best.read_bytes()[:-10]) if harm == "cut short" else best.unlink()
    done = run("colors-forms", "part.png", "--json")
    assert json.loads(done.stdout)["variant"] == "fp32"
    assert "edge_rt models pull colors-forms:int8" in caplog.text  # which Python writes to stderr
    assert run.models("pull", "colors-forms").exit_code == 0
    caplog.clear()
    again = run("colors-forms", "part.png", "-v")
    assert "int8 on onnx_cpu:cpu" in again.stderr
    assert "models pull" not in caplog.text
