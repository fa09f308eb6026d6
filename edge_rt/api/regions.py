"""Memory that clients share for large tensors: who gave it, what it is, and that it is still there.

A client makes a memfd, which it seals against shrinking, and sends its descriptor over the Unix socket
server.shm_socket_path; the answer is the region's name. A request names region, offset and size; workers read and write
the region through /proc/PID/fd, as the files they are, and this process never touches the bytes. A region lives as long
as the connection that brought it, and under running requests.

Messages are packets of SOCK_SEQPACKET, one JSON object each:

    {"op": "register"} with one descriptor   {"region": "5f…", "byte_size": 1048576}
    {"op": "unregister", "region": "5f…"}    {}
    {"op": "status"}                         {"regions": [{"region": "5f…", "byte_size": 1048576}]}

and an error is {"error": "…", "code": "…"}.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from edge_rt import config
from edge_rt.api import listen
from edge_rt.api.callers import Peer
from edge_rt.api.status import open_inference_body, reply
from edge_rt.errors import AuthError, EdgeRtError, InvalidRequestError, OverloadedError
from edge_rt.tensor_types import TensorRegion

_log = logging.getLogger("edge_rt.api")

_MAX_PACKET_BYTES: Final = 4096
_MAX_FDS: Final = 4  # more than the one that is right, so that too many are seen and closed


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    op: Literal["register", "unregister", "status"]
    region: str = ""


@dataclass(slots=True, eq=False)
class _Region:
    """One memfd. fd is closed when it is neither registered nor under a request."""

    name: str
    uid: int
    fd: int
    size_bytes: int
    device: int
    inode: int
    is_registered: bool = True
    n_uses: int = 0

    def close_if_unused(self) -> None:
        if not self.is_registered and not self.n_uses:
            os.close(self.fd)


class Regions:
    """All regions of the daemon. Their names are not to be guessed: whoever knows one was told by its owner."""

    def __init__(self, *, max_regions: int, max_bytes: int) -> None:
        self._max_regions = max_regions
        self._max_bytes = max_bytes
        self._regions: dict[str, _Region] = {}

    def register(self, fd: int, uid: int) -> tuple[str, int]:
        """Take over a descriptor; give the region's name and size.

        Raises InvalidRequestError for what is no sealed memfd, OverloadedError beyond the limits; then the descriptor
        is still the caller's.
        """
        found = self._check(fd)
        name = secrets.token_hex(16)
        self._regions[name] = _Region(name, uid, fd, found.st_size, found.st_dev, found.st_ino)
        return name, found.st_size

    def unregister(self, name: str, uid: int) -> None:
        """Forget a region; requests that use it go on. Raises InvalidRequestError for one that is not uid's."""
        region = self._find(name, uid)
        del self._regions[name]
        region.is_registered = False
        region.close_if_unused()

    @contextmanager
    def lease(self, name: str, offset: int, size_bytes: int, uid: int | None) -> Iterator[TensorRegion]:
        """Keep a part of a region usable in the block.

        uid  None where the caller's is not known: its knowing the name counts
        Raises InvalidRequestError for an unknown region and for a part that is not inside it.
        """
        region = self._find(name, uid)
        if offset + size_bytes > region.size_bytes:
            problem = f"has {region.size_bytes} bytes, {size_bytes} from {offset} on are not inside it"
            raise InvalidRequestError(param=f"shared memory {name}", problem=problem)
        region.n_uses += 1
        try:
            yield TensorRegion(
                name=name,
                path=f"/proc/{os.getpid()}/fd/{region.fd}",
                device=region.device,
                inode=region.inode,
                offset=offset,
                size_bytes=size_bytes,
            )
        finally:
            region.n_uses -= 1
            region.close_if_unused()

    def sizes(self, names: list[str]) -> list[dict[str, Any]]:
        return [{"region": name, "byte_size": self._regions[name].size_bytes} for name in names]

    def _find(self, name: str, uid: int | None) -> _Region:
        region = self._regions.get(name)
        if region is None or uid not in (None, region.uid):
            raise InvalidRequestError(param="shared_memory_region", problem=f"no region {name[:80]!r} of yours is here")
        return region

    def _check(self, fd: int) -> os.stat_result:
        if len(self._regions) >= self._max_regions:
            raise OverloadedError(resource="regions", limit=self._max_regions, setting="server.max_regions")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # first: what is no memfd may block, as FUSE's files do
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise InvalidRequestError(param="region", problem="must be a memfd, sealed with F_SEAL_SHRINK")
        found = os.fstat(fd)
        if not found.st_size:
            raise InvalidRequestError(param="region", problem="is empty")
        if found.st_size + sum(region.size_bytes for region in self._regions.values()) > self._max_bytes:
            raise OverloadedError(
                resource="bytes of shared memory", limit=self._max_bytes, setting="server.max_regions_bytes"
            )
        try:
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as exc:
            problem = f"cannot be opened for reading and writing: {exc.strerror}"
            raise InvalidRequestError(param="region", problem=problem) from exc
        return found


