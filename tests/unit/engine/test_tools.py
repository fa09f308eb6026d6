"""Tool calls on the null back end, which answers a chat with the question: asked to write a call, it writes one."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.null import NullSession
from edge_rt.engine.form import Forms
from edge_rt.engine.tool_styles import _FAMILIES, GENERIC, ToolStyle
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import GenerateRequest, Message, ResponseFormat, Sampling, Tool, ToolCall
from tests.unit.engine.null_engine import Answer, Bench, chat, complete

SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP = Tool(name="look_up", description="Finds a word.", parameters=json.dumps(SCHEMA))
STOP = Tool(name="look", parameters='{"type": "object", "properties": {}, "additionalProperties": false}')
TOOLS = (LOOK_UP, STOP)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a}\\""}}\n</tool_call>'


def asked(text: str, **fields: Any) -> Answer:
    bench = Bench(n_ctx=4096)
    answer = bench.ask(chat(text, **{"tools": TOOLS, "max_tokens": 400, **fields}))
    bench.run(answer)
    bench.assert_idle()
    return answer


def calls_of(answer: Answer) -> list[ToolCall]:
    """Join an answer's deltas as clients do."""
    calls: list[ToolCall] = []
    for chunk in answer.chunks:
        for delta in chunk.tool_calls:
            if delta.index == len(calls):
                assert delta.id
                assert delta.name
                calls.append(ToolCall(id=delta.id, name=delta.name, arguments=delta.arguments))
            else:
                assert delta.index == len(calls) - 1
                assert (delta.id, delta.name) == ("", "")
                last = calls.pop()
                calls.append(ToolCall(id=last.id, name=last.name, arguments=last.arguments + delta.arguments))
    return calls


def names_and_arguments(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls_of(answer)]


def test_text_comes_as_text_and_a_call_as_a_call() -> None:
    answer = asked(f"Let me see. {CALL}")
    assert answer.text == "Let me see. "
    assert names_and_arguments(answer) == [("look_up", {"word": 'a}"'})]
    assert answer.last.finish_reason == "tool_calls"
    assert len({call.id for call in calls_of(answer)}) == 1


def test_an_answer_without_calls_is_plain() -> None:
    text = "No <tool_ca but <tool {}"
    answer = asked(text)
    assert (answer.text, answer.last.finish_reason, calls_of(answer)) == (text, "stop", [])


def test_several_calls_come_in_order_and_only_where_they_may() -> None:
    two = f'{CALL}\n<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>'
    assert names_and_arguments(asked(two)) == [("look_up", {"word": 'a}"'}), ("look", {})]
    assert names_and_arguments(asked(two, parallel_tool_calls=False)) == [("look_up", {"word": 'a}"'})]


def test_arguments_come_in_pieces() -> None:
    answer = asked(CALL)
    deltas = [delta for chunk in answer.chunks for delta in chunk.tool_calls]
    assert len(deltas) > 5
    assert "".join(delta.arguments for delta in deltas) == '{"word": "a}\\""}'


@pytest.mark.parametrize("text", ["<tool_call>nonsense", "<tool_call>\n{'name': 1}", '<tool_call>{"name": "other"'])
def test_what_begins_as_a_call_becomes_one(text: str) -> None:
    answer = asked(text, sampling=Sampling(temperature=1.2, seed=1))
    ((name, arguments),) = names_and_arguments(answer)[:1]
    assert name in ("look_up", "look")
    jsonschema.validate(arguments, SCHEMA if name == "look_up" else json.loads(STOP.parameters))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_name": "look_up"}, {"tool_name": "look"}])
def test_a_call_that_must_come_comes(seed: int, fields: dict[str, Any]) -> None:
    answer = asked("Hello", sampling=Sampling(temperature=1.5, seed=seed), **fields)
    assert answer.text == ""
    calls = names_and_arguments(answer)
    assert calls
    wanted = fields.get("tool_name")
    assert all(name == wanted or wanted is None for name, _ in calls)
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMA if name == "look_up" else json.loads(STOP.parameters))
    assert answer.last.finish_reason == "tool_calls"


def test_without_a_choice_there_are_no_tools() -> None:
    answer = asked(CALL, tool_choice="none")
    assert (answer.text, answer.last.finish_reason) == (CALL, "stop")


def test_a_call_that_is_cut_says_so() -> None:
    answer = asked(CALL, max_tokens=50)
    assert answer.last.finish_reason == "length"
    assert [call.name for call in calls_of(answer)] == ["look_up"]


def test_stop_strings_end_the_text_and_not_a_call() -> None:
    assert asked("abc def", stop=("c d",)).text == "ab"
    answer = asked(f"abc {CALL}", stop=("word", "c <tool_call>x"))
    assert (answer.text, answer.last.finish_reason) == ("abc ", "tool_calls")
    stopped = asked(f"ab. {CALL}", stop=(".",))
    assert (stopped.text, stopped.last.finish_reason, calls_of(stopped)) == ("ab", "stop", [])


def test_an_answer_has_its_form_or_calls() -> None:
    form = ResponseFormat(kind="json_schema", text=json.dumps({"type": "array", "items": {"type": "integer"}}))
    assert asked("[1, 22]", response_format=form).text == "[1, 22]"
    for seed in range(6):
        drawn = asked("x", response_format=form, sampling=Sampling(temperature=1, seed=seed))
        assert calls_of(drawn) or isinstance(json.loads(drawn.text), list)
    assert names_and_arguments(asked(CALL, response_format=form)) == [("look_up", {"word": 'a}"'})]
    quoted = asked('["<tool_call>"]', response_format=ResponseFormat(kind="choice", text='["[\\"<tool_call>\\"]"]'))
    assert (quoted.text, calls_of(quoted)) == ('["<tool_call>"]', [])


