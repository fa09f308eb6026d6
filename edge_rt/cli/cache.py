"""`edge_rt cache`: look at stored answers, correct and remove them, through the daemon or, without one, in the file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import click
import msgspec
from tabulate import tabulate

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.api.listen import socket_path
from edge_rt.cache import admin
from edge_rt.cache.answers import store_path
from edge_rt.cache.store import Store as AnswerStore
from edge_rt.catalog.store import Store
from edge_rt.errors import CacheEntryNotFoundError, DaemonUnreachableError, InvalidRequestError

_TIMEOUT_S = 30.0
_EXPORT_LIMIT = 20_000


class Keeper(Protocol):
    """Who holds the stored answers: a daemon or their file."""

    def cache_stats(self) -> dict[str, Any]: ...

    def cache_entries(self, *, model: str = "", tag: str = "", limit: int = 100) -> list[dict[str, Any]]: ...

    def cache_entry(self, key: str) -> dict[str, Any]: ...

    def cache_correct(self, key: str, text: str) -> dict[str, Any]: ...

    def cache_remove(self, key: str) -> int: ...

    def cache_remove_all(self, *, model: str = "", tag: str = "") -> int: ...

    def cache_clear(self) -> int: ...


class StoreKeeper:
    """The file itself, as Client shows it."""

    def __init__(self, store: AnswerStore) -> None:
        self._store = store

    def cache_stats(self) -> dict[str, Any]:
        return admin.stats(self._store)

    def cache_entries(self, *, model: str = "", tag: str = "", limit: int = 100) -> list[dict[str, Any]]:
        found = admin.entries(self._store, time.time(), model=model, tag=tag, limit=limit)
        return [_plain(entry) for entry in found]

    def cache_entry(self, key: str) -> dict[str, Any]:
        found = admin.find(self._store, key)
        return _plain(admin.detail(self._store, found, self._store.get_now(found), time.time()))

    def cache_correct(self, key: str, text: str) -> dict[str, Any]:
        found = admin.find(self._store, key)
        admin.correct(self._store, found, self._store.get_now(found), text, time.time())
        return self.cache_entry(found.hex())

    def cache_remove(self, key: str) -> int:
        return self._store.remove([admin.find(self._store, key)])

    def cache_remove_all(self, *, model: str = "", tag: str = "") -> int:
        return admin.remove(self._store, model=model, tag=tag)

    def cache_clear(self) -> int:
        return self._store.clear()


@click.group("cache", short_help="Look at stored answers, correct and remove them.")
@click.option("--socket", type=click.Path(path_type=Path), help="The daemon's socket. [default: the configured one]")
@click.pass_context
def command(ctx: click.Context, socket: Path | None) -> None:
    """Look at the answers that are stored to be given again, correct and remove them.

    A running daemon is asked; without one the file is opened. A daemon shows each user the answers to their own
    questions, and all of them to root and to the user it runs as. docs/cache.md tells what is stored, and for how long.
    """
    ctx.obj = (ctx.obj or config.load(), socket)


_Above = tuple[config.Loaded, Path | None]


@command.command("stats", short_help="Show how full the cache is and what it saved.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def stats(above: _Above, as_json: bool) -> None:
    """Show how many entries there are, how often they were given, and what that saved."""
    with _keeper(above) as keeper:
        found = keeper.cache_stats()
    if as_json:
        click.echo(_json(found))
        return
    share = found["size_bytes"] / found["max_bytes"]
    rows = [
        ("entries", found["n_entries"]),
        ("size", f"{found['size_bytes'] / 2**20:.1f} of {found['max_bytes'] / 2**20:.0f} MiB ({share:.0%})"),
        ("hits", found["n_hits"]),
        ("saved", f"{found['saved_s']:.1f} s" + (f", {found['saved_j']:.1f} J" if found["saved_j"] else "")),
        ("evicted", f"{found['n_evicted']} since the start"),
        ("rejected", f"{found['n_rejected']} since the start"),
        ("file", found["path"] or "none: in memory only"),
        *([("problem", found["problem"])] if found["problem"] and found["path"] else []),
    ]
    click.echo(tabulate(rows, tablefmt="plain", disable_numparse=True))


@command.command("show", short_help="List entries, or show one.")
@click.argument("key", required=False)
@click.option("--model", default="", help="Only of this model.")
@click.option("--tag", default="", help="Only with this tag.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, _EXPORT_LIMIT), default=20, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(above: _Above, key: str | None, model: str, tag: str, limit: int, as_json: bool) -> None:
    """List entries, those given most often first; with KEY (its first digits do) show question and answer."""
    with _keeper(above) as keeper:
        if key is not None:
            entry = keeper.cache_entry(key)
            click.echo(_json(entry) if as_json else _detail(entry))
            return
        found = keeper.cache_entries(model=model, tag=tag, limit=limit)
    if as_json:
        click.echo(_json({"entries": found}))
    elif not found:
        click.echo("nothing is stored" + (" that fits" if model or tag else ""))
    else:
        head = ["KEY", "MODEL", "HITS", "AGE", "BYTES", "SAVES", "QUESTION"]
        rows = [
            [
                entry["key"][:12],
                entry["model"] + (f" ({entry['endpoint']})" if entry.get("endpoint") else ""),
                entry["n_hits"],
                _age(entry["age_s"]),
                entry["size_bytes"],
                f"{entry['saved_s']:.2f} s",
                _printable(entry["title"])[:60],
            ]
            for entry in found
        ]
        click.echo(tabulate(rows, head, tablefmt="plain", disable_numparse=True))


@command.command("rm", short_help="Remove entries.")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--model", default="", help="All of this model.")
@click.option("--tag", default="", help="All with this tag.")
@click.pass_obj
def rm(above: _Above, keys: tuple[str, ...], model: str, tag: str) -> None:
    """Remove the entries of KEY..., or all of a model or with a tag."""
    if bool(keys) == bool(model or tag):
        raise click.UsageError("give keys, or --model or --tag")
    with _keeper(above) as keeper:
        if keys:
            n_removed = sum(keeper.cache_remove(key) for key in keys)
        else:
            n_removed = keeper.cache_remove_all(model=model, tag=tag)
    click.echo(f"removed {n_removed}")


@command.command("clear", short_help="Forget everything.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def clear(above: _Above, yes: bool) -> None:
    """Remove all entries; answers that are being computed now are not stored either."""
    if not yes:
        click.confirm("Forget all stored answers?", abort=True)
    with _keeper(above) as keeper:
        click.echo(f"removed {keeper.cache_clear()}")


@command.command("set", short_help="Correct a stored answer.")
@click.argument("key")
@click.option("--file", type=click.File(encoding="utf-8"), default="-", help="The new text. [default: standard input]")
@click.pass_obj
def correct(above: _Above, key: str, file: TextIO) -> None:
    """Give the answer of KEY another text. It then stands until it is removed."""
    try:
        text = file.read(admin.MAX_TEXT_BYTES + 1)
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(param="--file", problem=f"is no UTF-8 text: {exc.reason}") from exc
    with _keeper(above) as keeper:
        entry = keeper.cache_correct(key, text)
    click.echo(f"{entry['key'][:12]} now answers with {len(text)} characters, until it is removed")


@command.command("export", short_help="Write entries as JSON lines.")
@click.option(
    "--file", type=click.File("w", encoding="utf-8"), default="-", help="Where to. [default: standard output]"
)
@click.option("--model", default="", help="Only of this model.")
@click.option("--tag", default="", help="Only with this tag.")
@click.pass_obj
def export(above: _Above, file: TextIO, model: str, tag: str) -> None:
    """Write each entry with question and answer as a line of JSON."""
    with _keeper(above) as keeper:
        for entry in keeper.cache_entries(model=model, tag=tag, limit=_EXPORT_LIMIT):
            with suppress(CacheEntryNotFoundError):  # it has left since
                line = msgspec.json.encode(keeper.cache_entry(entry["key"]))
                file.write(f"{line.decode()}\n")


@contextmanager
def _keeper(above: _Above) -> Iterator[Keeper]:
    """Ask the daemon; where none runs, open the file, if there is one."""
    loaded, socket = above
    with _daemon(socket, socket_path(loaded.config.server, os.environ)) as client:
        if client is not None:
            yield client
            return
    settings = loaded.config.cache
    path = store_path(settings, Store.open(loaded.config.catalog).root)
    if not path.exists():
        click.echo(f"edge_rt cache: nothing has been stored yet: no daemon answers, and there is no {path}", err=True)
        sys.exit(1)
    store = AnswerStore.open(
        path, max_bytes=settings.max_bytes, max_value_bytes=settings.max_answer_bytes, must_persist=True
    )
    try:
        yield StoreKeeper(store)
    finally:
        store.close()


@contextmanager
def _daemon(socket: Path | None, usual: Path) -> Iterator[Client | None]:
    """Reach the daemon; give None where none runs, unless its socket was named."""
    if socket is None and not usual.exists():
        yield None
        return
    with Client(socket or usual, timeout_s=_TIMEOUT_S) as client:
        try:
            client.is_ready()
        except DaemonUnreachableError:
            if socket is not None:
                raise
            yield None
            return
        yield client


def _detail(entry: dict[str, Any]) -> str:
    facts = [
        ("key", entry["key"]),
        ("model", f"{entry['model']} {entry.get('variant', '')}".strip()),
        ("answered by", f"cloud endpoint {entry['endpoint']}" if entry.get("endpoint") else "this device"),
        ("asked by", entry.get("tenant", "")),
        ("tags", ", ".join(entry.get("tags", ()))),
        ("age", _age(entry["age_s"])),
        ("stands for", "as long as it is not removed" if entry["ttl_s"] is None else _age(entry["ttl_s"])),
        ("hits", f"{entry['n_hits']}, each saves {entry['saved_s']:.2f} s"),
        ("tokens", f"{entry.get('prompt_tokens', 0)} asked, {entry.get('completion_tokens', 0)} answered"),
        ("corrected", "yes" if entry.get("is_corrected") else ""),
    ]
    head = tabulate([fact for fact in facts if fact[1]], tablefmt="plain", disable_numparse=True)
    if entry["kind"] != "answer":
        return f"{head}\n\n{_printable(entry['title'])}"
    return f"{head}\n\nquestion\n{_printable(entry.get('question', ''))}\n\nanswer\n{_printable(entry.get('text', ''))}"


def _printable(text: str) -> str:
    """Leave out what would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "in the future"
    for size_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _plain(entry: admin.Entry) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(entry)
    return plain


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
