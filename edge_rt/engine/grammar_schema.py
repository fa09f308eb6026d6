"""Which JSON Schemas an answer can be held to; all others are refused by name, before anything is compiled.

A keyword that nobody looks at would let an answer pass that does not validate. So every keyword is known here: as one
that the library enforces, as a note that asks for nothing, or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from edge_rt.engine import grammar_rewrite
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_FORMAT_BYTES: Final = 128 * 2**10  # of a schema, grammar, regular expression or list of choices
_MAX_DEPTH: Final = 48
_MAX_NESTED: Final = 120  # lists and objects in each other; the library reads 127
_TOO_DEEP: Final = f"is nested too deeply, the limit is {_MAX_NESTED} lists and objects in each other"
_MAX_KEYWORDS: Final = 10_000
# Of what stands behind each name that propertyNames lists: these multiply where they are nested. Before a schema is as
# long as that with them, the library finds it too large.
_MAX_REPEATED_BYTES: Final = 2**20
_MAX_VALUES: Final = 5_000  # of all enums together
_MAX_OPTIONAL: Final = 400  # properties of one object that may be left out: each makes a step's parse longer
_MAX_EXACT: Final = 2**53
_MAX_MINIMUM: Final = 2**20  # characters, items or properties that a schema may ask for
# Beside a bound less than 1 away the library allows an exclusive whole one, without its decimal point, all the same.
# Numbers that are nearer to one than this are never written.
_JUST_BEYOND: Final = 1e-9
_EXCLUSIVE: Final[Mapping[str, int]] = {"exclusiveMaximum": -1, "exclusiveMinimum": 1}
_NEVER_REACHED: Final = 2**31  # the library counts up to 2^32; no answer gets as long, so it needs no limit there
_MAX_MULTIPLE: Final = 1_000  # the product of all multipleOf: divisions are automata with as many states

_NESTED: Final = frozenset({"additionalProperties", "additionalItems", "items"})
_NESTED_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NESTED_MAPS: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_LIMITS: Final = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_BOUNDS: Final = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})
_VALUES: Final = frozenset({"$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type"})
# What says nothing about which instances are valid.
_NOTES: Final = _words(
    "$anchor $comment $id $schema contentEncoding contentMediaType contentSchema default deprecated description "
    "discriminator example examples readOnly title writeOnly"
)
KEYWORDS: Final = _NESTED | _NESTED_LISTS | _NESTED_MAPS | _LIMITS | _BOUNDS | _VALUES
REFUSED: Final = _words("$dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef $vocabulary")
FORMATS: Final = _words("date date-time duration email hostname ipv4 ipv6 time uri uuid")

# The library knows these three by less exact expressions: 29 February in every year, and leap seconds at any time.
_YEAR_DAY: Final = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
).replace(r"\d", "[0-9]")
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)".replace(
    r"\d", "[0-9]"
)
_EXACT: Final[Mapping[str, str]] = {
    "date": f"^{_YEAR_DAY}$",
    "date-time": f"^{_YEAR_DAY}[Tt]{_TIME}$",
    "time": f"^{_TIME}$",
}


def check_size(text: str, param: str) -> None:
    """Raise InvalidRequestError for a schema or another format that has too many bytes."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes > MAX_FORMAT_BYTES:
        raise InvalidRequestError(param=param, problem=f"has {n_bytes} bytes, the limit is {MAX_FORMAT_BYTES}")


def parse(text: str, param: str) -> Any:
    """Read JSON that a client wrote, such as a schema. Raises InvalidRequestError naming param.

    How deep it may be nested is bounded, so that whoever walks it may do so by recursion.
    """
    check_size(text, param)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as exc:
        raise InvalidRequestError(param=param, problem=_TOO_DEEP) from exc
    except ValueError as exc:
        raise InvalidRequestError(param=param, problem=f"is not valid JSON: {exc}"[:300]) from exc
    if _is_deep(value):
        raise InvalidRequestError(param=param, problem=_TOO_DEEP)
    return value


