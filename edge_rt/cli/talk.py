"""Where `run` and `chat` get their answers: from a running daemon, or from a model loaded into this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
import msgspec

from edge_rt import config
from edge_rt.api.client import Client, Piece
from edge_rt.api.listen import socket_path
from edge_rt.catalog.store import is_file_name
from edge_rt.cli.answer_form import wire_fields
from edge_rt.cli.progress import pull_progress
from edge_rt.cli.stand_in import announce, shown
from edge_rt.errors import ConfigError, DaemonUnreachableError, ModelNotFoundError, UnsupportedFeatureError
from edge_rt.service.units import SOCKET_PATH
from edge_rt.types import FinishReason, Message, Usage

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What an answer took. is_speed: a real device computed it, so tokens a second are worth showing."""

    finish_reason: FinishReason | None
    usage: Usage
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    is_speed: bool = True

    def line(self) -> str:
        """Write it as one line for people."""
        cached = f", {self.usage.cached_tokens} of them cached" if self.usage.cached_tokens else ""
        parts = [
            f"{self.usage.prompt_tokens} prompt tokens{cached}",
            f"prefill {self.prefill_s:.2f} s{_rate(self.prefill_tps)}",
            f"{self.usage.completion_tokens} tokens",
            f"decode {self.decode_s:.2f} s{_rate(self.decode_tps)}",
        ]
        if (energy := self.usage.energy) is not None:
            parts.append(f"{energy.total_j:.3g} J of the {energy.boundary}, {energy.quality}")
        return " · ".join(parts)

    def record(self) -> dict[str, Any]:
        """Give it as JSON keys."""
        return {
            "finish_reason": self.finish_reason,
            **{f.name: getattr(self.usage, f.name) for f in fields(self.usage) if f.name != "energy"},
            **({} if self.usage.energy is None else {"energy": asdict(self.usage.energy)}),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prefill_tps": self.prefill_tps,
            "decode_tps": self.decode_tps,
        }

    @property
    def prefill_tps(self) -> float | None:
        return _tps(self.prefill_tokens, self.prefill_s) if self.is_speed else None

    @property
    def decode_tps(self) -> float | None:
        return _tps(self.decode_tokens, self.decode_s) if self.is_speed else None


def _tps(n_tokens: int, seconds: float) -> float | None:
    return n_tokens / seconds if n_tokens > 0 and seconds > 0 else None


def _rate(tps: float | None) -> str:
    return "" if tps is None else f" ({tps:.1f} t/s)"


def backend_line(name: str, reason: str, evidence: str = "device") -> str:
    """Write a back end, what stands in for its device, and why it is not the first choice, for people."""
    name = name if evidence == "device" else f"{name} ({evidence}: no figure of it is a speed)"
    return f"{name}, because {reason}" if reason else name


class Talk(Protocol):
    """One model to talk with.

    place    where it runs, for people
    account  what the last whole answer took, None before and while one comes
    backend  the back end that answers, and why it is not the first choice; None if unknown
    variant  the model's form that answers; None if unknown, and of a file
    """

    place: str
    account: Account | None

    def backend(self) -> str | None: ...

    def variant(self) -> str | None: ...

    def ask(self, prompt: str | Sequence[Message], options: dict[str, Any]) -> Iterator[str]:
        """Stream an answer: to a conversation, or the continuation of a text. Closing the iterator stops it."""
        ...


class DaemonTalk:
    """Asks the daemon."""

    def __init__(self, client: Client, model: str) -> None:
        self.place = f"the daemon on {client.address}"
        self.account: Account | None = None
        self._client = client
        self._model = model

    def backend(self) -> str | None:
        meta = self._client.model(self._model).get("meta", {})
        if not meta.get("backend"):
            return None
        return backend_line(meta["backend"], meta.get("backend_reason", ""), meta.get("evidence", "device"))

    def variant(self) -> str | None:
        variant: str | None = self._client.model(self._model).get("meta", {}).get("variant")
        return variant

    def ask(self, prompt: str | Sequence[Message], options: dict[str, Any]) -> Iterator[str]:
        self.account = None
        options = {"model": self._model, **options}
        if (form := options.pop("response_format", None)) is not None:
            options |= wire_fields(form)
        if isinstance(prompt, str):
            pieces = self._client.complete(prompt, **options)
        else:
            pieces = self._client.chat(prompt, **options)
        for piece in pieces:
            if piece.usage is not None:
                self.account = _daemon_account(piece)
            if piece.text:
                yield piece.text


def _daemon_account(piece: Piece) -> Account | None:
    if piece.usage is None or piece.timings is None:
        return None
    timings = {name: value or 0.0 for name, value in piece.timings.items()}
    return Account(
        finish_reason=piece.finish_reason,
        usage=piece.usage,
        prefill_s=timings["prompt_ms"] / 1e3,
        prefill_tokens=int(timings["prompt_n"]),
        decode_s=timings["predicted_ms"] / 1e3,
        decode_tokens=max(0, int(timings["predicted_n"]) - 1),
    )


class LocalTalk:
    """Asks a model in this process."""

    def __init__(self, model: Any) -> None:
        self.place = "this process"
        self.account: Account | None = None
        self._model = model

    def backend(self) -> str | None:
        info = self._model.info
        return backend_line(info.backend, info.backend_reason, info.evidence)

    def variant(self) -> str | None:
        return self._model.info.variant or None

    def ask(self, prompt: str | Sequence[Message], options: dict[str, Any]) -> Iterator[str]:
        self.account = None
        answer = self._model.generate(prompt, raw=isinstance(prompt, str), **options)
        try:
            with shown(self._model):  # until there is something to see
                first = next(answer, None)
            if first is not None:
                yield first
            yield from answer
        finally:
            answer.close()
        self.account = Account(
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            prefill_s=answer.timings.prefill_s,
            prefill_tokens=answer.timings.prefill_tokens,
            decode_s=answer.timings.decode_s,
            decode_tokens=answer.timings.decode_tokens,
            is_speed=self._model.info.evidence == "device",
        )


