"""The command line's part; that held signals are acted on later is tried on real processes, in tests/api and power."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from edge_rt.__main__ import command
from edge_rt.cli import main

BLOCKED = """
import signal, sys
sys.argv = sys.argv[1:]
import edge_rt.__main__ as entry, edge_rt.cli
edge_rt.cli.main = lambda **_: print(sorted(s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
entry.main()
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["serve"], "serve"),
        (["--config", "run", "serve", "--offline"], "serve"),
        (["--config=x", "--debug", "serve"], "serve"),
        (["run", "serve"], "run"),
        (["--config", "serve"], ""),
        (["--help"], ""),
        ([], ""),
    ],
)
def test_the_command_is_known_before_anything_is_imported(words: list[str], name: str) -> None:
    assert command(words) == name


def test_every_option_before_a_command_is_known() -> None:
    for option in main.params:
        assert isinstance(option, click.Option)
        value = [] if option.is_flag else ["x"]
        for name in option.opts:
            assert command([name, *value, "serve"]) == "serve", name


def test_only_the_daemon_holds_its_signals() -> None:
    for name, held in (("serve", "['SIGHUP', 'SIGINT', 'SIGTERM']"), ("run", "[]")):
        command_line = [sys.executable, "-c", BLOCKED, "edge_rt", name]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == held, done.stderr
