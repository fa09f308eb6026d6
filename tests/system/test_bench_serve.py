"""`edge_rt bench serve`, `top` and `doctor` against the daemon they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.api.daemon import Daemon


def _edge_rt(socket: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"EDGE_RT__SERVER__SOCKET_PATH": str(socket)}
    command = [sys.executable, "-m", "edge_rt", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_every_stream_is_answered_whole(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        options = ["-m", "null-slow", "-N", "1,3", "--requests", "3", "-p", "12", "-n", "5", "-o", "jsonl"]
        done = _edge_rt(daemon.socket, "bench", "serve", *options)
    assert done.returncode == 0, done.stderr
    for record, n_streams in zip(map(json.loads, done.stdout.splitlines()), (1, 3), strict=True):
        assert record["n_streams"] == n_streams
        assert (record["n_done"], record["errors"]) == (3, {})
        assert (record["prompt_tokens"], record["completion_tokens"]) == (36, 15)
        assert 0 < record["ttft_p50_s"] <= record["latency_p50_s"]


def test_a_refused_request_is_counted_and_makes_the_exit_code_1(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        done = _edge_rt(daemon.socket, "bench", "serve", "-m", "null", "-N", "1", "--requests", "2", "-p", "5000")
    assert done.returncode == 1
    assert "error context_length_exceeded: 2" in done.stdout


def test_an_unknown_model_is_the_daemons_own_message(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        done = _edge_rt(daemon.socket, "bench", "serve", "-m", "nope")
    assert done.returncode == 1
    assert done.stderr.startswith("edge_rt: model 'nope' is not in the catalog")


def test_top_shows_what_the_daemon_has_done(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        _edge_rt(
            daemon.socket, "bench", "serve", "-m", "null-slow", "-N", "1", "--requests", "2", "-p", "12", "-n", "5"
        )
        done = _edge_rt(daemon.socket, "top", "--once", "--interval", "0.2", "--json")
        shown = _edge_rt(daemon.socket, "top", "--once", "--interval", "0.2").stdout
    view = json.loads(done.stdout)
    (model,) = [m for m in view["models"] if m["model"] == "null-slow"]
    assert (model["loaded"], model["running"], model["waiting"], model["restarts"]) == (True, 0, 0, 0)
    assert model["ttft_p50_s"] > 0
    assert model["threads"] >= 1
    assert model["kv_cells"] > 0
    assert model["rss_bytes"] > 2**20
    assert view["rss_bytes"] > 2**20
    assert "null-slow  loaded" in shown


def test_top_without_a_daemon_says_so(socket_dir: Path) -> None:
    done = _edge_rt(socket_dir / "s", "top")
    assert done.returncode == 1
    assert done.stderr.startswith(f"edge_rt: no daemon answers on {socket_dir / 's'}")


def test_the_doctor_finds_the_daemon(socket_dir: Path) -> None:
    with Daemon(socket_dir) as daemon:
        done = _edge_rt(daemon.socket, "doctor", "--json")
    found = {check["name"]: check["status"] for check in json.loads(done.stdout)}
    assert (found["daemon"], found["socket"]) == ("ok", "ok")