def test_guesses_and_company_change_no_call() -> None:
    answers = []
    for max_draft in (0, 8):
        bench = Bench(n_ctx=8192, max_draft=max_draft)
        for seed in range(3):
            sampling = Sampling(temperature=1.0, seed=seed)
            answer = bench.ask(chat(CALL * 2, f"r{seed}", tools=TOOLS, max_tokens=300, sampling=sampling))
            answers.append(answer)
        bench.run(*answers[-3:])
    assert [names_and_arguments(a) for a in answers[:3]] == [names_and_arguments(a) for a in answers[3:]]


def test_logprobs_come_with_calls_too() -> None:
    answer = asked(CALL, top_logprobs=0)
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
    assert b"".join(entry.raw for entry in entries).decode() == CALL


def refusal(**fields: Any) -> Exception:
    bench = Bench()
    answer = bench.ask(chat("x", **{"tools": TOOLS, **fields}))
    assert answer.error is not None
    return answer.error


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": (Tool(name="a b"),)}, "tools[0].function.name"),
        ({"tools": (Tool(name=""),)}, "tools[0].function.name"),
        ({"tools": (Tool(name="x" * 65),)}, "tools[0].function.name"),
        ({"tools": (Tool(name="a"), Tool(name="a"))}, "tools[1].function.name"),
        ({"tools": tuple(Tool(name=f"t{i}") for i in range(129))}, "tools"),
        ({"tools": (Tool(name="a", parameters="{"),)}, "tools[0].function.parameters"),
        ({"tools": (Tool(name="a", parameters='{"type": "string"}'),)}, "tools[0].function.parameters#/type"),
        ({"tools": (Tool(name="a", parameters="false"),)}, "tools[0].function.parameters"),
        ({"tool_name": "c"}, "tool_choice.function.name"),
    ],
)
def test_tools_that_are_none_are_refused_by_name(fields: dict[str, Any], place: str) -> None:
    error = refusal(**fields)
    assert isinstance(error, InvalidRequestError)
    assert error.param == place


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}])
def test_a_broken_schema_is_refused_with_its_place_whatever_the_choice(fields: dict[str, Any]) -> None:
    broken = Tool(name="b", parameters='{"properties": {"a": {"type": "string", "pattern": "(("}}}')
    error = refusal(tools=(LOOK_UP, broken), **fields)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "tools[1].function.parameters"
    assert "unclosed group" in error.problem


def test_what_a_schema_may_not_ask_is_refused_with_its_tool() -> None:
    error = refusal(tools=(LOOK_UP, Tool(name="b", parameters='{"properties": {"a": {"not": {}}}}')))
    assert isinstance(error, UnsupportedFeatureError)
    assert error.feature == "tools[1].function.parameters#/properties/a/not"


def test_tools_go_with_messages() -> None:
    bench = Bench()
    answer = bench.ask(complete("x", tools=TOOLS))
    assert isinstance(answer.error, InvalidRequestError)
    beside = refusal(response_format=ResponseFormat(kind="grammar", text='root ::= "a"'))
    assert isinstance(beside, UnsupportedFeatureError)


def forms_of(session: NullSession, style: ToolStyle, request: GenerateRequest) -> tuple[Any, Any]:
    return Forms(session, lambda: style).of(request)


WORDS = st.text(alphabet='ab}{"\\é,: ', max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from([*_FAMILIES, GENERIC]),
    words=st.lists(WORDS, min_size=1, max_size=3),
    before=st.sampled_from(["", " ", "\n", "Well, <too", "<"]),
    data=st.data(),
)
def test_every_style_is_read_back_as_it_is_written(
    style: ToolStyle, words: list[str], before: str, data: st.DataObject
) -> None:
    """What a model of each family writes is taken token by token, and read as the calls that it means."""
    before = before if not style.at_start else before.strip("Wel,<to")
    words = words if style.parallel else words[:1]
    arguments = [{"word": word[:6]} for word in words]
    opening = data.draw(st.sampled_from(style.openings))
    written = [style.head % "look_up" + json.dumps(a, ensure_ascii=False) + style.tail for a in arguments]
    text = before + opening.mark + opening.rest + style.between.join(written) + style.end
    bench = Bench()
    form, read = forms_of(bench.session, style, chat("x", tools=TOOLS))
    said = ""
    deltas = []
    for token in text.encode():
        if form.allowed is not None:
            assert form.allowed.allows(token), (text, chr(token))
        assert form.take(token, forces=False) == [token]
        said += read.push(token)
        deltas += read.take_calls()
    said += read.flush()
    assert said == (before if not style.at_start else "")
    assert [delta.name for delta in deltas if delta.name] == ["look_up"] * len(words)
    for i, wanted in enumerate(arguments):
        assert json.loads("".join(d.arguments for d in deltas if d.index == i)) == wanted


def test_results_and_calls_come_back_in_the_prompt() -> None:
    bench = Bench(n_ctx=4096)
    call = ToolCall(id="c1", name="look_up", arguments='{"word":"Graz"}')
    messages = (
        Message(role="user", content="Q"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="a town", tool_call_id="c1"),
    )
    answer = bench.ask(GenerateRequest(id="r", model="null", messages=messages, tools=TOOLS))
    bench.run(answer)
    assert answer.text == "<tool_response>\na town\n</tool_response>"  # what the last user message is, then
    bad = (
        *messages[:1],
        Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="n", arguments="[1]"),)),
    )
    refused = bench.ask(GenerateRequest(id="s", model="null", messages=bad))
    assert isinstance(refused.error, InvalidRequestError)
    assert refused.error.param == "messages[1].tool_calls[0].function.arguments"
