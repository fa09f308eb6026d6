"""Run every command block of the README and the docs, page by page, in a directory and a home of their own.

A fenced block's language decides: `sh` runs as a script, `sh background` starts and stays until the page is done,
`python` runs as a script, `sh ci` is what CI itself runs and is only compared with the Makefile. Other languages are
not commands. The store is this machine's own, so that no page fetches the model again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import patience
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {"sh", "sh background", "sh ci", "python"}
BLOCK_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1].strip(), found[2], text.count("\n", 0, found.start()) + 1)
        for found in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind in KINDS - {"sh ci"}]


@pytest.fixture
def environ(tmp_path: Path, socket_dir: Path, model_store: Path) -> dict[str, str]:
    """A user's environment: this venv on PATH, an empty home, and the store that has the model."""
    store = model_store.parents[2]  # STORE/models/ID/FILE
    home = tmp_path / "home"
    home.mkdir()
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(socket_dir),
        "EDGE_RT__CATALOG__STORE_DIR": str(store),
        "EDGE_RT__SERVER__SOCKET_PATH": str(socket_dir / "edge_rt" / "edge_rt.sock"),
    }


def run(block: Block, page: Path, cwd: Path, environ: dict[str, str]) -> str:
    command = [sys.executable, "-W", "error", "-c"] if block.kind == "python" else ["/bin/sh", "-eu", "-c"]
    done = subprocess.run(
        [*command, block.text],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    place = f"{page.name}:{block.line}"
    assert done.returncode == 0, f"{place} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, f"{place}\n{done.stderr}"
    return done.stdout


@contextmanager
def background(block: Block, cwd: Path, environ: dict[str, str]) -> Iterator[None]:
    """Keep a daemon running; it must become ready, and end well on SIGTERM."""
    log = cwd / "background.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["/bin/sh", "-eu", "-c", f"exec {block.text}"], cwd=cwd, env=environ, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        patience.until(lambda: "listens on" in log.read_text() or process.poll() is not None, told=log.read_text)
        assert process.poll() is None, log.read_text()
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


SLOW = {"bench.md": pytest.mark.slow}


@pytest.mark.model
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=SLOW.get(page.name, ()), id=page.name) for page in PAGES if commands(page)],
)
def test_the_pages_commands_work(page: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    cwd = tmp_path / "work"
    cwd.mkdir()
    with ExitStack() as running:
        for block in commands(page):
            if block.kind == "sh background":
                running.enter_context(background(block, cwd, environ))
            else:
                run(block, page, cwd, environ)


def test_every_page_is_linked_from_the_readme() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_what_ci_runs_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for block in blocks(PAGES[0]) if block.kind == "sh ci" for line in block.text.splitlines()]
    assert lines == ["make demo", "make test"]
    assert all(f"\n{line.removeprefix('make ')}:" in makefile for line in lines)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_block_escapes_by_its_language(page: Path) -> None:
    not_commands = {"", "console", "toml", "json", "text", "ini"}
    assert [(b.line, b.kind) for b in blocks(page) if b.kind not in KINDS | not_commands] == []
