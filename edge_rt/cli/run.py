"""`edge_rt run`: one prompt, one answer; or one file, and what is in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import click

from edge_rt import config
from edge_rt.cli.answer_form import form_of, form_options
from edge_rt.cli.look import TAKES, Job, media_task
from edge_rt.cli.look import run as look
from edge_rt.cli.talk import Talk, answer_options, given, open_talk, with_backend
from edge_rt.types import Message


@click.command("run", short_help="Answer one prompt, or look at one file.")
@click.argument("model")
@click.argument("prompt", metavar="[PROMPT|FILE]", required=False)
@click.option("--system", metavar="TEXT", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it stands, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the answer and what it took.")
@click.option(
    "--reference",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A picture of how it should be, to compare with.",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the picture with its boxes."
)
@click.option("--min-score", type=click.FloatRange(0, 1), help="Leave out what is less sure than this.")
@click.option(
    "--backend",
    type=click.Choice(get_args(config.Backend)),
    help="Load the model here, on this back end. [default: as configured]",
)
@form_options
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
    reference: Path | None,
    output: Path | None,
    min_score: float | None,
    backend: config.Backend | None,
    socket: Path | None,
    local: bool,
    force: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL and stream the answer to stdout, or look at FILE and print what is in it.

    MODEL is an id of `edge_rt models list`, optionally with :VARIANT, or the path of a GGUF file. Without PROMPT or
    FILE, or with -, it is read from stdin.

    Models of pictures take JPEG and PNG, and print labels, boxes or text; those that find boxes also write FILE's name
    with .found.png, the picture with its boxes, into the current directory. Models of sound take WAV and print from
    when to when somebody speaks. Models that embed take a text and print its embedding as JSON.

    A running daemon is asked if there is one, because it has the model in memory. Otherwise, and for a VARIANT or a
    file, the model is loaded into this process, and pulled first if it is not here.

    \b
      edge_rt run smollm2-135m-instruct "What is gravity?"
      dmesg | tail | edge_rt run smollm2-135m-instruct --system "Summarise this log." -
      edge_rt run smollm2-135m-instruct "Is iron a metal?" --choice yes --choice no
      edge_rt run efficientnet-lite0 part.jpg
      edge_rt run pp-ocrv4 label.jpg -o label.found.png
      edge_rt run smollm2-135m-instruct:q4_1 "Hello" --backend fpga_sim -n 4
    """
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    if backend is not None:
        if socket is not None:
            raise click.UsageError("--backend loads the model here, and --socket asks a daemon: give one of them.")
        loaded, local = with_backend(loaded, model, backend), True
    form = form_of(options)
    if task := media_task(loaded, model):
        top_k = options.pop("top_k") or None  # 0 leaves none out, as for language models
        if system or raw or form is not None or given(options):
            raise click.UsageError(
                f"{model} takes {TAKES[task]}; --system, --raw and the sampling options are for text."
            )
        job = Job(
            model=model,
            task=task,
            file=prompt,
            reference=reference,
            output=output,
            top_k=top_k,
            min_score=min_score,
            as_json=as_json,
            verbose=verbose,
        )
        look(job, loaded, socket=socket, local=local, force=force)
        return
    if reference is not None or output is not None or min_score is not None:
        raise click.UsageError(f"--reference, --output and --min-score are for files; {model} is a language model.")
    if raw and system:
        raise click.UsageError("--system belongs to the chat template, which --raw leaves out.")
    text = _read(prompt)
    turns = [Message(role="system", content=system)] if system else []
    question: str | list[Message] = text if raw else [*turns, Message(role="user", content=text)]
    asked = given(options) | ({} if form is None else {"response_format": form})
    with open_talk(loaded, model, socket=socket, local=local, force=force) as talk:
        answer: list[str] = []
        for piece in talk.ask(question, asked):
            answer.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
        if as_json:
            click.echo(json.dumps(_record(model, talk, "".join(answer))))
        else:
            click.echo()
        if verbose and talk.account is not None:
            ran = " on ".join(filter(None, (talk.variant(), talk.backend() or "back end unknown")))
            click.echo(f"{talk.account.line()} · on {talk.place}: {ran}", err=True)


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
    return {
        "model": model,
        "place": talk.place,
        "variant": talk.variant(),
        "backend": talk.backend(),
        "text": answer,
        **account,
    }
