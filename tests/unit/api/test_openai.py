from __future__ import annotations

import json
from typing import Any

import pytest

from edge_rt.api.openai import chat_request, completion_requests
from edge_rt.api.schemas import ChatRequest, CompletionRequest, decode
from edge_rt.config import Limits
from edge_rt.errors import EdgeRtError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.guard.limits import check_request
from edge_rt.types import Beams, GenerateRequest, Message, Sampling


def chat(messages: Any = None, **fields: Any) -> GenerateRequest:
    messages = [{"role": "user", "content": "x"}] if messages is None else messages
    wire = decode(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)
    return chat_request(wire, request_id="r", model="m", tenant="uid:1")


def complete(prompt: Any, **fields: Any) -> GenerateRequest:
    wire = decode(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest)
    [asked] = completion_requests(wire, request_id="r", model="m", tenant="uid:1")
    return asked


def test_defaults_are_llama_servers() -> None:
    assert chat() == GenerateRequest(
        id="r",
        model="m",
        messages=(Message(role="user", content="x"),),
        stream=False,
        sampling=Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
        tenant="uid:1",
    )


def test_every_field_arrives() -> None:
    asked = chat(
        max_tokens=5,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_k=1,
        top_p=0.5,
        min_p=0.1,
        repeat_penalty=1.1,
        repeat_last_n=9,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=4,
        logit_bias={"7": -100},
        ignore_eos=True,
        deadline_s=2,
        **{"speculative.n_max": 4},
        logprobs=True,
        top_logprobs=3,
    )
    assert asked == GenerateRequest(
        id="r",
        model="m",
        messages=(Message(role="user", content="x"),),
        max_tokens=5,
        stop=("a", "b"),
        stream=True,
        ignore_eos=True,
        max_draft=4,
        top_logprobs=3,
        deadline_s=2,
        tenant="uid:1",
        sampling=Sampling(
            temperature=0,
            top_k=1,
            top_p=0.5,
            min_p=0.1,
            repeat_penalty=1.1,
            repeat_last_n=9,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            seed=4,
            logit_bias={7: -100},
        ),
    )


def test_nulls_mean_defaults() -> None:
    names = [name for name in ChatRequest.__struct_encode_fields__ if name != "messages"]
    assert chat(**dict.fromkeys(names)) == chat()


def test_max_tokens_has_two_names() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    with pytest.raises(InvalidRequestError, match="differs from max_completion_tokens"):
        chat(max_completion_tokens=7, max_tokens=8)


def test_stop_may_be_one_string() -> None:
    assert chat(stop="end").stop == ("end",)
    assert chat(stop=None).stop == ()


def test_logprobs_without_rivals() -> None:
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=False).top_logprobs is None


def test_content_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat([{"role": "user", "content": parts}]).messages == (Message(role="user", content="a\nb"),)


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    assert chat([answer]).messages == (Message(role="assistant", content="hi"),)


