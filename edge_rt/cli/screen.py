"""Draw text on the terminal's other screen, so that what stood there before comes back."""

from __future__ import annotations

from collections.abc import Iterator

import click

_OTHER_SCREEN, _BACK, _HOME = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H\x1b[J"


def redraw(title: str, frames: Iterator[str]) -> None:
    """Show the title, then each frame below it in place of the last one, until there are no more or Ctrl-C."""
    click.echo(f"{_OTHER_SCREEN}{_HOME}{title}", nl=False)
    try:
        for frame in frames:
            click.echo(f"{_HOME}{title}\n\n{frame}\n\nCtrl-C ends.", nl=False)
    finally:
        click.echo(_BACK, nl=False)
