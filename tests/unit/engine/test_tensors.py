"""The tensor engine's loop on the null model, whose answer depends on every value of its row."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.catalog.pipelines import StateTensor
from edge_rt.engine.calls import Call
from edge_rt.engine.tensors import TensorEngine, TensorSettings
from edge_rt.engine.waiting import Answer
from edge_rt.errors import (
    BackendLoadError,
    BackendStepError,
    DeadlineError,
    InvalidRequestError,
    ShuttingDownError,
)
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S
from tests.unit.engine.tensor_sessions import STATEFUL, Heard, WatchedSession, alone, call, rows, session

STATE = (StateTensor(input="s", output="t", shape=(1, 8)),)


def engine(watched: WatchedSession, clock: FakeClock | None = None, **settings: Any) -> TensorEngine:
    return TensorEngine(watched, TensorSettings(**({"max_batch": 8} | settings)), clock=clock or FakeClock())


def submit(target: TensorEngine, *calls: Call) -> list[Heard]:
    heard = [Heard() for _ in calls]
    for one, sink in zip(calls, heard, strict=True):
        target.submit(one, sink)
    return heard


def test_calls_are_joined_and_each_owner_gets_its_rows() -> None:
    watched = WatchedSession()
    target = engine(watched)
    calls = [call("a", 1), call("b", 2, 3), call("c", 4)]
    heard = submit(target, *calls)
    assert target.step()
    assert watched.runs == [4]
    for one, sink in zip(calls, heard, strict=True):
        assert sink.outputs is not None
        assert np.array_equal(sink.outputs["y"], alone("", one.feeds)["y"])
        assert sink.timings is not None
        assert sink.timings.batch_size == 4
    assert target.stats().step_rows[2] == target.stats().steps_total == 1
    assert target.stats().rows_total == 4


def test_what_differs_is_not_joined() -> None:
    watched = WatchedSession("inputs=x:FP32:-1x-1,outputs=y:FP32:-1x4+z:FP32:-1x4")
    target = engine(watched)
    others = [Call(id="w", feeds={"x": np.zeros((1, 5), np.float32)}), call("o", 1, outputs=("y",))]
    heard = submit(target, call("a", 1), *others, call("b", 1))
    while len(watched.runs) < 3:
        target.step()
    assert sorted(watched.runs) == [1, 1, 2]
    assert [set(sink.outputs or ()) for sink in heard] == [{"y", "z"}, {"y", "z"}, {"y"}, {"y", "z"}]


@pytest.mark.parametrize(
    "variant",
    ["inputs=x:FP32:1x4", "outputs=y:FP32:4", "inputs=x:FP32:-1x4+k:INT64:", "inputs=x:FP32:-1x4+k:FP32:2x-1"],
)
def test_a_model_without_rows_in_every_tensor_is_never_joined(variant: str) -> None:
    watched = WatchedSession(variant)
    target = engine(watched)
    assert target.max_batch == 1
    feeds = {"x": rows(1)} | (
        {"k": np.zeros((), np.int64)} if "k:INT64" in variant else {"k": np.zeros((2, 1), np.float32)}
    )
    feeds = {name: feeds[name] for name in [spec.name for spec in watched.inputs]}
    submit(target, Call(id="a", feeds=feeds), Call(id="b", feeds=feeds))
    target.step()
    target.step()
    assert len(watched.runs) == 2


def test_inputs_with_different_rows_are_computed_alone() -> None:
    watched = WatchedSession("inputs=x:FP32:-1x4+k:FP32:-1x4")
    target = engine(watched)
    feeds = {"x": rows(1), "k": rows(1, 2)}
    heard = submit(target, Call(id="a", feeds=feeds), Call(id="b", feeds=feeds))
    target.step()
    assert heard[0].outputs is not None
    assert heard[1].n_ends == 0


def test_a_bad_call_fails_at_once_and_never_meets_the_others() -> None:
    watched = WatchedSession()
    target = engine(watched)
    bad = [
        Call(id="b1", feeds={"x": np.zeros((1, 5), np.float32)}),
        Call(id="b2", feeds={"x": rows(1).astype("f8")}),
        Call(id="b3", feeds={}),
        call("b4", 1, outputs=("nothing",)),
        call("b5", 1, stream="s"),
    ]
    heard = submit(target, call("good", 1), *bad)
    assert [type(sink.error) for sink in heard] == [type(None)] + [InvalidRequestError] * 5
    target.step()
    assert watched.runs == [1]
    assert heard[0].outputs is not None


def test_a_call_of_many_rows_takes_no_more_memory_than_a_batch() -> None:
    watched = WatchedSession()
    target = engine(watched)
    (heard,) = submit(target, call("a", *range(21)))
    target.step()
    assert watched.runs == [8, 8, 5]
    assert heard.outputs is not None
    assert np.array_equal(heard.outputs["y"], alone("", {"x": rows(*range(21))})["y"])
    assert heard.timings is not None
    assert heard.timings.batch_size == 8


def test_a_model_that_loses_rows_of_a_long_call_fails_it() -> None:
    watched = WatchedSession()
    watched.cut_rows = 1
    target = engine(watched)
    (heard,) = submit(target, call("a", *range(21)))
    target.step()
    assert "7" in str(heard.error)


def test_when_a_batch_fails_only_the_culprit_does() -> None:
    def refuse_sevens(feeds: Any) -> None:
        if (feeds["x"] == 7).any():
            raise BackendStepError(reason="seven")

    watched = WatchedSession(on_run=refuse_sevens)
    target = engine(watched)
    heard = submit(target, call("a", 1), call("b", 7), call("c", 3))
    target.step()
    assert [sink.error is not None for sink in heard] == [False, True, False]
    assert heard[2].outputs is not None
    assert np.array_equal(heard[2].outputs["y"], alone("", {"x": rows(3)})["y"])
    assert watched.runs == [3, 1, 1, 1]


def test_what_nobody_foresaw_fails_its_call_and_not_the_engine() -> None:
    def odd(feeds: Any) -> None:
        if (feeds["x"] == 7).any():
            raise KeyError("odd")

    target = engine(WatchedSession(on_run=odd))
    heard = submit(target, call("a", 7))
    target.step()
    assert "KeyError" in str(heard[0].error)
    again = submit(target, call("b", 1))
    target.step()
    assert again[0].outputs is not None


def test_a_model_that_loses_rows_of_a_batch_has_each_call_computed_alone() -> None:
    watched = WatchedSession()
    watched.cut_rows = 1
    target = engine(watched)
    heard = submit(target, call("a", 1), call("b", 2))
    target.step()
    assert watched.runs == [2, 1, 1]
    assert [sink.n_ends for sink in heard] == [1, 1]


def test_a_sink_that_breaks_costs_the_others_nothing() -> None:
    class Broken(Heard):
        def answered(self, *args: Any, **kwargs: Any) -> None:
            raise BackendStepError(reason="too large")

    target = engine(WatchedSession())
    broken, sound = Broken(), Heard()
    target.submit(call("a", 1), broken)
    target.submit(call("b", 2), sound)
    target.step()
    assert isinstance(broken.error, BackendStepError)
    assert sound.outputs is not None


def test_cancelled_calls_are_not_computed_and_hear_nothing() -> None:
    watched = WatchedSession()
    target = engine(watched)
    heard = submit(target, call("a", 1), call("b", 2))
    target.cancel("b")
    target.cancel("unknown")
    target.step()
    assert watched.runs == [1]
    assert [sink.n_ends for sink in heard] == [1, 0]
    assert target.stats().cancelled_total == 1


def test_late_calls_are_dropped_and_a_deadline_bounds_the_wait_for_others() -> None:
    clock, watched = FakeClock(), WatchedSession()
    target = engine(watched, clock, max_delay_s=10.0)
    crowd = submit(target, call("a", 1), call("b", 1))
    target.step()
    assert crowd[1].n_ends == 1
    late = submit(target, call("late", 1, deadline_s=1.0))
    clock.advance(0.2)
    target.step()
    assert late[0].n_ends == 0
    clock.advance(0.06)  # a quarter of its deadline is what it may wait for a companion
    target.step()
    assert late[0].outputs is not None
    dropped = submit(target, call("dropped", 1, deadline_s=0.5))
    clock.advance(0.6)
    target.step()
    assert isinstance(dropped[0].error, DeadlineError)


def test_stop_computes_what_is_inside_and_refuses_what_comes_or_is_over_time() -> None:
    clock, watched = FakeClock(), WatchedSession()
    target = engine(watched, clock, max_batch=1)
    inside = submit(target, call("a", 1), call("b", 2))
    target.stop(1.0)
    late = submit(target, call("c", 3))
    assert isinstance(late[0].error, ShuttingDownError)
    assert target.step()
    assert inside[0].outputs is not None
    clock.advance(1.0)
    assert not target.step()
    assert isinstance(inside[1].error, ShuttingDownError)


def test_stop_waits_for_no_companion() -> None:
    target = engine(WatchedSession(), max_delay_s=10.0)
    submit(target, call("a", 1), call("b", 2))
    target.step()
    inside = submit(target, call("c", 3))
    assert target.step()
    assert inside[0].n_ends == 0
    target.stop(5.0)
    assert target.step()
    assert inside[0].outputs is not None
    assert not target.step()


# Streams.


def stateful(clock: FakeClock | None = None, **settings: Any) -> tuple[TensorEngine, WatchedSession]:
    watched = WatchedSession(STATEFUL)
    return engine(watched, clock, state=STATE, **settings), watched


def ask(target: TensorEngine, value: float, **fields: Any) -> Heard:
    (heard,) = submit(target, call("c", value, **fields))
    target.step()
    return heard


def chain(*values: float) -> list[bytes]:
    """Give the answers of a client that carries the state itself."""
    state, answers = np.zeros((1, 8), np.float32), []
    for value in values:
        made = session(STATEFUL).run({"x": rows(value), "s": state})
        state = made["t"]
        answers.append(made["y"].tobytes())
    return answers


def y(heard: Heard) -> bytes:
    assert heard.outputs is not None, heard.error
    return heard.outputs["y"].tobytes()


def test_a_stream_goes_on_from_its_own_state_and_nobody_elses() -> None:
    target, watched = stateful()
    a1, b1 = ask(target, 1, stream="a"), ask(target, 5, stream="b")
    a2, other = ask(target, 2, stream="a"), ask(target, 2, stream="a", tenant="other")
    b2 = ask(target, 6, stream="b")
    assert [y(a1), y(a2)] == chain(1, 2)
    assert [y(b1), y(b2)] == chain(5, 6)
    assert [y(other)] == chain(2)
    assert [heard.n_stream_calls for heard in (a1, b1, a2, other, b2)] == [1, 1, 2, 1, 2]
    assert watched.runs == [1] * 5


def test_calls_of_one_stream_are_computed_one_after_the_other() -> None:
    target, _ = stateful()
    heard = submit(target, *(call(f"{i}", i, stream="a") for i in range(5)))
    while target.stats().waiting:
        target.step()
    assert [y(one) for one in heard] == chain(0, 1, 2, 3, 4)


def test_without_a_stream_every_call_starts_fresh_and_keeps_nothing() -> None:
    target, _ = stateful()
    assert y(ask(target, 1)) == y(ask(target, 1)) == chain(1)[0]
    assert ask(target, 1).n_stream_calls == 0
    assert len(target._streams) == 0


def test_the_last_call_forgets_the_stream() -> None:
    target, _ = stateful()
    ask(target, 1, stream="a")
    last = ask(target, 2, stream="a", is_last=True)
    assert (y(last), last.n_stream_calls) == (chain(1, 2)[1], 2)
    assert len(target._streams) == 0
    assert y(ask(target, 2, stream="a")) == chain(2)[0]


def test_a_first_call_starts_its_stream_afresh() -> None:
    target, _ = stateful()
    ask(target, 1, stream="a")
    again = ask(target, 2, stream="a", is_first=True)
    assert ([y(again)], again.n_stream_calls) == (chain(2), 1)
    assert y(ask(target, 3, stream="a")) == chain(2, 3)[1]


def test_a_state_that_the_client_gives_is_used_as_it_is() -> None:
    target, _ = stateful()
    ask(target, 1, stream="a")
    given = np.full((1, 8), 0.5, np.float32)
    own = session(STATEFUL).run({"x": rows(2), "s": given})
    (heard,) = submit(target, Call(id="c", feeds={"x": rows(2), "s": given}, stream="a"))
    target.step()
    assert y(heard) == own["y"].tobytes()
    after = session(STATEFUL).run({"x": rows(3), "s": own["t"]})
    assert y(ask(target, 3, stream="a")) == after["y"].tobytes()


def test_a_stream_gets_only_the_outputs_it_wants_and_keeps_its_state_all_the_same() -> None:
    target, _ = stateful()
    heard = [ask(target, value, stream="a", outputs=("y",)) for value in (1, 2)]
    assert [set(one.outputs or ()) for one in heard] == [{"y"}, {"y"}]
    assert [y(one) for one in heard] == chain(1, 2)
    assert set(ask(target, 1, outputs=("y",)).outputs or ()) == {"y"}


def test_a_failed_call_leaves_the_state_as_it_was() -> None:
    target, watched = stateful()
    ask(target, 1, stream="a")
    watched.on_run = lambda _: (_ for _ in ()).throw(BackendStepError(reason="no"))
    assert ask(target, 9, stream="a").error is not None
    watched.on_run = lambda _: None
    assert y(ask(target, 2, stream="a")) == chain(1, 2)[1]
    watched.on_run = lambda _: (_ for _ in ()).throw(BackendStepError(reason="no"))
    ask(target, 9, stream="a", is_last=True)
    assert len(target._streams) == 0


def test_streams_beyond_the_limit_begin_anew_and_say_so() -> None:
    target, _ = stateful(max_streams=2)
    for stream in ("a", "b", "a", "c"):  # b is least recently used
        ask(target, 1, stream=stream)
    assert ask(target, 2, stream="a").n_stream_calls == 3
    assert ask(target, 2, stream="b").n_stream_calls == 1


def test_a_tenant_with_many_streams_drives_out_its_own_only() -> None:
    target, _ = stateful(max_streams=3)
    ask(target, 1, stream="s", tenant="quiet")
    for i in range(10):
        ask(target, 1, stream=f"{i}", tenant="busy")
    assert ask(target, 2, stream="s", tenant="quiet").n_stream_calls == 2
    assert len(target._streams) == 3


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (StateTensor(input="q", output="t", shape=(1, 8)), "input 'q'"),
        (StateTensor(input="s", output="q", shape=(1, 8)), "output 'q'"),
        (StateTensor(input="s", output="t", shape=(1, 9)), r"\(1, 9\)"),
    ],
)
def test_a_state_that_is_not_the_models_fails_the_load(state: StateTensor, problem: str) -> None:
    with pytest.raises(BackendLoadError, match=problem):
        TensorEngine(WatchedSession(STATEFUL), TensorSettings(state=(state,)))


def test_a_huge_state_is_refused_before_it_is_made() -> None:
    huge = (StateTensor(input="s", output="t", shape=(2**20, 2**20)),)
    watched = WatchedSession("inputs=x:FP32:1x4+s:FP32:-1x-1,outputs=y:FP32:1x4+t:FP32:-1x-1")
    with pytest.raises(BackendLoadError, match="4398046511104 bytes, the limit is 67108864"):
        TensorEngine(watched, TensorSettings(state=huge))


def test_a_state_that_grows_out_of_its_input_fails_the_call() -> None:
    watched = WatchedSession("inputs=x:FP32:1x4+s:FP32:1x8,outputs=y:FP32:1x4+t:FP32:1x9")
    target = engine(watched, state=STATE)
    assert "has the shape (1, 9)" in str(ask(target, 1, stream="a").error)


# Threads.


@pytest.mark.parametrize("max_runs", [1, 3])
def test_many_threads_each_get_their_own_answers(max_runs: int) -> None:
    watched = WatchedSession()
    watched.info = replace(watched.info, max_runs=max_runs)
    target = TensorEngine(watched, TensorSettings(max_batch=4, max_delay_s=0.001))
    runner = threading.Thread(target=target.run)
    runner.start()
    wrong: list[int] = []

    def client(number: int) -> None:
        for i in range(30):
            done = threading.Event()
            sink = _Waited(done)
            value = number * 1000 + i
            target.submit(call(f"{value}", value), sink)
            assert done.wait(PATIENCE_S)
            if sink.outputs is None or not np.array_equal(sink.outputs["y"], alone("", {"x": rows(value)})["y"]):
                wrong.append(value)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(PATIENCE_S)
    target.stop(0.0)
    runner.join(PATIENCE_S)
    assert not runner.is_alive()
    assert wrong == []
    assert target.stats().rows_total == 240


class _Waited(Heard):
    def __init__(self, done: threading.Event) -> None:
        super().__init__()
        self._done = done

    def answered(self, *args: Any, **kwargs: Any) -> None:
        super().answered(*args, **kwargs)
        self._done.set()


def test_a_lone_caller_computes_on_its_own_thread_and_beside_others_waits_for_the_engine() -> None:
    watched = WatchedSession()
    target = engine(watched)
    alone_heard, beside = Heard(), Heard()
    target.call(call("a", 1), alone_heard)
    assert alone_heard.outputs is not None  # nobody else has computed
    submit(target, call("b", 2))
    target.call(call("c", 3), beside)
    assert beside.n_ends == 0
    target.step()
    assert beside.outputs is not None
    assert watched.runs == [1, 2]
    bad, late = Heard(), Heard()
    target.call(Call(id="d", feeds={}), bad)
    assert isinstance(bad.error, InvalidRequestError)
    target.stop(0.0)
    target.call(call("e", 1), late)
    assert isinstance(late.error, ShuttingDownError)


def test_no_more_runs_at_a_time_than_the_session_takes() -> None:
    lock, both, inside, most = threading.Lock(), threading.Barrier(2), 0, 0

    def on_run(_: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        both.wait(PATIENCE_S)  # so two do compute at a time
        with lock:
            inside -= 1

    watched = WatchedSession(on_run=on_run)
    watched.info = replace(watched.info, max_runs=2)
    target = TensorEngine(watched, TensorSettings(max_batch=1))
    runner = threading.Thread(target=target.run)
    runner.start()
    answers = [Answer() for _ in range(20)]
    callers = [
        threading.Thread(target=lambda i=i: (target.call(call(f"{i}", i), answers[i]), answers[i].wait()))
        for i in range(20)
    ]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(PATIENCE_S)
    target.stop(0.0)
    runner.join(PATIENCE_S)
    assert (most, len(watched.runs)) == (2, 20)


def test_warm_up_computes_zeros_and_shrugs_at_models_that_do_not_take_them() -> None:
    watched = WatchedSession()
    engine(watched).warm_up()
    assert watched.runs == [1, 1]
    engine(WatchedSession("fail_after=0")).warm_up()
    target, watched = stateful()
    target.warm_up()
    assert len(target._streams) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.004, 0.02])), max_size=25
    ),
    st.integers(1, 6),
)
def test_every_call_ends_once_with_its_own_answer(script: list[tuple[int, bool, bool, float]], max_batch: int) -> None:
    clock, watched = FakeClock(), WatchedSession()
    target = engine(watched, clock, max_batch=max_batch, max_delay_s=0.01)
    sent: list[tuple[Call, Heard, bool]] = []
    for number, (n_rows, steps, cancels, pause_s) in enumerate(script):
        one = call(f"{number}", *(number * 10 + i for i in range(n_rows)))
        (heard,) = submit(target, one)
        if cancels:
            target.cancel(one.id)
        sent.append((one, heard, cancels))
        if steps:
            target.step()
        clock.advance(pause_s)
    target.stop(1.0)
    while target.step():
        pass
    for one, heard, was_cancelled in sent:
        assert heard.n_ends == (0 if was_cancelled else 1)
        if not was_cancelled:
            assert heard.outputs is not None
            assert np.array_equal(heard.outputs["y"], alone("", one.feeds)["y"])
    assert all(n <= max_batch or n <= 4 for n in watched.runs)


def test_a_joined_run_s_time_is_shared_by_rows() -> None:
    clock = FakeClock()

    class Slow(WatchedSession):
        def run(self, feeds: Any, outputs: tuple[str, ...] = ()) -> Any:
            clock.advance(0.4)
            return super().run(feeds, outputs)

    target = engine(Slow(), clock)
    heard = submit(target, call("a", 1), call("b", 2, 3), call("c", 4))
    assert target.step()
    shares = [sink.timings.engine_s for sink in heard if sink.timings is not None]
    assert shares == pytest.approx([0.1, 0.2, 0.1])
    alone_ = submit(target, call("d", 1))
    assert target.step()
    assert alone_[0].timings is not None
    assert alone_[0].timings.engine_s == pytest.approx(0.4)
