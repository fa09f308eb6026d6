"""`edge_rt run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from edge_rt import config
from edge_rt.cli.talk import Talk, answer_options, given, open_talk
from edge_rt.types import Message


@click.command("run", short_help="Answer one prompt.")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it stands, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the answer and what it took.")
@answer_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    prompt: str | None,
    system: str | None,
    raw: bool,
    as_json: bool,
    socket: Path | None,
    local: bool,
    force: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL and stream the answer to stdout.

    MODEL is an id of `edge_rt models list`, optionally with :VARIANT, or the path of a GGUF file. Without PROMPT, or
    with -, the prompt is read from stdin.

    A running daemon is asked if there is one, because it has the model in memory. Otherwise, and for a VARIANT or a
    file, the model is loaded into this process, and pulled first if it is not here.

    \b
      edge_rt run smollm2-135m-instruct "What is gravity?"
      dmesg | tail | edge_rt run smollm2-135m-instruct --system "Summarise this log." -
    """
    if raw and system:
        raise click.UsageError("--system belongs to the chat template, which --raw leaves out.")
    text = _read(prompt)
    turns = [Message(role="system", content=system)] if system else []
    question: str | list[Message] = text if raw else [*turns, Message(role="user", content=text)]
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    with open_talk(loaded, model, socket=socket, local=local, force=force) as talk:
        answer: list[str] = []
        for piece in talk.ask(question, given(options)):
            answer.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
        if as_json:
            click.echo(json.dumps(_record(model, talk, "".join(answer))))
        else:
            click.echo()
        if verbose and talk.account is not None:
            click.echo(f"{talk.account.line()} · on {talk.place}: {talk.backend() or 'back end unknown'}", err=True)


def _read(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        if not prompt.strip():
            raise click.UsageError("The prompt is empty.")
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('Give a PROMPT, or pipe one in: edge_rt run MODEL "What is gravity?"')
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        raise click.UsageError("The prompt on stdin is empty.")
    return text


def _record(model: str, talk: Talk, answer: str) -> dict[str, Any]:
    account = talk.account.record() if talk.account is not None else {}
    return {"model": model, "place": talk.place, "backend": talk.backend(), "text": answer, **account}
