from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edge_rt.catalog import graph_copy
from edge_rt.catalog.graph_copy import FOOT_BYTES, MAX_FACTS_BYTES, make_copy, open_copy, read_facts, verify_copy
from edge_rt.catalog.place import Place, Record
from edge_rt.errors import ModelFormatError

GRAPH = b"graph" * 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    place = Place(path)
    place.write_record(Record(sha256=hashlib.sha256(b"model").hexdigest(), size_bytes=5))
    path.write_bytes(b"model")
    return path


def made(model: Path, key: str = "key") -> Path:
    copy = Place(model).graph
    assert make_copy(model, copy, key, lambda target: Path(target).write_bytes(GRAPH))
    return copy


def opens(model: Path, key: str = "key") -> bool:
    if (file := open_copy(model, Place(model).graph, key)) is None:
        return False
    with file:
        assert Path(f"/proc/self/fd/{file.fileno()}").read_bytes()[:-FOOT_BYTES] == GRAPH
    return True


def test_a_copy_is_found_again_and_leaves_nothing_else(model: Path) -> None:
    copy = made(model)
    assert opens(model)
    verify_copy(model)
    assert copy.stat().st_size == len(GRAPH) + FOOT_BYTES
    assert {p.name for p in model.parent.iterdir()} == {"m.onnx", ".m.onnx.json", ".m.onnx.graph"}
    assert Place(model).forget() > len(GRAPH)
    assert not any(model.parent.iterdir())


def test_a_copy_of_another_model_runtime_or_cpu_is_not_used(model: Path) -> None:
    copy = made(model)
    assert not opens(model, "another key")
    os.utime(model, ns=(0, 0))
    assert not opens(model)
    made(model)
    assert opens(model)
    copy.rename(copy.with_name("kept"))
    assert not opens(model)


def test_damage_anywhere_is_seen(model: Path) -> None:
    copy = made(model)
    whole = copy.read_bytes()
    for at in (0, len(GRAPH) - 1, len(GRAPH), len(GRAPH) + 40, len(whole) - FOOT_BYTES + 200):
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert not opens(model), at
    for cut in (whole[:-1], whole[1:], b"", whole[-FOOT_BYTES:], whole + b" ", whole[:FOOT_BYTES]):
        copy.write_bytes(cut)
        assert not opens(model)
    copy.write_bytes(b"\0" + whole[1:])
    with pytest.raises(ModelFormatError, match="a load makes it anew"):
        verify_copy(model)


def test_facts_are_kept_with_the_graph_and_hashed_with_it(model: Path) -> None:
    copy, facts = Place(model).graph, '{"größe": 1}'.encode()
    assert make_copy(model, copy, "key", lambda target: Path(target).write_bytes(GRAPH), facts=facts)
    assert read_facts(model, copy, "key") == facts
    assert read_facts(model, copy, "another key") == b""
    verify_copy(model)
    file = open_copy(model, copy, "key")
    assert file is not None
    file.close()
    whole = copy.read_bytes()
    begin, end = len(GRAPH), len(whole) - FOOT_BYTES
    for at in (*range(begin, end), end + 11, end + 100):
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert (read_facts(model, copy, "key"), open_copy(model, copy, "key")) == (b"", None), at
    copy.write_bytes(whole[: begin + 30] + b"\0" + whole[begin + 31 :])
    with pytest.raises(ModelFormatError, match="a load makes it anew"):
        verify_copy(model)


@pytest.mark.parametrize("facts", [b"", b"x" * MAX_FACTS_BYTES], ids=["none", "too long"])
def test_a_copy_may_be_without_facts(model: Path, facts: bytes) -> None:
    copy = Place(model).graph
    assert make_copy(model, copy, "key", lambda target: Path(target).write_bytes(GRAPH), facts=facts)
    assert opens(model)
    assert read_facts(model, copy, "key") == b""


def test_of_a_graph_that_cannot_be_read_no_facts_are_kept(model: Path) -> None:
    copy = Place(model).graph
    assert make_copy(model, copy, "key", lambda _: None, facts=b"facts")
    assert graph_copy.is_hopeless(model, copy, "key")
    assert read_facts(model, copy, "key") == b""


def test_links_pipes_and_directories_are_not_followed(model: Path, tmp_path: Path) -> None:
    copy = made(model)
    elsewhere = copy.rename(tmp_path / "elsewhere")
    copy.symlink_to(elsewhere)
    assert not opens(model)
    copy.unlink()
    os.mkfifo(copy)
    assert not opens(model)
    copy.unlink()
    new = copy.with_name(f"{copy.name}.new")
    new.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic"):
        made(model)
    assert not (tmp_path / "victim").exists()


def test_a_writer_that_fails_leaves_nothing(model: Path) -> None:
    def fails(target: str) -> None:
        Path(target).write_bytes(b"half")
        raise RuntimeError("out of ideas")

    with pytest.raises(RuntimeError):
        make_copy(model, Place(model).graph, "key", fails)
    assert {p.name for p in model.parent.iterdir()} == {"m.onnx", ".m.onnx.json"}


def test_a_full_disk_and_a_file_outside_the_store_get_none(model: Path, tmp_path: Path) -> None:
    def never(target: str) -> None:
        raise AssertionError(target)

    with pytest.raises(OSError, match="MiB are free"):
        make_copy(model, Place(model).graph, "key", never, free_bytes=lambda _: graph_copy.SPACE_MARGIN_BYTES)
    other = tmp_path / "other.onnx"
    other.write_bytes(b"model")
    assert not make_copy(other, Place(other).graph, "key", never)
    assert open_copy(other, Place(other).graph, "key") is None


def test_while_another_process_makes_it_nobody_else_does(model: Path) -> None:
    copy = Place(model).graph

    def again(target: str) -> None:
        assert not make_copy(model, copy, "key", again)
        Path(target).write_bytes(GRAPH)

    assert make_copy(model, copy, "key", again)
    assert opens(model)
