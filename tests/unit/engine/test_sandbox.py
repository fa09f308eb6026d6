# ruff: noqa: E501  # one case a line
"""TemplateSandbox: what chat templates need works, what would reach Python or exhaust the machine does not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count

import pytest
from jinja2 import TemplateError

from edge_rt.engine.meter import LimitError, Meter
from edge_rt.engine.sandbox import RaisedByTemplateError, TemplateSandbox

MAX_CHARS = 500_000
NOON = datetime(2024, 7, 26, 12, 30, tzinfo=UTC)


def render(source: str, clock: Callable[[], float] | None = None, **values: object) -> str:
    """Render under a clock that ends after a few thousand steps, so that endless loops end the same everywhere."""
    sandbox = TemplateSandbox(
        Meter(max_chars=MAX_CHARS, max_time_s=1.0, clock=clock or count(0.0, 0.005).__next__), now=lambda: NOON
    )
    tree = sandbox.parse(source)
    sandbox.check(tree, max_nodes=5000)
    return sandbox.from_string(tree).render(**values)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' + 'b' ~ 1 ~ none ~ true }}", "ab1NoneTrue"),
        ("{{ 1 + 2 * 3 - 4 // 2 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ 1 / 2 }} {{ -3 }}", "5 3 1024 0.5 -3"),
        ("{{ 'ab' * 2 }}{{ 2 * 'c' }}{{ [1] * 2 }}{{ [1] + [2] }}", "ababcc[1, 1][1, 2]"),
        ("{{ [1, 2, 3][::-1] }} {{ 'abcd'[1:-1] }} {{ (1, 2, 3)[:1] }} {{ 'abc'[0] }}", "[3, 2, 1] bc (1,) a"),
        ("{{ 1 < 2 < 3 }} {{ 'b' in 'abc' }} {{ 'x' not in ['x'] }}", "True True False"),
        ("{{ absent }}{{ absent is defined }}{{ 'x' if absent }}", "False"),
        ("{{ {'a': [1, 'é']} | tojson }}", '{"a": [1, "é"]}'),
        ("{{ \"<a href='x'>&\" | tojson }}", "\"<a href='x'>&\""),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"a":"\\u00e9"}'),
        ("{{ ' a b ' | trim }}|{{ 'xax'.strip('x') }}|{{ '\n a'.lstrip('\n') }}|{{ 'a\n'.rstrip() }}", "a b|a| a|a"),
        ("{{ 'a</think>b'.split('</think>')[-1] }} {{ 'a,b' .split(',') | join('-') }}", "b a-b"),
        ("{{ 'aXbX'.replace('X', '--') }} {{ 'aa'.replace('a', 'b', 1) }} {{ 'abc' | replace('b', '') }}", "a--b-- ba ac"),
        ("{{ 'ab'.startswith('a') and 'ab'.endswith('b') }} {{ 'AbC'.lower() }} {{ 'user' | capitalize }}", "True abc User"),
        ("{{ ', '.join(['a', 'b']) }} {{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}", "a, b 1+2"),
        ("{{ [1, 2] | first }} {{ [1, 2] | last }} {{ 'abc' | length }} {{ [3, 1] | sort }} {{ [1, 1] | unique | list }}", "1 2 3 [1, 3] [1]"),
        ("{{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1}.items() | list }} {{ {'a': 1}.get('b', 'no') }}", "[('a', 2), ('b', 1)] [('a', 1)] no"),
        ("{{ [{'r': 'u', 'v': 1}, {'r': 's', 'v': 2}] | selectattr('r', 'equalto', 'u') | map(attribute='v') | list }}", "[1]"),
        ("{{ ['a', 'b'] | map('upper') | join }} {{ [0, 1] | reject('equalto', 0) | list }}", "AB [1]"),
        ("{{ absent | default('x') }}{{ '' | d('y', true) }} {{ '3' | int + 1 }} {{ 3 | string + 'x' }}", "xy 4 3x"),
        ("{{ 'a\nb' | indent(2) }} {{ 'A' | safe }}", "a\n  b A"),
        ("{% set ns = namespace(n=0) %}{% for x in [1, 2, 3] if x != 2 %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "4"),
        ("{% for x in 'abc' %}{{ loop.index0 }}{{ x }}{% if loop.last %}!{% else %},{% endif %}{% endfor %}", "0a,1b,2c!"),
        ("{% for x in range(9) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}", "02"),
        ("{% for x in [1, 2] %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.length }}{{ loop.cycle('a', 'b') }} {% endfor %}", "22a 12b "),
        ("{% for x in 'ab' %}{{ x.replace('a', 'c') }}{{ '-'.join([x, x]) }}{% endfor %}", "ca-abb-b"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for x in [[1], [2, [3]]] recursive %}{{ loop(x) if x is not number else x }}{% endfor %}", "123"),
        ("{% macro m(a, b='-') %}<{{ a }}{{ b }}>{% endmacro %}{{ m(1) }}{{ m(2, b='+') }}", "<1-><2+>"),
        ("{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}", "[x]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}", "a1B2"),
        ("{% set a, b = 1, 2 %}{{ b }}{{ a }}{{ 'y' if a == 2 else 'n' }}", "21n"),
        ("{% generation %}a{% set x = 1 %}{{ x }}{% endgeneration %}b{{ x }}", "a1b"),
        ("{{ strftime_now('%d %b %Y %-d') }}", "26 Jul 2024 26"),
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{{ 1 is number and 'a' is string and {} is mapping and [] is sequence and none is none and true is boolean }}", "True"),
    ],
)  # fmt: skip
def test_chat_templates_find_what_they_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_raise_exception_carries_the_templates_words() -> None:
    with pytest.raises(RaisedByTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


_DOUBLE = "{% set ns = namespace(a=START, b=START) %}{% for i in range(200) %}{% set ns.a = STEP %}{% endfor %}"


def doubling(start: str, step: str) -> str:
    return _DOUBLE.replace("START", start).replace("STEP", step)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ ([1] * 10**9) | length }}",
        "{{ ((1, 2) * 10**9) | length }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set a = 2 ** 100 %}{{ a * a }}",
        doubling("2", "ns.a * ns.a"),
        doubling("'xxxx'", "ns.a + ns.a"),
        doubling("'xxxx'", "ns.a ~ ns.a"),
        doubling("'xxxx'", "[ns.a, ns.a] | join"),
        doubling("'xxxx'", "''.join([ns.a, ns.a])"),
        doubling("'xxxx'", "ns.a.replace('x', 'xx')"),
        doubling("'xxxx'", "ns.a | replace('x', 'xx')"),
        doubling("['x']", "ns.a + ns.a"),
        doubling("['x']", "[ns.a, ns.a]"),
        doubling("['x']", "(ns.a, ns.a)"),
        doubling("['x']", "{'a': ns.a, 'b': ns.a}"),
        doubling("['x']", "[ns.a, ns.a] | list"),
        doubling("'x'", "([ns.a] * 9) | string"),
        doubling("'x'", "[ns.a, ns.a] | tojson"),
        "{% set ns = namespace(a='xx') %}{% for i in range(60) %}{% set x %}{{ ns.a }}{{ ns.a }}{% endset %}"
        "{% set ns.a = x %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{{ a }}{{ a }}{% else %}xx{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set s = 'x' * 100000 %}{% set ns = namespace(a=[]) %}{% for i in range(9999) %}"
        "{% set ns.a = ns.a + [s[1:]] %}{% endfor %}",
        "{{ range(9999) | list | join('x' * 100000) }}",
        "{{ ('x' * 100000).join(range(9999) | list) }}",
        "{{ ('x' * 100000) | replace('', 'y' * 1000) }}",
        "{{ ('x' * 1000).replace('x', 'y' * 1000) }}",
        "{{ ('\n' * 100000) | indent(60) }}",
        "{{ 'x\nx' | indent(10**9) }}",
        "{{ [1, 2] | tojson(indent=10**9) }}",
        "{{ range(10**12) | list }}",
        "{{ range(10**30) }}",
        "{% for i in range(9999) %}{% for j in range(9999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
        "{% macro m() %}{% for i in range(999) %}" + "x" * 1000 + "{% endfor %}{% endmacro %}{% set a = m() %}",
    ],
)
def test_memory_bombs_stop_small(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((LimitError, OverflowError)):
            render(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * MAX_CHARS


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% for c in 'x' * 400000 if false %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% set x = range(9999) | list | length %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
        "{% set a = 'x' %}" + "{% if a == a %}{% endif %}" * 800,
        "{% set a = 'x' %}" + "{{ a is eq a }}" * 900,
        "{{ range(9999) | map('string') | map('upper') | select('eq', 'x') | list }}",
    ],
)
def test_endless_work_stops_at_the_deadline(source: str) -> None:
    with pytest.raises(LimitError, match="takes more than 1 s"):
        render(source, count(0.0, 0.1).__next__)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set ns = namespace(a=[]) %}{% for i in range(5000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=[]) %}{% for i in range(5000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a | tojson }}",
    ],
)
def test_endless_recursion_is_pythons_error(source: str) -> None:
    with pytest.raises(RecursionError):
        render(source, lambda: 0.0)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "''['__class__']",
        "{}.__class__",
        "raise_exception.__globals__",
        "strftime_now.__func__",
        "namespace.__init__",
        "range.__self__",
        "self.__init__",
        "loop.__class__",
        "m.__globals__",
        "m._func",
        "ns.__class__",
        "messages.append",
        "messages.__init__",
        "'x'.format",
        "'x'.format_map",
        "'x'.encode",
        "'x'.center",
        "'x'.ljust",
        "'x'.zfill",
        "'x'.expandtabs",
        "'x'.translate",
        "{}.update",
        "{}.pop",
        "[].sort",
    ],
)
def test_attributes_that_templates_do_not_need_are_undefined(expression: str) -> None:
    source = (
        "{% macro m() %}{% endmacro %}{% set ns = namespace() %}{% set messages = [1] %}"
        f"{{% for x in [1] %}}{{{{ {expression} is defined }}}}{{% endfor %}}"
    )
    assert render(source) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ 'x'.center(9) }}",
        "{{ '{:>9}'.format(1) }}",
        "{{ '%9d' % 1 }}",
        "{{ 'x' | center(9) }}",
        "{{ '%9d' | format(1) }}",
        "{{ [1] | batch(9, 0) | list }}",
        "{{ ['<'] | map('attr', '__class__') | list }}",
        "{{ [''] | map(attribute='__class__.__mro__') | list }}",
        "{{ '' | attr('__class__') }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ 1.5 | round(9) }}",
        "{{ lipsum() }}",
        "{{ cycler(1).next() }}",
        "{{ dict(a=1) }}",
        "{{ strftime_now('%099d') }}",
        "{{ strftime_now('%Y' * 99) }}",
        "{{ namespace() }}",
        "{{ self }}",
        "{{ range }}",
        "{% for x in [1] %}{{ loop }}{% endfor %}",
        "{{ [namespace()] }}",
    ],
)
def test_what_templates_do_not_need_is_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'a' %}",
        "{% import 'a' as b %}",
        "{% from 'a' import b %}",
        "{% extends 'a' %}",
        "{% block a %}{% endblock %}",
        "{% autoescape true %}{% endautoescape %}",
        "{% macro m() %}{{ varargs }}{% endmacro %}",
        "{% macro m() %}{{ kwargs }}{% endmacro %}",
        "{{ a }}" * 6000,
    ],
)
def test_templates_that_are_refused_unrun(source: str) -> None:
    with pytest.raises(LimitError):
        render(source)


def test_a_long_comparison_chain_is_a_syntax_error() -> None:
    with pytest.raises(TemplateError, match="chain is too long"):
        render("{{ " + " == ".join("a" * 9) + " }}")
