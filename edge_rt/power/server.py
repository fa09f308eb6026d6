"""powerd's socket: who may say what, and never more work than the loop can bear. Standard library only.

SOCK_SEQPACKET keeps messages apart, and the kernel tells who is at the other end (SO_PEERCRED, SO_PEERGROUPS). Nothing
here waits: a client that does not read its answers, says too much or sends nonsense is let go.
"""

from __future__ import annotations

import contextlib
import grp
import math
import os
import selectors
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edge_rt.errors import ConfigError
from edge_rt.power.bucket import Bucket
from edge_rt.power.state import Advice, Hint
from edge_rt.power.wire import (
    MAX_BYTES,
    Ask,
    AskPower,
    BadMessageError,
    Cap,
    TakesAdvice,
    decode,
    encode,
    encode_advice,
)

MAX_CLIENTS: Final = 32
MAX_CLIENTS_PER_UID: Final = 8
MAX_CLIENTS_OF_ROOT: Final = 32  # beside the others': it must be able to look even when they have taken all
_MAX_BAD: Final = 8  # messages that break the protocol, then the client is let go
_MESSAGES_HZ: Final = 100.0  # of one client in the long run …
_MESSAGES_BURST: Final = 200.0  # … and at once
_CONNECTS_HZ: Final = 20.0  # of one user in the long run …
_CONNECTS_BURST: Final = 64.0  # … and at once
_ACCEPTS_HZ: Final = 200.0  # of all users: what is beyond waits in the kernel, where it costs nothing …
_ACCEPTS_BURST: Final = 128.0
_PAUSE_S: Final = 0.05  # … for so long, then it is some more's turn
_BARRED_S: Final = 1.0  # after a user was let go for what it sent: a new connection would be a new burst
_MAX_BARRED: Final = 64
_AT_ONCE: Final = 32  # of one client, then it is the next one's turn
_BACKLOG: Final = 16
_MAX_PATH_BYTES: Final = 107
_REPEAT_S: Final = 1.0  # of advice while a client works: what it has not heard again for some seconds is over
_SO_PEERGROUPS: Final = 59
_MAX_GROUPS: Final = 256
_FIRST_INHERITED_FD: Final = 3
_KEY: Final = "power.socket_path"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says; pid was theirs when they connected."""

    pid: int
    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Rights:
    """Who may do what besides root.

    uids, gids  of those who may give hints
    cap_gid     of those who may set a cap; None: root alone
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    cap_gid: int | None = None

    def may_hint(self, peer: Peer) -> bool:
        return peer.uid == 0 or peer.uid in self.uids or bool(peer.gids & self.gids)

    def may_cap(self, peer: Peer) -> bool:
        return peer.uid == 0 or (self.cap_gid is not None and self.cap_gid in peer.gids)


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    peer: Peer
    messages: Bucket
    hint: Hint | None = None
    takes: TakesAdvice | None = None
    told: tuple[Advice, bool] | None = None
    told_s: float = 0.0
    n_bad: int = 0


