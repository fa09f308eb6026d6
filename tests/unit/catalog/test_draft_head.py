from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt.backends.base import ModelFile
from edge_rt.catalog.draft_head import ARCH, TENSORS, DraftHead, is_head, model_sha256, read_head
from edge_rt.errors import ModelFormatError
from tests.draft_heads import TinyHead
from tests.gguf_files import GgufFile, Tensor
from tests.tiny_models import TinyModel

MODEL = TinyModel()


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    return MODEL.write(tmp_path / "m.gguf")


def read(path: Path, model: ModelFile) -> DraftHead:
    return read_head(path, "tiny", model.path, model.header)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_comes_with_its_tokens_rows_of_the_output_matrix(tmp_path: Path, is_tied: bool) -> None:
    model = replace(MODEL, is_tied=is_tied)
    file, known = model.write(tmp_path / "m.gguf"), (1, 5, 63)
    head = read(TinyHead(model=model, known=known).write(tmp_path / "h.gguf", file), file)
    assert head.vocabulary == known
    assert [info.name for info, _ in head.tensors] == [*TENSORS, "output"]
    assert all(info.size_bytes == len(data) for info, data in head.tensors)
    info, rows = head.tensors[-1]
    assert info.shape == (64, 3)
    output = model.weights()["token_embd.weight" if is_tied else "output.weight"]
    assert struct.unpack("<64f", rows[256:512]) == tuple(output[5])


def test_one_of_another_model_is_refused(model: ModelFile, tmp_path: Path) -> None:
    other = replace(MODEL, seed=9).write(tmp_path / "other.gguf")
    path = TinyHead(model=MODEL).write(tmp_path / "h.gguf", other)
    with pytest.raises(ModelFormatError, match=r"tiny .*trained on another model") as caught:
        read(path, model)
    assert caught.value.field == f"{ARCH}.model_sha256"


def spoilt(model: ModelFile, **keys: tuple[str, object]) -> GgufFile:
    file = TinyHead(model=MODEL).file(model_sha256(model.path, model.header))
    for key, (kind, content) in keys.items():
        file.set(key, kind, content)
    return file


@pytest.mark.parametrize("n_ff", [("u32", 0), ("u32", 1 << 20), ("string", "64"), ("f32", 64.0)])
def test_a_width_out_of_range_is_refused(model: ModelFile, tmp_path: Path, n_ff: tuple[str, object]) -> None:
    path = tmp_path / "h.gguf"
    path.write_bytes(spoilt(model, **{f"{ARCH}.feed_forward_length": n_ff}).encode())
    with pytest.raises(ModelFormatError, match="32 to 65536"):
        read(path, model)


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("state.weight", None, "missing"),
        ("vocabulary", None, "missing"),
        ("vocabulary", Tensor("vocabulary", (24,), "F32"), "list of I32"),
        ("vocabulary", Tensor("vocabulary", (4, 2), "I32"), "list of I32"),
        ("vocabulary", Tensor("vocabulary", (2,), "I32"), "do not rise"),
        ("state.weight", Tensor("stat.weight", (64, 64)), "no meaning"),
    ],
)
def test_other_tensors_are_refused(
    model: ModelFile, tmp_path: Path, name: str, tensor: Tensor | None, problem: str
) -> None:
    file, path = spoilt(model), tmp_path / "h.gguf"
    file.tensors.remove(file.tensor(name))
    if tensor is not None:
        file.tensors.append(tensor)
    path.write_bytes(file.encode())
    with pytest.raises(ModelFormatError, match=problem):
        read(path, model)


@pytest.mark.parametrize("known", [(3, 2), (2, 2), (60, 64), (-1, 4)])
def test_tokens_that_the_model_has_not_are_refused(model: ModelFile, tmp_path: Path, known: tuple[int, ...]) -> None:
    with pytest.raises(ModelFormatError, match="are not among the model's 64"):
        read(TinyHead(model=MODEL, known=known).write(tmp_path / "h.gguf", model), model)


def test_what_is_no_head_or_cut_is_refused(model: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"general\.architecture"):
        read(model.path, model)
    path = TinyHead(model=MODEL).write(tmp_path / "h.gguf", model)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelFormatError, match="truncated"):
        read(path, model)


def test_a_file_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="No such file"):
        is_head(tmp_path / "gone.gguf")
