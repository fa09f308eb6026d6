"""What to measure: llama-bench's parameters and the cases they span, with reproducible tokens."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
MAX_COUNT = 1 << 24
_MAX_VALUES = 1024
_MAX_TRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test: n_prompt tokens are prefilled and n_gen decoded one by one, after n_depth tokens of context."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_batch: int
    n_ubatch: int
    n_threads: int

    @property
    def name(self) -> str:
        """Name it as llama-bench does: pp512, tg128, pp512+tg128, each with " @ d1024" at a depth."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def n_ctx(self) -> int:
        return self.n_tokens + self.n_depth


def parse_counts(text: str, *, least: int = 0) -> tuple[int, ...]:
    """Read llama-bench's lists: "512", "1,2,4", "a-b", "a-b+step", "a-b*factor", and mixtures of them.

    Raises ValueError with a sentence for people.
    """
    values: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a number nor a range a-b, a-b+step or a-b*factor")
        first, last = int(match[1]), int(match[2] or match[1])
        values += _expand(part, first, last, match[3] or "+", int(match[4] or 1))
        if len(values) > _MAX_VALUES:
            raise ValueError(f"{text!r} has more than {_MAX_VALUES} values")
    for value in values:
        if not least <= value <= MAX_COUNT:
            raise ValueError(f"{value} is not in {least}..{MAX_COUNT}")
    return tuple(values)


def parse_pairs(text: str) -> tuple[int, int]:
    """Read -pg's "prompt,gen". Raises ValueError."""
    values = parse_counts(text)
    if len(values) != 2 or "-" in text:
        raise ValueError(f"{text!r} is not PROMPT,GEN, two numbers such as 512,128")
    return values[0], values[1]


def cases(
    *,
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    pg: Sequence[tuple[int, int]],
    n_depth: Sequence[int],
    n_batch: Sequence[int],
    n_ubatch: Sequence[int],
    n_threads: Sequence[int],
) -> tuple[Case, ...]:
    """Span the cases in llama-bench's order: batch, micro-batch, threads, depth, then pp, tg and pg; zeros drop out."""
    shapes = [(p, 0) for p in n_prompt] + [(0, n) for n in n_gen] + list(pg)
    return tuple(
        Case(n_prompt=p, n_gen=n, n_depth=depth, n_batch=batch, n_ubatch=min(ubatch, batch), n_threads=threads)
        for batch, ubatch, threads, depth in itertools.product(n_batch, n_ubatch, n_threads, n_depth)
        for p, n in shapes
        if p + n > 0
    )


def token_ids(
    n_tokens: int,
    n_vocab: int,
    seed: int,
    *,
    is_plain: Callable[[int], bool] = lambda _id: True,
    first: int | None = None,
) -> list[int]:
    """Draw plain tokens uniformly from the vocabulary, the same for the same seed; first replaces the first one.

    is_plain leaves out control tokens, which a real prompt has none of in its middle.
    """
    draw = random.Random(seed)  # noqa: S311 - reproducible on purpose
    ids: list[int] = []
    while len(ids) < n_tokens:
        tries = (draw.randrange(n_vocab) for _ in range(_MAX_TRIES))
        if (found := next(filter(is_plain, tries), None)) is None:
            raise ValueError(f"no plain token among {_MAX_TRIES} drawn from a vocabulary of {n_vocab}")
        ids.append(found)
    if first is not None and ids:
        ids[0] = first
    return ids


def _expand(part: str, first: int, last: int, operator: str, step: int) -> list[int]:
    if last < first:
        raise ValueError(f"{part!r} ends before it begins")
    if (operator == "+" and step < 1) or (operator == "*" and (step < 2 or first < 1) and first != last):
        raise ValueError(f"{part!r} never reaches its end: it takes a step >= 1, or a factor >= 2 from a start >= 1")
    values: list[int] = []
    value = first
    while value <= last and len(values) <= _MAX_VALUES:
        values.append(value)
        if operator == "+":
            value += step
        else:
            value = value * step if step > 1 and value > 0 else last + 1
    return values