def check(schema: Any, param: str) -> None:
    """Refuse a schema that an answer cannot be held to.

    Raises UnsupportedFeatureError with the JSON pointer of the keyword, InvalidRequestError for what is no schema or
    too large.
    """
    n_keywords = n_values = 0
    multiple = 1
    for where, part in _parts(schema, param):
        if isinstance(part, bool):
            continue
        n_keywords += len(part)
        if n_keywords > _MAX_KEYWORDS:
            raise InvalidRequestError(param=param, problem=f"has more than {_MAX_KEYWORDS} keywords")
        for name in part:
            if name in grammar_rewrite.WRITTEN:
                if remedy := grammar_rewrite.refused(part, name):
                    raise UnsupportedFeatureError(feature=f"{where}/{name}", remedy=remedy)
                continue
            if name not in KEYWORDS and name not in _NOTES and not _is_private(name):
                remedy = "leave it out" if name in REFUSED else "it is no keyword; leave it out or begin it with x-"
                raise UnsupportedFeatureError(feature=f"{where}/{_escaped(name)}", remedy=remedy)
        n_values += _check_values(part, where)
        if n_values > _MAX_VALUES:
            raise InvalidRequestError(param=param, problem=f"has more than {_MAX_VALUES} values in enums")
        _check_properties(part, where)
        if (divisor := part.get("multipleOf")) is not None:
            multiple *= _multiple(divisor, where)
            if multiple > _MAX_MULTIPLE:
                problem = (
                    f"comes to {multiple} units of its last digit, multiplied with the schema's others, the limit is "
                    f"{_MAX_MULTIPLE}; leave one out or round it"
                )
                raise InvalidRequestError(param=f"{where}/multipleOf", problem=problem)


def plain(schema: Any) -> Any:
    """Write a schema that check has passed as the library takes it, with limits such as 2.0 as whole numbers."""
    if not isinstance(schema, dict):
        return schema
    schema = grammar_rewrite.rewrite(schema)
    written: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NESTED_LISTS or (name == "items" and isinstance(value, list)):
            written[name] = [plain(item) for item in value]
        elif name in _NESTED_MAPS:
            written[name] = {key: plain(item) for key, item in value.items()}
        elif name in _NESTED:
            written[name] = plain(value)
        elif name != "format" or value not in _EXACT:
            written[name] = int(value) if name in _LIMITS else value
            if name in _EXCLUSIVE and schema.get("type") != "integer" and value == value // 1:
                written[name] = value + _EXCLUSIVE[name] * max(_JUST_BEYOND, math.ulp(value))
            if name in _LIMITS and written[name] >= _NEVER_REACHED:
                del written[name]
    if (exact := _EXACT.get(schema.get("format", ""))) is not None:
        written["allOf"] = [*written.get("allOf", []), {"pattern": exact}]
    return written


def _parts(schema: Any, param: str) -> Iterator[tuple[str, Any]]:
    """Give every schema inside a schema, itself first, with its place; each is a mapping or a bool."""
    todo: list[tuple[str, Any, int, int]] = [(f"{param}#", schema, 0, 1)]
    n_repeated_bytes = 0
    while todo:
        where, part, depth, n_copies = todo.pop()
        if not isinstance(part, Mapping | bool):
            raise InvalidRequestError(param=where, problem="must be a schema: an object, true or false")
        if depth > _MAX_DEPTH:
            raise InvalidRequestError(param=where, problem=f"is nested more than {_MAX_DEPTH} schemas deep")
        yield where, part
        if isinstance(part, bool):
            continue
        for name, value in part.items():
            place = f"{where}/{_escaped(name)}"
            n_inside = n_copies * grammar_rewrite.n_copies(part, name)
            if n_inside > n_copies:
                n_repeated_bytes += n_inside * len(json.dumps(value))
                if n_repeated_bytes > _MAX_REPEATED_BYTES:
                    limit = f"{_MAX_REPEATED_BYTES // 2**20} MiB"
                    problem = f"comes to more than {limit}, repeated for each of the names in propertyNames; list fewer"
                    raise InvalidRequestError(param=place, problem=problem)
            if name in _NESTED_LISTS or (name == "items" and isinstance(value, list)):
                if not isinstance(value, list) or not value:
                    raise InvalidRequestError(param=place, problem="must be a list of schemas")
                todo += [(f"{place}/{i}", item, depth + 1, n_copies) for i, item in enumerate(value)]
            elif name in _NESTED_MAPS:
                if not isinstance(value, Mapping):
                    raise InvalidRequestError(param=place, problem="must be an object of schemas")
                todo += [(f"{place}/{_escaped(key)}", item, depth + 1, n_copies) for key, item in value.items()]
            elif name in _NESTED:
                todo.append((place, value, depth + 1, n_inside))
            elif name in grammar_rewrite.WRITTEN:
                inside = grammar_rewrite.nested(name, value)
                todo += [
                    (f"{place}/{_escaped(key)}" if key else place, item, depth + 1, n_inside) for key, item in inside
                ]


