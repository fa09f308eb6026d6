"""A real daemon tells a real powerd what it does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.daemon import Daemon
from tests.unit.power.process import PATIENCE_S, Process, started
from tests.unit.power.tree import machine

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
    until_s = time.monotonic() + PATIENCE_S
    while (found := powerd.status())["work"] != work:
        assert time.monotonic() < until_s, found
    return found


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
    with both(socket_dir) as (powerd, _, client), ThreadPoolExecutor() as others:
        answer = others.submit(client.post, "/v1/chat/completions", json=BODY | {"stream": stream})
        found = seen(powerd, "decode")
        assert (found["n_running"], found["n_waiting"], found["state"]) == (1, 0, "acting")
        assert answer.result().status_code == 200
        assert seen(powerd, "idle")["n_running"] == 0


def test_nothing_waits_for_a_powerd_that_is_gone(socket_dir: Path) -> None:
    with both(socket_dir) as (powerd, _, client):
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        powerd.end(signal.SIGKILL)
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_a_daemon_that_is_gone_has_no_work(socket_dir: Path) -> None:
    with both(socket_dir) as (powerd, daemon, client), ThreadPoolExecutor() as others:
        answer = others.submit(client.post, "/v1/chat/completions", json=BODY)
        seen(powerd, "decode")
        daemon.process.kill()
        seen(powerd, None)
        assert isinstance(answer.exception(), httpx2.HTTPError)


def test_tensor_requests_are_work_too(socket_dir: Path) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]}
    with both(socket_dir) as (powerd, _, client), ThreadPoolExecutor() as others:

        def ask_often() -> set[int]:
            return {client.post("/v2/models/null/infer", json=body).status_code for _ in range(400)}

        answers = others.submit(ask_often)
        assert seen(powerd, "prefill")["n_running"] == 1
        assert answers.result() == {200}
        seen(powerd, "idle")
