"""Share memory with a daemon, so that large tensors are not sent: standard library only.

    with SharedMemory(Path("/run/edge_rt/shm.sock")) as shared, shared.region(1_228_800) as region:
        region.buffer[:] = picture
        client.infer("detector", {"image": region.tensor("UINT8", (1, 640, 640, 3))})

A region's name, offset and size go into a request's parameters as Triton's shared memory extension has them, which
tritonclient's set_shared_memory writes too.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import mmap
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from edge_rt.api.kserve_wire import RegionPart
from edge_rt.api.status import rebuild
from edge_rt.errors import DaemonLostError, DaemonUnreachableError
from edge_rt.tensor_types import ITEM_BYTES, Datatype

_MAX_PACKET_BYTES = 64 * 1024
_TIMEOUT_S = 30.0


class SharedMemory:
    """A connection to a daemon's server.shm_socket_path; what it has registered goes with it.

    Raises DaemonUnreachableError, and what the daemon answers as typed errors.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._sock.settimeout(_TIMEOUT_S)
        try:
            self._sock.connect(self.address)
        except OSError as exc:
            self._sock.close()
            raise DaemonUnreachableError(address=self.address, reason=exc.strerror or str(exc)) from exc

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def region(self, size_bytes: int) -> Region:
        """Make a region of zeros and register it."""
        fd = os.memfd_create("edge_rt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return Region(self, self.register(fd), fd, size_bytes)
        finally:
            os.close(fd)  # the mapping and the daemon have it now

    def register(self, fd: int) -> str:
        """Share a memfd that is sealed against shrinking; give its name."""
        name: str = self._ask({"op": "register"}, fd)["region"]
        return name

    def unregister(self, name: str) -> None:
        self._ask({"op": "unregister", "region": name})

    def regions(self) -> dict[str, int]:
        """Give this connection's regions and their sizes in bytes."""
        return {entry["region"]: entry["byte_size"] for entry in self._ask({"op": "status"})["regions"]}

    def _ask(self, message: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
        try:
            packet = self._exchange(msgspec.json.encode(message), rights)
        except OSError as exc:
            raise DaemonLostError(address=self.address, reason=exc.strerror or str(exc)) from exc
        if not packet:
            raise DaemonLostError(address=self.address, reason="it closed the connection")
        answer = msgspec.json.decode(packet, type=dict[str, Any])
        if "error" in answer:
            raise rebuild(400, packet)
        return answer

    def _exchange(self, packet: bytes, rights: list[tuple[int, int, array.array[int]]]) -> bytes:
        """Send and wait for the answer; one given before the daemon closed is read all the same."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendmsg([packet], rights)
        try:
            return self._sock.recv(_MAX_PACKET_BYTES)
        except ConnectionResetError:  # what was sent was not read; the kernel says so before it gives the answer
            return self._sock.recv(_MAX_PACKET_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """An input in shared memory."""

    datatype: Datatype
    shape: tuple[int, ...]
    part: RegionPart


class Region:
    """Memory that this process and the daemon share. buffer is its bytes, to be written and read in place."""

    def __init__(self, shared: SharedMemory, name: str, fd: int, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._shared = shared
        self._map = mmap.mmap(fd, size_bytes)
        self.buffer = memoryview(self._map)

    def tensor(self, datatype: Datatype, shape: tuple[int, ...], *, offset: int = 0) -> SharedTensor:
        """Name an input whose bytes stand from offset on; of BYTES give a part instead."""
        size_bytes = math.prod(shape) * ITEM_BYTES[datatype]
        return SharedTensor(datatype=datatype, shape=shape, part=self.part(offset, size_bytes))

    def part(self, offset: int, size_bytes: int) -> RegionPart:
        """Name the room for an output."""
        return RegionPart(self.name, offset, size_bytes)

    def close(self) -> None:
        """Forget it here and there. Raises BufferError while a view of buffer, as an array on it, is alive."""
        self.buffer.release()
        self._map.close()
        self._shared.unregister(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