def _check_values(part: Mapping[str, Any], where: str) -> int:
    """Check a schema's plain keywords; give how many values its enum has."""
    for name in _LIMITS & part.keys():
        value = part[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            problem = f"must be a whole number from 0, got {str(value)[:40]}"
            raise InvalidRequestError(param=f"{where}/{name}", problem=problem)
        if name.startswith("min") and value > _MAX_MINIMUM:
            problem = f"asks for {str(value)[:40]}, the limit is {_MAX_MINIMUM}; lower it: no context holds as much"
            raise InvalidRequestError(param=f"{where}/{name}", problem=problem)
    for name in _BOUNDS & part.keys():
        value = part[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_EXACT:
            raise InvalidRequestError(param=f"{where}/{name}", problem=_number_problem(value))
    if not isinstance(part.get("pattern", ""), str):
        raise InvalidRequestError(param=f"{where}/pattern", problem="must be a string")
    target = part.get("$ref", "#")
    if not isinstance(target, str):
        raise InvalidRequestError(param=f"{where}/$ref", problem="must be a string")
    if not target.startswith("#"):
        raise UnsupportedFeatureError(
            feature=f"{where}/$ref", remedy="refer to a part of the schema itself, as #/$defs/x"
        )
    named = part.get("format")
    if named is not None and (not isinstance(named, str) or named not in FORMATS):
        remedy = f"the formats are {', '.join(sorted(FORMATS))}"
        raise UnsupportedFeatureError(feature=f"{where}/format {str(named)[:40]!r}", remedy=remedy)
    values = part.get("enum", [None])
    if not isinstance(values, list) or not values:
        raise InvalidRequestError(param=f"{where}/enum", problem="must be a list of at least one value")
    if any(map(_is_inexact, (*values, part.get("const")))):
        name = "const" if "const" in part else "enum"
        raise InvalidRequestError(param=f"{where}/{name}", problem="holds a whole number beyond 2^53")
    return len(values)


def _number_problem(value: Any) -> str:
    got = str(value)[:40]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number, got {got}"
    return f"is {got}, the limit is 2^53 on both sides of 0: beyond it not every number can be told from the next"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_NESTED):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _is_inexact(value: Any) -> bool:
    """Say whether a value holds a number that the library would round."""
    if isinstance(value, list):
        return any(map(_is_inexact, value))
    if isinstance(value, dict):
        return any(map(_is_inexact, value.values()))
    return isinstance(value, int) and abs(value) > _MAX_EXACT


def _check_properties(part: Mapping[str, Any], where: str) -> None:
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(param=f"{where}/required", problem="must be a list of names")
    properties = part.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidRequestError(param=f"{where}/properties", problem="must be an object of schemas")
    n_optional = len(properties.keys() - set(required))
    if n_optional > _MAX_OPTIONAL:
        problem = f"has {n_optional} that are not required, the limit is {_MAX_OPTIONAL}"
        raise InvalidRequestError(param=f"{where}/properties", problem=problem)
    # A name may come twice among those that no property lists. To a reader it is one then, and the two count as one.
    is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
    if not is_closed and part.get("minProperties", 0) > max(1, len(set(required))):
        remedy = "list the names as properties with additionalProperties false, or require them"
        raise UnsupportedFeatureError(feature=f"{where}/minProperties of names that are not listed", remedy=remedy)


def _multiple(value: Any, where: str) -> int:
    """Give a divisor as the number of steps that it makes of one decimal digit's unit."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-12 < value < 1e12:
        problem = f"must be a number above 1e-12 and below 1e12, got {str(value)[:40]}"
        raise InvalidRequestError(param=f"{where}/multipleOf", problem=problem)
    fraction = Fraction(str(value))
    while fraction.denominator % 10 == 0:
        fraction *= 10
    return max(1, int(fraction * fraction.denominator))


def _is_private(name: str) -> bool:
    return name.startswith("x-") and name != "x-guidance"  # that one would change how the library reads the schema


def _escaped(name: str) -> str:
    """Write a name as a JSON pointer's part, shortened."""
    return name.replace("~", "~0").replace("/", "~1")[:80]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
