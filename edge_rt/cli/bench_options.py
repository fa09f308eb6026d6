"""Option types and progress that `edge_rt bench` and `edge_rt bench serve` share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from edge_rt.bench.workload import parse_counts, parse_pairs
from edge_rt.errors import UnsupportedFeatureError
from edge_rt.types import Evidence


def refuse_stand_in(backend: str, evidence: Evidence) -> None:
    """Raise UnsupportedFeatureError for a back end whose device is simulated or emulated: its seconds are no speed."""
    if evidence in {"simulator", "emulated"}:
        remedy = f"it runs on a device's {evidence}, whose seconds say nothing; `edge_rt run` shows its answers"
        raise UnsupportedFeatureError(feature=f"a benchmark of {backend}", remedy=remedy)


class Counts(click.ParamType[tuple[int, ...]]):
    """llama-bench's lists and ranges of numbers."""

    name = "list"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_counts(value, least=self._least)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Pair(click.ParamType[tuple[int, int]]):
    name = "pp,tg"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_pairs(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


class Progress:
    """One line on stderr: rewritten in place on a terminal, else a line per step."""

    def __init__(self, wanted: bool | None, name: str = "edge_rt bench") -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._on = self._terminal if wanted is None else wanted

    def show(self, line: str) -> None:
        if self._on:
            click.echo(
                f"\r\x1b[K{line}" if self._terminal else f"{self._name}: {line}", err=True, nl=not self._terminal
            )

    def clear(self) -> None:
        if self._on and self._terminal:
            click.echo("\r\x1b[K", err=True, nl=False)


def counts_option(*names: str, default: str, least: int = 0, text: str) -> Callable[[Any], Any]:
    return click.option(
        *names,
        type=Counts(least),
        multiple=True,
        default=(default,),
        metavar="LIST",
        help=f"{text} [default: {default}]",
    )


def flat(values: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(value for group in values for value in group)
