"""A plot over time in characters: columns of eighths, one a value."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_UNKNOWN = "·"


def plot(values: Sequence[float | None], *, width: int, height: int, unit: str) -> list[str]:
    """Draw the last values as lines of text, from 0 up to a round number above the highest, newest on the right.

    None is unknown and drawn as a dot on the ground, never as 0.
    """
    shown = list(values)[-width:]
    top = ceiling(max((v for v in shown if v is not None), default=0.0))
    labels = [f"{top * (row + 1) / height:.4g} {unit}" for row in range(height)]
    margin = max(map(len, labels))
    lines = []
    for row in reversed(range(height)):
        cells = "".join(_cell(value, top, row, height) for value in shown)
        lines.append(f"{labels[row]:>{margin}} ┤{cells}")
    return [*lines, f"{f'0 {unit}':>{margin}} └{'─' * len(shown)}"]


def ceiling(value: float) -> float:
    """Give the next round number above: 1, 2 or 5 times a power of ten; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(round_ * power for round_ in (1.0, 2.0, 5.0, 10.0) if round_ * power >= value)


def _cell(value: float | None, top: float, row: int, height: int) -> str:
    if value is None:
        return _UNKNOWN if row == 0 else " "
    eighths = round(value / top * height * 8) - row * 8
    return _EIGHTHS[min(8, max(0, eighths))]
