"""The worker's service for tensor models: messages in, messages out, on the null model and on fakes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_rt.backends.base import TensorSession
from edge_rt.engine.arrays import to_tensor
from edge_rt.engine.infer import Infer
from edge_rt.engine.pipeline import Pipeline
from edge_rt.engine.tensors import TensorEngine, TensorSettings
from edge_rt.errors import (
    BackendLoadError,
    BackendStepError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
    UnsupportedFeatureError,
    from_wire,
)
from edge_rt.tensor_types import (
    PERMIT,
    WRITTEN,
    MediaAnswer,
    MediaRequest,
    NodePlacement,
    Tensor,
    TensorModelInfo,
    TensorRequest,
)
from edge_rt.worker import channel
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.tensors import Service, serve
from tests.patience import PATIENCE_S, until
from tests.unit.engine.tensor_sessions import STATEFUL, WatchedSession, alone, rows, session
from tests.unit.engine.test_tensors import STATE
from tests.unit.worker.parent import Parent, on_thread

NULL = Load(model="m", variant="", path="", quant="none", backend="null", n_ctx=0, tensor=TensorLoad(max_batch=4))


class FakePipeline:
    """Asks the model as its test says."""

    task = "fake"

    def __init__(self, run: Callable[[MediaRequest, Infer], MediaAnswer]) -> None:
        self.run = run


class HeldPipeline(FakePipeline):
    """Begins, and asks the model when it may go on."""

    def __init__(self) -> None:
        super().__init__(self._ask)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _ask(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        self.begun.set()
        self.go_on.wait(PATIENCE_S)
        infer({"x": rows(1)})
        return MediaAnswer(task="fake")


def running(
    engine: TensorEngine,
    pipeline: Pipeline | None = None,
    substitute: Callable[[], str] = lambda: "",
    info: Callable[[], TensorModelInfo] | None = None,
) -> AbstractContextManager[tuple[Parent, list[bool]]]:
    return on_thread(
        lambda out: Service(out, engine, pipeline, lambda: 77, place="null:null", substitute=substitute, info=info),
        engine,
    )


def served(
    made: TensorSession, pipeline: Pipeline | None = None, **settings: Any
) -> AbstractContextManager[tuple[Parent, list[bool]]]:
    return running(TensorEngine(made, TensorSettings(**settings)), pipeline)


def tensors(request_id: str, value: float = 1.0, **fields: Any) -> TensorRequest:
    return TensorRequest(id=request_id, model="m", inputs=(to_tensor("x", rows(value)),), **fields)


def media(request_id: str, **fields: Any) -> MediaRequest:
    return MediaRequest(id=request_id, model="m", data=b"file", **fields)


def failure(message: channel.FromWorker | None) -> Any:
    assert isinstance(message, channel.Failed), message
    return from_wire(message.code, message.fields)


def ended(results: list[bool]) -> None:
    """Wait until the service has ended by itself."""
    until(lambda: results)


def test_a_request_is_answered_with_the_models_outputs() -> None:
    with served(session()) as (parent, _):
        parent.infer(tensors("r", 5))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert message.id == "r"
        expected = alone("", {"x": rows(5)})["y"]
        assert message.tensors() == (Tensor(name="y", datatype="FP32", shape=(1, 4), data=expected.tobytes()),)
        assert message.place == "null:null"
        assert message.timings.batch_size == 1


def test_an_answer_is_written_to_the_client_that_was_lent_or_told_to_the_front_process() -> None:
    expected = alone("", {"x": rows(5)})["y"].tobytes()
    right = (channel.SentTensor("y", "FP32", (1, 4), len(expected)),)
    wrong = (channel.SentTensor("y", "FP32", (1, 5), len(expected)),)
    client, connection = socket.socketpair()
    permit = os.eventfd(0, os.EFD_NONBLOCK)
    with served(session()) as (parent, _), client, connection:
        connection.setblocking(False)
        socket.send_fds(parent.sock, [channel.encode(channel.Lend(3))], [connection.fileno(), permit])

        def ask(number: int, outputs: tuple[channel.SentTensor, ...], n_permits: int) -> channel.Inferred:
            os.eventfd_write(permit, n_permits)
            request, reply = tensors("r", 5), channel.SentReply(number, b"head ", outputs)
            attached = [tensor.data for tensor in request.inputs]
            frame = channel.encode(channel.Infer.of(request, "r", reply), attached)
            parent.sock.sendall(b"".join((frame, *attached)))
            message = parent.skip_figures()
            assert isinstance(message, channel.Inferred)
            return message

        written = ask(3, right, 1)
        assert (written.n_written, written.sent) == (len(b"head ") + len(expected), ())
        assert client.recv(1000) == b"head " + expected
        for number, outputs, n_permits in ((3, right, 0), (3, wrong, 1), (4, right, 0)):
            told = ask(number, outputs, n_permits)
            assert (told.n_written, told.tensors()[0].data) == (0, expected)
        assert os.eventfd_read(permit) == PERMIT | WRITTEN  # the wrong one's is still there
        with pytest.raises(BlockingIOError):
            client.recv(1, socket.MSG_DONTWAIT)
        connection.close()
        parent.send(channel.GiveBack(3))
        assert client.recv(1) == b""
        assert ask(3, right, 1).n_written == 0
    os.close(permit)


def test_what_the_cpu_has_computed_instead_names_it_and_is_not_written_as_the_devices() -> None:
    expected = alone("", {"x": rows(5)})["y"].tobytes()
    client, connection = socket.socketpair()
    permit = os.eventfd(PERMIT, os.EFD_NONBLOCK)
    engine = TensorEngine(session(), TensorSettings())
    with running(engine, substitute=lambda: "onnx_cpu:cpu") as (parent, _), client, connection:
        connection.setblocking(False)
        socket.send_fds(parent.sock, [channel.encode(channel.Lend(3))], [connection.fileno(), permit])
        request = tensors("r", 5)
        reply = channel.SentReply(3, b"head that names the device", (channel.SentTensor("y", "FP32", (1, 4), 16),))
        attached = [tensor.data for tensor in request.inputs]
        parent.sock.sendall(b"".join((channel.encode(channel.Infer.of(request, "r", reply), attached), *attached)))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert (message.n_written, message.tensors()[0].data) == (0, expected)
        assert message.answer(place="npu_qnn:htp").place == "onnx_cpu:cpu"
        with pytest.raises(BlockingIOError):
            client.recv(1, socket.MSG_DONTWAIT)
    os.close(permit)


def test_a_device_that_is_back_is_told_beside_the_figures_and_once() -> None:
    made = session()
    infos = [made.info]
    back = replace(made.info, placement=(NodePlacement(provider="NPU", n_nodes=1, kinds=(("Conv", 1),)),))
    with running(TensorEngine(made, TensorSettings()), info=lambda: infos[-1]) as (parent, _):
        parent.infer(tensors("a"))
        assert isinstance(parent.skip_figures(), channel.Inferred)
        infos.append(back)
        parent.infer(tensors("b"))
        assert isinstance(parent.skip_figures(), channel.Inferred)
        assert parent.skip_figures() == channel.Described(back)
        parent.infer(tensors("c"))
        assert isinstance(parent.skip_figures(), channel.Inferred)


def test_inputs_are_read_where_they_lie_in_lent_memory() -> None:
    memory = os.memfd_create("test")
    os.pwrite(memory, b"head" + rows(5).tobytes() + rows(7).tobytes(), 0)
    with served(session()) as (parent, _):
        socket.send_fds(parent.sock, [channel.encode(channel.LendMemory(8))], [memory])

        def ask(number: int, start: int) -> channel.FromWorker | None:
            parent.send(channel.Infer.of(tensors("r", 1), "r", None, (number, start)))
            return parent.skip_figures()

        for value, start in ((5, 4), (7, 4 + rows(5).nbytes), (5, 4)):
            told = ask(8, start)
            assert isinstance(told, channel.Inferred)
            assert told.tensors()[0].data == alone("", {"x": rows(value)})["y"].tobytes()
        assert isinstance(failure(ask(8, 4 + rows(5).nbytes + 1)), InvalidRequestError)  # it ends before
        assert isinstance(failure(ask(9, 4)), BackendStepError)
        parent.send(channel.GiveBack(8))
        assert isinstance(failure(ask(8, 4)), BackendStepError)
    os.close(memory)


def test_a_client_that_is_gone_leaves_the_answer_to_the_front_process() -> None:
    expected = alone("", {"x": rows(5)})["y"].tobytes()
    client, connection = socket.socketpair()
    permit = os.eventfd(1, os.EFD_NONBLOCK)
    with served(session()) as (parent, _), connection:
        connection.setblocking(False)
        socket.send_fds(parent.sock, [channel.encode(channel.Lend(3))], [connection.fileno(), permit])
        client.close()
        request = tensors("r", 5)
        reply = channel.SentReply(3, b"head ", (channel.SentTensor("y", "FP32", (1, 4), len(expected)),))
        attached = [tensor.data for tensor in request.inputs]
        frame = channel.encode(channel.Infer.of(request, "r", reply), attached)
        parent.sock.sendall(b"".join((frame, *attached)))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert (message.n_written, message.tensors()[0].data) == (0, expected)
        assert os.eventfd_read(permit) == 1
    os.close(permit)


def test_a_request_that_comes_alone_is_computed_by_who_read_it() -> None:
    computed_by: list[str] = []
    watched = WatchedSession(on_run=lambda _: computed_by.append(threading.current_thread().name))
    engine = TensorEngine(watched, TensorSettings(), clock=lambda: 0.0)
    with running(engine) as (parent, _):
        for i in range(3):
            parent.infer(tensors(str(i)))
            assert isinstance(parent.skip_figures(), channel.Inferred)
            until(lambda: not engine.stats().running)  # it is inside a little longer than its answer takes
    # How long one takes is known from the first only, and one that took long is given to the engine's own thread.
    assert computed_by[0] != "reader"
    assert computed_by[1:] == ["reader", "reader"]


def test_byte_strings_go_over_the_clerks() -> None:
    with served(session("inputs=t:BYTES:-1,outputs=u:BYTES:-1")) as (parent, _):
        sent = np.array([b"a", b"\xff"], object)
        parent.infer(TensorRequest(id="r", model="m", inputs=(to_tensor("t", sent),)))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert message.tensors()[0].shape == (2,)


def test_bad_requests_are_told_and_the_next_is_served() -> None:
    lies = Tensor(name="x", datatype="FP32", shape=(1, 4), data=b"short")
    bad_bytes = Tensor(name="x", datatype="BYTES", shape=(1,), data=b"\xff\xff\xff\xff")
    with served(session()) as (parent, _):
        for tensor in (lies, bad_bytes, to_tensor("z", rows(1))):
            parent.infer(TensorRequest(id="bad", model="m", inputs=(tensor,)))
            assert isinstance(failure(parent.skip_figures()), InvalidRequestError)
        parent.send(channel.Tokenize("t", "x", False, False))
        assert isinstance(failure(parent.skip_figures()), UnsupportedFeatureError)
        parent.send(channel.Look(media("m")))
        assert "no pipeline" in str(failure(parent.skip_figures()))
        parent.infer(tensors("good"))
        assert isinstance(parent.skip_figures(), channel.Inferred)


def test_a_pipeline_infers_on_a_clerk_and_its_failures_are_told() -> None:
    def run(request: MediaRequest, infer: Infer) -> MediaAnswer:
        if request.id == "odd":
            raise KeyError("odd")
        if request.id == "bad":
            raise InvalidRequestError(param="data", problem="is no picture")
        made = infer({"x": rows(3)})
        return MediaAnswer(task="fake", embedding=tuple(made.outputs["y"][0].tolist()), timings=made.timings)

    with served(session(), FakePipeline(run)) as (parent, _):
        parent.send(channel.Look(media("odd")))
        assert isinstance(failure(parent.skip_figures()), BackendStepError)
        parent.send(channel.Look(media("bad")))
        assert isinstance(failure(parent.skip_figures()), InvalidRequestError)
        parent.send(channel.Look(media("late", deadline_s=1e-9)))
        assert isinstance(failure(parent.skip_figures()), DeadlineError)
        parent.send(channel.Look(media("good")))
        message = parent.skip_figures()
        assert isinstance(message, channel.Found)
        assert message.answer.embedding == tuple(alone("", {"x": rows(3)})["y"][0].tolist())
        assert message.answer.place == "null:null"


def test_streams_of_a_pipeline_are_its_requests_own_and_end_with_it() -> None:
    def run(request: MediaRequest, infer: Infer) -> MediaAnswer:
        answers = [infer({"x": rows(value)}, stream="s").outputs["y"][0, 0].item() for value in (1, 2)]
        return MediaAnswer(task="fake", embedding=tuple(answers))

    with served(session(STATEFUL), FakePipeline(run), state=STATE) as (parent, _):
        found = []
        for request_id in ("a", "b"):
            parent.send(channel.Look(media(request_id)))
            message = parent.skip_figures()
            assert isinstance(message, channel.Found)
            found.append(message.answer.embedding)
        parent.infer(tensors("r", 2, stream="s"))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert message.n_stream_calls == 1
    assert found[0] == found[1]


def test_a_pipeline_whose_stream_was_evicted_fails_rather_than_err() -> None:
    def run(request: MediaRequest, infer: Infer) -> MediaAnswer:
        for stream in ("a", "b", "a"):
            infer({"x": rows(1)}, stream=stream)
        return MediaAnswer(task="fake")

    with served(session(STATEFUL), FakePipeline(run), state=STATE, max_streams=1) as (parent, _):
        parent.send(channel.Look(media("r")))
        assert isinstance(failure(parent.skip_figures()), OverloadedError)


def test_a_cancelled_pipeline_stops_at_its_next_inference_and_says_nothing() -> None:
    begun, ended = threading.Event(), threading.Event()

    def run(request: MediaRequest, infer: Infer) -> MediaAnswer:
        begun.set()
        try:
            while True:
                infer({"x": rows(1)})
        finally:
            ended.set()

    with served(session(), FakePipeline(run)) as (parent, _):
        parent.send(channel.Look(media("endless")))
        assert begun.wait(PATIENCE_S)
        parent.send(channel.Cancel("endless"))
        assert ended.wait(PATIENCE_S)
        parent.infer(tensors("next"))
        message = parent.skip_figures()
        assert isinstance(message, channel.Inferred)
        assert message.id == "next"


def test_what_waits_for_a_clerk_can_be_cancelled() -> None:
    go_on, seen = threading.Event(), []

    def run(request: MediaRequest, infer: Infer) -> MediaAnswer:
        seen.append(request.id)
        go_on.wait(PATIENCE_S)
        return MediaAnswer(task="fake")

    with served(session(), FakePipeline(run)) as (parent, _):
        parent.send(*(channel.Look(media(name)) for name in "abcd"), channel.Cancel("c"))
        parent.infer(tensors("r"))
        assert isinstance(parent.skip_figures(), channel.Inferred)  # so the cancellation has been taken
        go_on.set()
        found = {message.id for _ in range(3) if isinstance(message := parent.skip_figures(), channel.Found)}
    assert found == set("abd")
    assert sorted(seen) == ["a", "b", "d"]


def test_shutdown_lets_pipelines_finish_and_then_refuses() -> None:
    pipeline = HeldPipeline()
    with served(session(), pipeline) as (parent, results):
        parent.send(channel.Look(media("r")))
        assert pipeline.begun.wait(PATIENCE_S)
        parent.send(channel.Shutdown(PATIENCE_S))
        pipeline.go_on.set()
        assert isinstance(parent.skip_figures(), channel.Found)
        ended(results)
    assert results == [True]


def test_shutdown_without_time_ends_at_once() -> None:
    pipeline = HeldPipeline()
    with served(session(), pipeline) as (parent, results):
        parent.send(channel.Look(media("r")))
        assert pipeline.begun.wait(PATIENCE_S)
        parent.send(channel.Shutdown(0.0))
        ended(results)
        pipeline.go_on.set()
        assert isinstance(failure(parent.skip_figures()), ShuttingDownError)
    assert results == [True]


def test_a_vanished_front_process_ends_the_service() -> None:
    with served(session()) as (parent, results):
        parent.sock.shutdown(socket.SHUT_RDWR)
    assert results == [False]


@contextmanager
def serving(load: Load, **fakes: Any) -> Iterator[tuple[Parent, list[int]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        statuses: list[int] = []
        assert load.tensor is not None
        tensor = load.tensor
        out = WorkerChannel(theirs)
        thread = threading.Thread(target=lambda: statuses.append(serve(out, load, tensor, lambda: 7, **fakes)))
        thread.start()
        yield Parent(ours), statuses
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_serve_loads_tells_and_serves_until_shutdown() -> None:
    with serving(NULL) as (parent, statuses):
        ready = parent.receive()
        assert isinstance(ready, channel.TensorReady)
        assert (ready.info.max_batch, ready.info.is_stateful, ready.info.task) == (4, False, "")
        parent.infer(tensors("r"))
        assert isinstance(parent.skip_figures(), channel.Inferred)
        parent.send(channel.Shutdown(0.0))
    assert statuses == [0]


def test_a_load_that_fails_is_told() -> None:
    def odd(load: Load) -> TensorSession:
        raise KeyError("odd")

    with serving(NULL, load_session=odd) as (parent, statuses):
        assert "KeyError" in str(failure(parent.receive()))
    with serving(
        Load(**{name: getattr(NULL, name) for name in NULL.__struct_fields__} | {"tensor": TensorLoad(state=STATE)})
    ) as (parent, _):
        assert isinstance(failure(parent.receive()), BackendLoadError)
    assert statuses == [1]


def test_the_warm_up_is_done_before_it_is_ready() -> None:
    watched = WatchedSession()
    with serving(NULL, load_session=lambda _: watched) as (parent, _):
        assert isinstance(parent.receive(), channel.TensorReady)
        assert watched.runs == [1, 1]
        parent.send(channel.Shutdown(0.0))
