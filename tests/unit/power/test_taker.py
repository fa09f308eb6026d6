"""The daemon's side of advice: its limits, and that it ends with powerd."""

from __future__ import annotations

import gc
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_rt.power.client import HintSender
from edge_rt.power.state import Advice, Hint
from edge_rt.power.taker import AdviceTaker, advised
from edge_rt.power.wire import TakesAdvice
from tests.fakes import FakeClock
from tests.unit.power.test_server import Scene

HINT = Hint(work="decode", n_running=1, sent_s=999.0)
ADVICE = Advice(n_prefill_threads=4, n_decode_threads=2, max_batch=6)


class Worker:
    def __init__(self) -> None:
        self.heard: list[tuple[int | None, int | None]] = []

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        self.heard.append((n_prefill_threads, n_decode_threads))


class Bench:
    def __init__(self, **limits: int) -> None:
        self.taker = AdviceTaker(TakesAdvice(**({"max_threads": 4, "max_batch": 8} | limits)))
        self.batches: list[int | None] = []
        self.taker.run_at_most = self.batches.append
        self.worker = advised(Worker, self.taker)()


def test_workers_and_queues_hear_what_changes() -> None:
    bench = Bench()
    for advice in (ADVICE, ADVICE, Advice(n_prefill_threads=4, n_decode_threads=2, max_batch=5), Advice()):
        bench.taker.take(advice, is_dry=False, now_s=0.0)
    assert bench.worker.heard == [(4, 2), (None, None)]
    assert bench.batches == [6, 5, None]


def test_no_advice_exceeds_the_daemons_own_limits() -> None:
    bench = Bench(max_threads=3, max_batch=2)
    bench.taker.take(ADVICE, is_dry=False, now_s=0.0)
    assert bench.taker.in_force == Advice(n_prefill_threads=3, n_decode_threads=2, max_batch=2)
    assert bench.worker.heard == [(3, 2)]


def test_advice_of_a_dry_run_is_known_and_not_taken() -> None:
    bench = Bench()
    bench.taker.take(ADVICE, is_dry=True, now_s=0.0)
    assert (bench.taker.told, bench.taker.in_force) == (ADVICE, Advice())
    assert bench.worker.heard == bench.batches == []
    bench.taker.take(ADVICE, is_dry=False, now_s=1.0)
    bench.taker.take(ADVICE, is_dry=True, now_s=2.0)
    assert bench.worker.heard == [(4, 2), (None, None)]


def test_a_worker_that_comes_later_hears_what_is_in_force_and_one_that_goes_is_forgotten() -> None:
    bench = Bench()
    bench.taker.take(ADVICE, is_dry=False, now_s=0.0)
    later = advised(Worker, bench.taker)()
    assert later.heard == [(4, 2)]
    del later
    gc.collect()
    bench.taker.end("a test")
    assert bench.worker.heard == [(4, 2), (None, None)]
    assert advised(Worker, bench.taker)().heard == []


def test_advice_that_is_not_repeated_while_there_is_work_ends() -> None:
    bench = Bench()
    bench.taker.take(ADVICE, is_dry=False, now_s=0.0)
    bench.taker.check(100.0, works=False)  # nobody repeats it to who rests
    for at_s in (100.0, 102.0, 104.0):
        bench.taker.check(at_s, works=True)
        assert bench.taker.in_force == ADVICE
    bench.taker.check(104.5, works=True)
    assert bench.taker.in_force == bench.taker.told == Advice()
    bench.taker.take(ADVICE, is_dry=False, now_s=105.0)
    bench.taker.check(108.9, works=True)
    assert bench.taker.in_force == ADVICE


def test_short_answers_to_a_silent_powerd_add_up() -> None:
    bench = Bench()
    bench.taker.take(ADVICE, is_dry=False, now_s=0.0)
    for i in range(4):
        bench.taker.check(100.0 * i, works=True)
        bench.taker.check(100.0 * i + 1.0, works=False)
        assert bench.taker.in_force == ADVICE
    bench.taker.check(400.0, works=True)
    bench.taker.check(400.5, works=True)
    assert bench.taker.in_force == Advice()
    bench.taker.take(ADVICE, is_dry=False, now_s=400.6)  # it speaks again
    bench.taker.check(404.0, works=True)
    assert bench.taker.in_force == ADVICE


# -- by a real socket ------------------------------------------------------------------------------------------------


class Loop:
    """An event loop whose turn is the test's."""

    def __init__(self) -> None:
        self.readers: dict[int, object] = {}

    def add(self, fd: int, on_readable: object) -> None:
        assert fd not in self.readers
        self.readers[fd] = on_readable

    def remove(self, fd: int) -> None:
        del self.readers[fd]

    def turn(self) -> None:
        for on_readable in list(self.readers.values()):
            on_readable()  # type: ignore[operator]


