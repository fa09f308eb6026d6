"""Any field of a request that changes the answer changes the key, and no other does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_rt.cache.key import KEY_BYTES, UNKEYED, Identity, answer_key, partition_key
from edge_rt.types import (
    Adapter,
    Beams,
    CacheWishes,
    GenerateRequest,
    Message,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
)

TEXTS = st.text(max_size=20)
MESSAGES = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        content=TEXTS,
        tool_calls=st.lists(st.builds(ToolCall, id=TEXTS, name=TEXTS, arguments=TEXTS), max_size=2).map(tuple),
        tool_call_id=TEXTS,
        name=TEXTS,
    ),
    min_size=1,
    max_size=4,
).map(tuple)

# What each field may hold. A field that is added to a type below fails the test until it has a line here, and one that
# shall not be part of the key until UNKEYED names it as well.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_k": st.integers(0, 100),
    "top_p": st.floats(0.1, 1),
    "min_p": st.floats(0, 1),
    "repeat_penalty": st.floats(0.5, 2),
    "repeat_last_n": st.integers(0, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.none() | st.integers(0, 2**32),
    "logit_bias": st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
}
REQUEST: dict[str, st.SearchStrategy[Any]] = {
    "model": TEXTS,
    "prompt": st.none() | TEXTS,
    "prompt_token_ids": st.none() | st.lists(st.integers(0, 1000), max_size=4).map(tuple),
    "messages": st.none() | MESSAGES,
    "max_tokens": st.none() | st.integers(1, 1000),
    "stop": st.lists(TEXTS, max_size=3).map(tuple),
    "sampling": st.fixed_dictionaries(SAMPLING).map(lambda values: Sampling(**values)),
    "ignore_eos": st.booleans(),
    "top_logprobs": st.none() | st.integers(0, 20),
    "response_format": st.none()
    | st.builds(ResponseFormat, kind=st.sampled_from(["json_object", "json_schema", "regex"]), text=TEXTS),
    "tools": st.lists(st.builds(Tool, name=TEXTS, description=TEXTS, parameters=TEXTS), max_size=2).map(tuple),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "tool_name": TEXTS,
    "parallel_tool_calls": st.booleans(),
    "adapters": st.lists(st.builds(Adapter, name=TEXTS, scale=st.floats(0, 2)), max_size=2).map(tuple),
    "continues": st.booleans(),
    "prompt_logprobs": st.none() | st.integers(0, 3),
    "beams": st.none() | st.builds(Beams, n_beams=st.integers(2, 4), length_penalty=st.floats(0, 2)),
}
CARRIAGE: dict[str, st.SearchStrategy[Any]] = {
    "id": TEXTS,
    "stream": st.booleans(),
    "max_draft": st.none() | st.integers(0, 8),
    "deadline_s": st.none() | st.floats(0.1, 100),
    "max_signals": st.integers(0, 32),
    "tells_start": st.booleans(),
    "route": st.sampled_from(["auto", "local", "cloud"]),
    "cache": st.builds(CacheWishes, no_cache=st.booleans(), sampled=st.booleans()),
    "tenant": TEXTS,
    "priority": st.sampled_from(["interactive", "normal", "background"]),
}
IDENTITY: dict[str, st.SearchStrategy[Any]] = {
    f.name: st.integers(0, 100) if f.name == "n_ctx" else TEXTS for f in fields(Identity)
}
IDENTITY["adapters"] = st.lists(st.tuples(TEXTS, st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)


def _same(a: Any, b: Any) -> bool:
    """Tell whether two values of a field ask for the same, by the rule that the module declares."""
    from edge_rt.cache.key import normalised

    if isinstance(a, Message) and isinstance(b, Message):
        rest = (a.role, a.tool_calls) == (b.role, b.tool_calls)
        texts = ("content", "tool_call_id", "name")
        return rest and all(normalised(getattr(a, name)) == normalised(getattr(b, name)) for name in texts)
    if isinstance(a, tuple) and isinstance(b, tuple) and a and isinstance(a[0], Message):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _key(request: GenerateRequest, identity: Identity | None = None, *, epoch: int = 0, isolate: bool = True) -> bytes:
    return answer_key(request, identity or Identity(model="m"), epoch=epoch, isolate=isolate)


def _request(**values: Any) -> GenerateRequest:
    base: dict[str, Any] = {"id": "1", "model": "m", "messages": (Message(role="user", content="Hello"),)}
    return GenerateRequest(**{**base, **values})


def test_that_every_field_of_a_request_has_been_decided_on() -> None:
    assert {f.name for f in fields(GenerateRequest)} == set(REQUEST) | set(CARRIAGE)
    assert {f.name for f in fields(Sampling)} == set(SAMPLING)
    assert set(CARRIAGE) == UNKEYED
    decided = {"role", "content", "tool_calls", "tool_call_id", "name"}
    assert {f.name for f in fields(Message)} == decided, "decide whether it changes the answer"
    assert set(get_type_hints(Identity)) == set(IDENTITY)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_that_a_field_which_changes_the_answer_changes_the_key(data: st.DataObject) -> None:
    request = _request(**{name: data.draw(values, name) for name, values in REQUEST.items()})
    name = data.draw(st.sampled_from(sorted(REQUEST)), "field")
    other = data.draw(REQUEST[name], "other")
    before = getattr(request, name)
    if name == "prompt" and isinstance(before, str) and isinstance(other, str):
        assume(not _same(Message(role="user", content=before), Message(role="user", content=other)))
    assume(not _same(before, other))
    assert _key(request) != _key(replace(request, **{name: other}))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_that_each_sampling_field_changes_the_key(data: st.DataObject) -> None:
    sampling = Sampling(**{name: data.draw(values) for name, values in SAMPLING.items()})
    name = data.draw(st.sampled_from(sorted(SAMPLING)))
    other = data.draw(SAMPLING[name])
    changed = replace(sampling, **{name: other})
    assert (_key(_request(sampling=sampling)) == _key(_request(sampling=changed))) == (sampling == changed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_that_who_answers_changes_the_key(data: st.DataObject) -> None:
    identity = Identity(**{name: data.draw(values) for name, values in IDENTITY.items()})
    name = data.draw(st.sampled_from(sorted(IDENTITY)))
    changed = replace(identity, **{name: data.draw(IDENTITY[name])})
    assert (_key(_request(), identity) == _key(_request(), changed)) == (identity == changed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_that_how_an_answer_is_carried_does_not_change_the_key(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(CARRIAGE) - {"tenant"})))
    request = _request(**{name: data.draw(CARRIAGE[name])})
    assert _key(request) == _key(_request())


def test_that_tenants_share_answers_only_where_they_are_not_isolated() -> None:
    one, other = _request(tenant="1000"), _request(tenant="1001")
    assert _key(one) != _key(other)
    assert _key(one, isolate=False) == _key(other, isolate=False)
    assert _key(one, isolate=False) != _key(one)


def test_that_a_new_epoch_changes_the_key() -> None:
    assert _key(_request(), epoch=0) != _key(_request(), epoch=1)


@pytest.mark.parametrize(
    ("a", "b"),
    [("caf\u00e9", "cafe\u0301"), ("a\r\nb", "a\nb"), ("a\rb", "a\nb")],
)
def test_that_one_text_written_in_two_ways_is_one_text(a: str, b: str) -> None:
    assert _key(_request(messages=(Message(role="user", content=a),))) == _key(
        _request(messages=(Message(role="user", content=b),))
    )
    assert _key(_request(messages=None, prompt=a)) == _key(_request(messages=None, prompt=b))
    assert _key(_request(stop=(a,))) != _key(_request(stop=(b,))), "stop strings are compared with the answer's bytes"


@pytest.mark.parametrize(("a", "b"), [("Hello", "hello"), ("Hello", "Hello "), ("Hello", "Hello!"), ("ﬁ", "fi")])
def test_that_nothing_else_is_normalised(a: str, b: str) -> None:
    assert _key(_request(messages=(Message(role="user", content=a),))) != _key(
        _request(messages=(Message(role="user", content=b),))
    )


def test_that_a_text_cannot_pretend_to_be_two_messages() -> None:
    two = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    one = (Message(role="user", content='a"},{"role":"assistant","content":"b'),)
    assert _key(_request(messages=two)) != _key(_request(messages=one))
    assert _key(_request(stop=("a", "b"))) != _key(_request(stop=("a,b",)))


def test_that_a_number_counts_by_its_value_and_a_bias_by_its_token() -> None:
    assert _key(_request(sampling=Sampling(temperature=1))) == _key(_request(sampling=Sampling(temperature=1.0)))
    one, other = Sampling(logit_bias={1: 2.0, 3: 4.0}), Sampling(logit_bias={3: 4.0, 1: 2.0})
    assert _key(_request(sampling=one)) == _key(_request(sampling=other))


def test_that_a_lone_surrogate_has_a_key() -> None:
    assert len(_key(_request(messages=None, prompt="\ud800"))) == KEY_BYTES


def test_that_a_partition_is_everything_but_the_last_question() -> None:
    def key(**values: Any) -> bytes | None:
        return partition_key(_request(**values), Identity(model="m"), epoch=0, isolate=True)

    system, hello, bye = (
        Message(role="system", content="Be brief"),
        Message(role="user", content="Hello"),
        Message(role="user", content="Bye"),
    )
    answer = Message(role="assistant", content="Hi")
    assert key(messages=(hello,)) == key(messages=(bye,)) is not None
    assert key(messages=(system, hello)) != key(messages=(hello,)), "the system prompt"
    assert key(messages=(hello, answer, bye)) != key(messages=(bye, answer, bye)), "what was said before"
    assert key(messages=(hello,), max_tokens=5) != key(messages=(hello,))
    assert key(messages=(hello,), tenant="1") != key(messages=(hello,), tenant="2")
    assert key(messages=(hello, answer)) is None
    assert key(messages=None, prompt="Hello") is None
    assert key(messages=(hello,)) != _key(_request(messages=(hello,)))
