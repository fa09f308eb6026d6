"""`edge_rt chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click

from edge_rt import config
from edge_rt.cli.talk import Talk, answer_options, given, open_talk
from edge_rt.errors import CapacityError, RequestError, WorkerLostError
from edge_rt.types import Message

_HELP = """\
/clear          forget the conversation
/system [TEXT]  show or set what the model is told first, and start anew
/undo           forget the last question and its answer
/stats          what the last answer took
/exit           end (so does Ctrl-D)
\"\"\"             begin and end a text of several lines
Ctrl-C          stop the answer that is being written
"""


@click.command("chat", short_help="Talk with a model.")
@click.argument("model", required=False)
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@answer_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    system: str | None,
    socket: Path | None,
    local: bool,
    force: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Talk with MODEL, the default model if none is named; /help inside shows what one can type.

    MODEL is an id of `edge_rt models list`, optionally with :VARIANT, or the path of a GGUF file. A running daemon is
    asked if there is one. Otherwise, and for a VARIANT or a file, the model is loaded into this process, and pulled
    first if it is not here.
    """
    loaded = ctx.obj if isinstance(ctx.obj, config.Loaded) else config.load()
    model = model or loaded.config.catalog.default_model
    with open_talk(loaded, model, socket=socket, local=local, force=force) as talk:
        if sys.stdin.isatty():
            import readline  # noqa: F401 - importing it gives input() history and line editing

            click.echo(f"{model} on {talk.place}. /help for help, Ctrl-D to end.", err=True)
        Chat(talk, given(options), system=system, verbose=verbose).run()


class Chat:
    """The conversation so far and the loop that goes on with it."""

    def __init__(self, talk: Talk, options: dict[str, Any], *, system: str | None, verbose: bool) -> None:
        self._talk = talk
        self._options = options
        self._system = system
        self._verbose = verbose
        self._turns: list[Message] = []

    def run(self) -> None:
        """Converse to the end of the input. Raises UsageError for a piped input in which nothing stands."""
        n_lines = 0
        while (text := _read()) is not None:
            n_lines += bool(text.strip())
            if text.startswith("/"):
                if not self._obey(text):
                    return
            elif text.strip():
                self._answer(text)
        if not n_lines and not sys.stdin.isatty():
            raise click.UsageError("There is no question on stdin.")

    def _obey(self, text: str) -> bool:
        """Carry out a slash command; False ends the chat."""
        name, _, rest = text.strip().partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/clear":
            self._turns.clear()
        elif name == "/undo":
            del self._turns[-2:]
        elif name == "/system" and rest:
            self._system = rest
            self._turns.clear()
        elif name == "/system":
            click.echo(self._system or "(none)", err=True)
        elif name == "/stats":
            click.echo(self._talk.account.line() if self._talk.account else "no whole answer yet", err=True)
        else:
            click.echo(_HELP if name in ("/help", "/?") else f"no command {name}; /help lists them", err=True)
        return True

    def _answer(self, text: str) -> None:
        question = Message(role="user", content=text)
        system = [Message(role="system", content=self._system)] if self._system else []
        answer: list[str] = []
        pieces = self._talk.ask([*system, *self._turns, question], self._options)
        try:
            for piece in pieces:
                answer.append(piece)
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            if isinstance(pieces, Generator):
                pieces.close()  # stops the engine
            click.echo(" (stopped)", nl=False, err=True)
        except (RequestError, CapacityError, WorkerLostError) as exc:
            click.echo(f"edge_rt: {exc}", err=True)
            return  # the conversation stays as it was, so the user may try again
        click.echo()
        self._turns += [question, Message(role="assistant", content="".join(answer))]
        if self._verbose and self._talk.account is not None:
            click.echo(self._talk.account.line(), err=True)


def _read() -> str | None:
    """Read one question; None at the end of the input."""
    prompt = ">>> " if sys.stdin.isatty() else ""
    try:
        line = input(prompt)
        if not line.startswith('"""'):
            return line
        lines = [line[3:]]
        while not lines[-1].endswith('"""'):
            lines.append(input("... " if prompt else ""))
        lines[-1] = lines[-1][:-3]
        return "\n".join(lines)
    except EOFError:
        if prompt:
            click.echo()
        return None
    except KeyboardInterrupt:
        click.echo("\nCtrl-D ends the chat.", err=True)
        return ""
