"""Stored entries stay within bounds, survive what happens to processes, disks and files, and are never forged."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_rt.cache import store as store_module
from edge_rt.cache.disk import Disk
from edge_rt.cache.entries import Meta
from edge_rt.cache.store import RETRY_S, Store
from edge_rt.errors import CacheStoreError
from tests.fakes import FakeClock

MIB = 2**20
ROOT = Path(__file__).resolve().parents[3]


def _key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def _meta(**values: Any) -> Meta:
    return Meta(**{"kind": "answer", "model": "m", "created_at_s": 1000.0, "ttl_s": 60.0, "saved_s": 2.0, **values})


Opener = Callable[..., Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open the one store of a test, again and again."""
    stores: list[Store] = []

    def open_store(**options: Any) -> Store:
        values: dict[str, Any] = {"max_bytes": 4 * MIB, "max_value_bytes": MIB, **options}
        stores.append(Store.open(tmp_path / "state" / "cache.sqlite", **values))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def _file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "cache.sqlite"


def test_that_an_entry_comes_back_and_outlives_the_process(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    assert store.put(_key(1), _meta(tags=("a",)), b'{"text":"x"}')
    found = store.get_now(_key(1))
    assert found is not None
    assert (found.value, found.meta.tags) == (b'{"text":"x"}', ("a",))
    assert store.get_now(_key(2)) is None
    store.hit(_key(1), 1001.0)
    store.close()
    again = opened()
    assert again.hot(_key(1)) is None
    found = again.get_now(_key(1))
    assert found is not None
    assert found.value == b'{"text":"x"}'
    assert [n_hits for *_, n_hits in again.items()] == [1]
    assert (again.stats().n_hits, again.stats().saved_s) == (1, 2.0)


def test_that_file_and_key_are_the_owners_alone(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    store.put(_key(1), _meta(), b"x")
    store.flush()
    modes = {path.name: path.stat().st_mode & 0o777 for path in _file(tmp_path).parent.iterdir()}
    assert set(modes) >= {"cache.sqlite", "cache.sqlite-wal", "cache.sqlite.key"}
    assert set(modes.values()) == {0o600}


def test_that_a_value_which_is_not_hot_is_read_off_the_event_loop(opened: Opener) -> None:
    opened().put(_key(1), _meta(), b"x")
    store = opened()
    store.close()
    store = opened()

    async def main() -> None:
        first, second = await asyncio.gather(store.get(_key(1)), store.get(_key(1)))
        assert first is not None
        assert first == second
        assert store.hot(_key(1)) == first
        assert store.stats().hot_bytes == 1
        assert await store.get(_key(9)) is None

    store.put(_key(1), _meta(), b"x")
    store.flush()
    store._hot.clear()
    store._hot_bytes = 0
    asyncio.run(main())


def test_that_the_store_stays_within_its_bytes(opened: Opener, tmp_path: Path) -> None:
    store = opened(max_bytes=MIB)
    for n in range(400):
        assert store.put(_key(n), _meta(), bytes(20_000))
    stats = store.stats()
    assert stats.size_bytes <= MIB
    assert stats.n_entries == len(store) == MIB // 20_512
    assert stats.n_evicted == 400 - stats.n_entries
    store.flush()
    assert _file(tmp_path).stat().st_size <= 1.5 * MIB + 256 * 4096
    assert not store.put(_key(1000), _meta(), bytes(MIB + 1))
    kept = {key for key, *_ in store.items()}
    store.close()
    again = opened(max_bytes=MIB)
    assert {key for key, *_ in again.items()} == kept


def test_that_a_smaller_bound_counts_for_what_was_there(opened: Opener) -> None:
    store = opened()
    for n in range(100):
        store.put(_key(n), _meta(), bytes(20_000))
    store.close()
    store = opened(max_bytes=MIB)
    assert store.stats().size_bytes <= MIB
    store.flush()
    store.close()
    assert len(opened()) == len(store)


def test_that_hot_values_are_bounded(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    store._hot_limit_bytes = 100
    for n in range(10):
        store.put(_key(n), _meta(), bytes(30))
    assert store.stats().hot_bytes <= 100
    store.flush()
    assert store.hot(_key(0)) is None
    assert store.get_now(_key(0)) is not None


def _edit(tmp_path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(_file(tmp_path)) as connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("UPDATE entries SET value = ?", [b"forged"]),
        ("UPDATE entries SET mac = ?", [bytes(32)]),
        ("UPDATE entries SET mac = ?", ["text"]),
        ("UPDATE entries SET meta = ?", [msgspec.json.encode(_meta(ttl_s=None))]),
        ("UPDATE entries SET key = ? WHERE key = ?", [_key(7), _key(1)]),
        (
            "UPDATE entries SET (meta, value, mac) = (SELECT meta, value, mac FROM entries WHERE value = ?) ",
            [b"other"],
        ),
    ],
)
def test_that_an_edited_entry_is_rejected_and_removed(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str, values: list[object]
) -> None:
    store = opened()
    store.put(_key(1), _meta(), b"true")
    store.put(_key(2), _meta(), b"other")
    store.close()
    _edit(tmp_path, statement, *values)
    store = opened()
    found = {key: store.get_now(key) for key, *_ in store.items()}
    assert not [f for f in found.values() if f is not None and f.value not in {b"true", b"other"}]
    assert found.get(_key(1)) is None
    assert found.get(_key(7)) is None
    assert store.stats().n_rejected >= 1
    assert "was changed" in caplog.text
    store.flush()
    store.close()
    assert all(opened().get_now(key) for key, *_ in opened().items())


def test_that_a_row_whose_description_cannot_be_read_is_removed(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    for n in range(3):
        store.put(_key(n), _meta(), b"x")
    store.close()
    _edit(tmp_path, "UPDATE entries SET meta = ? WHERE key = ?", b"{", _key(1))
    _edit(tmp_path, "UPDATE entries SET meta = zeroblob(1000000) WHERE key = ?", _key(2))
    store = opened()
    assert [key for key, *_ in store.items()] == [_key(0)]
    assert "1 entries cannot be read" in caplog.text
    store.close()
    assert Disk(_file(tmp_path), max_bytes=MIB).keys() == [_key(0)]


@pytest.mark.parametrize("spoil", ["mode", "length", "gone"])
def test_that_a_key_which_others_had_signs_nothing_any_more(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    store = opened()
    store.put(_key(1), _meta(), b"x")
    store.close()
    secret = tmp_path / "state" / "cache.sqlite.key"
    before = secret.read_bytes()
    if spoil == "mode":
        secret.chmod(0o644)
    elif spoil == "length":
        secret.write_bytes(b"short")
    else:
        secret.unlink()
    store = opened()
    assert store.get_now(_key(1)) is None
    assert secret.read_bytes() != before
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) == 32


def test_that_a_link_in_place_of_file_or_key_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("mine")
    (tmp_path / "cache.sqlite").symlink_to(elsewhere)
    store = Store.open(tmp_path / "cache.sqlite", max_bytes=MIB, max_value_bytes=MIB)
    assert store.stats().path == ""
    assert elsewhere.read_text() == "mine"
    with pytest.raises(CacheStoreError):
        Store.open(tmp_path / "cache.sqlite", max_bytes=MIB, max_value_bytes=MIB, must_persist=True)


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + os.urandom(8000)])
def test_that_a_file_which_is_no_database_is_moved_aside(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    _file(tmp_path).parent.mkdir()
    _file(tmp_path).write_bytes(content)
    store = opened()
    assert len(store) == 0
    assert store.put(_key(1), _meta(), b"x")
    assert store.get_now(_key(1)) is not None
    assert "moved to cache.sqlite.damaged" in caplog.text
    assert (tmp_path / "state" / "cache.sqlite.damaged").read_bytes() == content


def test_that_another_programs_database_is_not_used(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    store.close()
    _edit(tmp_path, "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END")
    store = opened()
    store.put(_key(1), _meta(), b"x")
    store.close()
    assert len(opened()) == 1
    assert (tmp_path / "state" / "cache.sqlite.damaged").exists()


def test_that_damage_which_shows_later_costs_the_entries_and_nothing_else(
    opened: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(max_bytes=16 * MIB)
    for n in range(100):
        store.put(_key(n), _meta(), bytes(40_000))
    store.close()
    store = opened(max_bytes=16 * MIB)
    with _file(tmp_path).open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(_file(tmp_path).stat().st_size - 4096))
    assert [store.get_now(_key(n)) for n in range(100)].count(None) > 0
    assert "moved to cache.sqlite.damaged" in caplog.text
    assert store.put(_key(1), _meta(), b"new")
    assert len(store) == 1
    store.close()
    again = opened()
    found = again.get_now(_key(1))
    assert found is not None
    assert found.value == b"new"


def test_that_a_full_disk_stops_storing_but_not_answering(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    store = opened(clock=clock)
    store.put(_key(1), _meta(), b"kept")
    store.flush()
    assert store._disk is not None
    n_pages = store._disk._writer.execute("PRAGMA page_count").fetchone()[0]
    store._disk._writer.execute(f"PRAGMA max_page_count = {n_pages}")
    for n in range(2, 6):
        store.put(_key(n), _meta(), bytes(50_000))
        store.flush()
    assert caplog.text.count("database or disk is full") == 1
    assert not store.put(_key(7), _meta(), b"x")
    assert store.get_now(_key(1)) is not None
    assert store.stats().problem == "database or disk is full"
    store._disk._writer.execute("PRAGMA max_page_count = 100000")
    clock.advance(RETRY_S)
    with caplog.at_level(logging.INFO):
        assert store.put(_key(8), _meta(), bytes(50_000))
        store.flush()
    assert "can be written again" in caplog.text
    assert store.stats().problem == ""
    store.close()
    assert {key for key, *_ in opened().items()} == {_key(1), _key(8)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_that_a_directory_which_cannot_be_written_leaves_a_cache_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o500)
    store = Store.open(tmp_path / "cache.sqlite", max_bytes=MIB, max_value_bytes=MIB)
    _check_in_memory(store, caplog)
    tmp_path.chmod(0o700)


def test_that_a_place_which_is_no_directory_leaves_a_cache_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    _check_in_memory(
        Store.open(tmp_path / "file" / "cache.sqlite", max_bytes=MIB, max_value_bytes=MIB, clock=FakeClock()), caplog
    )


def _check_in_memory(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert caplog.text.count("kept in memory only") == 1
    for n in range(100):
        assert store.put(_key(n), _meta(), bytes(20_000))
    assert store.stats().size_bytes <= MIB
    assert store.stats().hot_bytes <= MIB
    found = asyncio.run(store.get(_key(99)))
    assert found is not None
    store.hit(_key(99), 1.0)
    assert store.clear() == MIB // 20_512
    assert store.get_now(_key(99)) is None
    store.flush()
    store.close()


def test_that_clearing_leaves_nothing_in_the_file_and_begins_an_epoch(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    store.put(_key(1), _meta(), b"secret words")
    assert store.epoch == 0
    assert store.clear() == 1
    assert store.get_now(_key(1)) is None
    store.close()
    for file in _file(tmp_path).parent.iterdir():
        assert b"secret words" not in file.read_bytes()
    assert opened().epoch == 1


def test_that_entries_are_removed_by_what_they_are(opened: Opener) -> None:
    store = opened()
    store.put(_key(1), _meta(model="a", file_sha256="1", tags=("x",)), b"1")
    store.put(_key(2), _meta(model="a", file_sha256="2"), b"2")
    store.put(_key(3), _meta(model="b", file_sha256="1"), b"3")
    assert store.remove_if(lambda meta: meta.model == "a" and meta.file_sha256 != "2") == 1
    assert store.remove_if(lambda meta: "x" in meta.tags) == 0
    assert store.remove([_key(3), _key(9)]) == 1
    store.close()
    assert [key for key, *_ in opened().items()] == [_key(2)]


def test_that_what_another_process_removed_is_no_error(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    store.put(_key(1), _meta(), b"x")
    store.close()
    store = opened()
    _edit(tmp_path, "DELETE FROM entries")
    assert store.get_now(_key(1)) is None
    assert len(store) == 0


# A child that stores entries until it is killed, and tells after each one that it has been handed over.
_CHILD = """
import os, sys
from pathlib import Path
from edge_rt.cache.entries import Meta
from edge_rt.cache.store import Store
store = Store.open(Path(sys.argv[1]), max_bytes=64 * 2**20, max_value_bytes=2**20)
for n in range(100_000):
    meta = Meta(kind="answer", model="m", created_at_s=1000.0 + n)
    store.put(n.to_bytes(32, "big"), meta, os.urandom(1000 + n * 37 % 20_000))
    store.flush() if n % 7 else None
    os.write(1, b"%d\\n" % n)
"""


@pytest.mark.parametrize("after", [1, 40, 150])
def test_that_kill_9_in_mid_write_loses_at_most_the_last_entry(opened: Opener, tmp_path: Path, after: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(_file(tmp_path))], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    n_told = 0
    while n_told < after:
        n_told = int(child.stdout.readline()) + 1
    child.send_signal(signal.SIGKILL)
    n_told = max([n_told, *(int(line) + 1 for line in child.stdout.read().splitlines())])
    child.wait()
    child.stdout.close()
    store = opened(max_bytes=64 * MIB)
    stored = {int.from_bytes(key, "big") for key, *_ in store.items()}
    assert stored >= set(range(n_told - 1)), "all but perhaps the last"
    assert all(store.get_now(_key(n)) is not None for n in stored), "and each of them whole"
    assert store.put(_key(1_000_000), _meta(), b"x")


def test_that_a_slow_disk_is_not_given_more_than_it_takes(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(max_bytes=64 * MIB)
    assert store._disk is not None
    with store._disk._writing:  # as a disk that does not answer
        n_taken = sum(store.put(_key(n), _meta(), bytes(MIB)) for n in range(20))
        assert n_taken == store_module._MAX_PENDING_BYTES // MIB
        found = asyncio.run(store.get(_key(0)))
        assert found is not None, "what has not been written yet can be read"
    store.flush()
    assert store.put(_key(50), _meta(), bytes(MIB))
