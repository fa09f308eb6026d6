from __future__ import annotations

import pytest
from msgspec import Raw

from edge_rt.api.fields import named_as, raw_text
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError

NAMES = {
    "max_tokens": "limit",
    "messages[": "input",
    "stop": "stop_sequences",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("max_tokens", "limit"),
        ("max_tokens_more", "max_tokens_more"),
        ("messages", "messages"),
        ("messages[3].content", "input"),
        ("stop[0]", "stop_sequences[0]"),
        ("tools[12].function.parameters#/properties/a", "tools[12].input_schema#/properties/a"),
        ("tools[1].function.name", "tools[1].name"),
        ("tools", "tools"),
        ("", ""),
    ],
)
def test_errors_name_fields_as_their_protocol_does(name: str, own: str) -> None:
    with pytest.raises(InvalidRequestError) as wrong, named_as(NAMES):
        raise InvalidRequestError(param=name, problem="p")
    assert (wrong.value.param, wrong.value.problem) == (own, "p")
    with pytest.raises(UnsupportedFeatureError) as refused, named_as(NAMES):
        raise UnsupportedFeatureError(feature=name, remedy="r")
    assert (refused.value.feature, refused.value.remedy) == (own, "r")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), named_as(NAMES):
        raise KeyError("x")


def test_raw_text() -> None:
    assert raw_text(Raw(b'{"a": 1}'), "p") == '{"a": 1}'
    assert raw_text(Raw(b"null"), "p") == raw_text(Raw(), "p") == ""
    with pytest.raises(InvalidRequestError, match="p: is not valid UTF-8"):
        raw_text(Raw(b'"\xff"'), "p")
