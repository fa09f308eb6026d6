from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edge_rt import config, daemon
from edge_rt.errors import ConfigError


def test_tcp_without_keys_is_refused_before_anything_starts(socket_dir: Path) -> None:
    path = socket_dir / "s"
    loaded = config.load(environ={}, flags={"server.tcp_host": "127.0.0.1", "server.socket_path": str(path)})
    with pytest.raises(ConfigError, match=r"server\.api_keys_file: is required with server\.tcp_host"):
        daemon.run(loaded, environ={})
    assert not path.exists()


def test_a_tcp_port_in_use_leaves_no_socket_behind(socket_dir: Path) -> None:
    path, keys = socket_dir / "s", socket_dir / "keys"
    keys.write_text("key\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = {
            "server.tcp_host": "127.0.0.1",
            "server.tcp_port": taken.getsockname()[1],
            "server.api_keys_file": str(keys),
            "server.socket_path": str(path),
        }
        with pytest.raises(ConfigError, match=r"server\.tcp_port: cannot bind"):
            daemon.run(config.load(environ={}, flags=flags), environ={})
    assert not path.exists()


def test_a_start_that_fails_ends_the_daemon_with_its_error(socket_dir: Path) -> None:
    def broken(_: daemon.Listening) -> None:
        raise BrokenPipeError("nobody reads")

    flags = {"server.socket_path": str(socket_dir / "s"), "catalog.store_dir": str(socket_dir)}
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        daemon.run(config.load(environ={}, flags=flags), environ={}, ready=broken)
    assert not (socket_dir / "s").exists()
