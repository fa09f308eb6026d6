from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edge_rt.api.formats import response_format
from edge_rt.api.schemas import ChatRequest, decode
from edge_rt.cli import main
from edge_rt.cli.answer_form import form_of, wire_fields
from edge_rt.types import ResponseFormat

NOTHING: dict[str, Any] = {"json_schema": None, "grammar": None, "regex": None, "choice": ()}


@pytest.mark.parametrize(
    "form",
    [
        ResponseFormat(kind="json_schema", text='{"type": "integer"}'),
        ResponseFormat(kind="json_object"),
        ResponseFormat(kind="grammar", text='root ::= "a"'),
        ResponseFormat(kind="regex", text="a+"),
        ResponseFormat(kind="choice", text='["a","b"]'),
    ],
)
def test_a_daemon_understands_every_form(form: ResponseFormat) -> None:
    body = json.dumps({"messages": [], **wire_fields(form)}).encode()
    assert response_format(decode(body, ChatRequest)) == form


def test_options_become_forms(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text('{"type": "integer"}')
    options = {**NOTHING, "json_schema": file, "seed": 1}
    assert form_of(options) == ResponseFormat(kind="json_schema", text='{"type": "integer"}')
    assert options == {"seed": 1}
    assert form_of({**NOTHING, "grammar": file}) == ResponseFormat(kind="grammar", text='{"type": "integer"}')
    assert form_of({**NOTHING, "choice": ("a", "b")}) == ResponseFormat(kind="choice", text='["a", "b"]')
    assert form_of({**NOTHING, "regex": "a"}) == ResponseFormat(kind="regex", text="a")
    assert form_of({**NOTHING}) is None


def test_two_forms_are_refused() -> None:
    with pytest.raises(click.UsageError, match="--regex and --choice"):
        form_of({**NOTHING, "regex": "a", "choice": ("b",)})


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 200_000, None])
def test_files_that_hold_no_schema_are_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(click.FileError) as caught:
        form_of({**NOTHING, "json_schema": file})
    assert str(file) in caught.value.format_message()


def test_run_answers_in_a_form() -> None:
    arguments = ["run", "null", "Hello", "--backend", "null", "--choice", "yes", "--choice", "no"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() in ("yes", "no")
