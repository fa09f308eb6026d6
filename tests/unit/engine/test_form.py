"""Answers that must look like something, on the null back end: token by token, at any temperature, in any company."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.null import EOS, NullBackend, NullSession
from edge_rt.engine import grammar_rewrite, grammar_schema, grammar_text
from edge_rt.engine.form import Forms
from edge_rt.engine.grammar import Grammars
from edge_rt.errors import EdgeRtError, InvalidRequestError, UnsupportedFeatureError
from edge_rt.types import ResponseFormat, Sampling
from tests.unit.engine.null_engine import Answer, Bench, chat, complete

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema_of(schema: Any) -> ResponseFormat:
    return ResponseFormat(kind="json_schema", text=json.dumps(schema))


def hot(seed: int) -> Sampling:
    return Sampling(temperature=1.5, seed=seed)


def answer_to(bench: Bench, form: ResponseFormat, text: str = "x", **fields: Any) -> Answer:
    answer = bench.ask(complete(text, max_tokens=200, response_format=form, **fields))
    bench.run(answer)
    return answer


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_answer_validates_and_ends_when_it_is_whole(bench: Bench) -> None:
    answer = answer_to(bench, schema_of(PERSON), sampling=hot(1))
    assert answer.last.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PERSON)
    assert answer.last.usage is not None
    assert answer.last.usage.completion_tokens == len(answer.text.encode())  # the end took no token
    bench.assert_idle()


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}])
def test_names_of_any_kind_ask_for_nothing(bench: Bench, names: Any) -> None:
    record = {"type": "object", "propertyNames": names, "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    answer = answer_to(bench, schema_of({**record, "additionalProperties": False}), sampling=hot(1))
    assert json.loads(answer.text) == {"a": 1}


def test_forced_tokens_are_not_sampled(bench: Bench) -> None:
    answer = bench.ask(complete("x", max_tokens=200, response_format=schema_of(PERSON), sampling=hot(1)))
    n_compiled_bytes = bench.engine.stats().grammar_bytes
    bench.run(answer)
    stats = bench.engine.stats()
    n_steps = stats.steps_total
    assert stats.forced_tokens_total == stats.completion_tokens_total - n_steps
    assert 50_000 < n_compiled_bytes < 500_000
    assert n_compiled_bytes < stats.grammar_bytes < 1_000_000  # with what the answer has taught it
    n_free = len(answer.text) - len('{"name": "", "age": , "tags": []}')
    assert n_steps <= n_free + 8 < len(answer.text)


def test_logprobs_come_for_every_token(bench: Bench) -> None:
    answer = answer_to(bench, ResponseFormat(kind="choice", text='["yes"]'), top_logprobs=1)
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
    assert b"".join(entry.raw for entry in entries) == b"yes"
    assert bench.engine.stats().steps_total == 3  # nothing was forced
    assert all(entry.logprob < -1 for entry in entries)  # of the logits as they are: the model wanted something else


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (ResponseFormat(kind="json_object"), r"\{.*"),
        (ResponseFormat(kind="choice", text='["red", "gr\\u00fcn", "a\\"b\\\\c\\n"]'), 'red|grün|a"b\\\\c\n'),
        (ResponseFormat(kind="regex", text=r"[a-c]{2}/\d+ é"), r"[a-c]{2}/[0-9]+ é"),
        (ResponseFormat(kind="grammar", text='root ::= "a" [0-9]{2} [\\u00e9]'), r"a[0-9]{2}é"),
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(), hot(3), Sampling(temperature=1.0, top_k=2, seed=4)])
def test_every_kind_is_kept(bench: Bench, form: ResponseFormat, pattern: str, sampling: Sampling) -> None:
    answer = answer_to(bench, form, sampling=sampling)
    assert re.match(pattern, answer.text, re.DOTALL)
    if answer.last.finish_reason == "stop":
        assert re.fullmatch(pattern, answer.text, re.DOTALL)


def test_an_answer_that_is_cut_says_so(bench: Bench) -> None:
    answer = bench.ask(complete("x", max_tokens=5, response_format=schema_of(PERSON)))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ('{"nam', "length")


def test_an_answer_that_is_whole_at_its_limit_is_not_cut(bench: Bench) -> None:
    answer = bench.ask(complete("x", max_tokens=3, response_format=ResponseFormat(kind="choice", text='["yes"]')))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("yes", "stop")


def test_the_end_comes_only_where_the_form_may_end(bench: Bench) -> None:
    # The null model answers a chat with the question, and then wants to end.
    answer = bench.ask(chat("ab", response_format=ResponseFormat(kind="regex", text="[a-c]{4}")))
    bench.run(answer)
    assert (answer.text, answer.last.finish_reason) == ("abaa", "stop")


def test_ignore_eos_goes_on_until_the_form_is_whole(bench: Bench) -> None:
    form = ResponseFormat(kind="regex", text="[a-c]{2,4}")
    ends, goes_on = (bench.ask(chat("ab", f"r{i}", response_format=form, ignore_eos=i == 1)) for i in range(2))
    bench.run(ends, goes_on)
    assert (ends.text, goes_on.text) == ("ab", "abaa")


def test_a_bias_cannot_break_the_form(bench: Bench) -> None:
    sampling = Sampling(logit_bias={ord("z"): 100.0, EOS: 100.0, ord("y"): -100.0})
    answer = answer_to(bench, ResponseFormat(kind="choice", text='["yes"]'), sampling=sampling)
    assert answer.text == "yes"


def test_guesses_change_nothing() -> None:
    form = schema_of({"type": "array", "items": {"enum": ["abcabc", "abcabd"]}, "minItems": 4, "maxItems": 4})
    texts = set()
    for max_draft in (0, 8):
        bench = Bench(max_draft=max_draft)
        answer = answer_to(bench, form, text='["abcabc", "abcabc", ', sampling=hot(5))
        texts.add(answer.text)
    assert len(texts) == 1
    jsonschema.validate(json.loads(texts.pop()), json.loads(form.text))


def test_answers_in_company_are_those_of_a_lone_run() -> None:
    forms = [schema_of(PERSON), ResponseFormat(kind="regex", text="[a-f]{30}"), None, schema_of({"type": "integer"})]
    requests = [
        complete(f"p{i}", f"r{i}", max_tokens=60, response_format=form, sampling=hot(i)) for i, form in enumerate(forms)
    ]
    alone = []
    for request in requests:
        bench = Bench()
        answer = bench.ask(request)
        bench.run(answer)
        alone.append(answer.text)
    crowded = Bench(n_ctx=160)  # too small for all: somebody is preempted
    answers = [crowded.ask(request) for request in requests]
    crowded.run(*answers)
    assert [answer.text for answer in answers] == alone
    crowded.assert_idle()


def refusal(bench: Bench, form: ResponseFormat, **fields: Any) -> EdgeRtError:
    answer = bench.ask(complete("x", response_format=form, **fields))
    assert answer.error is not None
    return answer.error


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "#/not"),
        ({"properties": {"a/b~": {"items": {"uniqueItems": True}}}}, "#/properties/a~1b~0/items/uniqueItems"),
        ({"anyOf": [{"type": "string"}, {"if": {}, "then": {}}]}, "#/anyOf/1/if"),
        ({"type": "string", "maxLenght": 3}, "#/maxLenght"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
        ({"propertyNames": {"maxLength": 3}, "required": ["a"]}, "#/propertyNames"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, "#/propertyNames"),
        ({"propertyNames": {"enum": [str(i) for i in range(401)]}}, "#/propertyNames"),
        ({"propertyNames": {"patern": "^a"}}, "#/propertyNames"),
        ({"contains": {"type": "string"}}, "#/contains"),
        ({"contains": {}, "minContains": 0, "maxContains": 3}, "#/contains"),
        ({"maxContains": 3, "contains": {}, "minContains": 0}, "#/contains"),
        ({"not": {"type": "integer"}}, "#/not"),
        ({"not": {"type": ["string", "boolean"], "minLength": 3}}, "#/not"),
        ({"uniqueItems": True, "maxItems": 2}, "#/uniqueItems"),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False, "$defs": {"a": {}}}, "#/unevaluatedProperties"),
        ({"items": [{}], "unevaluatedItems": False}, "#/unevaluatedItems"),
        ({"dependentSchemas": {"a": {"then": {}, "if": {}}}}, "#/dependentSchemas/a/then"),
        ({"dependencies": {"a": "b"}}, "#/dependencies"),
        ({"$ref": "https://example.org/a"}, "#/$ref"),
        ({"format": "idn-email"}, "#/format 'idn-email'"),
        ({"minProperties": 2}, "#/minProperties"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
    ],
)
def test_what_a_schema_may_not_ask_is_refused_by_name(bench: Bench, schema: Any, place: str) -> None:
    error = refusal(bench, schema_of(schema))
    assert isinstance(error, UnsupportedFeatureError)
    assert place in error.feature


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"dependentRequired": {"a": ["b"]}, "type": "object"}, ["{}", '{"b": 1}', '{"b": 2, "a": 1}'], ['{"a": 1}']),
        ({"dependencies": {"a": ["b"]}, "properties": {"a": {}, "b": {}}}, ['{"a": 1, "b": 2}', "3"], ['{"a": 1}']),
        (
            {
                "properties": {"a": {}},
                "dependentSchemas": {"a": {"properties": {"b": {"const": 1}}, "required": ["b"]}},
            },
            ['{"a": 2, "b": 1}', '{"b": 2}'],
            ['{"a": 2}', '{"a": 2, "b": 2}'],
        ),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}},
            ['{"xy": null}'],
            ['{"xy": 1', '{"y'],
        ),
        ({"propertyNames": {"enum": ["a", "b"]}, "type": "object"}, ['{"a": 1}', '{"b": []}', "{}"], ['{"c']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}, "type": "object"}, ['{"abc": 1}'], ['{"a":', '{"abcd']),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}', "{}", "1"], ['{"b']),
        ({"prefixItems": [{"const": 1}], "unevaluatedItems": {"type": "null"}}, ["[1, null]", "[]"], ["[1, 2"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.01"], ["-1", "-1.0"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
        ({"not": {"type": ["string", "number"]}}, ["true", "null", "[]", "{}"], ['"', "1"]),
        ({"uniqueItems": False, "contains": {}, "minContains": 0, "if": {"const": 1}}, ["[1, 1]"], []),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_the_library_does_not_know_is_written_by_what_it_does(
    schema: Any, valid: list[str], invalid: list[str]
) -> None:
    grammars = Grammars(null_session())
    text = grammar_text.of_format(schema_of(schema))

    def accepts(instance: str, *, is_whole: bool) -> bool:
        constraint = grammars.compile(text, "schema")
        return all(constraint.allows(byte) and constraint.take(byte, forces=False) for byte in instance.encode()) and (
            not is_whole or constraint.allows(EOS)
        )

    assert [instance for instance in valid if not accepts(instance, is_whole=True)] == []
    assert [
        instance
        for instance in invalid
        if accepts(instance, is_whole=instance[-1] in "}]0123456789" and "{" not in instance and "[" not in instance)
    ] == []


@pytest.mark.parametrize(
    "form",
    [
        ResponseFormat(kind="json_schema", text="{"),
        ResponseFormat(kind="json_schema", text="3"),
        ResponseFormat(kind="json_schema", text='{"type": NaN}'),
        ResponseFormat(kind="json_schema", text='"\\ud800"'),
        ResponseFormat(kind="json_schema", text='{"const": "\\ud800"}'),
        ResponseFormat(kind="json_schema", text="false"),
        ResponseFormat(kind="json_schema", text='{"type": "strin"}'),
        ResponseFormat(kind="json_schema", text='{"properties": []}'),
        ResponseFormat(kind="json_schema", text='{"anyOf": {}}'),
        ResponseFormat(kind="json_schema", text='{"required": "a"}'),
        ResponseFormat(kind="json_schema", text='{"minItems": -1}'),
        ResponseFormat(kind="json_schema", text='{"minimum": 1e400}'),
        ResponseFormat(kind="json_schema", text='{"enum": []}'),
        ResponseFormat(kind="json_schema", text='{"enum": [9007199254740993]}'),
        ResponseFormat(kind="json_schema", text='{"const": {"a": [9007199254740993]}}'),
        ResponseFormat(kind="json_schema", text='{"pattern": "("}'),
        ResponseFormat(kind="json_schema", text='{"pattern": 3}'),
        ResponseFormat(kind="json_schema", text='{"minItems": 3, "maxItems": 2, "type": "array"}'),
        ResponseFormat(kind="json_schema", text='{"items":' * 100 + "{}" + "}" * 100),
        ResponseFormat(kind="json_schema", text="[" * 100_000),
        ResponseFormat(kind="json_schema", text='{"enum":' + "[" * 900 + "]" * 900 + "}"),
        ResponseFormat(kind="json_schema", text='{"const":' + '{"a":' * 900 + "1" + "}" * 901),
        ResponseFormat(kind="json_schema", text=json.dumps({"enum": list(range(6000))})),
        ResponseFormat(kind="json_schema", text=json.dumps({"properties": {f"p{i}": {} for i in range(500)}})),
        ResponseFormat(kind="json_schema", text='{"multipleOf": 99991}'),
        ResponseFormat(kind="json_schema", text='{"anyOf": [{"multipleOf": 97}, {"multipleOf": 89}]}'),
        ResponseFormat(kind="json_schema", text=" " * 200_000),
        ResponseFormat(kind="regex", text="("),
        ResponseFormat(kind="regex", text="(?=a)b"),
        ResponseFormat(kind="regex", text="(" * 5000 + "a" + ")" * 5000),
        ResponseFormat(kind="regex", text=""),
        ResponseFormat(kind="grammar", text="root ::= x"),
        ResponseFormat(kind="grammar", text='x ::= "a"'),
        ResponseFormat(kind="grammar", text='root ::= "\\ud800"'),
        ResponseFormat(kind="grammar", text="root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        ResponseFormat(kind="choice", text="[]"),
        ResponseFormat(kind="choice", text='["a", ""]'),
        ResponseFormat(kind="choice", text='{"a": 1}'),
    ],
    ids=lambda form: f"{form.kind} {form.text[:30]}",
)
def test_what_is_no_form_is_refused(bench: Bench, form: ResponseFormat) -> None:
    assert isinstance(refusal(bench, form), InvalidRequestError)
    bench.assert_idle()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (ResponseFormat(kind="regex", text="(?!a)b"), "look-ahead"),
        (ResponseFormat(kind="regex", text=r"[^\s\S]"), "no answer at all"),
        (ResponseFormat(kind="grammar", text="root ::= root"), "refers to itself"),
        (ResponseFormat(kind="grammar", text='root ::= "\\U00110000"'), "grammar: .U00110000 is no character"),
        (schema_of({"$ref": "#"}), "refers to itself"),
        (schema_of({"type": "string", "pattern": "(("}), "unclosed group"),
        (
            schema_of({"type": "string", "minLength": 2**52}),
            r"#/minLength: asks for 4503599627370496, the limit is 1048576",
        ),
        (schema_of({"minItems": int("9" * 400)}), r"#/minItems: asks for 9{40}, the limit is"),
        (schema_of({"maxLength": 1.5}), r"#/maxLength: must be a whole number from 0, got 1\.5"),
        (schema_of({"maximum": 2**60}), r"#/maximum: is 1152921504606846976, the limit is 2\^53"),
        (schema_of({"minimum": "1"}), r"#/minimum: must be a number, got 1"),
        (schema_of({"multipleOf": 0}), r"#/multipleOf: must be a number above 1e-12 and below 1e12, got 0"),
        (schema_of({"multipleOf": 99991}), r"#/multipleOf: comes to 99991 units .* the limit is 1000"),
        (ResponseFormat(kind="regex", text="é" * 70_000), r"has 140000 bytes, the limit is 131072"),
        (ResponseFormat(kind="json_schema", text='"' + "é" * 70_000 + '"'), r"has 140002 bytes, the limit is 131072"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.text[:20],
)
def test_what_is_wrong_with_a_form_is_said(bench: Bench, form: ResponseFormat, said: str) -> None:
    assert re.match(r"(grammar|regex|response_format\S*): (?!grammar:)", str(refusal(bench, form)))
    assert re.search(said, str(refusal(bench, form)))


def test_a_limit_that_no_answer_reaches_is_none(bench: Bench) -> None:
    answer = answer_to(bench, schema_of({"type": "string", "minLength": 3, "maxLength": 2**53 - 1}), sampling=hot(2))
    assert answer.error is None
    assert answer.text.startswith('"')


class Walked(dict[str, Any]):
    """A schema that counts how often schemas are walked."""

    n_walks = 0

    def items(self) -> Any:
        Walked.n_walks += 1
        assert Walked.n_walks < 1000
        return super().items()


def test_every_schema_is_written_once() -> None:
    schema = Walked(type="string")
    for _ in range(46):
        schema = Walked(format="date", allOf=[schema])
    grammar_schema.check(schema, "schema")
    written, depth = grammar_schema.plain(schema), 0
    while "allOf" in written:
        written, pattern = written["allOf"]
        assert pattern.keys() == {"pattern"}
        depth += 1
    assert (written, depth) == ({"type": "string"}, 46)


@pytest.mark.parametrize("rest", ["additionalProperties", "unevaluatedProperties"])
def test_what_is_written_for_each_of_many_names_is_bounded(rest: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(7):
        schema = {"propertyNames": {"enum": ["a", "b", "c"]}, rest: schema}
    grammar_schema.check(schema, "schema")
    for _ in range(20):
        schema = {"propertyNames": {"enum": ["a", "b", "c"]}, rest: schema}
    with pytest.raises(
        InvalidRequestError, match=rf"/{rest}: comes to more than 1 MiB, repeated for each of the names"
    ):
        grammar_schema.check(schema, "schema")


def test_stop_strings_would_cut_a_form(bench: Bench) -> None:
    error = refusal(bench, schema_of(PERSON), stop=("a",))
    assert isinstance(error, InvalidRequestError)
    assert error.param == "stop"


def null_session() -> NullSession:
    file = ModelFile(model="null", variant="", path=Path("-"), quant="")
    return NullBackend().load(file, LoadOptions(n_ctx=64))


def test_a_grammar_that_takes_too_much_ends_its_answer_alone() -> None:
    seconds = iter(range(0, 10**6, 1))
    grammars = Grammars(null_session(), clock=lambda: next(seconds) * 0.3)
    constraint = grammars.compile("start: /a+/", "grammar")
    constraint.take(ord("a"), forces=False)
    with pytest.raises(InvalidRequestError, match=r"grammar: took 0\.6 s of computing"):
        constraint.take(ord("a"), forces=False)


def test_an_ambiguous_grammar_does_not_run_for_ever(bench: Bench) -> None:
    ambiguous = ResponseFormat(kind="grammar", text='root ::= x\nx ::= x x | x x x | "a" | "b" | ""')
    other = bench.ask(complete("y", "other", max_tokens=20))
    answer = bench.ask(complete("x", max_tokens=400, response_format=ambiguous, sampling=hot(1)))
    bench.run(other, answer)
    assert other.last.finish_reason is not None
    assert answer.error is None or isinstance(answer.error, InvalidRequestError)
    bench.assert_idle()


def test_a_form_that_never_ends_is_the_callers_fault_and_no_error_of_ours(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    endless = schema_of({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    other = bench.ask(complete("y", "other", max_tokens=20))
    answer = bench.ask(complete("x", max_tokens=400, response_format=endless))
    bench.run(other, answer)
    assert other.last.finish_reason is not None
    assert isinstance(answer.error, InvalidRequestError)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    bench.assert_idle()


def test_tokens_that_are_asked_for_one_by_one_are_those_of_the_mask() -> None:
    grammars = Grammars(null_session())
    for ignores_eos in (False, True):
        constraint = grammars.compile("start: /[a-z ]*/", "regex", ignores_eos=ignores_eos)
        ids = [ord("a"), EOS, *range(ord("b"), ord("z")), ord("A"), ord(" ")]
        mask = constraint.mask()
        assert constraint.first(ids, 20) == [token_id for token_id in ids if mask[token_id]][:20]
        assert len(constraint.first([*range(128, 200), *ids], 20)) < 20  # so many are banned that a mask is faster
        constraint.take(ord("b"), forces=False)
        assert constraint.allows(ord("c"))  # to ask moves nothing


def test_requests_share_no_state() -> None:
    grammars = Grammars(null_session())
    one, two = (grammars.compile('start: "ab" | "cd"', "grammar") for _ in range(2))
    one.take(ord("a"), forces=False)
    assert (one.allows(ord("b")), two.allows(ord("b")), two.allows(ord("c"))) == (True, False, True)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UnsupportedFeatureError, match=r"edge_rt\[structured\]"):
        Forms(null_session()).of(complete("x", response_format=ResponseFormat(kind="json_object")))


def test_the_pages_list_what_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured.md").read_text()
    assert [word for word in sorted(grammar_schema.REFUSED) if f"`{word}`" not in page] == []
    assert [word for word in sorted(grammar_rewrite.WRITTEN) if f"`{word}`" not in page] == []
    assert [word for word in sorted(grammar_schema.KEYWORDS) if f"`{word}`" not in page] == []
    assert [word for word in sorted(grammar_schema.FORMATS) if f"`{word}`" not in page] == []
