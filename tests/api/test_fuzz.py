"""No body makes the API fail: it is answered, or refused with a status below 500 and OpenAI's error shape."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from edge_rt.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, WireMessage
from tests.api.asgi import FakeRuntime, Reply, ask, whole

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
numbers = st.integers(-3, 200) | st.floats(-3, 3) | scalars
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool", "x"])},
        optional={
            "content": values | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": scalars}), max_size=2),
            **{name: values for name in WireMessage.__struct_encode_fields__ if name not in ("role", "content")},
        },
    ),
    max_size=3,
)


def bodies(cls: Any, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: known.get(name, numbers | values) for name in cls.__struct_encode_fields__ if name not in known}
    return st.fixed_dictionaries(known, optional=fields)


def check(reply: Reply) -> None:
    assert reply.status == 200 or 400 <= reply.status < 500
    assert reply.whole
    if reply.status != 200:
        assert set(reply.error) >= {"message", "type", "param", "code"}
        assert len(reply.error["message"]) < 1000


@given(bodies(ChatRequest, messages=messages, model=st.just("default")))
@example({"messages": [{"role": "user", "content": "x"}], "model": "default"})
def test_chat(body: dict[str, Any]) -> None:
    check(ask(FakeRuntime(whole("a", "b")), "POST", "/v1/chat/completions", body))


@given(bodies(CompletionRequest, prompt=values | st.lists(st.integers(-1, 9), max_size=3), model=st.just("default")))
@example({"prompt": "x", "model": "default"})
def test_completions(body: dict[str, Any]) -> None:
    check(ask(FakeRuntime(whole("a", "b")), "POST", "/v1/completions", body))


@given(bodies(TokenizeRequest, content=values), bodies(DetokenizeRequest, tokens=values))
def test_tokens(tokenize: dict[str, Any], detokenize: dict[str, Any]) -> None:
    check(ask(FakeRuntime(), "POST", "/tokenize", tokenize))
    check(ask(FakeRuntime(), "POST", "/detokenize", detokenize))


@given(st.binary(max_size=80), st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]))
def test_bytes(body: bytes, path: str) -> None:
    check(ask(FakeRuntime(whole("a")), "POST", path, body))


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_a_good_body_with_some_bytes_changed(place: int, change: bytes) -> None:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "héllo \ud83d\ude00"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "logit_bias": {"5": 1},
            "stop": ["a"],
        }
    ).encode()
    place %= len(body)
    check(ask(FakeRuntime(whole("a")), "POST", "/v1/chat/completions", body[:place] + change + body[place + 1 :]))
