from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from edge_rt.cli import EXIT_CONFIG, EXIT_ERROR, EXIT_INTERRUPTED, LazyGroup, main
from edge_rt.errors import ConfigError, OfflineError


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def test_help_lists_every_command_and_each_of_them_exists() -> None:
    listed = run("--help")
    assert listed.exit_code == 0
    names = main.list_commands(click.Context(main))
    assert {"serve", "run", "chat", "top", "bench", "models", "devices", "config", "doctor"} <= set(names)
    for name in names:
        assert name in listed.output
        assert importlib.util.find_spec(f"edge_rt.cli.{name}") is not None


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_each_command_has_help(name: str) -> None:
    shown = run(name, "--help")
    assert shown.exit_code == 0, shown.output
    assert "Usage:" in shown.output


def test_every_overview_line_is_a_whole_sentence() -> None:
    groups = [
        main,
        *(c for name in main.list_commands(click.Context(main)) if isinstance(c := command(name), click.Group)),
    ]
    assert len(groups) >= 4
    for group in groups:
        listed = run(*([group.name] if group is not main else []), "--help").output.partition("Commands:")[2]
        lines = [line.split(maxsplit=1)[1] for line in listed.strip().splitlines()]
        assert [line for line in lines if not (line[0].isupper() and re.search(r"[^.]\.$", line))] == []


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys; from edge_rt.cli import main; main(['--help'], standalone_mode=False);"
        "print([m for m in sys.modules if m.startswith('edge_rt.cli.') or m in ('numpy', 'uvicorn', 'httpx2')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_front_process_imports_no_native_inference_code() -> None:
    code = (
        "import sys; import edge_rt.cli.serve;"
        "print([m for m in ('numpy', 'llama_cpp', 'jinja2') if m in sys.modules],"
        "[m for m in sys.modules if m.startswith(('edge_rt.engine', 'edge_rt.backends'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[] []"


def test_python_m_edge_rt() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_rt", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("edge_rt, version ")


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("fly").exit_code == 2


def test_a_mistyped_command_is_told_which_it_might_be() -> None:
    done = run("serv")
    assert done.exit_code == 2
    assert "'serve'" in done.stderr


def group_with(command: Callable[[], None]) -> click.Group:
    @click.group(cls=LazyGroup)
    @click.option("--debug", is_flag=True)
    def group(debug: bool) -> None:
        del debug

    class Fixed(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return click.command(cmd_name)(command)

    group.__class__ = Fixed
    return group


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ConfigError(key="a.b", problem="is bad", origin="flag"), EXIT_CONFIG, "edge_rt: a.b: is bad (from flag)"),
        (OfflineError(model="m"), EXIT_ERROR, "edge_rt: m is not in the local store"),
        (OSError(28, "No space left on device"), EXIT_ERROR, "edge_rt: No space left on device"),
        (PermissionError(13, "Permission denied", "/a"), EXIT_ERROR, "edge_rt: /a: Permission denied"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
    ],
)
def test_errors_become_a_line_and_an_exit_code(error: BaseException, status: int, words: str) -> None:
    def fails() -> None:
        raise error

    done = CliRunner().invoke(group_with(fails), ["x"])
    assert done.exit_code == status
    assert done.stderr.startswith(words)
    assert "Traceback" not in done.stderr
    if words:
        assert "Traceback" in CliRunner().invoke(group_with(fails), ["--debug", "x"]).stderr


def test_a_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    done = run("--config", str(tmp_path / "none.toml"), "config", "show")
    assert done.exit_code == EXIT_CONFIG
    assert "cannot be read" in done.stderr