ASKED = {"role": "user", "content": "a"}
BEGUN = {"role": "assistant", "content": "b"}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("last", "fields", "continues"),
    [
        (BEGUN, {}, True),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}, True),
        (BEGUN, {"continue_final_message": False, "add_generation_prompt": True}, False),
        (BEGUN, {"add_generation_prompt": True}, False),
        (BEGUN, {"add_generation_prompt": False}, True),
        (CALLED, {}, False),
        (ASKED, {"add_generation_prompt": True}, False),
        (ASKED, {"continue_final_message": True}, True),  # which is refused with the other ranges
        (ASKED, {"add_generation_prompt": False}, True),  # so is this
    ],
)
def test_an_answer_may_go_on_with_the_last_message(
    last: dict[str, Any], fields: dict[str, Any], continues: bool
) -> None:
    assert chat([ASKED, last], **fields).continues is continues


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}),
        (BEGUN, {"continue_final_message": False, "add_generation_prompt": False}),
        (ASKED, {"continue_final_message": False, "add_generation_prompt": False}),
    ],
)
def test_the_generation_prompt_goes_with_how_the_answer_begins(last: dict[str, Any], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        chat([ASKED, last], **fields)


def test_no_generation_prompt_after_a_question_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        check_request(chat([ASKED], add_generation_prompt=False), Limits())


def test_developer_is_system() -> None:
    assert chat([{"role": "developer", "content": "x"}]).messages == (Message(role="system", content="x"),)


@pytest.mark.parametrize(
    ("message", "kind", "place"),
    [
        ({"role": "user", "content": None}, InvalidRequestError, "messages[0].content"),
        ({"role": "user"}, InvalidRequestError, "messages[0].content"),
        ({"role": "wizard", "content": "x"}, InvalidRequestError, "messages[0].role"),
        ({"role": "tool", "content": "x"}, InvalidRequestError, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, InvalidRequestError, "messages[0].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, InvalidRequestError, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, UnsupportedFeatureError, "messages[0].role"),
        ({"role": "user", "content": "x", "name": "bob"}, UnsupportedFeatureError, "messages[0].name"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]},
            InvalidRequestError,
            "messages[0].tool_calls",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            UnsupportedFeatureError,
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, InvalidRequestError, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "file": {}}]},
            UnsupportedFeatureError,
            "messages[0].content[0].file",
        ),
    ],
)
def test_messages_that_cannot_be_answered(message: dict[str, Any], kind: type[EdgeRtError], place: str) -> None:
    with pytest.raises(kind) as caught:
        chat([message])
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_fields_that_need_others(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(EdgeRtError, match=words):
        chat(**fields)


def test_prompts() -> None:
    assert complete("x").prompt == "x"
    assert complete(["x"]).prompt == "x"
    assert complete([1, 2]).prompt_token_ids == (1, 2)
    assert complete([[1, 2]]).prompt_token_ids == (1, 2)
    assert complete([]).prompt_token_ids == ()
    assert complete("x", logprobs=2).top_logprobs == 2
    with pytest.raises(InvalidRequestError, match="a token id between prompts"):
        complete(["x", 1])


@pytest.mark.parametrize(
    ("fields", "beams"),
    [
        ({}, None),
        ({"num_beams": 1}, None),
        ({"use_beam_search": False}, None),
        ({"num_beams": 4}, Beams(n_beams=4)),
        ({"num_beams": 4, "n": 3, "temperature": 0}, Beams(n_beams=4, n_best=3)),
        ({"use_beam_search": True, "n": 2}, Beams(n_beams=2, n_best=2)),
        ({"use_beam_search": True}, Beams(n_beams=1)),
        ({"num_beams": 2, "length_penalty": 0, "early_stopping": True},
         Beams(n_beams=2, length_penalty=0, early_stopping="first")),
        ({"num_beams": 2, "early_stopping": "never"}, Beams(n_beams=2, early_stopping="never")),
        ({"num_beams": 2, "early_stopping": False}, Beams(n_beams=2)),
    ],
)  # fmt: skip
def test_beam_searches(fields: dict[str, Any], beams: Beams | None) -> None:
    for asked in (chat(**fields), complete("x", **fields)):
        assert asked.beams == beams
        assert asked.sampling == Sampling() or beams is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "top_p": 0.5}, "top_p"),
        ({"num_beams": 2, "logit_bias": {"1": 1}}, "logit_bias"),
        ({"num_beams": 2, "stream": True}, "stream"),
        ({"num_beams": 2, "echo": True}, "echo"),
        ({"num_beams": 2, "use_beam_search": False}, "num_beams"),
        ({"num_beams": 0}, "num_beams"),
        ({"length_penalty": 1}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_does_not_go_with_a_beam_search_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete("x", **fields)
    assert caught.value.param == param


def test_each_prompt_is_a_request() -> None:
    wire = decode(b'{"prompt": ["x", [1, 2]], "echo": true, "logprobs": 1, "max_tokens": 0}', CompletionRequest)
    asked = completion_requests(wire, request_id="r", model="m", tenant="uid:1")
    assert [(each.prompt, each.prompt_token_ids) for each in asked] == [("x", None), (None, (1, 2))]
    assert {(each.prompt_logprobs, each.top_logprobs, each.max_tokens) for each in asked} == {(1, 1, 0)}


def test_an_echo_is_scored_where_logprobs_are_wanted_or_nothing_else_is() -> None:
    assert complete("x", echo=True).prompt_logprobs is None
    assert complete("x", echo=True, max_tokens=0).prompt_logprobs == 0
    assert complete("x", echo=True, logprobs=3).prompt_logprobs == 3
    assert complete("x", logprobs=3).prompt_logprobs is None


@pytest.mark.parametrize("field", ["suffix"])
def test_completion_extras_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=field):
        complete("x", **{field: 5})
