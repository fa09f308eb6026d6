"""A simulated board behind PYNQ.remote: what pynq 4 speaks to a board over the network, here on this machine only.

    python -m hw.fpga.sim.remote CONFIGURATION FOLDER [ADDRESS]

writes the configuration's hand-off into FOLDER, says `ready ADDRESS` and serves until its standard input ends. A script
then reaches it with PYNQ_REMOTE_DEVICES=ADDRESS set. The protocol knows no password, so ADDRESS is one of loopback's:
127.0.0.1, or any other in 127.0.0.0/8 to have several boards, since the port is fixed. This module needs pynq 4.
"""

from __future__ import annotations

import ipaddress
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from pynq.remote import (
    buffer_pb2,
    buffer_pb2_grpc,
    mmio_pb2,
    mmio_pb2_grpc,
    remote_device_pb2,
    remote_device_pb2_grpc,
)

from hw.fpga.sim.board import LABEL, Region, SimulatedBoard
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.engine import BusError
from hw.fpga.sim.handoff import HandoffError, write_handoff

PORT = 7967
CHUNK_BYTES = 1 << 20
_FIRMWARE = "/lib/firmware/"
_LOADER = "/sys/class/fpga_manager/fpga0/firmware"


@dataclass(slots=True)
class Served:
    """One board and what its clients hold; one lock, for the engine is not made for two callers at a time."""

    board: SimulatedBoard
    lock: threading.Lock = field(default_factory=threading.Lock)
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Mmio(mmio_pb2_grpc.MmioServicer):
    def __init__(self, served: Served) -> None:
        self._served = served
        self._windows: dict[str, tuple[int, int]] = {}

    def get_mmio(self, request: Any, _context: Any) -> Any:
        name = str(next(self._served.names))
        self._windows[name] = (request.base_addr, request.length)
        return mmio_pb2.GetMmioResponse(status=True, mmio_id=name)

    def read(self, request: Any, _context: Any) -> Any:
        if request.length not in (1, 2, 4):
            said = f"{request.length} bytes at a time; PYNQ.remote's answers hold 4: read the halves one by one"
            return mmio_pb2.ReadResponse(status=False, msg=said)
        try:
            address = self._address(request, 0)
            with self._served.lock:
                value = self._served.board.read(address)
        except (BusError, LookupError) as exc:
            return mmio_pb2.ReadResponse(status=False, msg=str(exc))
        return mmio_pb2.ReadResponse(status=True, data=value & (1 << 8 * request.length) - 1)

    def write(self, request: Any, _context: Any) -> Any:
        try:
            for i in range(0, len(request.data), 4):
                address = self._address(request, i)
                with self._served.lock:
                    self._served.board.write(address, int.from_bytes(request.data[i : i + 4], "little"))
        except (BusError, LookupError) as exc:
            return mmio_pb2.WriteResponse(status=False, msg=str(exc))
        return mmio_pb2.WriteResponse(status=True)

    def _address(self, request: Any, further: int) -> int:
        base, n_bytes = self._windows[request.mmio_id]
        offset: int = request.offset + further
        if not 0 <= offset <= n_bytes - 4:
            raise IndexError(f"offset {offset} in a window of {n_bytes} bytes")
        return base + offset


