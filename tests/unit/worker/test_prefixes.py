"""Which folder of prefixes a worker opens, and whose files it takes up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.null import NullBackend
from edge_rt.catalog.place import Place, Record
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.types import AdapterFile
from edge_rt.worker.channel import Load
from edge_rt.worker.prefixes import open_disk


@pytest.fixture
def load(tmp_path: Path) -> Load:
    path = tmp_path / "m.gguf"
    Place(path).write_record(Record(sha256="0" * 64, size_bytes=5))
    path.write_bytes(b"model")
    return Load(
        model="m", variant="", path=str(path), quant="none", backend="null", n_ctx=64, n_seq_max=2,
        max_prefix_disk_bytes=2**30,
    )  # fmt: skip


def opened(load: Load) -> PrefixDisk:
    file = ModelFile(model="m", variant="", path=Path(load.path), quant="none")
    disk = open_disk(load, NullBackend().load(file, LoadOptions(n_ctx=64)))
    assert disk is not None
    assert disk.open()
    return disk


def keep_one(load: Load) -> None:
    disk = opened(load)
    assert disk.save("", [1, 2, 3], [np.zeros(10, np.uint8)]) is not None
    disk.close()
    assert len(kept(load)) == 1


def kept(load: Load) -> list[Path]:
    return list(Place(Path(load.path)).prefixes.glob("*.kv*"))


def test_files_are_found_again(load: Load) -> None:
    keep_one(load)
    assert [file.token_ids for file in opened(load).files] == [(1, 2, 3)]


def test_what_users_shared_is_not_kept_once_they_are_isolated(load: Load) -> None:
    keep_one(load)
    disk = opened(msgspec.structs.replace(load, isolate_prefixes=True))
    assert (disk.files, kept(load)) == ([], [])


def test_a_file_that_is_not_of_the_store_has_no_folder(load: Load, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"model")
    file = ModelFile(model="m", variant="", path=other, quant="none")
    session = NullBackend().load(file, LoadOptions(n_ctx=64))
    assert open_disk(msgspec.structs.replace(load, path=str(other)), session) is None


def test_what_was_computed_with_another_adapter_of_the_name_is_not_taken(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"one")
    load = msgspec.structs.replace(load, adapters=(AdapterFile(name="poems", path=str(path)),))
    keep_one(load)
    before = opened(load)
    assert before.files
    before.close()
    path.write_bytes(b"other")
    disk = opened(load)
    assert (disk.files, kept(load)) == ([], [])
