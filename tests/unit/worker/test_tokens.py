from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from edge_rt.backends.base import Backend, LoadOptions, MemoryNeed, ModelFile, TokenSession
from edge_rt.backends.null import NullBackend
from edge_rt.devices.base import known
from edge_rt.engine.sequence import Sink
from edge_rt.errors import BackendUnavailableError, ContextBeyondTrainingError, InvalidRequestError, ModelTooLargeError
from edge_rt.types import Chunk, EngineStats, GenerateRequest, ResponseFormat, Tool
from edge_rt.worker import channel
from edge_rt.worker.channel import Load
from edge_rt.worker.draft import FoundDraft
from edge_rt.worker.own_end import WorkerChannel
from edge_rt.worker.service import STATS_INTERVAL_S
from edge_rt.worker.tokens import Engine, Service, load_session, serve
from tests import byte_model
from tests.patience import PATIENCE_S
from tests.unit.worker.fake_child import LAST, request
from tests.unit.worker.parent import Parent, on_thread

NULL = Load(model="m", variant="", path="", quant="none", backend="null", n_ctx=64, n_seq_max=2, memory_margin_bytes=50)


class FakeEngine:
    """Notes what it is asked; the test answers through the sinks. submit waits until the test lets it through."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.calls: SimpleQueue[str] = SimpleQueue()
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.figures = EngineStats()
        self.crash: Exception | None = None
        self._stop = threading.Event()
        self.may_compile, self.is_compiling = threading.Event(), threading.Event()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self.may_submit.wait(PATIENCE_S)
        if request.response_format is not None or request.tools:
            self.is_compiling.set()
            self.may_compile.wait(PATIENCE_S)
        if request.prompt == "odd":
            raise KeyError("odd")
        self.sinks[request.id] = sink
        self.calls.put(f"submit {request.id}")

    def cancel(self, request_id: str) -> None:
        self.calls.put(f"cancel {request_id}")

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        self.calls.put(f"advise {n_prefill_threads} {n_decode_threads}")

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        return [len(text), int(special), int(add_bos)]

    def prompt_ids(self, request: GenerateRequest) -> list[int]:
        return list((request.prompt or "").encode())

    def detokenize(self, token_ids: list[int]) -> str:
        raise InvalidRequestError(param="tokens", problem="outside the vocabulary")

    def stats(self) -> EngineStats:
        return self.figures

    def run(self) -> None:
        self._stop.wait(PATIENCE_S)
        if self.crash is not None:
            raise self.crash

    def stop(self, drain_s: float) -> None:
        self.calls.put(f"stop {drain_s:g}")
        self._stop.set()

    def heard(self) -> str:
        return self.calls.get(timeout=PATIENCE_S)


def served(
    engine: FakeEngine, clock: Callable[[], float] = time.monotonic
) -> AbstractContextManager[tuple[Parent, list[bool]]]:
    return on_thread(lambda out: Service(out, engine, lambda: 77, clock=clock), engine)


def test_requests_and_answers_pass_through() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        parent.send(channel.Generate(request("r")))
        assert engine.heard() == "submit r"
        engine.sinks["r"].chunk(Chunk(text="a"))
        engine.sinks["r"].chunk(LAST)
        assert parent.skip_figures() == channel.ChunkOut("r", Chunk(text="a"))
        assert parent.skip_figures() == channel.ChunkOut("r", LAST)
        engine.sinks["r"].failed(InvalidRequestError(param="p", problem="q"))
        assert parent.skip_figures() == channel.Failed("r", "invalid_request", {"param": "p", "problem": "q"})
        parent.send(channel.Tokenize("1", "abc", special=True, add_bos=False))
        assert parent.skip_figures() == channel.TokensOut("1", [3, 1, 0])
        parent.send(channel.ReadPrompt(GenerateRequest(id="3", model="m", prompt="ab")))
        assert parent.skip_figures() == channel.TokensOut("3", [97, 98])
        parent.send(channel.Detokenize("2", [9]))
        answer = parent.skip_figures()
        assert isinstance(answer, channel.Failed)
        assert (answer.id, answer.code) == ("2", "invalid_request")


def test_cancel_reaches_the_engine_while_a_long_prompt_is_being_prepared() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        parent.send(channel.Generate(request("running")))
        assert engine.heard() == "submit running"
        engine.may_submit.clear()
        parent.send(channel.Generate(request("long")), channel.Cancel("running"))
        assert engine.heard() == "cancel running"
        engine.may_submit.set()
        assert engine.heard() == "submit long"


def test_a_grammar_that_takes_long_holds_up_no_other_prompt() -> None:
    engine = FakeEngine()
    form = ResponseFormat(kind="json_object")
    with served(engine) as (parent, _):
        parent.send(channel.Generate(replace(request("formed"), response_format=form)))
        parent.send(channel.Generate(replace(request("called"), tools=(Tool(name="f"),))))
        parent.send(channel.Generate(request("plain")))
        assert engine.heard() == "submit plain"
        assert engine.is_compiling.wait(PATIENCE_S)  # one that waits is dropped, and not heard of
        parent.send(channel.Cancel("called"), channel.Cancel("formed"), channel.Cancel("unknown"))
        assert engine.heard() == "cancel unknown"  # so the others have been taken, too
        engine.may_compile.set()
        assert [engine.heard() for _ in range(2)] == ["submit formed", "cancel formed"]
        parent.send(channel.Generate(replace(request("later"), response_format=form)))
        assert engine.heard() == "submit later"  # what nobody wants is not compiled


def test_a_request_cancelled_before_the_engine_knows_it_is_cancelled_once_it_does() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        engine.may_submit.clear()
        parent.send(channel.Generate(request("r")), channel.Cancel("r"), channel.Cancel("unknown"))
        assert engine.heard() == "cancel unknown"  # so the first cancellation has been taken, too
        engine.may_submit.set()
        assert engine.heard() == "submit r"
        assert engine.heard() == "cancel r"


def test_an_unforeseen_failure_of_one_request_ends_only_that_request() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        parent.send(channel.Generate(replace(request("bad"), prompt="odd")), channel.Generate(request("good")))
        answer = parent.skip_figures()
        assert isinstance(answer, channel.Failed)
        assert (answer.id, answer.fields) == ("bad", {"reason": "KeyError: 'odd'"})
        assert engine.heard() == "submit good"


def test_an_answer_too_large_for_a_frame_is_an_error_of_that_request() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        parent.send(channel.Generate(request("r")))
        assert engine.heard() == "submit r"
        engine.sinks["r"].chunk(Chunk(text="x" * (channel.MAX_FRAME_BYTES + 1)))
        answer = parent.skip_figures()
        assert isinstance(answer, channel.Failed)
        assert "cannot be sent" in answer.fields["reason"]


def test_figures_come_at_once_after_the_load_then_only_while_busy() -> None:
    now_s = 0.0
    engine = FakeEngine()
    with served(engine, lambda: now_s) as (parent, _):
        assert parent.receive() == channel.Stats(EngineStats(rss_bytes=77))
        for request_id in "ab":  # at b the reader has set the time for the next figures
            parent.send(channel.Cancel(request_id))
            assert engine.heard() == f"cancel {request_id}"
        engine.figures = EngineStats(running=1, steps_total=5)
        now_s += STATS_INTERVAL_S
        parent.send(channel.Cancel("c"))
        # The next message is of the time after: none came before it, although the worker was spoken to.
        assert parent.receive() == channel.Stats(EngineStats(running=1, steps_total=5, rss_bytes=77))


def test_the_figures_of_an_answer_come_before_its_end() -> None:
    engine = FakeEngine()
    with served(engine, lambda: 0.0) as (parent, _):
        parent.receive()  # those of the load
        parent.send(channel.Generate(request("r")))
        assert engine.heard() == "submit r"
        engine.figures = EngineStats(completion_tokens_total=2)
        engine.sinks["r"].chunk(Chunk(text="a"))
        engine.sinks["r"].chunk(LAST)
        assert parent.receive() == channel.ChunkOut("r", Chunk(text="a"))
        assert parent.receive() == channel.Stats(EngineStats(completion_tokens_total=2, rss_bytes=77))
        assert parent.receive() == channel.ChunkOut("r", LAST)


def test_shutdown_ends_the_service_in_order() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, results):
        parent.send(channel.Shutdown(1.5))
        assert engine.heard() == "stop 1.5"
    assert results == [True]


def test_a_vanished_front_process_ends_the_service() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, results):
        parent.sock.shutdown(socket.SHUT_RDWR)
        assert engine.heard() == "stop 0"
    assert results == [False]


def test_a_front_process_that_talks_nonsense_ends_the_service() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, results):
        parent.sock.sendall(b"\xff" * 8)
        assert engine.heard() == "stop 0"
    assert results == [False]


# serve and load_session


@contextmanager
def serving(
    load: Load,
    *,
    load_session: Callable[[Load, FoundDraft | None], TokenSession] = load_session,
    make_engine: Callable[..., Engine],
) -> Iterator[tuple[Parent, list[int]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        status: list[int] = []
        out = WorkerChannel(theirs)
        thread = threading.Thread(
            target=lambda: status.append(
                serve(out, load, lambda: 0, load_session=load_session, make_engine=make_engine)
            )
        )
        thread.start()
        parent = Parent(ours)
        yield parent, status
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_serve_loads_reports_and_ends_with_zero() -> None:
    with serving(NULL, make_engine=lambda load, session, draft, idle_cores: FakeEngine()) as (parent, status):
        ready = parent.receive()
        assert isinstance(ready, channel.Ready)
        assert (ready.info.backend, ready.info.caps.n_ctx, ready.info.caps.n_seq_max) == ("null", 64, 2)
        parent.send(channel.Shutdown(0.0))
    assert status == [0]


def test_serve_reports_why_a_load_failed() -> None:
    load = Load(model="m", variant="", path="", quant="", backend="abacus", n_ctx=8)
    with serving(load, make_engine=lambda load, session, draft, idle_cores: FakeEngine()) as (parent, status):
        answer = parent.receive()
        assert isinstance(answer, channel.Failed)
        assert (answer.id, answer.code, answer.fields["backend"]) == ("", BackendUnavailableError.code, "abacus")
    assert status == [1]


def test_serve_reports_an_unforeseen_failure_of_a_load() -> None:
    def breaks(load: Load, draft: FoundDraft | None) -> TokenSession:
        raise ZeroDivisionError("oops")

    with serving(NULL, load_session=breaks, make_engine=lambda load, session, draft, idle_cores: FakeEngine()) as (
        parent,
        status,
    ):
        answer = parent.receive()
        assert isinstance(answer, channel.Failed)
        assert (answer.code, answer.fields["reason"]) == ("backend_load", "ZeroDivisionError: oops")
    assert status == [1]


class HungryBackend(NullBackend):
    loads = 0

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        return MemoryNeed(weights_bytes=100, kv_bytes=20, scratch_bytes=3)

    def load(self, file: ModelFile, options: LoadOptions) -> TokenSession:
        self.loads += 1
        return super().load(file, options)


def hungry(load: Load, available_bytes: int) -> tuple[HungryBackend, Callable[[], TokenSession]]:
    backend = HungryBackend()

    def find(name: str) -> Backend:
        assert name == "null"
        return backend

    return backend, lambda: load_session(load, find=find, available=lambda: known(available_bytes, "test"))


def test_the_memory_is_checked_before_the_back_end_loads() -> None:
    backend, load = hungry(NULL, 172)
    with pytest.raises(ModelTooLargeError) as caught:
        load()
    assert (caught.value.need_bytes, caught.value.have_bytes) == (123, 122)
    assert backend.loads == 0
    assert hungry(NULL, 173)[1]().caps.n_ctx == 64


def test_force_skips_the_memory_check() -> None:
    forced = Load(model="m", variant="", path="", quant="", backend="null", n_ctx=64, force=True)
    assert hungry(forced, 0)[1]().caps.n_ctx == 64


def test_a_context_beyond_training_is_refused_unless_forced(tmp_path: Path) -> None:
    path = str(byte_model.write(tmp_path / "m.gguf").path)  # trained on 512 tokens

    def load(n_ctx: int, *, force: bool = False) -> Callable[[], TokenSession]:
        asked = Load(model="m", variant="", path=path, quant="", backend="null", n_ctx=n_ctx, force=force)
        return hungry(asked, 10**9)[1]

    with pytest.raises(ContextBeyondTrainingError) as caught:
        load(513)()
    assert (caught.value.n_ctx, caught.value.n_ctx_train) == (513, 512)
    assert load(512)().caps.n_ctx == 512
    assert load(513, force=True)().caps.n_ctx == 513


def test_the_manifests_chat_template_overrides_the_files() -> None:
    own = Load(model="m", variant="", path="", quant="", backend="null", n_ctx=64, chat_template="{{ x }}")
    session = load_session(own)
    assert session.vocab.chat_template == "{{ x }}"
    assert session.info.has_chat_template
    assert load_session(NULL).vocab.chat_template not in (None, "{{ x }}")


def test_advice_reaches_the_engine() -> None:
    engine = FakeEngine()
    with served(engine) as (parent, _):
        parent.send(channel.Advise(4, 2), channel.Advise(None, None))
        assert [engine.heard(), engine.heard()] == ["advise 4 2", "advise None None"]
