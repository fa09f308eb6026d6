"""Packed weights beside a model of the store."""

from __future__ import annotations

import hashlib
import logging
import mmap
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edge_rt.catalog.packed import HEAD_BYTES, SPACE_MARGIN_BYTES, Packing, open_packed, read_head, verify_packed
from edge_rt.catalog.place import Place, Record
from edge_rt.errors import ModelFormatError

WEIGHTS = bytes(range(256)) * 33
PLENTY = 2**40


class Packer:
    """Packs the same bytes and counts how often."""

    def __init__(self, weights: bytes = WEIGHTS, layout: str = "tiles-1") -> None:
        self.n_packed = 0
        self.weights = weights
        self.packing = Packing(layout=layout, n_bytes=len(weights), pack=self.pack)

    def pack(self, out: mmap.mmap) -> None:
        self.n_packed += 1
        out[HEAD_BYTES:] = self.weights

    def open(self, path: Path, free_bytes: int = PLENTY) -> bytes | None:
        mapped = open_packed(path, self.packing, free_bytes=lambda _: free_bytes)
        return None if mapped is None else mapped[HEAD_BYTES:]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Make a model of the store: its file and record."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"model")
    Place(path).write_record(Record(sha256=hashlib.sha256(b"model").hexdigest(), size_bytes=5))
    path.write_bytes(b"model")
    return path


def test_the_second_load_maps_what_the_first_packed(model: Path) -> None:
    packer = Packer()
    assert packer.open(model) == WEIGHTS
    assert packer.open(model) == WEIGHTS
    assert packer.n_packed == 1
    verify_packed(model, lambda _: None)
    assert not Place(model).packing.exists()


def test_a_file_that_is_not_the_stores_gets_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"model")
    assert Packer().open(path) is None
    assert list(tmp_path.iterdir()) == [path]


def test_another_layout_is_packed_anew(model: Path) -> None:
    Packer().open(model)
    other = Packer(WEIGHTS[::-1], layout="tiles-2")
    assert other.open(model) == WEIGHTS[::-1]
    assert other.n_packed == 1


def _replace_model(path: Path) -> None:
    Place(path).write_record(Record(sha256=hashlib.sha256(b"other").hexdigest(), size_bytes=5))
    path.write_bytes(b"other")


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _damage(content: bytes) -> Callable[[Path], None]:
    return lambda path: Place(path).packed.write_bytes(content) and None


def _make_pipe(path: Path) -> None:
    Place(path).packed.unlink()
    os.mkfifo(Place(path).packed)


def _make_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    Place(path).packed.rename(elsewhere)
    Place(path).packed.symlink_to(elsewhere)


def _give_away(path: Path) -> None:
    os.chown(Place(path).packed, 12345, -1)


