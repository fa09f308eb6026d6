"""A real daemon tells a real powerd what it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import pytest

from tests import patience
from tests.api.daemon import Daemon
from tests.unit.power.process import Process, started
from tests.unit.power.tree import machine

CHAT = "/v1/chat/completions"
BODY = {
    "model": "null-slow",
    "messages": [{"role": "user", "content": "word " * 50}],
    "max_tokens": 50,
    "temperature": 0,
}
EXTRA = """
[cache]
enabled = false

[power]
socket_path = "{path}"
"""


def seen(powerd: Process, work: str | None) -> dict[str, Any]:
    """Wait until powerd takes the daemon to be at work."""
    found: dict[str, Any] = {}

    def look() -> bool:
        found.update(powerd.status())
        return bool(found["work"] == work)

    patience.until(look, told=lambda: found)
    return found


class Asking(threading.Thread):
    """Ask the same again and again, so that there is work for as long as it takes powerd to see it."""

    def __init__(self, client: httpx2.Client, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._client, self._path, self._body = client, path, body
        self._enough = threading.Event()
        self.statuses: set[int] = set()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                self.statuses.add(self._client.post(self._path, json=self._body).status_code)
        except httpx2.HTTPError as exc:
            self.error = exc

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._enough.set()
        self.join()


@contextmanager
def both(directory: Path) -> Iterator[tuple[Process, Daemon, httpx2.Client]]:
    machine(directory)
    (directory / "d").mkdir()
    with started(directory) as powerd:
        powerd.heard("READY=1")
        extra = EXTRA.format(path=powerd.socket)
        with Daemon(directory / "d", extra=extra) as daemon, daemon.client() as client:
            yield powerd, daemon, client


@pytest.mark.parametrize("stream", [True, False])
def test_powerd_sees_the_daemons_work_in_whatever_form_it_answers(socket_dir: Path, stream: bool) -> None:
    with both(socket_dir) as (powerd, _, client):
        with Asking(client, CHAT, BODY | {"stream": stream}) as asking:
            found = seen(powerd, "decode")
            assert (found["n_running"], found["n_waiting"], found["state"]) == (1, 0, "acting")
        assert (asking.statuses, asking.error) == ({200}, None)
        assert seen(powerd, "idle")["n_running"] == 0


def test_nothing_waits_for_a_powerd_that_is_gone(socket_dir: Path) -> None:
    with both(socket_dir) as (powerd, _, client):
        assert client.post(CHAT, json=BODY).status_code == 200
        powerd.end(signal.SIGKILL)
        assert client.post(CHAT, json=BODY).status_code == 200


def test_a_daemon_that_is_gone_has_no_work(socket_dir: Path) -> None:
    with both(socket_dir) as (powerd, daemon, client), Asking(client, CHAT, BODY) as asking:
        seen(powerd, "decode")
        daemon.process.kill()
        asking.join()
        seen(powerd, None)
    assert isinstance(asking.error, httpx2.HTTPError)


def test_tensor_requests_are_work_too(socket_dir: Path) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]}
    with both(socket_dir) as (powerd, _, client):
        with Asking(client, "/v2/models/null/infer", body) as asking:
            assert seen(powerd, "prefill")["n_running"] == 1
        assert (asking.statuses, asking.error) == ({200}, None)
        seen(powerd, "idle")