@pytest.fixture
def scene(socket_dir: Path, clock: FakeClock) -> Iterator[Scene]:
    with selectors.DefaultSelector() as selector:
        made = Scene(str(socket_dir / "p"), clock, selector)
        made.start()
        yield made
        made.server.close()


class Daemon:
    def __init__(self, scene: Scene) -> None:
        self.scene, self.bench, self.loop = scene, Bench(), Loop()
        self.sender = HintSender(scene.path, scene.clock, taker=self.bench.taker, watch=self.loop)

    @property
    def in_force(self) -> Advice:
        return self.bench.taker.in_force

    def work(self) -> None:
        self.sender.send(HINT)
        self.scene.turn()

    def powerd_advises(self, advice: Advice, *, is_dry: bool = False) -> None:
        self.scene.server.advise(advice, is_dry=is_dry, now_s=self.scene.clock())
        self.loop.turn()


def test_advice_is_asked_for_with_the_connection_and_taken_as_it_comes(scene: Scene) -> None:
    daemon = Daemon(scene)
    daemon.work()
    assert [(hint.max_threads, hint.max_batch) for hint in scene.server.hints()] == [(4, 8)]
    daemon.powerd_advises(ADVICE)
    assert daemon.in_force == ADVICE
    daemon.powerd_advises(Advice())
    assert daemon.in_force == Advice()
    daemon.sender.close()
    assert daemon.loop.readers == {}


def test_limits_that_a_reload_has_changed_are_told_with_the_next_hint(scene: Scene) -> None:
    daemon = Daemon(scene)
    daemon.work()
    daemon.bench.taker.limits = TakesAdvice(2, 1)
    daemon.powerd_advises(ADVICE)
    assert daemon.in_force == Advice(n_prefill_threads=2, n_decode_threads=2, max_batch=1)
    daemon.work()
    assert [(hint.max_threads, hint.max_batch) for hint in scene.server.hints()] == [(2, 1)]
    daemon.sender.close()


def test_advice_ends_with_powerd_and_comes_back_with_it(scene: Scene) -> None:
    daemon = Daemon(scene)
    daemon.work()
    daemon.powerd_advises(ADVICE)
    scene.server.close()
    daemon.loop.turn()
    assert daemon.in_force == Advice()
    assert daemon.loop.readers == {}
    assert daemon.sender.problem == "it hung up"
    Path(scene.path).unlink()
    scene.start()
    scene.clock.advance(60)
    daemon.work()
    daemon.powerd_advises(ADVICE)
    assert daemon.in_force == ADVICE
    daemon.sender.close()
    assert daemon.in_force == Advice()


def test_without_a_loop_advice_is_read_with_the_next_hint(scene: Scene) -> None:
    bench = Bench()
    sender = HintSender(scene.path, scene.clock, taker=bench.taker)
    sender.send(HINT)
    scene.turn()
    scene.server.advise(ADVICE, is_dry=False, now_s=scene.clock())
    assert bench.taker.in_force == Advice()
    sender.send(HINT)
    assert bench.taker.in_force == ADVICE
    sender.close()


def test_a_powerd_that_knows_of_no_advice_still_gets_hints(scene: Scene) -> None:
    """What an older one answers to the question for advice."""
    daemon = Daemon(scene)
    daemon.work()
    for client in scene.server._clients.values():
        scene.server._answer(client, b'{"type":"error","code":"bad_message","problem":"its type is none of hint, cap"}')
        client.takes = None
    daemon.loop.turn()
    assert daemon.in_force == Advice()
    daemon.work()
    assert len(scene.server.hints()) == 1
    daemon.sender.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"{}",
        b'{"type":"advice","version":2,"is_dry":false,"n_decode_threads":1}',
        b'{"type":"advice","version":1,"is_dry":false,"n_decode_threads":0}',
        b'{"type":"advice","version":1,"is_dry":false,"n_decode_threads":1e9}',
    ],
)
def test_advice_that_makes_no_sense_ends_what_was_advised(scene: Scene, raw: bytes) -> None:
    daemon = Daemon(scene)
    daemon.work()
    daemon.powerd_advises(ADVICE)
    for client in scene.server._clients.values():
        scene.server._answer(client, raw)
    daemon.loop.turn()
    assert daemon.in_force == Advice()
    daemon.powerd_advises(Advice(n_decode_threads=3))
    assert daemon.in_force == Advice(n_decode_threads=3)
    daemon.sender.close()
