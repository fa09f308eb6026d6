"""The endpoints of the answer cache: everybody sees what is theirs, the owner sees all."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_rt.api.callers import Peer
from edge_rt.api.context import Api
from edge_rt.cache import stored
from edge_rt.cache.entries import Meta
from edge_rt.cache.store import Store
from edge_rt.cache.stored import StoredAnswer
from edge_rt.config import Config
from edge_rt.telemetry import Telemetry
from tests.api.asgi import Call, FakeRuntime, Reply, app_of

OWNER = Peer(pid=1, uid=os.geteuid(), gid=0)
ALICE, BOB = Peer(pid=2, uid=71_001, gid=1), Peer(pid=3, uid=71_002, gid=1)


def key(n: int) -> str:
    return f"{n:02x}" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "cache.sqlite", max_bytes=2**20, max_value_bytes=2**16)
    for n, peer, tags in ((1, ALICE, ("a",)), (2, ALICE, ("b",)), (3, BOB, ("a",))):
        answer = StoredAnswer(
            model="m",
            pieces=stored.pieces_of(f"answer {n}"),
            prompt_tokens=5,
            completion_tokens=2,
            created_at_s=1e9 + n,
            question=f"question {n}",
        )
        meta = Meta(
            kind="answer",
            model="m",
            created_at_s=1e9 + n,
            ttl_s=60.0,
            tenant=f"uid:{peer.uid}",
            tags=tags,
            title=f"question {n}",
            saved_s=1.5,
        )
        made.put(bytes.fromhex(key(n)), meta, stored.encode(answer))
    yield made
    made.close()


def ask(store: Store | None, method: str, path: str, body: Any = None, *, peer: Peer = OWNER) -> Reply:
    runtime = FakeRuntime()
    api = Api(runtime=runtime, config=Config(), telemetry=Telemetry(), answer_store=store)
    raw = b"" if body is None else json.dumps(body).encode()
    return asyncio.run(Call(app_of(runtime, api=api), method, path, raw, peer=peer).reply())


def listed(store: Store, query: str = "", *, peer: Peer = OWNER) -> list[str]:
    entries = ask(store, "GET", f"/v1/cache/entries{query}", peer=peer).json["entries"]
    return [entry["title"] for entry in entries]


def test_that_figures_are_told(store: Store) -> None:
    store.hit(bytes.fromhex(key(1)), 1e9)
    told = ask(store, "GET", "/v1/cache").json
    assert (told["n_entries"], told["n_hits"], told["saved_s"], told["problem"]) == (3, 1, 1.5, "")


def test_that_the_owner_sees_all_and_others_see_their_own(store: Store) -> None:
    assert listed(store) == ["question 3", "question 2", "question 1"]
    assert listed(store, peer=ALICE) == ["question 2", "question 1"]
    assert listed(store, "?tag=a") == ["question 3", "question 1"]
    assert listed(store, "?tag=a", peer=ALICE) == ["question 1"]
    assert listed(store, "?model=other") == []
    assert listed(store, "?limit=1") == ["question 3"]
    assert ask(store, "GET", f"/v1/cache/entries/{key(3)}", peer=ALICE).error["code"] == "cache_entry_not_found"
    assert ask(store, "GET", f"/v1/cache/entries/{key(3)}", peer=BOB).json["text"] == "answer 3"


def test_that_the_first_digits_of_a_key_do(store: Store) -> None:
    told = ask(store, "GET", f"/v1/cache/entries/{key(2)[:8]}").json
    assert (told["key"], told["question"], told["text"]) == (key(2), "question 2", "answer 2")
    assert ask(store, "GET", "/v1/cache/entries/0202").status == 400
    assert ask(store, "GET", "/v1/cache/entries/not-a-key").status == 400
    assert ask(store, "GET", "/v1/cache/entries/ffffffff").status == 404


def test_that_an_answer_is_corrected_and_then_stands(store: Store) -> None:
    told = ask(store, "PUT", f"/v1/cache/entries/{key(1)}", {"text": "right"}).json
    assert (told["text"], told["is_corrected"], told["ttl_s"]) == ("right", True, None)
    found = store.get_now(bytes.fromhex(key(1)))
    assert found is not None
    answer = stored.decode(found.value)
    assert answer is not None
    assert stored.replay(answer, 2e9)[-1].finish_reason == "stop"
    assert ask(store, "PUT", f"/v1/cache/entries/{key(1)}", {"text": "wrong"}, peer=BOB).status == 404
    for body in ({"text": " "}, {"text": "x" * 70_000}, {"text": 5}, {"words": "x"}, {}):
        assert ask(store, "PUT", f"/v1/cache/entries/{key(1)}", body).status in (400, 413)
    assert ask(store, "GET", f"/v1/cache/entries/{key(1)}").json["text"] == "right"


def test_that_stored_tensors_are_shown_without_text_and_cannot_be_corrected(store: Store) -> None:
    store.put(b"\x09" * 32, Meta(kind="tensors", model="eyes", created_at_s=1e9, title="x UINT8 [4]"), b"{}")
    told = ask(store, "GET", f"/v1/cache/entries/{key(9)}").json
    assert (told["kind"], told["title"]) == ("tensors", "x UINT8 [4]")
    assert ask(store, "PUT", f"/v1/cache/entries/{key(9)}", {"text": "x"}).error["code"] == "unsupported"


def test_that_entries_are_removed_one_by_one_by_tag_and_all(store: Store) -> None:
    assert ask(store, "DELETE", f"/v1/cache/entries/{key(3)}", peer=ALICE).status == 404
    assert ask(store, "DELETE", f"/v1/cache/entries/{key(2)}", peer=ALICE).json == {"removed": 1}
    assert ask(store, "DELETE", "/v1/cache/entries").status == 400
    assert ask(store, "DELETE", "/v1/cache/entries?tag=a", peer=ALICE).json == {"removed": 1}
    assert listed(store) == ["question 3"]
    assert ask(store, "DELETE", "/v1/cache", peer=ALICE).json == {"removed": 0}
    assert store.epoch == 0
    assert ask(store, "DELETE", "/v1/cache").json == {"removed": 1}
    assert store.epoch == 1


@pytest.mark.parametrize("limit", ["0", "-1", "x", "20001", "9" * 30])
def test_that_a_limit_out_of_range_is_refused(store: Store, limit: str) -> None:
    assert ask(store, "GET", f"/v1/cache/entries?limit={limit}").status == 400


def test_that_a_cache_which_is_switched_off_says_so() -> None:
    error = ask(None, "GET", "/v1/cache").error
    assert "cache.enabled" in error["message"]
