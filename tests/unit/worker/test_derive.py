from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.catalog.gguf import read_header
from edge_rt.errors import BackendLoadError, ModelFormatError
from edge_rt.worker.derive import quantise
from tests.gguf_files import GgufFile, tiny_llama

pytest.importorskip("llama_cpp", reason="the back end llama_cpu is not installed")


def write(folder: Path, file: GgufFile) -> Path:
    path = folder / "src.gguf"
    path.write_bytes(file.encode())
    return path


@pytest.mark.parametrize("embedding", ["Q8_0", "F16"])
def test_linear_layers_change_and_the_embedding_stays(
    embedding: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    src, dst = write(tmp_path, tiny_llama(linear="Q8_0", embedding=embedding)), tmp_path / "dst.gguf"
    before = src.read_bytes()
    quantise(src, dst, "Q4_0")
    types = {tensor.name: tensor.type for tensor in read_header(dst).tensors}
    assert types["token_embd.weight"] == embedding
    assert types["blk.1.ffn_down.weight"] == "Q4_0"
    assert types["output_norm.weight"] == "F32"
    assert src.read_bytes() == before
    assert capfd.readouterr() == ("", "")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    src = write(tmp_path, tiny_llama(linear="Q8_0"))
    for name in "ab":
        quantise(src, tmp_path / name, "Q4_0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_hostile_source_is_refused_before_the_quantiser_sees_it(tmp_path: Path) -> None:
    file = tiny_llama()
    file.set("tokenizer.ggml.scores", "[f32]", [0.0])
    with pytest.raises(ModelFormatError) as caught:
        quantise(write(tmp_path, file), tmp_path / "dst.gguf", "Q4_0")
    assert caught.value.field == "tokenizer.ggml.scores"
    assert not (tmp_path / "dst.gguf").exists()


def test_unknown_quantisation(tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError, match="no quantisation Q4_9"):
        quantise(write(tmp_path, tiny_llama()), tmp_path / "dst.gguf", "Q4_9")


def test_quantiser_that_fails_is_quoted(tmp_path: Path) -> None:
    """A sound file of an architecture that llama.cpp has never heard of."""
    file = tiny_llama()
    for key in [k for k in file.keys if str(k).startswith("llama.")]:
        file.keys[str(key).replace("llama.", "alpaca.")] = file.keys.pop(key)
    file.set("general.architecture", "string", "alpaca")
    with pytest.raises(BackendLoadError, match="alpaca"):
        quantise(write(tmp_path, file), tmp_path / "dst.gguf", "Q4_0")


def test_destination_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError):
        quantise(write(tmp_path, tiny_llama(linear="Q8_0")), tmp_path / "missing" / "dst.gguf", "Q4_0")
