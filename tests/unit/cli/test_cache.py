"""`edge_rt cache` on the file itself, where no daemon runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_rt.cache import stored
from edge_rt.cache.entries import Meta
from edge_rt.cache.store import Store
from edge_rt.cache.stored import StoredAnswer
from edge_rt.cli import main

Run = Callable[..., Result]
KEYS = [f"{n:02x}" * 32 for n in range(1, 4)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[server]\nsocket_path = "{tmp_path / "none.sock"}"\n[catalog]\nstore_dir = "{tmp_path / "store"}"\n'
    )

    def invoke(*arguments: str, text: str | None = None) -> Result:
        return CliRunner().invoke(main, ["--config", str(config), "cache", *arguments], input=text)

    return invoke


@pytest.fixture
def filled(tmp_path: Path, run: Run) -> Run:
    store = Store.open(tmp_path / "store" / "cache.sqlite", max_bytes=2**28, max_value_bytes=2**20)
    for n, key in enumerate(KEYS, 1):
        answer = StoredAnswer(
            model="m",
            pieces=stored.pieces_of(f"answer {n}"),
            prompt_tokens=5,
            completion_tokens=2,
            created_at_s=time.time() - 7200,
            question=f"question {n}",
        )
        meta = Meta(
            kind="answer",
            model=f"m{n}",
            created_at_s=time.time() - 7200,
            ttl_s=86_400.0,
            tags=("even",) if n % 2 == 0 else (),
            title=f"question {n} \x1b[31m",
            saved_s=1.5,
        )
        store.put(bytes.fromhex(key), meta, stored.encode(answer))
    store.hit(bytes.fromhex(KEYS[1]), time.time())
    store.close()
    return run


def test_that_nothing_stored_is_no_empty_file(run: Run, tmp_path: Path) -> None:
    shown = run("stats")
    assert shown.exit_code == 1
    assert "nothing has been stored yet" in shown.stderr
    assert not (tmp_path / "store" / "cache.sqlite").exists()


def test_that_figures_and_entries_are_shown(filled: Run) -> None:
    assert "hits      1" in filled("stats").stdout
    assert json.loads(filled("stats", "--json").stdout)["n_entries"] == 3
    lines = filled("show").stdout.splitlines()
    assert lines[0].split() == ["KEY", "MODEL", "HITS", "AGE", "BYTES", "SAVES", "QUESTION"]
    assert lines[1].startswith(KEYS[1][:12]), "the one that was given comes first"
    assert "2 h" in lines[1]
    assert "\x1b" not in "".join(lines), "a question cannot move the cursor"
    assert len(lines) == 4
    assert [e["key"] for e in json.loads(filled("show", "--json", "--tag", "even").stdout)["entries"]] == [KEYS[1]]
    assert filled("show", "--model", "none").stdout == "nothing is stored that fits\n"


def test_that_one_entry_is_shown_and_corrected(filled: Run, tmp_path: Path) -> None:
    shown = filled("show", KEYS[0][:8]).stdout
    assert "question\nquestion 1\n\nanswer\nanswer 1\n" in shown
    (tmp_path / "right.txt").write_text("the right one\n")
    assert filled("set", KEYS[0][:8], "--file", str(tmp_path / "right.txt")).exit_code == 0
    assert filled("set", KEYS[1], text="from standard input").exit_code == 0
    assert "the right one" in filled("show", KEYS[0]).stdout
    shown = filled("show", KEYS[1]).stdout
    assert "from standard input" in shown
    assert "as long as it is not removed" in shown
    refused = filled("set", KEYS[0], text="  ")
    assert (refused.exit_code, "text" in refused.stderr) == (1, True)


def test_that_entries_are_removed(filled: Run) -> None:
    assert filled("rm", KEYS[0][:10]).stdout == "removed 1\n"
    assert filled("rm", "--tag", "even").stdout == "removed 1\n"
    assert filled("rm").exit_code == 2
    assert filled("rm", KEYS[2], "--tag", "x").exit_code == 2
    assert "begins with ffffff" in filled("rm", "ffffff").stderr
    assert filled("clear", text="n\n").exit_code == 1
    assert json.loads(filled("stats", "--json").stdout)["n_entries"] == 1
    assert filled("clear", "--yes").stdout == "removed 1\n"
    assert filled("show").stdout == "nothing is stored\n"


def test_that_entries_are_exported_as_lines(filled: Run, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in filled("export").stdout.splitlines()]
    assert {line["question"]: line["text"] for line in lines} == {f"question {n}": f"answer {n}" for n in range(1, 4)}
    assert filled("export", "--file", str(tmp_path / "out.jsonl"), "--model", "m1").stdout == ""
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_that_a_store_which_cannot_be_used_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "cache.sqlite").mkdir()
    shown = run("stats")
    assert shown.exit_code == 1
    assert "cache.store_file" in shown.stderr
