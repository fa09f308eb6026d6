from __future__ import annotations

import socket
import threading

from edge_rt.worker import channel
from edge_rt.worker.channel import FrameReader, FromWorker, Load, encode
from edge_rt.worker.main import serve
from edge_rt.worker.own_end import WorkerChannel
from tests.patience import PATIENCE_S


def first_answer(message: channel.ToWorker) -> tuple[FromWorker | None, list[int]]:
    """Send a worker its first message; give its first answer, None if it ends without one, and its exit status."""
    ours, theirs = socket.socketpair()
    status: list[int] = []
    with ours, theirs:
        thread = threading.Thread(target=lambda: status.append(serve(WorkerChannel(theirs))))
        thread.start()
        ours.settimeout(PATIENCE_S)
        ours.sendall(encode(message))
        if isinstance(message, Load):
            reader: FrameReader[FromWorker] = FrameReader(FromWorker)
            while not (answers := reader.received(ours.recv_into(reader.room()))):
                pass
            ours.sendall(encode(channel.Shutdown(0.0)))
            answer: FromWorker | None = answers[0]
        else:
            answer = None
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return answer, status


def test_a_language_model_gets_the_service_for_tokens() -> None:
    load = Load(model="m", variant="", path="", quant="none", backend="null", n_ctx=64, n_seq_max=2)
    answer, status = first_answer(load)
    assert isinstance(answer, channel.Ready)
    assert status == [0]


def test_a_tensor_model_gets_the_service_for_tensors() -> None:
    load = Load(model="m", variant="", path="", quant="none", backend="abacus", n_ctx=8, tensor=channel.TensorLoad())
    answer, status = first_answer(load)
    assert isinstance(answer, channel.Failed)
    assert answer.code == "backend_unavailable"
    assert status == [1]


def test_a_worker_that_is_not_told_what_to_load_ends() -> None:
    assert first_answer(channel.Shutdown(0.0)) == (None, [1])
