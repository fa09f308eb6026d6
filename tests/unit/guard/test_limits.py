from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.config import Limits
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.guard.limits import check_request, check_text, check_token_ids
from edge_rt.types import Adapter, Beams, GenerateRequest, Message, ResponseFormat, Sampling, ToolCall

LIMITS = Limits(
    max_messages=3, max_prompt_bytes=100, max_stop=2, max_stop_bytes=8, max_logit_bias=2, max_top_logprobs=5
)
GOOD = GenerateRequest(id="r", model="m", prompt="hello")


def message(text: str) -> Message:
    return Message(role="user", content=text)


def refused(request: GenerateRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": None, "messages": (message(""),)},
        {"prompt": None, "messages": (message("a"), message("b"), message("c"))},
        {"prompt": None, "prompt_token_ids": (0, 1, 2**31 - 1)},
        {"prompt": "x" * 100},
        {"prompt": "\x00"},
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1},
        {"stop": ("a", "b")},
        {"stop": ("12345678",)},
        {"top_logprobs": 0},
        {"prompt_logprobs": 5, "max_tokens": 0},
        {"beams": Beams(n_beams=4, n_best=4, length_penalty=-1.0), "sampling": Sampling(seed=3)},
        {"top_logprobs": 5},
        {"deadline_s": 0.001},
        {"max_draft": 0},
    ],
)
def test_what_is_in_range_passes(fields: dict[str, Any]) -> None:
    check_request(replace(GOOD, **fields), LIMITS)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ((), "continue_final_message"),
        ((message("a"),), "continue_final_message"),
        ((Message(role="assistant", content="a"),), "messages"),
        (
            (
                message("a"),
                Message(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments="{}"),)),
            ),
            "messages[1].tool_calls",
        ),
    ],
)
def test_only_a_text_of_the_assistants_can_be_gone_on_with(messages: tuple[Message, ...], param: str) -> None:
    asked = replace(GOOD, prompt=None if messages else "x", messages=messages or None, continues=True)
    assert refused(asked).param == param


@pytest.mark.parametrize(
    "fields", [{"response_format": ResponseFormat(kind="json_object")}, {"tool_choice": "required"}, {"tool_name": "f"}]
)
def test_an_answer_that_has_begun_has_no_form(fields: dict[str, Any]) -> None:
    messages = (message("a"), Message(role="assistant", content="b"))
    check_request(replace(GOOD, prompt=None, messages=messages, continues=True), LIMITS)
    with pytest.raises(UnsupportedFeatureError, match="of a given form"):
        check_request(replace(GOOD, prompt=None, messages=messages, continues=True, **fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"messages": (message("a"),)}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": "é" * 51}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": None, "prompt_token_ids": ()}, "prompt"),
        ({"prompt": None, "prompt_token_ids": (1, -1)}, "prompt[1]"),
        ({"prompt": None, "prompt_token_ids": (2**31,)}, "prompt[0]"),
        ({"prompt": None, "prompt_token_ids": (True,)}, "prompt[0]"),
        ({"prompt": None, "prompt_token_ids": (1,) * 26}, "prompt"),
        ({"prompt": None, "messages": ()}, "messages"),
        ({"prompt": None, "messages": (message("a"),) * 4}, "messages"),
        ({"prompt": None, "messages": (message("a" * 60), message("a" * 60))}, "messages"),
        ({"prompt": None, "messages": (message("a"), message("\udfff"))}, "messages[1].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"beams": Beams(n_beams=0)}, "num_beams"),
        ({"adapters": (Adapter(name="a"), Adapter(name="a"))}, "lora"),
        ({"adapters": tuple(Adapter(name=f"{i}") for i in range(9))}, "lora"),
        ({"adapters": (Adapter(name="a", scale=math.inf),)}, "lora[0].scale"),
        ({"beams": Beams(n_beams=257)}, "num_beams"),
        ({"beams": Beams(n_beams=2, n_best=3)}, "n"),
        ({"beams": Beams(n_beams=2, length_penalty=math.nan)}, "length_penalty"),
        ({"beams": Beams(n_beams=2), "sampling": Sampling(temperature=1.0)}, "num_beams"),
        ({"beams": Beams(n_beams=2), "prompt_logprobs": 1}, "num_beams"),
        ({"prompt_logprobs": 0, "max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"stop": ("a", "b", "c")}, "stop"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": ("123456789",)}, "stop[0]"),
        ({"stop": ("\ud800",)}, "stop[0]"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"max_draft": -1}, "speculative.n_max"),
        ({"max_draft": True}, "speculative.n_max"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(replace(GOOD, **fields)).param == param


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.0, 0.001, 2, 100.0], [-0.1, 0.0001, 100.1, math.nan, math.inf, True, "1", None]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 1.0, True, None]),
        ("top_p", [0.01, 1, 1.0], [0, 0.0, 1.01, -1, math.nan, None]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.1, math.nan]),
        ("repeat_penalty", [0.01, 1, 100], [0, -1, 1e-300, 101, math.inf, 10**400]),
        ("repeat_last_n", [0, 64], [-1, 1.5]),
        ("presence_penalty", [-2, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2.0], [-2.1, 2.1, -math.inf]),
        ("seed", [None, 0, 2**63 - 1], [-1, 2**63, 10**5000, 1.0, True]),
        ("logit_bias", [{}, {0: -100, 5: 100}], [{-1: 0}, {1: 101}, {1: math.nan}, {1: 1, 2: 1, 3: 1}, {2**31: 0}]),
    ],
)
def test_sampling_ranges(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_request(replace(GOOD, sampling=replace(Sampling(), **{field: value})), LIMITS)
    for value in bad:
        error = refused(replace(GOOD, sampling=replace(Sampling(), **{field: value})))
        assert error.param.startswith(field)
        assert len(str(error)) < 200


def test_messages_say_value_and_limit() -> None:
    assert str(refused(replace(GOOD, max_tokens=0))) == "max_tokens: must be from 1 to 2147483647, got 0"
    assert "101 bytes long, the limit is 100" in str(refused(replace(GOOD, prompt="x" * 101)))
    assert "U+D800 at character 1" in str(refused(replace(GOOD, prompt="a\ud800")))
    assert "or 0 for greedy" in str(refused(replace(GOOD, sampling=Sampling(temperature=-1.0))))
    given_both = replace(GOOD, prompt_token_ids=(1,))
    assert "got prompt and prompt_token_ids" in str(refused(given_both))


def test_the_shipped_limits_pass_the_defaults() -> None:
    check_request(GOOD, Limits())


def test_size_is_that_of_the_utf8_bytes() -> None:
    assert check_text("x", "aé😀", 10) == 7


def test_token_ids_need_not_be_a_tuple() -> None:
    check_token_ids("tokens", [1, 2], LIMITS)


@given(st.text(alphabet=st.characters(), max_size=50))
def test_text_passes_exactly_if_it_is_utf8_and_fits(text: str) -> None:
    try:
        fits = len(text.encode()) <= LIMITS.max_prompt_bytes
    except UnicodeEncodeError:
        fits = False
    try:
        check_text("x", text, LIMITS.max_prompt_bytes)
    except InvalidRequestError:
        assert not fits
    else:
        assert fits


@given(st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=3))
def test_no_value_of_any_type_escapes_as_another_error(value: Any) -> None:
    for field in ("temperature", "top_k", "top_p", "repeat_penalty", "seed"):
        try:
            check_request(replace(GOOD, sampling=replace(Sampling(), **{field: value})), LIMITS)
        except InvalidRequestError:
            continue
        assert value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        assert value is None or math.isfinite(value)
