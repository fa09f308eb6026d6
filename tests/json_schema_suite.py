"""The JSON Schema Test Suite, as the source distribution of the package jsonschema has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.source_archives import folder_of


class Case(NamedTuple):
    """One schema of the suite with its instances: (description, instance, whether it is valid)."""

    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]


def cases(*, optional: str = "") -> Iterator[Case]:
    """Give the suite's cases; optional names a folder of those that need not be met."""
    place = folder_of("jsonschema==4.26.0", "json/tests/draft2020-12", "json-schema-2020-12")
    place = place / "optional" / optional if optional else place
    for file in sorted(place.glob("*.json")):
        for case in json.loads(file.read_text()):
            tests = [(test["description"], test["data"], test["valid"]) for test in case["tests"]]
            yield Case(f"{file.stem}: {case['description']}", case["schema"], tests)
