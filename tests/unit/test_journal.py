from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from edge_rt import logs
from edge_rt.journal import is_journal, priority


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "stderr").open("w+") as file:
        yield file


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def environ_of(stream: TextIO) -> dict[str, str]:
    found = os.fstat(stream.fileno())
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


def test_a_stream_is_the_journals_if_the_environment_names_it(stream: TextIO) -> None:
    assert is_journal(stream, environ_of(stream))
    assert not is_journal(stream, {})
    assert not is_journal(stream, {"JOURNAL_STREAM": "8:1"})  # redirected since, as a shell's 2>file does
    assert not is_journal(io.StringIO(), environ_of(stream))


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (25, 6), (logging.INFO, 6), (logging.DEBUG, 7)],
)
def test_priority(level: int, number: int) -> None:
    assert priority(level) == number


@pytest.mark.usefixtures("_root_logger")
@pytest.mark.parametrize(("style", "start"), [("text", "<3>error x: failed"), ("json", '<3>{"time_s":')])
def test_every_line_of_a_record_has_its_priority(stream: TextIO, style: str, start: str) -> None:
    logs.configure("info", style, stream=stream, environ=environ_of(stream))  # type: ignore[arg-type]
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("x").exception("failed")
    logging.getLogger("x").info("well")
    stream.seek(0)
    lines = stream.read().splitlines()
    assert lines[0].startswith(start)
    assert all(line.startswith("<3>") for line in lines[:-1])
    assert lines[-1].startswith("<6>")


@pytest.mark.usefixtures("_root_logger")
def test_elsewhere_lines_have_their_time_instead(stream: TextIO) -> None:
    logs.configure("info", "text", stream=stream, environ={})
    logging.getLogger("x").info("well")
    stream.seek(0)
    assert re.match(r"\d{4}-\d\d-\d\dT", stream.read())
