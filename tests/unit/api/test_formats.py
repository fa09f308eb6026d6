from __future__ import annotations

import json
from typing import Any

import pytest

from edge_rt.api.openai import chat_request, completion_requests
from edge_rt.api.schemas import ChatRequest, CompletionRequest, decode
from edge_rt.errors import EdgeRtError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import ResponseFormat

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
BY_SCHEMA = ResponseFormat(kind="json_schema", text=json.dumps(SCHEMA))


def form(**fields: Any) -> ResponseFormat | None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    return chat_request(decode(body, ChatRequest), request_id="r", model="m", tenant="").response_format


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "grammar": None, "guided_json": None}, None),
        ({"response_format": {"type": "text"}, "grammar": ""}, None),
        ({"response_format": {"type": "json_object"}}, ResponseFormat(kind="json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            BY_SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA),
        ({"json_schema": SCHEMA}, BY_SCHEMA),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ResponseFormat(kind="json_object")),
        ({"grammar": 'root ::= "a"'}, ResponseFormat(kind="grammar", text='root ::= "a"')),
        ({"guided_grammar": "g"}, ResponseFormat(kind="grammar", text="g")),
        ({"guided_regex": "a+"}, ResponseFormat(kind="regex", text="a+")),
        ({"structured_outputs": {"regex": "a+"}}, ResponseFormat(kind="regex", text="a+")),
        ({"guided_choice": ["a", "é"]}, ResponseFormat(kind="choice", text='["a","é"]')),
        ({"structured_outputs": {"choice": ["a"]}}, ResponseFormat(kind="choice", text='["a"]')),
    ],
)
def test_every_name_of_a_form_is_read(fields: dict[str, Any], wanted: ResponseFormat | None) -> None:
    assert form(**fields) == wanted


def test_completions_have_the_same_fields() -> None:
    wire = decode(b'{"prompt": "x", "grammar": "g"}', CompletionRequest)
    (asked,) = completion_requests(wire, request_id="r", model="m", tenant="")
    assert asked.response_format == ResponseFormat(kind="grammar", text="g")


@pytest.mark.parametrize(
    ("fields", "error", "place"),
    [
        ({"response_format": {"type": "json_schema"}}, InvalidRequestError, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, InvalidRequestError, "schema"),
        ({"response_format": {"type": "xml"}}, UnsupportedFeatureError, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, InvalidRequestError, "response_format.x"),
        ({"response_format": {}}, InvalidRequestError, "response_format.type"),
        ({"response_format": "json"}, InvalidRequestError, "response_format"),
        ({"grammar": "g", "guided_regex": "a"}, InvalidRequestError, "guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, InvalidRequestError, "structured_outputs.regex"),
        ({"guided_choice": [1]}, InvalidRequestError, "guided_choice[0]"),
    ],
)
def test_what_is_no_form_is_refused_by_name(fields: dict[str, Any], error: type[EdgeRtError], place: str) -> None:
    with pytest.raises(error) as caught:
        form(**fields)
    assert place in str(caught.value)


def test_bytes_that_are_no_text_are_refused() -> None:
    body = b'{"messages": [], "guided_json": {"a": "\xff"}}'
    with pytest.raises(InvalidRequestError):
        chat_request(decode(body, ChatRequest), request_id="r", model="m", tenant="")
