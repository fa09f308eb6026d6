from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edge_rt import config, daemon
from edge_rt.errors import ConfigError


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify_sends_one_datagram(socket_dir: Path, is_abstract: bool) -> None:
    name = f"edge_rt-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}" if is_abstract else str(socket_dir / "n"))
        receiver.settimeout(10)
        daemon.notify("READY=1", {"NOTIFY_SOCKET": f"@{name}" if is_abstract else str(socket_dir / "n")})
        assert receiver.recv(100) == b"READY=1"


def test_notify_without_systemd_does_nothing(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon.notify("READY=1", {})
    assert caplog.text == ""
    daemon.notify("READY=1", {"NOTIFY_SOCKET": str(socket_dir / "nobody")})
    assert "cannot notify" in caplog.text


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
