"""Static embeddings: what they know, what they refuse, and that nothing else is loaded or asked for."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wordllama", reason="needs edge_rt[vectors]")

import numpy as np

from edge_rt import text_vectors
from edge_rt.errors import BackendUnavailableError, ModelFormatError
from edge_rt.text_vectors import TextVectors

WEIGHTS = Path("weights/l2_supercat_256.safetensors")
TOKENIZER = Path("tokenizers/l2_supercat_tokenizer_config.json")


@pytest.fixture(scope="module")
def vectors() -> TextVectors:
    return TextVectors.load()


@pytest.fixture
def package_dir(tmp_path: Path) -> Path:
    """A directory laid out like the package, with its real tokenizer and small weights of the right form."""
    import importlib.util

    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "weights").mkdir()
    (tmp_path / "tokenizers").mkdir()
    shutil.copy(Path(spec.origin).parent / TOKENIZER, tmp_path / TOKENIZER)
    write_weights(tmp_path, n_rows=32_000)
    return tmp_path


def write_weights(package_dir: Path, *, n_rows: int, dtype: str = "F16", cut_bytes: int = 0) -> None:
    tensor = {"dtype": dtype, "shape": [n_rows, 256], "data_offsets": [0, n_rows * 512]}
    header = json.dumps({"embedding.weight": tensor}).encode()
    with (package_dir / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + n_rows * 512 - cut_bytes)


def test_vectors_are_unit_float32_of_256(vectors: TextVectors) -> None:
    found = vectors.embed(["What is the capital of France?", "x" * 50_000, "日本の首都はどこですか", "\ud800?"])
    assert (found.shape, found.dtype) == ((4, 256), np.float32)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_the_same_words_as_the_package_itself_finds(vectors: TextVectors) -> None:
    # wordllama 0.4.0.post1's own embed(norm=True)[0, :4]
    expected = [0.08697302, 0.15507138, -0.06887751, -0.06851413]
    assert vectors.embed(["How do I learn Python quickly?"])[0, :4] == pytest.approx(expected, abs=1e-5)


def test_meaning_is_nearer_than_another_subject(vectors: TextVectors) -> None:
    asked, same, other = vectors.embed(
        ["How can I learn to cook?", "What is the best way to learn cooking?", "Which planet has the most moons?"]
    )
    assert asked @ same > 0.7 > 0.4 > asked @ other


def test_a_text_is_embedded_alike_alone_and_in_company(vectors: TextVectors) -> None:
    texts = ["one", "two words", "and rather a lot of words to make a longer text of it"]
    together = vectors.embed(texts)
    assert all(np.array_equal(vectors.embed([text])[0], row) for text, row in zip(texts, together, strict=True))


def test_nothing_gives_zeros_and_no_texts_give_no_rows(vectors: TextVectors) -> None:
    assert not vectors.embed([""]).any()
    assert vectors.embed([]).shape == (0, 256)


def test_of_a_long_text_beginning_and_end_count(vectors: TextVectors) -> None:
    middle = "filler " * 2000
    base, end, mid = vectors.embed([f"cats {middle} dogs", f"cats {middle} taxes", f"cats {middle}moon {middle} dogs"])
    assert not np.array_equal(base, end)
    assert base @ mid == pytest.approx(1.0, abs=1e-3)


def test_loading_runs_no_code_of_the_package_and_opens_no_socket() -> None:
    code = (
        "import socket, sys\n"
        "sys.addaudithook(lambda name, _: name.startswith('socket.') and sys.exit(f'asked the network: {name}'))\n"
        "from edge_rt.text_vectors import TextVectors\n"
        "assert TextVectors.load().embed(['hello']).any()\n"
        "print(sorted({'wordllama', 'requests', 'pydantic', 'safetensors'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['tokenizers'] = None\n"
        "from edge_rt.errors import BackendUnavailableError\n"
        "try:\n    import edge_rt.text_vectors\n"
        "except BackendUnavailableError as exc:\n    print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "edge_rt[vectors]" in done.stdout


def test_absent_files_are_a_missing_extra(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"edge_rt\[vectors\]"):
        TextVectors.load(tmp_path)


def test_sound_files_of_the_right_form_are_taken(package_dir: Path) -> None:
    assert TextVectors.load(package_dir).embed(["all weights are zero"]).shape == (1, 256)


@pytest.mark.parametrize(
    ("n_rows", "dtype", "cut_bytes"),
    [(31_999, "F16", 0), (32_000, "F32", 0), (32_000, "F16", 1), (0, "F16", 0)],
    ids=["too few rows", "another type", "cut short", "empty"],
)
def test_unfit_weights_are_refused(package_dir: Path, n_rows: int, dtype: str, cut_bytes: int) -> None:
    write_weights(package_dir, n_rows=n_rows, dtype=dtype, cut_bytes=cut_bytes)
    with pytest.raises(ModelFormatError):
        TextVectors.load(package_dir)


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 40, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 6) + b'{"a":1', struct.pack("<Q", 2**40)]
)
def test_a_damaged_header_is_refused(package_dir: Path, raw: bytes) -> None:
    (package_dir / WEIGHTS).write_bytes(raw)
    with pytest.raises(ModelFormatError):
        TextVectors.load(package_dir)


@pytest.mark.parametrize("raw", [b"", b"{}", b"\x00" * 100])
def test_a_damaged_tokenizer_is_refused(package_dir: Path, raw: bytes) -> None:
    (package_dir / TOKENIZER).write_bytes(raw)
    with pytest.raises(ModelFormatError):
        TextVectors.load(package_dir)


def test_the_width_is_said() -> None:
    assert text_vectors.N_DIMENSIONS == 256
