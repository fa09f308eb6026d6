"""Write what an answer may look like as a grammar of the library llguidance. Pure; nothing is compiled here.

JSON is written in one way: with one space after each comma and colon and no other white space, properties in the
schema's order. What can be written in one way only need not be sampled, and a small model cannot lose itself in
line ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from edge_rt.engine import grammar_schema
from edge_rt.errors import InvalidRequestError
from edge_rt.types import ResponseFormat

PARAM: Final[Mapping[str, str]] = {
    "json_object": "response_format",
    "json_schema": "response_format.json_schema.schema",
    "grammar": "grammar",
    "regex": "regex",
    "choice": "choice",
}
_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
_SPELLING: Final[Mapping[str, Any]] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_CHOICES: Final = 5_000
_CODE_POINT: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def of_format(form: ResponseFormat) -> str:
    """Give the grammar of a response format. Raises InvalidRequestError and UnsupportedFeatureError."""
    if form.kind == "grammar":
        return _gbnf(form.text)
    return f"start: {rule_of_format(form)}\n"


def rule_of_format(form: ResponseFormat) -> str:
    """Give what stands right of a rule's colon; not for GBNF, which has rules of its own."""
    param = PARAM[form.kind]
    if form.kind == "json_object":
        return json_rule(_OBJECT)
    if form.kind == "json_schema":
        schema = grammar_schema.parse(form.text, param)
        if schema is False:
            raise InvalidRequestError(param=param, problem="false allows no answer at all")
        grammar_schema.check(schema, param)
        return json_rule(schema)
    grammar_schema.check_size(form.text, param)
    if not form.text:
        raise InvalidRequestError(param=param, problem="must not be empty")
    if form.kind == "regex":
        return _regex(form.text)
    return " | ".join(map(literal, _choices(form.text)))


def json_rule(schema: Any) -> str:
    """Write a schema that has been checked as a rule."""
    if schema is True:
        schema = {}
    schema = grammar_schema.plain(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _SPELLING}, ensure_ascii=False)}"


def literal(text: str) -> str:
    """Quote a text. JSON's escapes are those of the grammar's strings."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """Write a regular expression as a rule; its classes are JSON Schema's, ASCII alone."""
    from llguidance import regex_to_lark  # an extra, and wanted here only

    if len(text.rstrip("\\")) % 2 != len(text) % 2:  # the library would drop it
        raise InvalidRequestError(param=PARAM["regex"], problem="ends within an escape")
    return f"/{regex_to_lark(text, 'dw')}/"


def _choices(text: str) -> list[str]:
    param = PARAM["choice"]
    choices = grammar_schema.parse(text, param)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise InvalidRequestError(param=param, problem="must be a list of texts, none of them empty")
    if len(choices) > _MAX_CHOICES:
        raise InvalidRequestError(param=param, problem=f"has {len(choices)} texts, the limit is {_MAX_CHOICES}")
    return choices


def _gbnf(text: str) -> str:
    """Translate llama.cpp's notation."""
    param = PARAM["grammar"]
    grammar_schema.check_size(text, param)
    from llguidance.gbnf_to_lark import gbnf_to_lark  # an extra, and wanted here only

    try:
        return str(gbnf_to_lark(_CODE_POINT.sub(_code_point, text)))
    except InvalidRequestError:
        raise
    except RecursionError as exc:
        raise InvalidRequestError(param=param, problem="is nested too deeply") from exc
    except Exception as exc:
        # The translator raises plain Exception, and on odd text whatever its code runs into.
        raise InvalidRequestError(param=param, problem=" ".join(str(exc).split())[:300] or "is no grammar") from exc


def _code_point(match: re.Match[str]) -> str:
    """Put the character where its number stands: the translator knows none above 255. What has a meaning of its own in
    texts or classes stays a number.
    """
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    number = int(digits, 16)
    if number < 128:
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise InvalidRequestError(param=PARAM["grammar"], problem=f"{match[0]} is no character")
    return chr(number)
