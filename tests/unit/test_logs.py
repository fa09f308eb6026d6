from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edge_rt import logs


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_root_logger")
def test_text_log_is_one_line_with_its_extras() -> None:
    stream = io.StringIO()
    logs.configure("info", "text", stream=stream)
    logging.getLogger("x").info("two\nlines %d", 7, extra={"uid": 1000, "gid": None})
    logging.getLogger("x").debug("not shown")
    line = stream.getvalue()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d info x: two\\nlines 7 uid=1000\n", line)


@pytest.mark.usefixtures("_root_logger")
def test_json_log_carries_the_request_id_and_the_traceback() -> None:
    stream = io.StringIO()
    logs.configure("debug", "json", stream=stream)
    token = logs.request_id.set("abc")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("x").exception("failed", extra={"path": SimpleNamespace(x=1)})
    finally:
        logs.request_id.reset(token)
    entry = json.loads(stream.getvalue())
    assert entry["request_id"] == "abc"
    assert entry["level"] == "error"
    assert "ValueError: boom" in entry["traceback"]
