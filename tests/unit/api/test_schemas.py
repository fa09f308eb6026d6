from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
    refuse_unsupported,
)
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def refused(body: bytes, cls: type[Any] = ChatRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, cls)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (chat(zzz=1), "zzz", "unknown field"),
        (b'{"messages":[{"role":"user","content":"x","zz":1}]}', "messages[0].zz", "unknown field"),
        (b"{}", "messages", "required"),
        (b'{"messages":[{}]}', "messages[0].role", "required"),
        (b'{"messages":[{"role":1}]}', "messages[0].role", "expected `str`, got `int`"),
        (b'{"messages":{}}', "messages", "expected `array`"),
        (b'{"messages":[[[[[[]]]]]]}', "messages[0]", "expected `object`"),
        (chat(stop=[1]), "stop[0]", "expected `str`"),
        (chat(max_tokens=True), "max_tokens", "got `bool`"),
        (chat(max_tokens=1.5), "max_tokens", "got `float`"),
        (chat(temperature="1"), "temperature", "got `str`"),
        (chat(temperature=False), "temperature", "got `bool`"),
        (chat(logit_bias={"x": 1}), "logit_bias", "expected `int`"),
        (chat(stream_options={"zz": 1}), "stream_options.zz", "unknown field"),
        (chat(metadata={"a": 1}), "metadata[...]", "expected `str`"),
        (b"[]", "", "expected `object`"),
        (b"", "", "empty"),
        (b"{", "", "not valid JSON"),
        (b'{"messages":[]} x', "", "not valid JSON"),
        (b'{"temperature":NaN}', "", "not valid JSON"),
        (b'{"temperature":1e999}', "temperature", "out of range"),
        (b'{"seed":' + b"9" * 5000 + b"}", "seed", "out of range"),
        (b'{"user":"\\ud800"}', "", "lone surrogates"),
        (b'{"user":"\\udc00abc"}', "", "lone surrogates"),
        (b'{"user":"\xff"}', "", "UTF-8"),
        (b'{"store":' + b"[" * 100_000, "", "nested too deeply"),
    ],
)
def test_a_bad_body_is_refused_by_name(body: bytes, param: str, words: str) -> None:
    error = refused(body)
    assert error.param == param
    assert words in error.problem
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": None},
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"functions": []},
        {"parallel_tool_calls": True},
        {"modalities": ["text"]},
        {"store": False},
        {"service_tier": "auto"},
        {"cache_prompt": True},
        {"audio": None, "prediction": None, "web_search_options": None, "reasoning_effort": None},
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y"},
    ],
)
def test_neutral_values_pass(fields: dict[str, Any]) -> None:
    refuse_unsupported(decode(chat(**fields), ChatRequest))


@pytest.mark.parametrize(
    "fields",
    [
        {"store": 0},
        {"store": 0.0},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"cache_prompt": False},
        {"audio": {"voice": "x"}},
        {"reasoning_effort": "high"},
        {"verbosity": "low"},
    ],
)
def test_values_that_ask_for_something_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        refuse_unsupported(decode(chat(**fields), ChatRequest))
    assert caught.value.feature == next(iter(fields))
    assert "leave it out or send" in str(caught.value)


@pytest.mark.parametrize("raw", [b"1e999", b'"\xff"', b"-0"])
def test_raw_values_that_do_not_decode_are_refused(raw: bytes) -> None:
    with pytest.raises(UnsupportedFeatureError):
        refuse_unsupported(decode(b'{"messages":[],"store":%b}' % raw, ChatRequest))


def test_prompts_may_be_strings_or_ids() -> None:
    for prompt in ("x", ["x"], [1, 2], [[1, 2]]):
        assert decode(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompt == prompt
    assert refused(b'{"prompt":[1.5]}', CompletionRequest).param == "prompt[0]"
    assert refused(b'{"prompt":null}', CompletionRequest).param == "prompt"


def test_tokenize_has_llama_servers_defaults() -> None:
    wire = decode(b'{"content":"x"}', TokenizeRequest)
    assert (wire.add_special, wire.parse_special) == (None, True)  # whether BOS comes first is the route's to know
    assert refused(b'{"tokens":["x"]}', DetokenizeRequest).param == "tokens[0]"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(ChatRequest.__struct_encode_fields__) | st.text(max_size=4), json_values, max_size=5
    )
)
def test_decoding_raises_nothing_but_request_errors(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()  # writes NaN and lone surrogates as JSON must not
    for cls in (ChatRequest, CompletionRequest):
        with suppress(InvalidRequestError, UnsupportedFeatureError):
            refuse_unsupported(decode(body, cls))


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    with suppress(InvalidRequestError):
        decode(body, TokenizeRequest)
