from __future__ import annotations

import asyncio

import pytest

from edge_rt.liveness import SUPERVISION_S, Activity, Reporter, status_line
from tests import virtual_time


class FakeRuntime:
    def __init__(self) -> None:
        self.now = Activity()

    def activity(self) -> Activity:
        return self.now


@pytest.mark.parametrize(
    ("activity", "line"),
    [
        (Activity(), "no model in memory; idle"),
        (Activity(models=("tiny",)), "tiny in memory; idle"),
        (Activity(models=("a", "b"), n_running=2, n_waiting=1), "a, b in memory; 2 running, 1 waiting"),
        (Activity(loading=("a",), n_waiting=1), "loading a; no model in memory; 0 running, 1 waiting"),
    ],
)
def test_status_line(activity: Activity, line: str) -> None:
    assert status_line(activity) == line


def test_a_note_is_one_line_whatever_it_holds() -> None:
    assert status_line(Activity(), "bad\nREADY=1") == "no model in memory; idle; bad READY=1"


def reporter(*, watchdog_s: float | None = 2.0) -> tuple[FakeRuntime, Reporter, list[str]]:
    runtime, sent = FakeRuntime(), list[str]()
    return runtime, Reporter(runtime, sent.append, watchdog_s=watchdog_s), sent


def test_a_start_is_prolonged_as_it_goes_on_and_no_longer() -> None:
    async def main() -> None:
        _, reports, sent = reporter()
        running = asyncio.create_task(reports.run())
        await asyncio.sleep(5.0)
        assert [message.count("EXTEND_TIMEOUT_USEC") for message in sent] == [1, 1, 1]
        reports.started()
        assert sent[3] == "READY=1"
        n_sent = len(sent)
        await asyncio.sleep(10.0)
        assert len(sent) > n_sent
        assert not any("EXTEND_TIMEOUT_USEC" in message for message in sent[n_sent:])
        running.cancel()

    virtual_time.run(main())


def test_the_watchdog_hears_nothing_while_the_supervision_of_workers_fails() -> None:
    runtime, reports, sent = reporter()
    runtime.now = Activity(late_s=SUPERVISION_S)
    reports.report()
    assert "WATCHDOG=1" in sent[-1].splitlines()
    runtime.now = Activity(late_s=SUPERVISION_S + 1)
    reports.report()
    assert "WATCHDOG=1" not in sent[-1].splitlines()
    assert "a worker makes no progress" in sent[-1]


def test_the_status_is_told_when_it_changes() -> None:
    runtime, reports, sent = reporter(watchdog_s=None)
    reports.started()
    assert sent == ["READY=1", "STATUS=no model in memory; idle"]
    reports.report()
    assert len(sent) == 2
    runtime.now = Activity(models=("tiny",))
    reports.report()
    assert sent[2:] == ["STATUS=tiny in memory; idle"]


def test_a_reload_ends_with_ready_and_leaves_its_note() -> None:
    _, reports, sent = reporter()
    reports.started()
    sent.clear()
    reports.reloading(5)
    reports.reloaded("the new configuration is not used: bad")
    assert sent[0] == "RELOADING=1\nMONOTONIC_USEC=5"
    assert sent[1] == "READY=1"
    assert sent[2].endswith("STATUS=no model in memory; idle; the new configuration is not used: bad")
    reports.reloaded("")
    assert sent[-1].endswith("STATUS=no model in memory; idle")


def test_an_end_asks_for_its_time() -> None:
    _, reports, sent = reporter()
    reports.stopping(4.5)
    assert sent[0].splitlines()[:2] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=4500000"]
