from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edge_rt.api import listen
from edge_rt.config import Server
from edge_rt.errors import ConfigError


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


@pytest.mark.parametrize(
    ("server", "environ", "uid", "path"),
    [
        (Server(socket_path="/x/s"), {"RUNTIME_DIRECTORY": "/run/y"}, 0, "/x/s"),
        (Server(), {"RUNTIME_DIRECTORY": "/run/y:/run/z"}, 1000, "/run/y/edge_rt.sock"),
        (Server(), {}, 0, "/run/edge_rt/edge_rt.sock"),
        (Server(), {"XDG_RUNTIME_DIR": "/run/user/1000"}, 1000, "/run/user/1000/edge_rt/edge_rt.sock"),
    ],
)
def test_where_the_socket_is(server: Server, environ: dict[str, str], uid: int, path: str) -> None:
    assert listen.socket_path(server, environ, uid=uid) == Path(path)


def test_a_user_without_a_runtime_directory_must_name_a_path() -> None:
    with pytest.raises(ConfigError, match=r"server\.socket_path"):
        listen.socket_path(Server(), {}, uid=1000)


@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
def test_mode_whatever_the_umask(socket_dir: Path, mode: int) -> None:
    path = socket_dir / "made" / "s"
    before = os.umask(0o077)
    try:
        with listen.bind_unix(path, mode=mode):
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert connects(path)
    finally:
        os.umask(before)


@pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another group takes root")
def test_group(socket_dir: Path) -> None:
    group = next(entry for entry in grp.getgrall() if entry.gr_gid != os.getgid())
    with listen.bind_unix(socket_dir / "s", mode=0o660, group=group.gr_name):
        assert (socket_dir / "s").stat().st_gid == group.gr_gid


def test_an_unknown_group_is_refused(socket_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.socket_group: no such group"):
        listen.bind_unix(socket_dir / "s", mode=0o660, group="no-such-group-here")
    assert not (socket_dir / "s").exists()


def test_a_stale_socket_is_replaced(socket_dir: Path) -> None:
    path = socket_dir / "s"
    listen.bind_unix(path, mode=0o660).close()
    assert path.exists()
    assert not connects(path)
    with listen.bind_unix(path, mode=0o660):
        assert connects(path)


def test_a_live_socket_is_left_alone_and_its_owner_named(socket_dir: Path) -> None:
    path = socket_dir / "s"
    with listen.bind_unix(path, mode=0o660):
        with pytest.raises(ConfigError, match=rf"served by process {os.getpid()} already"):
            listen.bind_unix(path, mode=0o660)
        assert connects(path)


def test_a_file_that_is_no_socket_is_left_alone(socket_dir: Path) -> None:
    path = socket_dir / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        listen.bind_unix(path, mode=0o660)
    assert path.read_text() == "precious"


def test_a_link_to_a_socket_is_not_followed(socket_dir: Path) -> None:
    path = socket_dir / "s"
    path.symlink_to(socket_dir / "elsewhere")
    with pytest.raises(ConfigError, match="is not a socket"):
        listen.bind_unix(path, mode=0o660)


def test_a_path_of_107_bytes_is_the_longest(socket_dir: Path) -> None:
    longest = socket_dir / ("x" * (106 - len(os.fsencode(socket_dir))))
    assert len(os.fsencode(longest)) == 107
    listen.bind_unix(longest, mode=0o660).close()
    with pytest.raises(ConfigError, match=r"108 bytes long.* may have 107"):
        listen.bind_unix(longest.with_name(longest.name + "x"), mode=0o660)


def test_bytes_are_counted_not_characters(socket_dir: Path) -> None:
    with pytest.raises(ConfigError, match="bytes long"):
        listen.bind_unix(socket_dir / ("ü" * 50), mode=0o660)


def test_a_directory_that_cannot_be_made(socket_dir: Path) -> None:
    (socket_dir / "file").touch()
    with pytest.raises(ConfigError, match="cannot be bound"):
        listen.bind_unix(socket_dir / "file" / "s", mode=0o660)


def test_only_our_own_socket_file_is_removed(socket_dir: Path) -> None:
    path = socket_dir / "s"
    listen.bind_unix(path, mode=0o660).close()
    ours = listen.inode(path)
    path.rename(socket_dir / "kept")  # keeps the inode from being given out again
    listen.bind_unix(path, mode=0o660).close()
    listen.remove(path, ours)
    assert path.exists()
    listen.remove(path, listen.inode(path))
    assert not path.exists()
    listen.remove(path, ours)


CHILD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), sys.argv[2]
from edge_rt.api import listen
from edge_rt.errors import ConfigError
try:
    for sock in listen.inherited(os.environ):
        print(sock.family.name, sock.getsockname(), sock.get_inheritable())
except ConfigError as exc:
    print(exc)
"""


def take_over(sock: socket.socket, n_fds: str = "1") -> str:
    fd = sock.fileno()
    command = [sys.executable, "-c", CHILD, str(fd), n_fds]
    return subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, check=True, timeout=30).stdout


def test_a_socket_from_systemd_is_taken_over(socket_dir: Path) -> None:
    with listen.bind_unix(socket_dir / "s", mode=0o660) as sock:
        assert take_over(sock) == f"AF_UNIX {socket_dir}/s False\n"


def test_descriptors_that_cannot_be_served_are_refused(socket_dir: Path) -> None:
    with listen.bind_unix(socket_dir / "s", mode=0o660) as sock:
        assert "must be a count" in take_over(sock, "many")
    left, right = socket.socketpair()
    with left, right:
        assert "does not listen" in take_over(left)


def test_sockets_meant_for_another_process_are_not_taken() -> None:
    assert listen.inherited({}) == []
    assert listen.inherited({"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1"}) == []


def test_tcp() -> None:
    with listen.bind_tcp("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        assert (host, port > 0) == ("127.0.0.1", True)
        with pytest.raises(ConfigError, match=r"server\.tcp_port: cannot bind"):
            listen.bind_tcp("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"server\.tcp_host"):
        listen.bind_tcp("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"server\.tcp_host"):
        listen.bind_tcp("no such host", 0)
