"""A worker's service on a thread, and the front process' end of its channel."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge_rt.tensor_types import TensorRequest
from edge_rt.worker import channel
from edge_rt.worker.channel import FrameReader, FromWorker, ToWorker, encode
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.service import Engine, Service
from tests.patience import PATIENCE_S


class Parent:
    """The front process' end of the channel, blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self.sock = sock
        self._reader: FrameReader[FromWorker] = FrameReader(FromWorker)
        self._ready: list[FromWorker] = []

    def send(self, *messages: ToWorker) -> None:
        self.sock.sendall(b"".join(encode(message) for message in messages))

    def infer(self, request: TensorRequest) -> None:
        attached = [tensor.data for tensor in request.inputs]
        self.sock.sendall(b"".join((encode(channel.Infer.of(request, request.id), attached), *attached)))

    def receive(self) -> FromWorker | None:
        while not self._ready:
            data = self.sock.recv(65536)
            if not data:
                return None
            self._ready += self._reader.feed(data)
        return self._ready.pop(0)

    def skip_figures(self) -> FromWorker | None:
        while isinstance(message := self.receive(), channel.Stats):
            pass
        return message


@contextmanager
def on_thread(make: Callable[[WorkerChannel], Service], engine: Engine) -> Iterator[tuple[Parent, list[bool]]]:
    """Run a service; gives its other end, and what run has given when it is over."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        out = WorkerChannel(theirs)
        service = make(out)
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(service.run(n_clerks=2)))
        thread.start()
        yield Parent(ours), results
        engine.stop(0)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        out.flush()
