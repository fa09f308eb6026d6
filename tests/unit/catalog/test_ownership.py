from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_rt.catalog.ownership import give_to_owner

OWNER = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def owned(path: Path) -> int:
    return path.lstat().st_uid


@root_only
def test_what_root_has_made_belongs_to_the_stores_owner_afterwards(tmp_path: Path) -> None:
    store = tmp_path / "store"
    model = store / "models" / "tiny" / "tiny.gguf"
    model.parent.mkdir(parents=True)
    model.write_text("x")
    os.chown(store, OWNER, OWNER)
    (tmp_path / "link").symlink_to(store)
    assert give_to_owner(tmp_path / "link") == 3
    assert [owned(path) for path in (store / "models", model.parent, model)] == [OWNER] * 3
    assert give_to_owner(store) == 0


@root_only
def test_nothing_outside_is_given_away(tmp_path: Path) -> None:
    outside, store = tmp_path / "secret", tmp_path / "store"
    outside.write_text("x")
    (tmp_path / "directory").mkdir()
    store.mkdir()
    os.chown(store, OWNER, OWNER)
    (store / "link").symlink_to(outside)
    (store / "folder").symlink_to(tmp_path / "directory")
    (store / "second name").hardlink_to(outside)
    assert give_to_owner(store) == 0
    assert [owned(outside), owned(tmp_path / "directory")] == [0, 0]


@root_only
def test_a_store_of_roots_own_stays(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert give_to_owner(tmp_path) == 0


def test_others_give_nothing_and_a_store_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert give_to_owner(tmp_path, euid=1000) == 0
    assert give_to_owner(tmp_path / "none", euid=0) == 0
