"""The [[pin]] tables of a configuration: where each stands in its file, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_rt.config.tables import Pin
from edge_rt.errors import ConfigError

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*pin[ \t]*\]\]", re.MULTILINE)
_PLACE = re.compile(r"\$\.pin\[(\d+)\](?:\.(\w+))?")


def pin_places(text: str, path: Path, n_pins: int) -> tuple[str, ...]:
    """Tell the file and line of each pin; the file alone where a text in it looks like one more pin."""
    lines = [text.count("\n", 0, header.start()) + 1 for header in _HEADER.finditer(text)]
    return tuple(f"{path}, line {line}" for line in lines) if len(lines) == n_pins else (str(path),) * n_pins


def pin_name(pin: Pin, number: int) -> str:
    """Name a pin, the number-th from 0 on: as it says, after its file, or by its number from 1 on."""
    return pin.name or (Path(pin.file).name if pin.file else f"pin-{number + 1}")


def check_pins(pins: Sequence[Pin], places: Sequence[str]) -> None:
    """Raise ConfigError for the first pin that has no text, two of them, or another's name."""
    first: dict[tuple[str, str], int] = {}
    for number, pin in enumerate(pins):
        key, origin = f"pin[{number}]", origin_of(number, places)
        if pin.system and pin.file:
            raise ConfigError(key=key, problem="both system and file are given; leave one out", origin=origin)
        if not pin.system and not pin.file:
            raise ConfigError(key=key, problem="neither system nor file is given, or it is empty", origin=origin)
        name = pin_name(pin, number)
        if (other := first.setdefault((pin.model, name), number)) != number:
            problem = f"{pin.model} has a pin named {name!r} already, pin[{other}]; give this one another name"
            raise ConfigError(key=f"{key}.name", problem=problem, origin=origin)


def origin_of(number: int, places: Sequence[str]) -> str:
    """Tell where a pin stands, as far as that is known."""
    return places[number] if number < len(places) else "configuration"


def pin_error(place: str, problem: str, values: Mapping[str, Any], places: Sequence[str]) -> ConfigError | None:
    """Make an error of what msgspec finds in a pin, by the place that it names; None for another place."""
    if (found := _PLACE.match(place)) is None:
        return None
    number, field = int(found[1]), found[2]
    key = f"pin[{number}]"
    if "unknown field" in problem:
        key, problem = f"{key}.{problem.split('`')[1]}", f"no such key; a pin has {', '.join(Pin.__struct_fields__)}"
    elif field:
        problem = f"{re.sub(r', got `[a-z]+`$', '', problem)}, got {values['pin'][number].get(field)!r}"
        key = f"{key}.{field}"
    else:
        problem = problem.replace("`object`", "a table")
    return ConfigError(key=key, problem=problem, origin=origin_of(number, places))