@pytest.mark.parametrize(
    "change",
    [
        _replace_model,
        _touch,
        _damage(b""),
        _damage(b"\0" * HEAD_BYTES),
        _damage(b"{" * HEAD_BYTES + WEIGHTS),
        _damage(b"[" * HEAD_BYTES + WEIGHTS),
        _damage(b"\xff" * (HEAD_BYTES + len(WEIGHTS))),
        lambda path: os.truncate(Place(path).packed, HEAD_BYTES + len(WEIGHTS) - 1),
        _make_pipe,
        _make_link,
        pytest.param(_give_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")),
    ],
    ids=[
        "another model",
        "a newer file",
        "empty",
        "zeros",
        "no JSON",
        "deep JSON",
        "no text",
        "cut short",
        "a pipe",
        "a link",
        "another user's",
    ],
)
def test_a_copy_of_something_else_or_a_broken_one_is_packed_anew(model: Path, change: Callable[[Path], None]) -> None:
    packer = Packer()
    packer.open(model)
    change(model)
    assert packer.open(model) == WEIGHTS
    assert packer.n_packed == 2
    assert packer.open(model) == WEIGHTS
    assert packer.n_packed == 2


def test_a_full_disk_leaves_no_copy_and_says_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Packer().open(model, free_bytes=60 * 2**20) is None
    assert "MiB are free" in caplog.text
    assert not Place(model).packed.exists()
    assert not Place(model).packing.exists()


def test_a_place_that_cannot_be_written_is_no_error(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    Place(model).packing.mkdir()
    with caplog.at_level(logging.WARNING):
        assert Packer().open(model) is None
    assert "not kept on disk" in caplog.text


def test_what_a_killed_process_left_is_no_hindrance(model: Path) -> None:
    Place(model).packing.write_bytes(b"half of it" * 10_000)
    assert Packer().open(model) == WEIGHTS


def test_what_is_of_no_use_does_not_take_up_the_room(model: Path) -> None:
    """A killed process's half and a copy in another layout: with them the disk is full."""
    Packer(layout="tiles-0").open(model)
    place = Place(model)
    place.packing.write_bytes(b"half of it" * 1000)

    def free_bytes(_: Path) -> int:
        taken = [p.stat().st_size for p in (place.packing, place.packed) if p.exists()]
        return SPACE_MARGIN_BYTES + HEAD_BYTES + len(WEIGHTS) - sum(taken)

    mapped = open_packed(model, Packer().packing, free_bytes=free_bytes)
    assert mapped is not None
    assert mapped[HEAD_BYTES:] == WEIGHTS


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to], ids=["link", "hard link"])
def test_a_planted_link_does_not_lead_the_packer_elsewhere(
    model: Path, tmp_path: Path, plant: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    plant(Place(model).packing, victim)
    assert Packer().open(model) is None
    assert victim.read_bytes() == b"precious"
    assert "not kept on disk" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_packing_leaves_nothing(model: Path, error: type[BaseException]) -> None:
    def fail(out: mmap.mmap) -> None:
        view = memoryview(out)
        raise error(len(view))

    with pytest.raises(error):
        open_packed(model, Packing(layout="x", n_bytes=10, pack=fail), free_bytes=lambda _: PLENTY)
    assert not Place(model).packing.exists()
    assert not Place(model).packed.exists()


def _pack_at(path: Path, out: multiprocessing.SimpleQueue[bool]) -> None:
    out.put(Packer().open(path) in (WEIGHTS, None))


def test_processes_that_pack_at_once_do_not_meet(model: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    workers = [context.Process(target=_pack_at, args=(model, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert all(results.get() for _ in workers)
    head = read_head(Place(model).packed)
    assert head is not None
    assert Packer().open(model) == WEIGHTS
    verify_packed(model, lambda _: None)


def test_a_reader_keeps_its_map_when_the_copy_is_replaced(model: Path) -> None:
    first = open_packed(model, Packer().packing, free_bytes=lambda _: PLENTY)
    Packer(WEIGHTS[::-1], layout="tiles-2").open(model)
    assert first is not None
    assert first[HEAD_BYTES:] == WEIGHTS


def test_verify_finds_a_changed_byte(model: Path) -> None:
    Packer().open(model)
    packed = Place(model).packed
    raw = bytearray(packed.read_bytes())
    raw[-1] ^= 1
    packed.write_bytes(raw)
    with pytest.raises(ModelFormatError, match="the next load makes it anew"):
        verify_packed(model, lambda _: None)


def test_forgetting_a_model_takes_its_copy_along(model: Path) -> None:
    Packer().open(model)
    assert Place(model).forget() >= HEAD_BYTES + len(WEIGHTS)
    assert not Place(model).packed.exists()


def test_the_head_names_the_model_by_its_hash(model: Path) -> None:
    Packer().open(model)
    head = read_head(Place(model).packed)
    assert head is not None
    assert head.sha256 == hashlib.sha256(b"model").hexdigest()
    assert head.packed_sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert msgspec.structs.replace(head, layout="x") != head


@pytest.mark.parametrize("at", [HEAD_BYTES, -1])
def test_a_damaged_copy_is_made_anew_and_logged(model: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    packer = Packer()
    packer.open(model)
    packed = Place(model).packed
    raw = bytearray(packed.read_bytes())
    raw[at] ^= 1
    packed.write_bytes(raw)
    assert packer.open(model) == WEIGHTS
    assert packer.n_packed == 2
    assert "m.gguf: its packed weights on disk are damaged and are made anew" in caplog.text
    verify_packed(model, lambda _: None)
    assert packer.open(model) == WEIGHTS
    assert packer.n_packed == 2
