"""What answers took, from a meter on a serial port to every API: a real daemon, a pseudo terminal that says watts."""

from __future__ import annotations

import json
import os
import pty
import tempfile
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.api.client import Client
from edge_rt.types import Message
from tests import patience
from tests.api.daemon import Daemon

WATTS = 4.0


@contextmanager
def meter() -> Iterator[str]:
    """Say watts on a port, 50 times a second."""
    device, port = pty.openpty()
    tty.setraw(port)
    name, done = os.ttyname(port), threading.Event()

    def say() -> None:
        while not done.wait(0.02):
            os.write(device, b"P=%.1f\n" % WATTS)

    speaker = threading.Thread(target=say)
    speaker.start()
    try:
        yield name
    finally:
        done.set()
        os.close(port)
        speaker.join()
        os.close(device)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as directory,
        meter() as port,
        Daemon(Path(directory), extra=f'\n[power]\nmeter = "serial:{port}:lines"\n') as running,
    ):
        yield running


def checked(energy: dict[str, Any]) -> dict[str, Any]:
    assert (energy["boundary"], energy["quality"]) in {("board", "measured"), ("board", "derived")}
    assert energy["source"].startswith("lines /dev/")
    assert energy["total_j"] > 0
    assert 0.5 <= energy["coverage"] <= 1
    return energy


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "null-slow", "messages": [{"role": "user", "content": text}], "temperature": 0, **options}


def test_a_whole_answer(daemon: Daemon) -> None:
    with daemon.client() as http:
        answer = http.post("/v1/chat/completions", json=chat("abcdefghij" * 4)).json()
    energy, timings = checked(answer["usage"]["energy"]), answer["timings"]
    spent_s = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
    assert energy["total_j"] == pytest.approx(WATTS * spent_s, rel=0.25)
    assert energy["decode_j_per_token"] == pytest.approx(WATTS * timings["predicted_per_token_ms"] / 1e3, rel=0.25)
    assert energy["prefill_j_per_token"] > 0


def test_a_stream_with_usage_and_one_without(daemon: Daemon) -> None:
    with daemon.client() as http:
        events = {}
        for wanted in (True, False):
            body = chat(f"stream {wanted}", stream=True, stream_options={"include_usage": wanted})
            lines = http.post("/v1/chat/completions", json=body).text.splitlines()
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
            events[wanted] = [json.loads(one) for one in data]
    checked(events[True][-1]["usage"]["energy"])
    assert all("energy" not in json.dumps(event) for event in events[False])


def test_a_stored_answer_took_nothing_and_saves_joules(daemon: Daemon) -> None:
    with daemon.client() as http:
        first = http.post("/v1/chat/completions", json=chat("the same again")).json()
        before = daemon.metric("edge_rt_cache_saved_joules_total")
        stored = {"cache-control": "only-if-cached"}
        reply = http.post("/v1/chat/completions", json=chat("the same again"), headers=stored)
    assert reply.headers["x-edge-cache"] == "hit-exact"
    assert "energy" not in reply.json()["usage"]
    saved_j = daemon.metric("edge_rt_cache_saved_joules_total") - before
    energy = first["usage"]["energy"]
    assert saved_j == pytest.approx(energy.get("above_idle_j", energy["total_j"]), rel=1e-3)


def test_tensors_tell_it_in_their_parameters(daemon: Daemon) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    with daemon.client() as http:
        http.post("/v2/models/null/infer", json=body)  # loads
        parameters = http.post("/v2/models/null/infer", json=body).json()["parameters"]
    checked({name.removeprefix("energy_"): value for name, value in parameters.items()})


def test_tensors_tell_it_over_grpc() -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    with tempfile.TemporaryDirectory(prefix="ert-") as directory, meter() as port:
        socket = Path(directory) / "g"
        extra = f'\n[power]\nmeter = "serial:{port}:lines"\n[server]\ngrpc_socket_path = "{socket}"\n'
        with Daemon(Path(directory), extra=extra), grpc.InferenceServerClient(f"unix:{socket}") as client:
            wanted = grpc.InferInput("x", [1, 4], "FP32")
            wanted.set_data_from_numpy(np.ones((1, 4), np.float32))
            client.infer("null", [wanted])
            found = client.infer("null", [wanted]).get_response().parameters
    assert found["energy_total_j"].double_param > 0
    assert found["energy_boundary"].string_param == "board"


def test_the_python_client_and_metrics_tell_it(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        last = list(client.chat([Message(role="user", content="for the client")], model="null-slow"))[-1]
    assert last.usage is not None
    assert last.usage.energy is not None
    assert last.usage.energy.total_j > 0
    for phase in ("prefill", "decode"):
        assert daemon.metric(f'edge_rt_energy_joules_total{{model="null-slow",phase="{phase}"}}') > 0
    # Where the machine is so busy that the meter was not heard for a while, it is absent.
    assert patience.until(lambda: daemon.metric("edge_rt_power_watts{")) == pytest.approx(WATTS)
    assert 0 < daemon.metric("edge_rt_power_coverage{") <= 1


def test_answers_at_the_same_time_share_what_is_drawn(daemon: Daemon) -> None:
    texts = [letter * 30 for letter in "abcd"]
    answers: list[dict[str, Any]] = []

    def ask(text: str) -> None:
        with daemon.client() as http:
            answers.append(http.post("/v1/chat/completions", json=chat(text, temperature=0.5)).json())

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans_s = [(a["timings"]["prompt_ms"] + a["timings"]["predicted_ms"]) / 1e3 for a in answers]
    total_j = sum(checked(a["usage"]["energy"])["total_j"] for a in answers)
    assert total_j < 0.6 * WATTS * sum(spans_s)  # each for itself would be all of it


def test_a_daemon_without_a_meter_says_so_and_nothing_of_energy() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="ert-") as directory,
        Daemon(Path(directory), extra='\n[power]\nmeter = "none"\n') as running,
        running.client() as http,
    ):
        answer = http.post("/v1/chat/completions", json=chat("no meter")).json()
        assert "energy" not in answer["usage"]
        assert "edge_rt_power_watts{" not in http.get("/metrics").text
        assert "answers do not tell what they took: power.meter is none" in running.log


def test_an_answer_that_nobody_waits_for_any_more_counts_as_aborted(daemon: Daemon) -> None:
    aborted = 'edge_rt_energy_joules_total{model="null-slow",phase="aborted"}'
    assert daemon.metric(aborted) == 0.0
    body = {"model": "null-slow", "messages": [{"role": "user", "content": "x" * 3000}], "stream": True}
    with daemon.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(40):  # a token takes 0.02 s, an event 0.05 s at least
            next(lines)
    joules = patience.until(lambda: daemon.metric(aborted))
    assert 0.0 < joules < WATTS * patience.PATIENCE_S
