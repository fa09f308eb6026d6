"""`edge_rt completion`: print the script that completes edge_rt in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "edge_rt"
VARIABLE = "_EDGE_RT_COMPLETE"


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", metavar="SHELL", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes edge_rt's commands and options in SHELL: bash (4.4 or newer), zsh or fish.

    \b
    bash  edge_rt completion bash > ~/.local/share/bash-completion/completions/edge_rt
    zsh   edge_rt completion zsh > "${fpath[1]}/_edge_rt"
    fish  edge_rt completion fish > ~/.config/fish/completions/edge_rt.fish
    """
    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    click.echo(completion(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
