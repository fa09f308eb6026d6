"""The sockets the daemon listens on: its own Unix socket, one inherited from systemd, TCP where configured."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from edge_rt.api.callers import Peer
from edge_rt.config import Server
from edge_rt.errors import ConfigError

_MAX_PATH_BYTES: Final = 107  # sockaddr_un.sun_path less its closing zero
_BACKLOG: Final = 128
_FIRST_INHERITED_FD: Final = 3
_KEY: Final = "server.socket_path"


def socket_path(server: Server, environ: Mapping[str, str], *, uid: int | None = None) -> Path:
    """Choose the socket's path. Raises ConfigError where neither the configuration nor the environment gives one."""
    if server.socket_path:
        return Path(server.socket_path)
    if directory := environ.get("RUNTIME_DIRECTORY"):
        return Path(directory.split(":")[0]) / "edge_rt.sock"
    if (os.getuid() if uid is None else uid) == 0:
        return Path("/run/edge_rt/edge_rt.sock")
    if directory := environ.get("XDG_RUNTIME_DIR"):
        return Path(directory) / "edge_rt" / "edge_rt.sock"
    raise ConfigError(
        key=_KEY,
        problem="is not set, and there is no XDG_RUNTIME_DIR to put the socket in; name a path, also with --socket",
        origin="default",
    )


def bind_unix(
    path: Path, *, mode: int, group: str = "", key: str = _KEY, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """Bind and listen with the file's mode and group set before anyone can connect.

    A stale socket, one that refuses connections, is replaced; a live one, a file of another kind and a path that is too
    long raise ConfigError.
    """
    _check_length(path, key)
    gid = _gid(group)
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _only_one(path):
            _clear(path, key, kind)
            sock.bind(os.fspath(path))
            # Nobody can connect before listen, so the mode the umask gave is never used.
            path.chmod(mode)
            if gid != -1:
                os.chown(path, -1, gid)
            sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise _unusable(path, f"cannot be bound: {exc.strerror}", key) from exc
    except ConfigError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def bound_by_another(path: Path, *, mode: int, group: str, key: str) -> Iterator[Path]:
    """Give a path for a library that binds and listens by itself; the socket it made there is moved to path after it.

    Until its mode and group are set it stands in a directory that only this user may enter. Raises as bind_unix does.
    """
    _check_length(path, key)
    gid = _gid(group)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _only_one(path):
            _clear(path, key)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as private:
                made = Path(private) / "s"
                _check_length(made, key)
                yield made
                made.chmod(mode)
                if gid != -1:
                    os.chown(made, -1, gid)
                made.rename(path)
    except OSError as exc:
        raise _unusable(path, f"cannot be bound: {exc.strerror}", key) from exc


def _check_length(path: Path, key: str) -> None:
    if (size_bytes := len(os.fsencode(path))) > _MAX_PATH_BYTES:
        raise _unusable(path, f"is {size_bytes} bytes long, a Unix socket's path may have {_MAX_PATH_BYTES}", key)


def _gid(group: str) -> int:
    """Give a group's id, -1 for none."""
    if not group:
        return -1
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as exc:
        raise ConfigError(key="server.socket_group", problem="no such group", origin=group) from exc


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Let one daemon bind at a time: between bind and listen a socket looks as stale as a dead one's."""
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _clear(path: Path, key: str, sock_type: socket.SocketKind = socket.SOCK_STREAM) -> None:
    """Remove a stale socket."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise _unusable(path, "exists and is not a socket", key)
    with socket.socket(socket.AF_UNIX, sock_type) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError as exc:  # a full backlog, or no right to connect: somebody is there
            raise _unusable(path, f"is in use: {exc.strerror or exc}", key) from exc
        owner = f" by process {peer.pid}" if (peer := Peer.of(probe)) and peer.pid else ""
        raise _unusable(path, f"is served{owner} already; stop that daemon or set another path", key)


def remove(path: Path, sock_inode: tuple[int, int]) -> None:
    """Remove our socket's file; one that another daemon has put in its place stays."""
    with contextlib.suppress(OSError):
        if inode(path) == sock_inode:
            path.unlink()


def inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def inherited(environ: Mapping[str, str], *, pid: int | None = None) -> list[socket.socket]:
    """Take over the sockets systemd passed (LISTEN_PID, LISTEN_FDS); [] without socket activation."""
    if environ.get("LISTEN_PID") != str(os.getpid() if pid is None else pid):
        return []
    count = environ.get("LISTEN_FDS", "")
    if not count.isdecimal():
        raise ConfigError(key="LISTEN_FDS", problem=f"must be a count, got {count!r}", origin="environment")
    sockets = []
    for fd in range(_FIRST_INHERITED_FD, _FIRST_INHERITED_FD + int(count)):
        try:
            sock = socket.socket(fileno=fd)
        except OSError as exc:
            raise ConfigError(
                key="LISTEN_FDS", problem=f"descriptor {fd} is not a socket: {exc.strerror}", origin="environment"
            ) from exc
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(key="LISTEN_FDS", problem=f"descriptor {fd} does not listen", origin="environment")
        os.set_inheritable(fd, False)
        sockets.append(sock)
    return sockets


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind and listen on TCP. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(key="server.tcp_host", problem=str(exc), origin=host) from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        key = "server.tcp_port" if exc.errno in (errno.EADDRINUSE, errno.EACCES) else "server.tcp_host"
        raise ConfigError(key=key, problem=f"cannot bind: {exc.strerror}", origin=f"{host}:{port}") from exc
    return sock


def _unusable(path: Path, problem: str, key: str) -> ConfigError:
    return ConfigError(key=key, problem=problem, origin=str(path))
