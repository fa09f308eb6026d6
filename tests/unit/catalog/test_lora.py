from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends.base import ModelFile
from edge_rt.catalog.lora import check_adapter, check_numbers, same_file
from edge_rt.errors import ModelFormatError
from edge_rt.types import AdapterFile
from tests.lora_files import RANK, TARGETS, Pair, random_pairs, shapes, write_adapter, write_model


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    return write_model(tmp_path / "m.gguf")


def check(model: ModelFile, path: Path, base_sha256: str = "") -> int:
    return check_adapter(AdapterFile(name="a", path=str(path), base_sha256=base_sha256), model.header, model.path)


def test_an_adapter_that_fits(model: ModelFile, tmp_path: Path) -> None:
    pairs = random_pairs(1)
    path = write_adapter(tmp_path / "a.gguf", pairs)
    assert check(model, path) == sum(4 * (a.size + b.size) for a, b in pairs.values())
    digest = hashlib.sha256(model.path.read_bytes()).hexdigest()
    assert check(model, path, digest) > 0
    with pytest.raises(ModelFormatError, match="belongs to the model with SHA-256 0000"):
        check(model, path, "0" * 64)


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"arch": "qwen2"}, "general.architecture"),
        ({"type": "model"}, "general.type"),
        ({"kind": "dora"}, "adapter.type"),
    ],
)
def test_another_kind_is_refused(model: ModelFile, tmp_path: Path, keys: dict[str, str], field: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        check(model, write_adapter(tmp_path / "a.gguf", random_pairs(1), **keys))
    assert caught.value.field == field


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


N_OUT, N_IN = shapes()[TARGETS[0]]


@pytest.mark.parametrize(
    ("name", "pair", "problem"),
    [
        ("blk.9.attn_q.weight", (zeros(RANK, N_IN), zeros(N_OUT, RANK)), "belongs to no matrix"),
        (TARGETS[0], (zeros(RANK, N_IN + 1), zeros(N_OUT, RANK)), "do not make up"),
        (TARGETS[0], (zeros(RANK, N_IN), zeros(N_OUT, RANK + 1)), "do not make up"),
        (TARGETS[0], (zeros(RANK, N_OUT + 3), zeros(N_IN, RANK)), "do not make up"),
        (TARGETS[0], (zeros(N_IN), zeros(N_OUT, RANK)), "stands for no matrix"),
        ("blk.0.attn_norm.weight", (zeros(RANK, N_IN), zeros(N_OUT, RANK)), "stands for no matrix"),
        ("token_embd.weight", (zeros(RANK, N_IN), zeros(N_OUT, RANK)), "changes the embedding"),
        (TARGETS[0], (zeros(RANK, N_IN).astype(np.int32), zeros(N_OUT, RANK)), "unknown tensor type|not one of"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    model: ModelFile, tmp_path: Path, name: str, pair: Pair, problem: str
) -> None:
    with pytest.raises(ModelFormatError, match=problem):
        check(model, write_adapter(tmp_path / "a.gguf", {name: pair}))


def test_a_truncated_adapter_is_refused(model: ModelFile, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", random_pairs(1))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ModelFormatError, match="truncated"):
        check(model, path)
    with pytest.raises(ModelFormatError, match=r"general\.type"):
        check(model, model.path)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_numbers_that_are_none_are_refused(tmp_path: Path, number: float, kind: type) -> None:
    a, b = (matrix.astype(kind) for matrix in random_pairs(1)[TARGETS[1]])
    adapter = AdapterFile(name="a", path=str(write_adapter(tmp_path / "a.gguf", {TARGETS[1]: (a, b)})))
    check_numbers(adapter)
    b[-1, -1] = number
    write_adapter(Path(adapter.path), {TARGETS[1]: (a, b)})
    with pytest.raises(ModelFormatError, match=r"ffn_down\.weight\.lora_b: holds a number that is not finite"):
        check_numbers(adapter)


def test_what_is_no_file_of_its_own_is_refused_without_reading_it(model: ModelFile, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", random_pairs(1))
    link = tmp_path / "link.gguf"
    link.symlink_to(path)
    assert check(model, link) > 0  # the configuration named it: whose file it is, its owner knows
    for target, problem in (("nowhere", "cannot be read"), ("/dev/zero", "not a regular file"), (".", "a directory")):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(ModelFormatError, match=f"{problem}|not a regular file"):
            check(model, link)


def test_a_huge_adapter_costs_no_memory_to_refuse(model: ModelFile, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", {TARGETS[0]: (zeros(4097, N_IN), zeros(N_OUT, 4097))})
    with pytest.raises(ModelFormatError, match="by a rank of 1 to 4096"):
        check(model, path)
    with path.open("r+b") as file:
        file.truncate(2**40)  # a file with a hole: none of it is on the disk
    with pytest.raises(ModelFormatError):
        check(model, path)


def test_a_file_is_told_from_another_under_its_name(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", random_pairs(1))
    adapter = AdapterFile(name="a", path=str(path))
    first = same_file(adapter)
    assert same_file(adapter) == first
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    assert same_file(adapter) != first
    path.unlink()
    assert same_file(adapter) == ("a", 0, 0)
