"""What a chat template may spend, and the accounting of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jinja2 import TemplateRuntimeError, Undefined

NODE_CHARS = 16  # a list item or number costs as much as a text of this length

_TICKS_PER_CLOCK_READ = 32


class LimitError(Exception):
    """A template spends more than it may."""


class Meter:
    """What one compilation or render may still spend.

    max_chars   text characters and NODE_CHARS an item, made in all by every operation; also the most one nested
                value may hold when written out, which is what comparing or printing it costs
    max_time_s  by clock, which should count CPU time: a busy machine is not the template's fault
    """

    def __init__(self, *, max_chars: int, max_time_s: float, clock: Callable[[], float]) -> None:
        self._max_chars = max_chars
        self._chars_left = max_chars
        self._ticks = _TICKS_PER_CLOCK_READ
        self._max_time_s = max_time_s
        self._clock = clock
        self._deadline_s = clock() + max_time_s
        # Weights by identity; holding the object keeps its id from being given to another.
        self._weights: dict[int, tuple[object, int]] = {}

    def tick(self) -> bool:
        """Count one step. Always True, so that generated code can put it before an `and`."""
        self._ticks -= 1
        if self._ticks <= 0:
            self._ticks = _TICKS_PER_CLOCK_READ
            if self._clock() > self._deadline_s:
                raise LimitError(f"takes more than {self._max_time_s:g} s")
        return True

    def charge(self, n_chars: int) -> None:
        """Pay for text before it is made."""
        self._chars_left -= n_chars
        if self._chars_left < 0:
            raise LimitError(f"makes more than {self._max_chars} characters of text and list items")

    def weigh(self, value: object) -> int:
        """Give a value's size written out, counting what is in it twice twice.

        Lists of lists of one string can hold 2**n copies of it in n objects: cheap to make, endless to compare.
        """
        kind = type(value)
        if kind is str:
            return NODE_CHARS + len(value)  # type: ignore[arg-type]
        if kind is list or kind is tuple or kind is dict:
            known = self._weights.get(id(value))
            if known is not None:
                return known[1]
            return self._weigh_items(value)  # type: ignore[arg-type]
        if value is None or kind is bool or kind is int or kind is float or isinstance(value, Undefined):
            return NODE_CHARS
        raise TemplateRuntimeError(f"a {kind.__name__} cannot be kept in a list or written out")

    def _weigh_items(self, value: Sequence[object] | dict[object, object]) -> int:
        weight = NODE_CHARS
        items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        for item in items:
            weight += self.weigh(item)
            if weight > self._max_chars:
                raise LimitError(f"makes a list of more than {self._max_chars} characters")
        self._weights[id(value)] = (value, weight)
        return weight
