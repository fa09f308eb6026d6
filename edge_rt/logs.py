"""How log lines look and where they go. Prompts and answers never reach one."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

import msgspec

from edge_rt.journal import JournalFormatter, is_journal

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> Mapping[str, Any]:
    extras = {key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None}
    if "request_id" not in extras and (current := request_id.get()):
        extras["request_id"] = current
    return extras


class TextFormatter(logging.Formatter):
    """One line: time, level, logger, message, then key=value; line breaks in it are escaped.

    has_time  False where who reads the lines notes the time itself
    """

    def __init__(self, *, has_time: bool = True) -> None:
        super().__init__()
        self._has_time = has_time

    def format(self, record: logging.LogRecord) -> str:
        now = time.strftime("%Y-%m-%dT%H:%M:%S ", time.localtime(record.created)) if self._has_time else ""
        pairs = "".join(f" {key}={value}" for key, value in _extras(record).items())
        line = f"{now}{record.levelname.lower()} {record.name}: {record.getMessage()}{pairs}"
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def configure(
    level: str,
    style: Literal["text", "json"],
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Send the root logger to stderr (or stream), replacing handlers set up before.

    Lines that go straight to systemd's journal (JOURNAL_STREAM in environ) begin with their priority.
    """
    stream = stream or sys.stderr
    to_journal = is_journal(stream, environ)
    formatter = JsonFormatter() if style == "json" else TextFormatter(has_time=not to_journal)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JournalFormatter(formatter) if to_journal else formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(root.level, logging.WARNING))
