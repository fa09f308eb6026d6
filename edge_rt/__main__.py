"""python -m edge_rt, and the command edge_rt"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edge_rt.held_signals import hold

_WITH_VALUE = frozenset({"--config"})  # of the options before a command


def main() -> None:
    """Run the command line; a daemon's signals are held first, before the imports that take their time."""
    if command(sys.argv[1:]) == "serve":
        hold()
    from edge_rt.cli import main as command_line

    command_line(prog_name="edge_rt")


def command(words: Sequence[str]) -> str:
    """Name the command that will be run, "" if there is none. Pure."""
    left = iter(words)
    for word in left:
        if word in _WITH_VALUE:
            next(left, None)
        elif not word.startswith("-"):
            return word
    return ""


if __name__ == "__main__":
    main()
