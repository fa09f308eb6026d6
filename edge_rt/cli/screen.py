"""Watch what changes: such commands' options, and the other screen, which brings back what stood there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import click

_OTHER_SCREEN, _BACK, _HOME = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H\x1b[J"


F = TypeVar("F", bound=Callable[..., None])


def watching(*, least_s: float, default_s: float) -> Callable[[F], F]:
    """Give a command interval_s, once and as_json."""

    def decorate(command: F) -> F:
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line."),
            click.option("--once", is_flag=True, help="Print one view, taken over one interval, and end."),
            click.option(
                "--interval",
                "interval_s",
                type=click.FloatRange(least_s, 3600),
                default=default_s,
                show_default=True,
                metavar="SECONDS",
                help="Time between two looks.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def redraw(title: str, frames: Iterator[str]) -> None:
    """Show the title, then each frame below it in place of the last one, until there are no more or Ctrl-C."""
    click.echo(f"{_OTHER_SCREEN}{_HOME}{title}", nl=False)
    try:
        for frame in frames:
            click.echo(f"{_HOME}{title}\n\n{frame}\n\nCtrl-C ends.", nl=False)
    finally:
        click.echo(_BACK, nl=False)
