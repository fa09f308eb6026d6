"""powerd as its clients see it: hints that cost next to nothing, advice, questions with an answer.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from edge_rt.errors import DaemonLostError, DaemonUnreachableError, InvalidRequestError
from edge_rt.power.state import Advice, Hint
from edge_rt.power.wire import (
    MAX_BYTES,
    BadMessageError,
    TakesAdvice,
    advice_of,
    encode,
    encode_hint,
    encode_takes_advice,
    parse,
)

_FIRST_PAUSE_S: Final = 0.5  # after a connection failed or was lost, doubled by each further one …
_LAST_PAUSE_S: Final = 30.0  # … up to this
_AT_ONCE: Final = 16  # messages of powerd's
_MAX_CHARS: Final = 200
_STEADY_S: Final = 10.0  # a connection that held so long was a good one
_REMEDY: Final = "start edge_rt-powerd.service, or `python -m edge_rt.power.powerd`"


class Taker(Protocol):
    """Takes advice; edge_rt.power.taker.AdviceTaker is one."""

    @property
    def limits(self) -> TakesAdvice: ...

    def take(self, advice: Advice, *, is_dry: bool, now_s: float) -> None: ...

    def check(self, now_s: float, *, works: bool) -> None: ...

    def end(self, reason: str) -> None: ...


class Watch(Protocol):
    """Tells when a socket can be read; an event loop's add_reader and remove_reader."""

    def add(self, fd: int, on_readable: Callable[[], None]) -> None: ...

    def remove(self, fd: int) -> None: ...


class HintSender:
    """Sends hints and never waits: what powerd does not take at once is dropped, for the next hint says it anew.

    Belongs to one thread. Without a powerd a send costs a look at the clock, and now and then a failed connect.

    taker, watch  take powerd's advice, which is asked for with the connection and ends with it; watch None reads it
                  with each hint only
    problem       why the last hint was not sent, "" if it was
    """

    def __init__(
        self,
        path: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        taker: Taker | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.problem = ""
        self.n_dropped = 0
        self._taker, self._watch = taker, watch
        self._path, self._clock = path, clock
        self._sock: socket.socket | None = None
        self._said = ""  # by powerd, of why it may hang up
        self._told: TakesAdvice | None = None  # over this connection
        self._connected_s = 0.0
        self._retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def send(self, hint: Hint) -> bool:
        """Send one hint, connecting first if it is time; False if it was dropped."""
        if self._taker is not None:
            self.receive()
            self._taker.check(self._clock(), works=hint.work != "idle")
        if self._sock is None and not self._connect():
            self.n_dropped += 1
            return False
        assert self._sock is not None
        self._ask_for_advice(self._sock)
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

    def receive(self) -> None:
        """Take the advice that has come, and note that powerd is gone."""
        for _ in range(_AT_ONCE):
            if self._sock is None or self._taker is None:
                return
            try:
                raw = self._sock.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT)
                if not raw:
                    self._lost("it hung up")
                    return
                values = parse(raw)
                if values.get("type") == "error":  # a powerd that knows of no advice, or that lets this program go
                    self._said = str(values.get("problem", ""))[:_MAX_CHARS]
                else:
                    advice, is_dry = advice_of(values)
                    self._taker.take(advice, is_dry=is_dry, now_s=self._clock())
            except BlockingIOError:
                return
            except OSError as exc:
                self._lost(exc.strerror or str(exc))
            except BadMessageError as exc:
                self._taker.end(f"what powerd says {exc}")

    def close(self) -> None:
        """Hang up; powerd then knows of no work, and its advice has ended."""
        if self._sock is not None:
            if self._watch is not None and self._taker is not None:
                self._watch.remove(self._sock.fileno())
            self._sock.close()
            self._sock = None
        if self._taker is not None:
            self._taker.end("the connection to powerd has ended")

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
        self._sock, self._connected_s, self._said, self._told = sock, now_s, "", None
        if self._taker is not None and self._watch is not None:
            self._watch.add(sock.fileno(), self.receive)
        return True

    def _ask_for_advice(self, sock: socket.socket) -> None:
        """Say within which limits it is taken, if that has not been said yet."""
        if self._taker is None or self._taker.limits == self._told:
            return
        with contextlib.suppress(OSError):  # the hint that follows finds it out
            sock.send(encode_takes_advice(self._taker.limits), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._told = self._taker.limits

    def _lost(self, problem: str) -> None:
        now_s = self._clock()
        self.close()
        if now_s - self._connected_s >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        self.problem = self._said or problem
        self._said = ""
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def ask(path: str, kind: str, *, timeout_s: float = 2.0, **values: Any) -> Mapping[str, Any]:
    """Send "status" or "cap" and wait for the answer.

    Raises DaemonUnreachableError, DaemonLostError, and InvalidRequestError for what powerd refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        # Where others stand in line before it, connecting waits its turn; with settimeout it would fail at once.
        seconds, fraction = divmod(max(timeout_s, 0.001), 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        try:
            sock.connect(path)
            sock.settimeout(timeout_s)
        except OSError as exc:
            remedy = "join its group, or ask as root" if exc.errno in (errno.EACCES, errno.EPERM) else _REMEDY
            raise DaemonUnreachableError(address=path, reason=exc.strerror or str(exc), remedy=remedy) from exc
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have said already why it does not listen
                sock.send(encode(kind, **values), socket.MSG_NOSIGNAL)
            raw = _answer(sock)
            answer = parse(raw) if raw else {}
        except (OSError, BadMessageError) as exc:
            raise DaemonLostError(address=path, reason=f"{exc}") from exc
    if not answer:
        raise DaemonLostError(address=path, reason="it hung up")
    if answer.get("type") == "error":
        raise InvalidRequestError(param=kind, problem=str(answer.get("problem", "refused")))
    return answer


def _answer(sock: socket.socket) -> bytes:
    try:
        return sock.recv(MAX_BYTES + 1)
    except ConnectionResetError:  # told first where it hung up without hearing; then comes what it said before that
        return sock.recv(MAX_BYTES + 1)


def _last_words(sock: socket.socket) -> str:
    """Give why powerd hung up, if it said so."""
    try:
        return str(parse(sock.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT)).get("problem", ""))
    except (OSError, BadMessageError):
        return ""