@dataclass(slots=True)
class Server:
    """The clients of one listening socket. Belongs to the thread that owns selector.

    status    gives what a client that asks is told
    power     gives what its meter has counted
    on_hint   is called with nothing after a hint that changes something
    on_cap    takes a cap that a client who may has set
    resume_s  when to call resume; infinity: it is not needed
    """

    listener: socket.socket
    selector: selectors.BaseSelector
    rights: Rights
    status: Callable[[], Mapping[str, Any]]
    on_hint: Callable[[], None]
    on_cap: Callable[[float, Peer], None]
    say: Callable[[int, str, str], None]  # priority, what it is about, text
    clock: Callable[[], float]
    peer_of: Callable[[socket.socket], Peer] = field(default_factory=lambda: peer)
    power: Callable[[], Mapping[str, Any]] = dict
    n_refused: int = 0
    _clients: dict[int, _Client] = field(default_factory=dict)  # by descriptor
    _barred_s: dict[int, float] = field(default_factory=dict)  # by user: since when
    _connects: dict[int, Bucket] = field(default_factory=dict)  # by user
    _accepts: Bucket = field(init=False)
    resume_s: float = math.inf

    def __post_init__(self) -> None:
        self._accepts = Bucket(_ACCEPTS_HZ, _ACCEPTS_BURST, self.clock())
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    @property
    def n_clients(self) -> int:
        return len(self._clients)

    def hints(self) -> list[Hint]:
        """Give each client's last hint."""
        return [client.hint for client in self._clients.values() if client.hint is not None]

    def advise(self, advice: Advice, *, is_dry: bool, now_s: float) -> None:
        """Tell advice to who takes it, where it is another than before or is due to be repeated."""
        for client in list(self._clients.values()):
            if client.takes is None:
                continue
            works = client.hint is not None and client.hint.work != "idle"
            if client.told != (advice, is_dry) or (works and now_s - client.told_s >= _REPEAT_S):
                client.told, client.told_s = (advice, is_dry), now_s
                self._answer(client, encode_advice(advice, is_dry=is_dry))

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._let_go(client)
        if self.resume_s == math.inf:
            self.selector.unregister(self.listener)
        self.listener.close()

    def resume(self, now_s: float) -> None:
        """Hear of new clients again, if it is time."""
        if now_s >= self.resume_s:
            self.resume_s = math.inf
            self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
            self._accept()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if self.resume_s < math.inf:
                return
            try:
                sock, _ = self.listener.accept()
            except OSError:  # nobody is there any more, or no descriptor is left: the next round tries again
                return
            if not self._accepts.take(self.clock()):  # this one is the last for now
                self.selector.unregister(self.listener)
                self.resume_s = self.clock() + _PAUSE_S
            sock.setblocking(False)
            try:
                found = self.peer_of(sock)
            except OSError as exc:
                self._refuse(sock, "denied", f"your process cannot be told: {exc.strerror}")
                continue
            if self.clock() - self._barred_s.get(found.uid, -_BARRED_S) < _BARRED_S:
                self._refuse(sock, "busy", "a program of yours sent too much or nonsense a moment ago; try again later")
                continue
            if not self._may_connect(found):
                self._refuse(sock, "busy", "programs of yours connect too often; keep a connection, or try again later")
                continue
            if not self._has_room(found.uid):
                self._refuse(sock, "busy", "too many clients are connected; try again later")
                continue
            client = _Client(sock, found, Bucket(_MESSAGES_HZ, _MESSAGES_BURST, self.clock()))
            self._clients[sock.fileno()] = client
            self.selector.register(sock, selectors.EVENT_READ, lambda client=client: self._receive(client))

    def _may_connect(self, found: Peer) -> bool:
        """Say whether this user has not connected too often. Root too: its loops are as much work as others'."""
        if (bucket := self._connects.get(found.uid)) is None:
            if len(self._connects) >= _MAX_BARRED:
                self._connects.pop(next(iter(self._connects)))
            bucket = self._connects[found.uid] = Bucket(_CONNECTS_HZ, _CONNECTS_BURST, self.clock())
        if bucket.take(self.clock()):
            return True
        self.say(4, f"connects {found.uid}", f"processes of user {found.uid} connect too often, {found.pid} the last")
        return False

    def _has_room(self, uid: int) -> bool:
        """Say whether one more client may stay. All have a bound: without descriptors the loop would spin."""
        n_own = sum(client.peer.uid == uid for client in self._clients.values())
        if uid == 0:
            return n_own < MAX_CLIENTS_OF_ROOT
        n_root = sum(client.peer.uid == 0 for client in self._clients.values())
        return n_own < MAX_CLIENTS_PER_UID and len(self._clients) - n_root < MAX_CLIENTS

    def _refuse(self, sock: socket.socket, code: str, problem: str) -> None:
        self.n_refused += 1
        with contextlib.suppress(OSError):
            sock.send(encode("error", code=code, problem=problem), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        sock.close()

    def _receive(self, client: _Client) -> None:
        for _ in range(_AT_ONCE):
            try:
                raw = client.sock.recv(MAX_BYTES + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._let_go(client)
                return
            if not raw:  # the end, or a message of no bytes, which nobody has a reason to send
                self._let_go(client)
                return
            now_s = self.clock()
            if not client.messages.take(now_s):
                self.say(4, f"flood {client.peer.uid}", f"process {client.peer.pid} sends too much and is let go")
                self._bar(client)
                self._let_go(client)
                return
            self._take(client, raw, now_s)
            if client.sock.fileno() == -1:
                return

    def _take(self, client: _Client, raw: bytes, now_s: float) -> None:
        try:
            message = decode(raw)
        except BadMessageError as exc:
            client.n_bad += 1
            self._answer(client, encode("error", code="bad_message", problem=f"the message {exc}"))
            if client.n_bad >= _MAX_BAD:
                self._bar(client)
                self._let_go(client)
            return
        if isinstance(message, Hint):
            self._take_hint(client, message, now_s)
        elif isinstance(message, TakesAdvice):
            self._take_limits(client, message)
        elif isinstance(message, Cap):
            if not self.rights.may_cap(client.peer):
                self._answer(client, encode("error", code="denied", problem="only root or power.cap_group sets a cap"))
                return
            self.on_cap(message.max_w, client.peer)
            self._answer(client, encode("done"))
        elif isinstance(message, Ask):
            self._answer(client, _told("status", self.status))
        elif isinstance(message, AskPower):
            self._answer(client, _told("power", self.power))

    def _take_limits(self, client: _Client, takes: TakesAdvice) -> None:
        """Give a client advice from now on: what it may be told, only who gives hints may know and need."""
        if not self.rights.may_hint(client.peer):
            self._answer(client, encode("error", code="denied", problem="advice is for who may give hints"))
            return
        client.takes, client.told = takes, None
        if client.hint is not None:
            client.hint = replace(client.hint, max_threads=takes.max_threads, max_batch=takes.max_batch)
        self.on_hint()

    def _take_hint(self, client: _Client, hint: Hint, now_s: float) -> None:
        if not self.rights.may_hint(client.peer):
            self._answer(client, encode("error", code="denied", problem="hints come from power.socket_group or root"))
            self._let_go(client)
            return
        if hint.sent_s > now_s + 1.0:
            client.n_bad += 1
            self._answer(client, encode("error", code="bad_message", problem="sent_s lies in the future"))
            return
        if (takes := client.takes) is not None:
            hint = replace(hint, max_threads=takes.max_threads, max_batch=takes.max_batch)
        client.hint = hint
        self.on_hint()

    def _answer(self, client: _Client, raw: bytes) -> None:
        if client.sock.fileno() == -1:
            return
        try:
            client.sock.send(raw, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:  # so many answers unread that there is no room for one more
            self._bar(client)
            self._let_go(client)
        except OSError:  # gone
            self._let_go(client)

    def _bar(self, client: _Client) -> None:
        """Refuse this user for a moment; never root, which must be able to look."""
        if client.peer.uid != 0:
            if len(self._barred_s) >= _MAX_BARRED:
                self._barred_s.pop(next(iter(self._barred_s)))
            self._barred_s[client.peer.uid] = self.clock()

    def _let_go(self, client: _Client) -> None:
        if self._clients.pop(client.sock.fileno(), None) is None:
            return
        self.selector.unregister(client.sock)
        client.sock.close()
        if client.hint is not None:
            self.on_hint()  # what it was busy with is nobody's any more


def _told(kind: str, tell: Callable[[], Mapping[str, Any]]) -> bytes:
    try:
        return encode(kind, **tell())
    except ValueError as exc:  # more than fits, or a number that is none: no reason to end
        return encode("error", code="internal", problem=f"the {kind} cannot be told: {exc}"[:200])


def peer(sock: socket.socket) -> Peer:
    """Ask the kernel who is at the other end. Raises OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    size = struct.calcsize("I")
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * size)
        more = struct.unpack(f"{len(raw) // size}I", raw)
    except OSError:  # Linux before 4.13, or more groups than fit: the first one has to do
        more = ()
    return Peer(pid=pid, uid=uid, gids=frozenset((gid, *more)))


def rights(socket_group: str, cap_group: str) -> Rights:
    """Find the groups. A socket_group that does not exist gives nobody a right; an unknown cap_group is an error."""
    gids = frozenset({os.getegid()} - {0})
    if (gid := gid_of(socket_group)) is not None:
        gids |= {gid}
    cap_gid = None
    if cap_group and (cap_gid := gid_of(cap_group)) is None:
        raise ConfigError(key="power.cap_group", problem="no such group", origin=cap_group)
    return Rights(uids=frozenset({os.geteuid()}), gids=gids, cap_gid=cap_gid)


def gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except KeyError:
        return None


def listen(
    path: str, group: str, environ: Mapping[str, str], *, first_fd: int = _FIRST_INHERITED_FD
) -> tuple[socket.socket, bool]:
    """Take the socket that systemd passed, or bind one: mode 0660, of the group; True if it is ours to remove.

    A stale socket is replaced, a live one raises ConfigError.
    """
    if environ.get("LISTEN_PID") == str(os.getpid()) and environ.get("LISTEN_FDS", "0") != "0":
        return _inherited(environ, first_fd), False
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(key=_KEY, problem=f"a socket's path may have {_MAX_PATH_BYTES} bytes", origin=path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
        _clear(path)
        # Bound where only this user may connect; nobody gets in before listen, when the group has been set.
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        if (gid := gid_of(group)) is not None:
            os.chown(path, -1, gid)
        os.chmod(path, 0o660)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(key=_KEY, problem=f"cannot be bound: {exc.strerror}", origin=path) from exc
    except ConfigError:
        sock.close()
        raise
    return sock, True


def _inherited(environ: Mapping[str, str], fd: int) -> socket.socket:
    if environ["LISTEN_FDS"] != "1":
        raise ConfigError(key="LISTEN_FDS", problem=f"must be 1, got {environ['LISTEN_FDS']!r}", origin="environment")
    try:
        sock = socket.socket(fileno=fd)
        is_right = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET
        is_right = is_right and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as exc:
        raise ConfigError(key="LISTEN_FDS", problem=f"is no socket: {exc.strerror}", origin="environment") from exc
    if not is_right:
        sock.close()
        raise ConfigError(
            key="LISTEN_FDS", problem="is no listening Unix socket of SOCK_SEQPACKET", origin="environment"
        )
    sock.set_inheritable(False)
    return sock


def _clear(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(key=_KEY, problem="exists and is no socket", origin=path)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError as exc:
            raise ConfigError(key=_KEY, problem=f"is in use: {exc.strerror}", origin=path) from exc
    raise ConfigError(key=_KEY, problem="is served by another powerd already", origin=path)