class RemoteBuffer(buffer_pb2_grpc.RemoteBufferServicer):
    """Buffers with a cached copy on the board's side too: a client's flush writes into it, then writes it back."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._buffers: dict[str, tuple[Region, NDArray[np.uint8]]] = {}

    def allocate(self, request: Any, context: Any) -> Any:
        with self._served.lock:
            try:
                region = self._served.board.allocate(request.size)
            except MemoryError as exc:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(exc))
        name = str(next(self._served.names))
        self._buffers[name] = (region, np.zeros(request.size, np.uint8))
        return buffer_pb2.AllocateResponse(buffer_id=name)

    def write(self, request_iterator: Iterable[Any], _context: Any) -> Any:
        at = 0
        for request in request_iterator:
            _, cached = self._buffers[request.buffer_id]
            data = np.frombuffer(request.data, np.uint8)
            if at + len(data) > len(cached):
                return buffer_pb2.BufferWriteResponse(msg=f"{at + len(data)} bytes for a buffer of {len(cached)}")
            cached[at : at + len(data)] = data
            at += len(data)
        return buffer_pb2.BufferWriteResponse()

    def read(self, request: Any, _context: Any) -> Iterator[Any]:
        _, cached = self._buffers[request.buffer_id]
        for at in range(0, len(cached), CHUNK_BYTES):
            yield buffer_pb2.BufferReadResponse(data=cached[at : at + CHUNK_BYTES].tobytes())

    def flush(self, request: Any, _context: Any) -> Any:
        region, cached = self._buffers[request.buffer_id]
        with self._served.lock:
            self._served.board.memory(region, 0, len(cached))[:] = cached
        return buffer_pb2.FlushResponse()

    def invalidate(self, request: Any, _context: Any) -> Any:
        region, cached = self._buffers[request.buffer_id]
        with self._served.lock:
            cached[:] = self._served.board.memory(region, 0, len(cached))
        return buffer_pb2.InvalidateResponse()

    def physical_address(self, request: Any, _context: Any) -> Any:
        return buffer_pb2.AddressResponse(address=self._buffers[request.buffer_id][0].address)

    def freebuffer(self, request: Any, _context: Any) -> Any:
        region, _ = self._buffers.pop(request.buffer_id)
        with self._served.lock:
            self._served.board.free(region)
        return buffer_pb2.FreeBufferResponse()


class RemoteDevice(remote_device_pb2_grpc.RemoteDeviceServicer):
    """The few files of a board that pynq reads and writes, and the loading of a bitstream through them."""

    def __init__(self, served: Served) -> None:
        self._served = served
        board = served.board.board
        self._files = {
            "/proc/version": f"Linux version 6.6 (simulated) {board.arch}\n".encode(),
            "/proc/device-tree/chosen/pynq_board": f"{board.name} (simulated)\0".encode(),
            "/sys/class/fpga_manager/fpga0/state": b"operating\n",
            "/sys/class/fpga_manager/fpga0/flags": b"0\n",
        }

    def existsfile(self, request: Any, _context: Any) -> Any:
        return remote_device_pb2.ExistsFileResponse(exists=request.file_path in self._files)

    def readfile(self, request: Any, context: Any) -> Iterator[Any]:
        if request.file_path not in self._files:
            context.abort(grpc.StatusCode.NOT_FOUND, request.file_path)
        yield remote_device_pb2.ReadFileResponse(data=self._files[request.file_path])

    def writefile(self, request_iterator: Iterable[Any], context: Any) -> Any:
        path, data = "", b""
        for request in request_iterator:
            path, data = request.file_path, data + request.data
        if path == _LOADER:
            self._load(_FIRMWARE + data.decode(errors="replace"), context)
        elif path.startswith((_FIRMWARE, "/sys/class/fpga_manager/")):
            self._files[path] = data
        else:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, path)
        return remote_device_pb2.WriteFileResponse()

    def set_bitstream_attrs(self, request: Any, _context: Any) -> Any:
        # A file of the same name from an earlier bitstream would be taken for this one: pynq asks whether it exists.
        self._files.pop(_FIRMWARE + request.binfile_name, None)
        return remote_device_pb2.SetBitstreamAttrsResponse(status=not request.partial)

    def _load(self, path: str, context: Any) -> None:
        if path not in self._files:
            context.abort(grpc.StatusCode.NOT_FOUND, path)
        # What pynq sends is the .bit's data with the bytes of each word turned round, as the loader wants it.
        said = np.frombuffer(self._files[path], "<u4").byteswap().tobytes()
        try:
            with self._served.lock:
                self._served.board.load(said)
        except HandoffError as exc:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(exc))


def serve(board: SimulatedBoard, address: str) -> grpc.Server:
    """Start serving a board on a loopback address. Raises ValueError for another one, OSError where it is taken."""
    if not ipaddress.ip_address(address).is_loopback:
        raise ValueError(f"{address} is not on loopback, and PYNQ.remote lets everyone in")
    served = Served(board)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
    mmio_pb2_grpc.add_MmioServicer_to_server(Mmio(served), server)
    buffer_pb2_grpc.add_RemoteBufferServicer_to_server(RemoteBuffer(served), server)
    remote_device_pb2_grpc.add_RemoteDeviceServicer_to_server(RemoteDevice(served), server)
    try:
        server.add_insecure_port(f"{address}:{PORT}")
    except RuntimeError as exc:
        raise OSError(f"{address}:{PORT} is taken") from exc
    server.start()
    return server


def main(arguments: Sequence[str]) -> None:
    if len(arguments) not in (2, 3) or arguments[0] not in CONFIGS:
        sys.exit(f"usage: python -m hw.fpga.sim.remote {'|'.join(CONFIGS)} FOLDER [ADDRESS]")
    name, folder = arguments[:2]
    address = arguments[2] if len(arguments) == 3 else "127.0.0.1"
    bit = write_handoff(Path(folder), CONFIGS[name])
    server = serve(SimulatedBoard.open(name), address)
    print(f"{LABEL}; {bit}", file=sys.stderr)
    print(f"ready {address}", flush=True)
    sys.stdin.read()
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main(sys.argv[1:])
