from __future__ import annotations

from pathlib import Path

from edge_rt.cli.talk import daemon_path
from edge_rt.config import Server


def test_a_user_without_a_runtime_directory_has_no_daemon_to_ask() -> None:
    assert daemon_path(Server(), {}, uid=1000) is None


def test_a_daemon_is_looked_for_where_it_would_listen() -> None:
    assert daemon_path(Server(socket_path="/a.sock"), {}, uid=1000) == Path("/a.sock")
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    assert daemon_path(Server(), environ, uid=1000) == Path("/run/user/1000/edge_rt/edge_rt.sock")
