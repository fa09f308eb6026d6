"""Tools and answers of a form on a real daemon, through the openai package and its helpers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Graz"}}\n</tool_call>'
LOOK_UP: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Town(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    is_large: bool
    n_people: int = pydantic.Field(ge=0, le=999)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_a_call_goes_out_and_its_result_comes_back(openai_sdk: openai.OpenAI) -> None:
    messages = user(f"So: {CALL}")
    answer = openai_sdk.chat.completions.create(model="null", messages=messages, tools=[LOOK_UP], temperature=0)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So: ")
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"word": "Graz"})
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a town"},
    ]
    then = openai_sdk.chat.completions.create(model="null", messages=messages, tools=[LOOK_UP], temperature=0)
    assert then.choices[0].message.content == "<tool_response>\na town\n</tool_response>"


def test_a_stream_of_calls_is_put_together_by_the_client(openai_sdk: openai.OpenAI) -> None:
    with openai_sdk.chat.completions.stream(
        model="null", messages=user(f"{CALL}\n{CALL}"), tools=[LOOK_UP], temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in final.message.tool_calls] == [{"word": "Graz"}] * 2
    assert len({call.id for call in final.message.tool_calls}) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_call_that_must_come_comes(openai_sdk: openai.OpenAI, choice: Any) -> None:
    answer = openai_sdk.chat.completions.create(
        model="null", messages=user("Hi"), tools=[LOOK_UP], tool_choice=choice, temperature=1.5, seed=1, max_tokens=400
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls


def test_an_answer_parses_as_the_model_of_its_schema(openai_sdk: openai.OpenAI) -> None:
    answer = openai_sdk.chat.completions.parse(
        model="null", messages=user("Graz?"), response_format=Town, temperature=1.5, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Town)


def test_what_cannot_be_asked_is_named(openai_sdk: openai.OpenAI) -> None:
    tool = json.loads(json.dumps(LOOK_UP))
    tool["function"]["parameters"]["properties"]["word"]["not"] = {}
    with pytest.raises(openai.BadRequestError) as caught:
        openai_sdk.chat.completions.create(model="null", messages=user("x"), tools=[tool], stream=True)
    assert caught.value.param == "tools[0].function.parameters#/properties/word/not"
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        openai_sdk.chat.completions.create(
            model="null",
            messages=user("x"),
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True}}},
        )


def test_grammars_and_choices_are_other_fields(openai_sdk: openai.OpenAI) -> None:
    for extra, allowed in (
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, {f"{a}{b}{c}" for a in "ab" for b in "ab" for c in "ab"}),
    ):
        answer = openai_sdk.chat.completions.create(
            model="null", messages=user("x"), extra_body=extra, temperature=1, seed=1
        )
        assert answer.choices[0].message.content in allowed
