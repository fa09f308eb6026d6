"""The options that say what an answer must look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from edge_rt.regular import read_regular
from edge_rt.types import ResponseFormat

F = TypeVar("F", bound=Callable[..., Any])

_MAX_BYTES: Final = 128 * 2**10  # more is refused by the engine in any case
_FILE: Final = click.Path(dir_okay=False, path_type=Path)


def form_options(command: F) -> F:
    """Add the options; they arrive as json_schema, grammar, regex and choice."""
    options = [
        click.option("--json-schema", type=_FILE, metavar="FILE", help="Answer with JSON that meets this JSON Schema."),
        click.option("--grammar", type=_FILE, metavar="FILE", help="Answer in a grammar, in GBNF."),
        click.option("--regex", metavar="REGEX", help="Answer with a text that this matches whole."),
        click.option("--choice", multiple=True, metavar="TEXT", help="Answer with one of these; repeat it for each."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def form_of(options: dict[str, Any]) -> ResponseFormat | None:
    """Take the options out of a command's and give what they ask for. Raises click.UsageError for two of them, and
    click.FileError for a file that cannot be read.
    """
    found = {name: options.pop(name) for name in ("json_schema", "grammar", "regex", "choice")}
    given = {name: value for name, value in found.items() if value not in (None, ())}
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"{names} say different things of the answer: give one of them.")
    for name, value in given.items():
        if name == "json_schema":
            return ResponseFormat(kind="json_schema", text=_schema(value))
        if name == "grammar":
            return ResponseFormat(kind="grammar", text=_read(value))
        if name == "regex":
            return ResponseFormat(kind="regex", text=value)
        return ResponseFormat(kind="choice", text=json.dumps(value))
    return None


def _schema(file: Path) -> str:
    text = _read(file)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.FileError(str(file), f"it is not valid JSON: {exc}"[:200]) from exc
    return text


def _read(file: Path) -> str:
    try:
        return read_regular(file, _MAX_BYTES).decode()
    except OSError as exc:
        raise click.FileError(str(file), exc.strerror or str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise click.FileError(str(file), "it is not UTF-8 text") from exc


def wire_fields(form: ResponseFormat) -> dict[str, Any]:
    """Write a form as the fields of a daemon's request."""
    if form.kind == "json_schema":
        return {"json_schema": json.loads(form.text)}
    if form.kind == "choice":
        return {"guided_choice": json.loads(form.text)}
    if form.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {"grammar" if form.kind == "grammar" else "guided_regex": form.text}
