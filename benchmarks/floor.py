"""What the way costs by itself: the same bytes through as many processes as edge_rt has, in blocking reads and writes.

A client, a front that passes on what it reads, and a worker that either computes with onnxruntime called directly or
sleeps. No HTTP, no event loop, no threads, no checks: what is left is the system's, that of waking three processes and
copying between them, and no server of this shape can cost less in Python.

python floor.py front PORT_FD WORKER_FD N_BYTES N_ANSWER | worker FD N_BYTES N_ANSWER FILE INPUT SHAPE SLEEP_S
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tensor_models

HOPS = ("client to front", "front to worker", "computing", "worker to front", "front to client")
_STAMP = struct.Struct("<d")  # CLOCK_MONOTONIC is one for all processes


def read(sock: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer, or end this process when the other end is gone."""
    at = 0
    while at < len(buffer):
        try:
            n_bytes = sock.recv_into(buffer[at:])
        except ConnectionResetError:
            n_bytes = 0
        if not n_bytes:
            sys.exit(0)
        at += n_bytes


class Floor:
    """The three processes, this one being the client. sleep_s makes the worker sleep instead of computing."""

    def __init__(self, name: str, path: Path, *, n_answer: int, sleep_s: float = 0.0) -> None:
        model = tensor_models.MODELS[name]
        ((input_name, array),) = model.feeds().items()
        self._request = array.tobytes()
        self._answer = memoryview(bytearray(n_answer + (len(HOPS) - 1) * _STAMP.size))
        shape = ",".join(map(str, array.shape))
        self._sock, front = socket.socketpair()
        to_worker, worker = socket.socketpair()
        sizes = [str(len(self._request)), str(n_answer)]
        self._processes = [
            _start("front", [front, to_worker], sizes),
            _start("worker", [worker], [*sizes, str(path), input_name, shape, array.dtype.str, str(sleep_s)]),
        ]
        for sock in (front, to_worker, worker):
            sock.close()

    def infer(self) -> list[float]:
        """Ask once; give the seconds of each of HOPS."""
        begun_s = time.monotonic()
        self._sock.sendall(self._request)
        read(self._sock, self._answer)
        stamps = [begun_s, *(s for (s,) in _STAMP.iter_unpack(self._answer[-(len(HOPS) - 1) * _STAMP.size :]))]
        stamps.append(time.monotonic())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sock.close()
        for process in self._processes:
            process.wait()


def _start(role: str, socks: Sequence[socket.socket], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    fds = [sock.fileno() for sock in socks]
    command = [sys.executable, __file__, role, *map(str, fds), *arguments]
    return subprocess.Popen(command, pass_fds=fds, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def front(client_fd: str, worker_fd: str, n_bytes: str, n_answer: str) -> None:
    client, worker = (socket.socket(fileno=int(fd)) for fd in (client_fd, worker_fd))
    request = memoryview(bytearray(int(n_bytes) + _STAMP.size))
    answer = memoryview(bytearray(int(n_answer) + (len(HOPS) - 1) * _STAMP.size))
    while True:
        read(client, request[: -_STAMP.size])
        _STAMP.pack_into(request, int(n_bytes), time.monotonic())
        worker.sendall(request)
        read(worker, answer[: -_STAMP.size])
        _STAMP.pack_into(answer, len(answer) - _STAMP.size, time.monotonic())
        client.sendall(answer)


def worker(
    fd: str, n_bytes: str, n_answer: str, path: str, input_name: str, shape: str, dtype: str, sleep_s: str
) -> None:
    import numpy as np
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    sock = socket.socket(fileno=int(fd))
    request = memoryview(bytearray(int(n_bytes) + _STAMP.size))
    pixels = np.frombuffer(request[: int(n_bytes)], dtype).reshape([int(n) for n in shape.split(",")])
    session.run(None, {input_name: pixels})
    while True:
        read(sock, request)
        arrived_s = time.monotonic()
        if float(sleep_s):
            time.sleep(float(sleep_s))
            answer = bytes(int(n_answer))
        else:
            answer = session.run(None, {input_name: pixels})[0].tobytes()
        stamps = request[int(n_bytes) :].tobytes() + _STAMP.pack(arrived_s) + _STAMP.pack(time.monotonic())
        sock.sendall(answer + stamps)


if __name__ == "__main__":
    {"front": front, "worker": worker}[sys.argv[1]](*sys.argv[2:])
