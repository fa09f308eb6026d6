# ruff: noqa: N802  # the visitors are called as Jinja calls them
"""A Jinja environment for chat templates, which come out of model files and are untrusted code.

Jinja's own sandbox keeps a template from reaching Python. This one also bounds what it can spend: every block, call,
operator, comparison and filter passes a Meter, which stops a render by CPU time and by the amount of text and list
items it makes. Nothing grows but through metered operations, so that what lives at any moment is bounded too.
Methods, filters and tests are lists of what public chat templates use; the rest is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial, wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from edge_rt.engine.meter import NODE_CHARS, LimitError, Meter

_MAX_INT_BITS = 128
_MAX_RANGE = 10_000
_MAX_INDENT = 64
_MAX_COMPARISONS = 4
_STRFTIME = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,64}")


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _names("get items keys values"),
    list: _names("count index"),
    tuple: _names("count index"),
    LoopContext: _names(
        "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"
    ),
}
_TEXT_FILTERS = _names("capitalize lower title trim upper")
_VALUE_FILTERS = _names(
    "abs count d default dictsort first float int items last length map max min reject rejectattr reverse select "
    "selectattr sort unique"
)
_TESTS = _names(
    "!= < <= == > >= boolean defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable le "
    "lessthan lt mapping ne none number odd sameas sequence string true undefined"
)
_REFUSED_NODES = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.EvalContextModifier)


class RaisedByTemplateError(Exception):
    """The template called raise_exception: it refuses these messages."""


class _MeteredCode(CodeGenerator):
    """Generate the same code as Jinja, with the meter in the places an environment cannot intercept."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            # Items that the condition drops never reach the body's tick.
            tick = nodes.EnvironmentAttribute("tick()", lineno=node.lineno)
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if len(node.ops) > _MAX_COMPARISONS:
            self.fail("comparison chain is too long", node.lineno)
        self.write("(environment.tick() and ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        self.write("(environment.tick() and ")
        super().visit_Test(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self.write("environment.pay(")
            super().visit_Tuple(node, frame)
            self.write(")")
        else:
            super().visit_Tuple(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.pay(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.pay(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if part is None:
                self.write("None")
            else:
                self.visit(part, frame)
        self.write(")")


class _GenerationTag(Extension):
    """Accept {% generation %}, which marks the assistant's words for training and prints its body as it is."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment the hub's chat templates are written for, metered.

    Set meter before compiling and before each render; one render at a time.
    """

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, meter: Meter, *, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self.text
        )
        self._now = now
        self.globals = {
            "namespace": self._namespace,
            "range": _checked_range,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }
        self.tests = {name: TESTS[name] for name in _TESTS}
        self.filters = {name: self._metered(FILTERS[name]) for name in _VALUE_FILTERS}
        self.filters |= {name: self._metered(self._on_text(FILTERS[name])) for name in _TEXT_FILTERS}
        self.filters |= {
            "indent": self._indent,
            "join": self._join_filter,
            "list": self._list,
            "replace": lambda value, old, new, count=-1: self._replace(self.text(value), old, new, count),
            "safe": self.text,
            "string": self.text,
            "tojson": self._tojson,
        }
        self.use(meter)

    def use(self, meter: Meter) -> None:
        self.meter = meter
        self.tick = meter.tick

    def check(self, tree: nodes.Template, max_nodes: int) -> None:
        """Refuse what no chat template needs and what would take Jinja's compiler too long. Raises LimitError."""
        for refused in tree.find_all(_REFUSED_NODES):
            raise LimitError(f"line {refused.lineno}: {type(refused).__name__} is not allowed in a chat template")
        n_nodes = 0
        for node in tree.find_all(nodes.Node):
            n_nodes += 1
            if isinstance(node, nodes.Name) and node.name in ("varargs", "kwargs"):
                raise LimitError(f"line {node.lineno}: {node.name} is not allowed in a chat template")
        if n_nodes > max_nodes:
            raise LimitError(f"has {n_nodes} syntax nodes, the limit is {max_nodes}")

    # What generated code calls.

    def pay(self, value: Any) -> Any:
        """Charge for a value just made and hand it on."""
        kind = type(value)
        if kind is str:
            self.meter.charge(len(value))
        elif kind is list or kind is tuple or kind is dict:
            self.meter.charge(NODE_CHARS * (1 + len(value)))
            self.meter.weigh(value)
        return value

    def text(self, value: object) -> str:
        """Write a value out as the template's output shows it."""
        kind = type(value)
        if kind is str:
            return value  # type: ignore[return-value]
        self.meter.charge(self.meter.weigh(value))
        text = str(value)
        self.meter.charge(len(text))
        return text

    def join(self, parts: Iterable[object], separator: str = "") -> str:
        texts: list[str] = []
        for part in parts:
            self.tick()
            text = self.text(part)
            self.meter.charge(len(text) + len(separator))
            texts.append(text)
        return separator.join(texts)

    def concat(self, parts: Iterable[str]) -> str:
        return self.join(parts)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.tick()
        return self.pay(value[start:stop:step])

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as Jinja's
        __self.tick()
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            # These two can make much from little, so they pay before.
            if __obj.__name__ == "replace":
                return super().call(__context, partial(__self._replace, __obj.__self__), *args, **kwargs)
            if __obj.__name__ == "join":
                return super().call(__context, partial(__self.join, separator=__obj.__self__), *args, **kwargs)
        return __self.pay(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if isinstance(left, int) and isinstance(right, int):
            _check_ints(operator, left, right)
        elif isinstance(left, str | list | tuple):
            if operator == "+" and type(left) is type(right):
                self._charge_for(len(left) + len(right), text=isinstance(left, str))
            elif operator == "*" and isinstance(right, int):
                self._charge_for(len(left) * max(right, 0), text=isinstance(left, str))
            elif operator == "%":
                raise TemplateRuntimeError("% formatting is not allowed in a chat template")
        elif operator == "*" and isinstance(right, str | list | tuple):
            return self.call_binop(context, operator, right, left)
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, list | tuple):
            self.meter.weigh(value)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ARG002
        if type(obj) is Namespace:
            return not attr.startswith("_")
        return attr in _ATTRIBUTES.get(type(obj), ())

    def wrap_str_format(self, value: Any) -> None:
        """Leave str.format to is_safe_attribute, which refuses it: a width in its argument makes any size."""

    # Filters and globals.

    def _charge_for(self, n_items: int, *, text: bool) -> None:
        self.meter.charge(n_items if text else n_items * NODE_CHARS)

    def _metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return self.pay(function(*args, **kwargs))

        return metered

    def _on_text(self, function: Callable[..., str]) -> Callable[..., str]:
        return lambda value, *args, **kwargs: function(self.text(value), *args, **kwargs)

    def _list(self, values: Iterable[Any]) -> list[Any]:
        items: list[Any] = []
        for value in values:
            self.tick()
            self.meter.charge(NODE_CHARS)
            items.append(value)
        self.meter.weigh(items)
        return items

    def _join_filter(self, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        return self.join(values, separator=self.text(d))

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        n_replaced = text.count(old) if count < 0 else min(count, text.count(old))
        self.meter.charge(len(text) + n_replaced * max(len(new) - len(old), 0))
        return text.replace(old, new, count)

    def _indent(self, value: Any, width: int = 4, first: bool = False, blank: bool = False) -> str:
        text = self.text(value)
        if not 0 <= width <= _MAX_INDENT:
            raise LimitError(f"indents by {width}, the limit is {_MAX_INDENT}")
        self.meter.charge(len(text) + (text.count("\n") + 1) * width)
        indented: str = FILTERS["indent"](text, width, first, blank)
        return indented

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode as json.dumps does; Jinja's own filter escapes < > & ' for HTML, which models never saw."""
        self.meter.weigh(value)
        if indent is not None and not 0 <= indent <= _MAX_INDENT:
            raise LimitError(f"indents by {indent}, the limit is {_MAX_INDENT}")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.join(encoder.iterencode(value))

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        namespace = Namespace(*args, **kwargs)
        self.meter.charge(NODE_CHARS * (1 + len(kwargs) + sum(len(arg) for arg in args)))
        return namespace

    def _strftime_now(self, format: str) -> str:  # noqa: A002  # what templates call it
        if _STRFTIME.fullmatch(format) is None:
            raise TemplateRuntimeError("strftime_now takes up to 64 characters and directives without a width")
        return self._now().strftime(format)


def _check_ints(operator: str, left: int, right: int) -> None:
    n_bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        n_bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        n_bits = left.bit_length() * abs(right)
    if n_bits > _MAX_INT_BITS:
        raise LimitError(f"makes a number of more than {_MAX_INT_BITS} bits")


def _checked_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _MAX_RANGE:
        raise LimitError(f"counts a range of {len(numbers)}, the limit is {_MAX_RANGE}")
    return numbers


def _raise_exception(message: object) -> Iterator[str]:
    raise RaisedByTemplateError(str(message)[:500])
