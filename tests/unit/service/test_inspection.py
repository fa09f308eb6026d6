from __future__ import annotations

import json

import pytest

from edge_rt.service import inspection
from edge_rt.service.inspection import parse, problem
from edge_rt.service.system import Done
from tests.unit.service.fake_machine import FakeMachine

SHOWN = """\
Id=edge_rt.socket
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
Result=success
MemoryCurrent=[not set]

Id=edge_rt.service
LoadState=loaded
ActiveState={state}
SubState=running
UnitFileState=disabled
Result={result}
MainPID={pid}
ExecMainStatus={status}
ExecMainCode=1
NRestarts=2
StatusText=tiny in memory; 1 running, 0 waiting
MemoryCurrent=73400320
NeedDaemonReload=no

Id=edge_rt-powerd.service
LoadState=not-found
ActiveState=inactive
SubState=dead
"""


def shown(state: str = "active", result: str = "success", pid: int = 77, status: int = 0) -> str:
    return SHOWN.format(state=state, result=result, pid=pid, status=status)


def test_units_are_read() -> None:
    socket, daemon, powerd = parse(shown())
    assert (socket.name, socket.state, socket.is_enabled, socket.memory_bytes) == (
        "edge_rt.socket",
        "active",
        True,
        None,
    )
    assert (daemon.pid, daemon.n_restarts, daemon.memory_bytes) == (77, 2, 70 * 2**20)
    assert daemon.says == "tiny in memory; 1 running, 0 waiting"
    assert not powerd.is_there
    assert [problem(unit) for unit in (socket, daemon, powerd)] == [None, None, None]


@pytest.mark.parametrize("text", ["", "nonsense", "Id=\n\nId=x", "\n\n\n", "=\nId=a\nMainPID=abc\nMemoryCurrent=-1"])
def test_odd_output_is_no_error(text: str) -> None:
    assert all(problem(unit) is None for unit in parse(text))


@pytest.mark.parametrize(
    ("state", "result", "status", "what"),
    [
        ("failed", "exit-code", 78, "its configuration is wrong"),
        ("failed", "exit-code", 203, "removed or moved"),
        ("failed", "exit-code", 243, "credentials"),
        ("failed", "exit-code", 1, "ended with status 1"),
        ("failed", "watchdog", 0, "did not answer the watchdog"),
        ("failed", "oom-kill", 0, "want of memory"),
        ("failed", "start-limit-hit", 1, "failed too often"),
        ("activating", "signal", 0, "a signal ended it"),
        ("failed", "something-new", 0, "something-new"),
    ],
)
def test_a_failed_unit_is_explained_with_a_remedy(state: str, result: str, status: int, what: str) -> None:
    (_, daemon, _) = parse(shown(state, result, 0, status))
    found = problem(daemon)
    assert found is not None
    assert what in found[0]
    assert "edge_rt.service" in found[1] or "MemoryMax" in found[1]


def test_systemd_is_not_asked_where_it_does_not_run() -> None:
    machine = FakeMachine(is_live=False)
    assert inspection.look(machine, ("edge_rt.service",)) is None
    assert machine.ran == []
    assert inspection.look(FakeMachine(has=False), ("edge_rt.service",)) is None
    assert inspection.look(FakeMachine({"systemctl show": Done(status=1, out="", err="")}), ("x",)) is None


def test_the_journals_last_errors() -> None:
    entries = [{"MESSAGE": "first"}, {"MESSAGE": [115, 101, 99, 255]}, {"MESSAGE": None}, {}]
    out = "\n".join([*map(json.dumps, entries), "no json", "[]"])
    machine = FakeMachine({"journalctl": Done(status=0, out=out, err="")})
    assert inspection.last_errors(machine, "edge_rt.service") == ("first", "sec\ufffd")
    assert inspection.last_errors(FakeMachine(has=False), "edge_rt.service") == ()
