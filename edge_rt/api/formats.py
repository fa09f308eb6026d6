"""What an answer must look like: the fields that OpenAI, llama-server and vLLM have for it → ResponseFormat.

A schema is handed on as it came; whoever computes the answer reads it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from edge_rt.api.fields import ABSENT, raw_text
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import ResponseFormat


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a request body."""


class WireJsonSchema(_Part, kw_only=True):
    """OpenAI's. name and description are for people; an answer is held to the schema with strict and without."""

    schema: Raw = ABSENT
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class WireFormat(_Part, kw_only=True):
    """OpenAI's response_format; llama-server also takes a schema beside json_object."""

    type: str
    json_schema: WireJsonSchema | None = None
    schema: Raw = ABSENT


class StructuredOutputs(_Part, kw_only=True):
    """vLLM's."""

    json: Raw = ABSENT
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Formatted(_Part, kw_only=True):
    """The fields that chat and completions share."""

    response_format: WireFormat | None = None
    grammar: str | None = None  # llama-server's, as is json_schema
    json_schema: Raw = ABSENT
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = ABSENT  # vLLM's older names
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def response_format(wire: Formatted) -> ResponseFormat | None:
    """Give what a request asks for. Raises InvalidRequestError where it asks for two things."""
    structured = wire.structured_outputs or StructuredOutputs()
    found = {
        "response_format": _openai(wire.response_format),
        "grammar": _text("grammar", wire.grammar),
        "json_schema": _schema(wire.json_schema, "json_schema"),
        "structured_outputs.json": _schema(structured.json, "structured_outputs.json"),
        "structured_outputs.json_object": ResponseFormat(kind="json_object") if structured.json_object else None,
        "structured_outputs.regex": _text("regex", structured.regex),
        "structured_outputs.choice": _choice(structured.choice),
        "structured_outputs.grammar": _text("grammar", structured.grammar),
        "guided_json": _schema(wire.guided_json, "guided_json"),
        "guided_regex": _text("regex", wire.guided_regex),
        "guided_choice": _choice(wire.guided_choice),
        "guided_grammar": _text("grammar", wire.guided_grammar),
    }
    given = [(name, form) for name, form in found.items() if form is not None]
    if len(given) > 1:
        raise InvalidRequestError(param=given[1][0], problem=f"there is {given[0][0]} already; give one of them")
    return given[0][1] if given else None


def _openai(wire: WireFormat | None) -> ResponseFormat | None:
    if wire is None:
        return None
    if wire.type == "text":
        return None
    if wire.type == "json_object":
        return _schema(wire.schema, "response_format.schema") or ResponseFormat(kind="json_object")
    if wire.type != "json_schema":
        remedy = f"send text, json_object or json_schema, not {wire.type[:40]!r}"
        raise UnsupportedFeatureError(feature="response_format.type", remedy=remedy)
    place = "response_format.json_schema"
    form = None if wire.json_schema is None else _schema(wire.json_schema.schema, f"{place}.schema")
    form = form or _schema(wire.schema, "response_format.schema")  # llama-server takes it here too
    if form is None:
        raise InvalidRequestError(param=f"{place}.schema", problem="is required")
    return form


def _schema(raw: Raw, param: str) -> ResponseFormat | None:
    text = raw_text(raw, param)
    return ResponseFormat(kind="json_schema", text=text) if text else None


def _text(kind: str, text: str | None) -> ResponseFormat | None:
    if not text:  # clients send "" for none
        return None
    return ResponseFormat(kind="regex" if kind == "regex" else "grammar", text=text)


def _choice(choices: list[str] | None) -> ResponseFormat | None:
    if choices is None:
        return None
    return ResponseFormat(kind="choice", text=msgspec.json.encode(choices).decode())
