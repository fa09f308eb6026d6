"""PrefixDisk: what was written comes back as it was, and nothing else does."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_rt.engine.prefix_disk import PrefixDisk, PrefixFile, state_key

KEY = state_key(["model", 1])
GIB = 2**30


def disk(folder: Path, key: str = KEY, max_bytes: int = GIB, free: int = 100 * GIB) -> PrefixDisk:
    opened = PrefixDisk(folder / "prefixes", key, max_bytes, free_bytes=lambda _: free)
    assert opened.open()
    return opened


def states(*sizes: int) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.uint8) for size in sizes]


def saved(folder: Path, **fields: str) -> PrefixFile:
    opened = disk(folder)
    file = opened.save(fields.get("owner", ""), [1, 2, 3], states(100, 7), pin=fields.get("pin", ""))
    assert file is not None
    opened.close()
    return file


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.text(max_size=20),
)
def test_what_was_saved_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, token_ids: list[int], sizes: list[int], owner: str
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    before = disk(folder)
    parts = states(*sizes)
    assert before.save(owner, token_ids, parts) is not None
    before.close()
    (file,) = disk(folder).files
    assert (file.head.owner, list(file.token_ids)) == (owner, token_ids)
    for number, part in enumerate(parts):
        found = file.state(number)
        assert found is not None
        assert np.array_equal(found, part)


def test_files_and_folder_are_the_owners_alone(tmp_path: Path) -> None:
    file = saved(tmp_path)
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_of_another_model_back_end_or_setting_is_removed(tmp_path: Path) -> None:
    file = saved(tmp_path)
    other = disk(tmp_path, state_key(["model", 2]))
    assert other.files == []
    assert list(file.path.parent.glob("*.kv*")) == []
    assert not file.path.exists()


@pytest.mark.parametrize("place", range(8))
def test_a_flipped_bit_anywhere_is_noticed_before_anything_is_used(tmp_path: Path, place: int) -> None:
    file = saved(tmp_path, owner="\1uid:1000")
    raw = bytearray(file.path.read_bytes())
    raw[(len(raw) - 1) * place // 7] ^= 4
    file.path.write_bytes(bytes(raw))
    for found in disk(tmp_path).files:
        for number, state in enumerate(states(100, 7)):
            if (read := found.state(number)) is None:
                break
            assert np.array_equal(read, state)
        else:
            pytest.fail("the flipped bit was not noticed")
    assert not file.path.exists()


@pytest.mark.parametrize("n_lost", [1, 32, 33, 120, 10**6])
def test_a_file_that_was_cut_short_is_removed(tmp_path: Path, n_lost: int) -> None:
    file = saved(tmp_path)
    raw = file.path.read_bytes()
    file.path.write_bytes(raw[: max(0, len(raw) - n_lost)])
    assert disk(tmp_path).files == []
    assert not file.path.exists()


@pytest.mark.parametrize("n_bytes", [0, 50, 330])
def test_a_file_that_is_cut_short_while_it_is_in_use_costs_only_itself(tmp_path: Path, n_bytes: int) -> None:
    saved(tmp_path)
    (file,) = disk(tmp_path).files
    first = file.state(0)
    assert first is not None
    os.truncate(file.path, n_bytes)  # looking into a mapping of it would end the process now
    assert np.array_equal(first, states(100)[0])
    assert file.state(1) is None
    assert not file.path.exists()
    assert file.state(0) is None


@given(st.binary(max_size=200))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_a_file(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("disk")
    disk(folder).close()
    path = folder / "prefixes" / "x.kv"
    for content in (raw, b"ERTKV\0\0\4" + raw):
        path.write_bytes(content)
        path.chmod(0o600)
        opened = disk(folder)
        assert opened.files == []
        opened.close()


def test_what_others_could_have_written_or_linked_is_not_read(tmp_path: Path) -> None:
    file = saved(tmp_path)
    file.path.chmod(0o644)
    opened = disk(tmp_path)
    assert opened.files == []
    opened.close()
    (tmp_path / "elsewhere").mkdir()
    target = saved(tmp_path / "elsewhere")
    link = tmp_path / "prefixes" / "link.kv"
    link.symlink_to(target.path)
    assert disk(tmp_path).files == []
    assert target.path.exists()


def test_the_oldest_goes_for_the_newest_but_what_is_pinned_stays(tmp_path: Path) -> None:
    opened = disk(tmp_path)
    one = opened.save("", [1], states(1000), pin="p")
    assert one is not None
    opened._max_bytes = one.n_bytes * 3 + 100
    files = [opened.save("", [number], states(1000)) for number in range(2, 6)]
    assert opened.n_bytes <= opened._max_bytes
    assert one.path.exists()
    assert [file is not None and file.path.exists() for file in files] == [False, False, True, True]
    assert opened.save("", [9], states(10**6)) is None


def test_a_full_disk_is_told_once_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = disk(tmp_path, free=0)
    for _ in range(3):
        assert opened.save("", [1], states(10)) is None
    assert len(caplog.records) == 1
    assert "0 MiB are free" in caplog.text
    assert [path.name for path in (tmp_path / "prefixes").iterdir()] == [".lock"]


def test_a_disk_that_fills_up_while_a_file_is_written_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = disk(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))  # longer files fail in the middle, for root too
        assert opened.save("", [1], states(*[250] * 1000)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in opened.problem
    assert len(caplog.records) == 1
    assert [path.name for path in (tmp_path / "prefixes").iterdir()] == [".lock"]
    assert opened.save("", [1], states(*[250] * 1000)) is not None


def test_a_write_that_is_broken_off_leaves_nothing(tmp_path: Path) -> None:
    opened = disk(tmp_path)
    answers = iter([True, False])
    assert opened.save("", [1], states(10, 10, 10), go_on=lambda: next(answers)) is None
    assert [path.name for path in (tmp_path / "prefixes").iterdir()] == [".lock"]


def test_what_a_crash_left_unfinished_is_removed(tmp_path: Path) -> None:
    disk(tmp_path).close()
    unfinished = tmp_path / "prefixes" / "x.kv-new"
    unfinished.write_bytes(b"half")
    disk(tmp_path)
    assert not unfinished.exists()


@pytest.mark.parametrize("name", ["x.kv", "x.kv-new"])
def test_a_folder_in_a_files_place_costs_no_load(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path)
    (tmp_path / "prefixes" / name).mkdir()
    assert [found.path for found in disk(tmp_path).files] == [file.path]


def test_two_processes_do_not_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = disk(tmp_path)
    assert not PrefixDisk(tmp_path / "prefixes", KEY, GIB, free_bytes=lambda _: GIB).open()
    assert "are not kept" in caplog.text
    assert "another worker" in caplog.text
    first.close()
    assert PrefixDisk(tmp_path / "prefixes", KEY, GIB, free_bytes=lambda _: GIB).open()


def test_what_cannot_be_removed_stops_nothing(tmp_path: Path) -> None:
    opened = disk(tmp_path, max_bytes=500)
    first = opened.save("", [1, 2, 3], states(100))
    assert first is not None
    first.path.unlink()
    first.path.mkdir()  # unlink fails, also for root
    assert first.state(0) is None
    second = opened.save("", [4, 5, 6], states(200))
    assert opened.files == [second]
    opened.close()
    again = disk(tmp_path)
    assert [file.token_ids for file in again.files] == [(4, 5, 6)]
    assert first.path.is_dir()  # which was tried again in vain
