"""A real daemon tells a real powerd what it does."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import httpx2
import pytest

from edge_rt.power.calibration import CalibratedDomain, Calibration, Phase, Point, ThreadPoint, write
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

    patience.until(look, told=lambda: found, every_s=patience.POWERD_S)
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


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, httpx2.Client]]:
    """Both, for tests that leave them as they were."""
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as directory,
        both(Path(directory)) as (powerd, _, client),
    ):
        yield powerd, client


@pytest.mark.parametrize("stream", [True, False])
def test_powerd_sees_the_daemons_work_in_whatever_form_it_answers(
    pair: tuple[Process, httpx2.Client], stream: bool
) -> None:
    powerd, client = pair
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


def test_tensor_requests_are_work_too(pair: tuple[Process, httpx2.Client]) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}]}
    powerd, client = pair
    with Asking(client, "/v2/models/null/infer", body) as asking:
        assert seen(powerd, "prefill")["n_running"] == 1
    assert (asking.statuses, asking.error) == ({200}, None)
    seen(powerd, "idle")


def test_powerd_hears_of_a_kept_prompt_as_no_work(socket_dir: Path) -> None:
    """The second time only the last token of the prompt is computed, and the answers are the same."""
    with both(socket_dir) as (_, _, client):
        first, second = (client.post(CHAT, json=BODY).json() for _ in range(2))
        assert first["choices"] == second["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        with client.stream("POST", CHAT, json=BODY | {"stream": True}) as streamed:
            events = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == first["choices"][0]["message"]["content"]
    assert all(delta or event is events[-1] for delta, event in zip(deltas, events, strict=True))


# -- advice ----------------------------------------------------------------------------------------------------------


def _calibrated(file: Path) -> None:
    """Write a board whose decoding takes the fewest joules on one of its two threads."""
    phases: tuple[Phase, ...] = get_args(Phase)
    points = tuple(
        ThreadPoint(phase=phase, max_hz=2.4e9, n_threads=n, n_streams=1, s_per_token=seconds, power_w=3.0 + n)
        for phase in phases
        for n, seconds in ((1, 0.02), (2, 0.01 if phase == "prefill" else 0.019))
    )
    point = Point(max_hz=2.4e9, prefill_s_per_token=0.01, decode_s_per_token=0.019, prefill_w=5.0, decode_w=5.0)
    domain = CalibratedDomain(name="policy0", points=(point,))
    write(
        file,
        Calibration(
            board="a board",
            made_at="2026-11-30T08:00:00Z",
            boundary="board",
            quality="measured",
            idle_w=2.0,
            domains=(domain,),
            threads=points,
        ),
    )


@contextmanager
def advised(directory: Path, **power: Any) -> Iterator[tuple[Process, httpx2.Client]]:
    machine(directory)
    (directory / "d").mkdir()
    _calibrated(directory / "power.json")
    with started(directory, model_file=str(directory / "power.json"), **power) as powerd:
        powerd.heard("READY=1")
        extra = EXTRA.format(path=powerd.socket) + "\n[engine]\nn_threads = 2\nn_parallel = 3\n"
        with Daemon(directory / "d", extra=extra) as daemon, daemon.client() as client:
            yield powerd, client


def shown(client: httpx2.Client, name: str) -> dict[str, float]:
    """Give a metric's values by its labels."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        metric, _, rest = line.partition("{")
        if metric == name:
            labels, _, value = rest.partition("}")
            found[labels] = float(value)
    return found


def test_the_daemon_works_by_powerds_advice_and_no_answer_is_lost_or_another(socket_dir: Path) -> None:
    with advised(socket_dir) as (powerd, client):
        plain = client.post(CHAT, json=BODY).json()["choices"]
        with Asking(client, CHAT, BODY) as asking:
            patience.until(
                lambda: (
                    shown(client, "edge_rt_power_advised_threads").get('phase="decode",state="applied"') == 1
                    and shown(client, "edge_rt_threads").get('model="null-slow"') == 1
                ),
                told=lambda: client.get("/metrics").text,
            )
            assert shown(client, "edge_rt_power_advised_batch") == {'state="applied"': 3.0}
            status = powerd.status()
            assert (status["advice"]["n_decode_threads"], status["takes_advice"]) == (1, True)
            powerd.end(signal.SIGKILL)  # and the advice has ended with it
            patience.until(
                lambda: (
                    not shown(client, "edge_rt_power_advised_threads")
                    and shown(client, "edge_rt_threads").get('model="null-slow"') == 2
                ),
                told=lambda: client.get("/metrics").text,
            )
        assert (asking.statuses, asking.error) == ({200}, None)
        assert client.post(CHAT, json=BODY).json()["choices"] == plain


def test_advice_of_a_dry_run_is_shown_and_not_applied(socket_dir: Path) -> None:
    with advised(socket_dir, enabled=False) as (powerd, client), Asking(client, CHAT, BODY):
        patience.until(
            lambda: 'phase="decode",state="shown"' in shown(client, "edge_rt_power_advised_threads"),
            told=lambda: client.get("/metrics").text,
        )
        assert powerd.status()["advice"]["n_decode_threads"] == 1
        patience.until(lambda: bool(shown(client, "edge_rt_threads")), told=lambda: client.get("/metrics").text)
        assert shown(client, "edge_rt_threads") == {'model="null-slow"': 2.0}
