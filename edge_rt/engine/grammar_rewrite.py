"""Write keywords of JSON Schema that the library does not know by those that it does, where that is exact.

What cannot be written so is refused by name (grammar_schema.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_IN_PLACE: Final = frozenset(
    {"$ref", "allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
)
_TYPES: Final = ("null", "boolean", "object", "array", "string", "number")
MAX_NAMES: Final = 400  # that propertyNames may list


def refused(part: Mapping[str, Any], name: str) -> str:
    """Say why a keyword of a schema cannot be kept; "" if it can. Its value may be anything."""
    value = part[name]
    match name:
        case "contains":
            asks_nothing = part.get("minContains", 1) == 0 and "maxContains" not in part
            return "" if asks_nothing else "leave it out"
        case "minContains" | "maxContains":
            return ""  # contains says whether it is refused with them; without it they ask for nothing
        case "dependentRequired":
            is_read = isinstance(value, Mapping) and all(map(_are_names, value.values()))
            return "" if is_read else "it must be an object of lists of names"
        case "dependentSchemas":
            return "" if isinstance(value, Mapping) else "it must be an object of schemas"
        case "dependencies":
            is_read = isinstance(value, Mapping) and all(
                _are_names(each) or isinstance(each, Mapping | bool) for each in value.values()
            )
            return "" if is_read else "it must be an object of lists of names or schemas"
        case "if":
            return "" if "then" not in part and "else" not in part else "write its cases as anyOf"
        case "then" | "else":
            return "" if "if" not in part else "write its cases as anyOf"
        case "not":
            return "" if value is False or _other_types(value) is not None else "say what may be instead"
        case "propertyNames":
            return _names_problem(part)
        case "unevaluatedItems":
            is_plain = not (_IN_PLACE | {"contains"}) & part.keys() and not isinstance(part.get("items"), list)
            return "" if _asks_nothing(value) or is_plain else "use items beside what they come from"
        case "unevaluatedProperties":
            is_plain = not _IN_PLACE & part.keys()
            return "" if _asks_nothing(value) or is_plain else "use additionalProperties beside what they come from"
        case "uniqueItems":
            n_most = part.get("maxItems", 2)
            is_kept = value is False or (isinstance(n_most, int | float) and n_most <= 1)
            return "" if is_kept else "leave it out, or write the choices as an object of booleans"
    return "leave it out"


def rewrite(part: Mapping[str, Any]) -> dict[str, Any]:
    """Write a schema, of which no keyword is refused, without the keywords that the library does not know."""
    written = {name: value for name, value in part.items() if name not in WRITTEN}
    also: list[Any] = []
    for name, value in part.items():
        if name in ("dependentRequired", "dependencies", "dependentSchemas"):
            for key, needed in value.items():
                is_names = isinstance(needed, list)
                then = {"required": needed} if is_names else {"allOf": [{"required": [key]}, needed]}
                if needed != []:
                    also.append({"anyOf": [{"properties": {key: False}}, then]})
        elif name == "not" and value is not False:
            also.append({"type": _other_types(value)})
        elif name == "propertyNames" and not _asks_nothing(value):
            written |= _names(part)
        elif name == "unevaluatedItems" and not _asks_nothing(value):
            written.setdefault("items", value)
        elif name == "unevaluatedProperties" and not _asks_nothing(value):
            written.setdefault("additionalProperties", value)
    if also:
        written["allOf"] = [*part.get("allOf", []), *also]
    return written


WRITTEN: Final = frozenset(
    {
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains"),
        *("minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)


def nested(name: str, value: Any) -> list[tuple[str, Any]]:
    """Give the schemas inside a keyword that is written by others, each with its key; they are kept as any other."""
    if name in ("dependentSchemas", "dependencies"):
        return [(key, each) for key, each in value.items() if not isinstance(each, list)]
    return [("", value)] if name in ("propertyNames", "unevaluatedItems", "unevaluatedProperties") else []


def n_copies(part: Mapping[str, Any], name: str) -> int:
    """Say how often rewrite writes what a keyword holds: once for each name that propertyNames lists."""
    names = part.get("propertyNames")
    if name not in ("additionalProperties", "unevaluatedProperties") or not isinstance(names, Mapping):
        return 1
    return max(1, len(names["enum"])) if isinstance(names.get("enum"), list) else 1


def _asks_nothing(value: Any) -> bool:
    return value is True or (isinstance(value, Mapping) and not value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _other_types(value: Any) -> list[str] | None:
    """Give the types that are not those a schema names; None for a schema that says anything else."""
    if not isinstance(value, Mapping) or value.keys() != {"type"}:
        return None
    named = value["type"] if isinstance(value["type"], list) else [value["type"]]
    if not named or not all(name in _TYPES for name in named):  # what is no integer may be a number: it has no name
        return None
    return [name for name in _TYPES if name not in named] or None


def _names_problem(part: Mapping[str, Any]) -> str:
    """Say why the names of an object's properties cannot be held to a schema; "" if they can."""
    value = part["propertyNames"]
    if _asks_nothing(value) or value == {"type": "string"}:
        return ""
    if not isinstance(value, Mapping):
        return "it must be a schema"
    asked = value.keys() - {"type"}
    if asked not in ({"pattern"}, {"enum"}, {"const"}) and not asked <= {"minLength", "maxLength"}:
        return "it may hold a pattern, an enum, a const, or minLength and maxLength"
    if isinstance(value.get("enum"), list) and len(value["enum"]) > MAX_NAMES:
        return f"it may list {MAX_NAMES} names"
    if value.get("type", "string") != "string":
        return "names are strings"
    if part.get("properties") or part.get("patternProperties") or part.get("required"):
        return "leave it out where properties are listed, and set additionalProperties"
    return ""


def _names(part: Mapping[str, Any]) -> dict[str, Any]:
    names = part["propertyNames"]
    rest = part.get("additionalProperties", part.get("unevaluatedProperties", True))
    if names.keys() <= {"type"}:
        return {}
    if "enum" in names or "const" in names:
        listed = names.get("enum", [names.get("const")])
        return {"properties": {name: rest for name in listed if isinstance(name, str)}, "additionalProperties": False}
    pattern = names.get("pattern")
    if pattern is None:
        most = int(names["maxLength"]) if "maxLength" in names else ""
        pattern = rf"^[\s\S]{{{int(names.get('minLength', 0))},{most}}}$"
    return {"patternProperties": {pattern: rest}, "additionalProperties": False}
