"""The command line. Each command lives in a file of its own that is imported when it is called."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import click

from edge_rt.errors import ConfigError, EdgeRtError
from edge_rt.journal import is_journal, priority

# name → one line for the overview, so that --help imports no command
_COMMANDS: Final = {
    "serve": "Serve models over a Unix socket.",
    "run": "Answer one prompt, or look at one file.",
    "chat": "Talk with a model.",
    "models": "List, pull, import, show, verify and remove models.",
    "top": "Watch what a running daemon does.",
    "bench": "Measure speed, as llama-bench does.",
    "placement": "Explain on which device a model runs.",
    "route": "Explain who answers a request, device or cloud.",
    "cache": "Look at stored answers, correct and remove them.",
    "prefix": "Let beginnings of prompts stay computed.",
    "devices": "Show what this machine can run models on.",
    "fpga": "Tell what ONNX models would take of an FPGA's engine.",
    "npu": "Install vendors' packages for NPUs apart from edge_rt's.",
    "power": "Show power, clocks and heat.",
    "config": "Show the configuration and where each value comes from.",
    "doctor": "Check this machine and this installation.",
    "status": "Show how the service does.",
    "install": "Make edge_rt a service of systemd.",
    "uninstall": "Stop the service and remove it.",
    "completion": "Print a shell completion script.",
}

EXIT_ERROR: Final = 1
EXIT_CONFIG: Final = 78  # EX_CONFIG
EXIT_INTERRUPTED: Final = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called.

    overview  name → one line for the help
    prefix    what a command's name is put behind to give its module
    """

    def __init__(
        self, *args: Any, overview: Mapping[str, str] = _COMMANDS, prefix: str = "edge_rt.cli.", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._overview = overview
        self._prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self._overview)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self._overview:
            return None
        return cast("click.Command", importlib.import_module(f"{self._prefix}{cmd_name}").command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name those it might be; click itself knows only commands that are imported."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as exc:
            raise click.exceptions.NoSuchCommand(exc.command_name, possibilities=self._overview, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(self._overview.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Turn edge_rt's errors, and the system's, into a line on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except EdgeRtError as exc:
            if ctx.find_root().params.get("debug"):
                traceback.print_exc()
            _say(str(exc))
            ctx.exit(EXIT_CONFIG if isinstance(exc, ConfigError) else EXIT_ERROR)
        except OSError as exc:
            if exc.errno == errno.EPIPE:  # `| head`: click ends quietly
                raise
            if ctx.find_root().params.get("debug"):
                traceback.print_exc()
            where = f"{exc.filename}: " if exc.filename else ""
            _say(f"{where}{exc.strerror or exc}")
            ctx.exit(EXIT_ERROR)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(EXIT_INTERRUPTED)


def _say(error: str) -> None:
    prefix = f"<{priority(logging.ERROR)}>" if is_journal(sys.stderr, os.environ) else ""
    click.echo(f"{prefix}edge_rt: {error}", err=True)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option(
    "--config",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read this file instead of $EDGE_RT_CONFIG or /etc/edge_rt/config.toml.",
)
@click.version_option(package_name="edge_rt", prog_name="edge_rt")
@click.pass_context
def main(ctx: click.Context, debug: bool, file: Path | None) -> None:  # noqa: ARG001  invoke reads debug
    """Serve INT4 language models, and ONNX models of pictures, sound and text, on this machine."""
    if file is not None:
        from edge_rt import config

        ctx.obj = config.load(file)
        ctx.with_resource(config.named(file))