class RegionServer:
    """Takes regions on a Unix socket. start once, then stop once, on one event loop."""

    def __init__(self, regions: Regions, path: Path, settings: config.Server) -> None:
        self._regions = regions
        self._path = path
        self._settings = settings
        self._listener: socket.socket | None = None
        self._inode = (0, 0)
        self._connections: dict[socket.socket, tuple[Peer, list[str]]] = {}

    async def start(self) -> None:
        """Bind and listen. Raises ConfigError."""
        self._listener = listen.bind_unix(
            self._path,
            mode=int(self._settings.socket_mode, 8),
            group=self._settings.socket_group,
            key="server.shm_socket_path",
            kind=socket.SOCK_SEQPACKET,
        )
        self._inode = listen.inode(self._path)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self, grace_s: float) -> None:  # noqa: ARG002  nothing here takes time
        """Close everything. Regions under requests stay until these end."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        listen.remove(self._path, self._inode)
        self._listener.close()
        for sock in list(self._connections):
            self._close(sock)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has left already, or there is no descriptor for it
            return
        sock.setblocking(False)
        peer = Peer.of(sock)
        try:
            if peer is None:
                raise AuthError
            if len(self._connections) >= (limit := self._settings.max_regions):
                raise OverloadedError(
                    resource="connections for shared memory", limit=limit, setting="server.max_regions"
                )
        except EdgeRtError as exc:
            self._send(sock, open_inference_body(reply(exc)))
            sock.close()
            return
        self._connections[sock] = (peer, [])
        asyncio.get_running_loop().add_reader(sock, self._receive, sock)

    def _close(self, sock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(sock)
        peer, names = self._connections.pop(sock)
        for name in names:
            self._regions.unregister(name, peer.uid)
        sock.close()

    def _receive(self, sock: socket.socket) -> None:
        fds: list[int] = []
        try:
            packet, flags = _receive(sock, fds)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            _close_all(fds)
            self._close(sock)
            return
        try:
            if flags & socket.MSG_CTRUNC:
                raise InvalidRequestError(param="", problem=f"a packet brings more than {_MAX_FDS} descriptors")
            if flags & socket.MSG_TRUNC:
                raise InvalidRequestError(param="", problem=f"a packet is longer than {_MAX_PACKET_BYTES} bytes")
            answer = msgspec.json.encode(self._answer(sock, packet, fds))
        except Exception as exc:  # noqa: BLE001  a request's boundary: no packet ends the daemon's loop
            if not isinstance(exc, EdgeRtError):
                _log.error("a packet failed unexpectedly", exc_info=exc)
            answer = open_inference_body(reply(exc))
        finally:
            _close_all(fds)
        if not self._send(sock, answer):
            self._close(sock)

    def _answer(self, sock: socket.socket, packet: bytes, fds: list[int]) -> dict[str, Any]:
        peer, names = self._connections[sock]
        try:
            message = msgspec.json.decode(packet, type=_Message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidRequestError(param="", problem=f"not a message: {exc}") from exc
        if len(fds) != (message.op == "register"):
            raise InvalidRequestError(param="op", problem=f"{message.op} with {len(fds)} descriptors")
        if message.op == "register":
            name, size_bytes = self._regions.register(fds[0], peer.uid)
            fds.clear()
            names.append(name)
            return {"region": name, "byte_size": size_bytes}
        if message.op == "unregister":
            if message.region not in names:
                raise InvalidRequestError(param="region", problem="is not one of this connection")
            names.remove(message.region)
            self._regions.unregister(message.region, peer.uid)
            return {}
        return {"regions": self._regions.sizes(names)}

    def _send(self, sock: socket.socket, packet: bytes) -> bool:
        """Send a packet; False for a client that does not read its answers."""
        with suppress(OSError):
            return sock.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(packet)
        return False


def _receive(sock: socket.socket, fds: list[int]) -> tuple[bytes, int]:
    """Receive a packet, and put the descriptors that came with it into fds."""
    item = array.array("i")
    packet, ancillary, flags, _ = sock.recvmsg(
        _MAX_PACKET_BYTES, socket.CMSG_SPACE(_MAX_FDS * item.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            item.frombytes(data[: len(data) - len(data) % item.itemsize])
    fds.extend(item)
    return packet, flags


def _close_all(fds: list[int]) -> None:
    """Close descriptors of unknown kinds, on a thread: closing some files waits for whoever provides them."""
    if fds:
        threading.Thread(target=lambda: list(map(os.close, fds)), name="close", daemon=True).start()
