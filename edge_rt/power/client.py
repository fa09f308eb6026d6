"""powerd as its clients see it: hints that cost next to nothing, questions with an answer. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from edge_rt.errors import DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.power.state import Hint
from edge_rt.power.wire import MAX_BYTES, BadMessageError, encode, encode_hint, parse

DEFAULT_PATH: Final = "/run/edge_rt/power.sock"
_FIRST_PAUSE_S: Final = 0.5  # after a connection failed or was lost, doubled by each further one …
_LAST_PAUSE_S: Final = 30.0  # … up to this
_STEADY_S: Final = 10.0  # a connection that held so long was a good one
_REMEDY: Final = "start edge_rt-powerd.service, or `python -m edge_rt.power.powerd`"


class HintSender:
    """Sends hints and never waits: what powerd does not take at once is dropped, for the next hint says it anew.

    Belongs to one thread. Without a powerd a send costs a look at the clock, and now and then a failed connect.

    problem  why the last hint was not sent, "" if it was
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.problem = ""
        self.n_dropped = 0
        self._path, self._clock = path, clock
        self._sock: socket.socket | None = None
        self._connected_s = 0.0
        self._retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def send(self, hint: Hint) -> bool:
        """Send one hint, connecting first if it is time; False if it was dropped."""
        if self._sock is None and not self._connect():
            self.n_dropped += 1
            return False
        assert self._sock is not None
        try:
            self._sock.send(encode_hint(hint), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.problem = "powerd does not keep up"
            self.n_dropped += 1
            return False
        except OSError as exc:
            self._lost(_last_words(self._sock) or exc.strerror or str(exc))
            self.n_dropped += 1
            return False
        self.problem = ""
        return True

    def close(self) -> None:
        """Hang up; powerd then knows of no work."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _connect(self) -> bool:
        now_s = self._clock()
        if now_s < self._retry_s:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
        except OSError as exc:
            sock.close()
            self._connected_s = now_s
            self._lost(f"{self._path}: {exc.strerror or exc}")
            return False
        self._sock, self._connected_s = sock, now_s
        return True

    def _lost(self, problem: str) -> None:
        now_s = self._clock()
        self.close()
        if now_s - self._connected_s >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        self.problem = problem
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def ask(path: str, kind: str, *, timeout_s: float = 2.0, **values: Any) -> Mapping[str, Any]:
    """Send "status" or "cap" and wait for the answer.

    Raises DaemonUnreachableError, DaemonLostError, and InvalidRequestError for what powerd refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(path)
        except OSError as exc:
            remedy = "join its group, or ask as root" if exc.errno in (errno.EACCES, errno.EPERM) else _REMEDY
            raise DaemonUnreachableError(address=path, reason=exc.strerror or str(exc), remedy=remedy) from exc
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have said already why it does not listen
                sock.send(encode(kind, **values), socket.MSG_NOSIGNAL)
            raw = sock.recv(MAX_BYTES + 1)
            answer = parse(raw) if raw else {}
        except (OSError, BadMessageError) as exc:
            raise DaemonLostError(address=path, reason=f"{exc}") from exc
    if not answer:
        raise DaemonLostError(address=path, reason="it hung up")
    if answer.get("type") == "error":
        raise InvalidRequestError(param=kind, problem=str(answer.get("problem", "refused")))
    return answer


def _last_words(sock: socket.socket) -> str:
    """Give why powerd hung up, if it said so."""
    try:
        return str(parse(sock.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT)).get("problem", ""))
    except (OSError, BadMessageError):
        return ""