def daemon_path(
    server: config.Server, environ: Mapping[str, str], *, uid: int | None = None, of_service: Path = Path(SOCKET_PATH)
) -> Path | None:
    """Give the path of the daemon that a client of this user asks.

    It is where the user's own daemon would listen; where it does not and nothing is configured, the service's socket if
    there is one (of_service). None where there is nothing to put a socket in.
    """
    try:
        own = socket_path(server, environ, uid=uid)
    except ConfigError:
        own = None
    if server.socket_path or (own is not None and os.path.lexists(own)) or not os.path.lexists(of_service):
        return own
    return of_service


@contextmanager
def running_daemon(loaded: config.Loaded, model: str, *, socket: Path | None, local: bool) -> Iterator[Client | None]:
    """Connect to the daemon that shall be asked, None if the model is to be loaded here.

    A daemon that answers on the configured socket is used, because it has the model in memory already, unless local
    is set; a named socket must answer. A daemon serves models of the catalog, each in one form: a file or a variant
    that is named runs here.
    """
    if socket is not None and local:
        raise click.UsageError("--socket asks a daemon and --local asks none: give one of them.")
    is_ours = is_file_name(model) or ":" in model
    if socket is not None and is_ours:
        what = "a file" if is_file_name(model) else "a variant"
        remedy = "a daemon serves each model of the catalog in the form that models.ID.variant names"
        raise UnsupportedFeatureError(feature=f"{what} with --socket", remedy=remedy)
    path = socket or daemon_path(loaded.config.server, os.environ)
    if path is not None and not local and not is_ours:
        with Client(path) as client:
            try:
                client.is_ready()
            except DaemonUnreachableError as exc:
                if socket is not None:
                    raise
                if os.path.lexists(path):  # there was one, and the user may believe there is
                    click.echo(f"edge_rt: {path}: {exc.reason}; loading the model into this process", err=True)
            else:
                yield client
                return
    yield None


@contextmanager
def open_talk(loaded: config.Loaded, model: str, *, socket: Path | None, local: bool, force: bool) -> Iterator[Talk]:
    """Connect to a running daemon, else load the model here, and pull it if need be."""
    with running_daemon(loaded, model, socket=socket, local=local) as client:
        if client is not None:
            _check_talks(client, model)
            yield DaemonTalk(client, model)
            return
    from edge_rt.library import load_text  # numpy and llama.cpp, which a call to the daemon does not need

    with pull_progress() as progress:
        loaded_model = load_text(model, settings=loaded, pull=True, progress=progress, force=force)
    with loaded_model:
        announce(loaded_model.info)
        yield LocalTalk(loaded_model)


def with_backend(loaded: config.Loaded, model: str, backend: str) -> config.Loaded:
    """Give the configuration with this back end for the model."""
    settings, model_id = loaded.config, model.partition(":")[0]
    own = msgspec.structs.replace(settings.model(model_id), backend=backend)
    engine = msgspec.structs.replace(settings.engine, backend=backend)
    plain = config.plain_id(model_id)
    others = {name: value for name, value in settings.models.items() if config.plain_id(name) != plain}
    changed = msgspec.structs.replace(settings, engine=engine, models={**others, model_id: own})
    return replace(loaded, config=changed)


def _check_talks(client: Client, model: str) -> None:
    """Raise UnsupportedFeatureError for a model of the daemon's that takes no text, before anybody writes to it."""
    try:
        card = client.model(model)
    except ModelNotFoundError:
        return  # nor is one that has not been pulled: the question's own error tells them apart
    if card.get("kind") == "tensor":
        takes = f"it takes files: `edge_rt run {model} FILE`" if card.get("task") else "it is a tensor model"
        raise UnsupportedFeatureError(feature=f"text from {model}", remedy=takes)


def answer_options(command: F) -> F:
    """Add the options of an answer, shared by run and chat; they arrive under the request's field names."""
    options = [
        click.option("-n", "--max-tokens", type=click.IntRange(min=1), help="Stop after so many tokens."),
        click.option("--temperature", type=click.FloatRange(0, 100), help="0 is greedy. [default: 0.8]"),
        click.option(
            "--top-k", type=click.IntRange(min=0), help="Keep the K likeliest tokens; 0 is off. [default: 40]"
        ),
        click.option("--top-p", type=click.FloatRange(0, 1), help="Keep the likeliest up to this sum. [default: 0.95]"),
        click.option(
            "--min-p",
            type=click.FloatRange(0, 1),
            help="Drop what is less likely than this share of the best. [default: 0.05]",
        ),
        click.option(
            "--repeat-penalty", type=click.FloatRange(0.01, 100), help="Over 1 avoids repetition. [default: 1]"
        ),
        click.option("--seed", type=int, help="The same seed gives the same answer."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."),
        click.option(
            "--socket",
            type=click.Path(path_type=Path, readable=False),
            help="Ask the daemon on this socket, nobody else.",
        ),
        click.option("--local", is_flag=True, help="Load the model into this process even if a daemon runs."),
        click.option("--force", is_flag=True, help="Load here even if memory seems too small."),
        click.option("-v", "--verbose", is_flag=True, help="Show on stderr where it ran and how fast."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Keep the options that were given; the rest falls to the defaults of whoever answers."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if value not in (None, ())
    }
