from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.cli.power_setter import Setter, lines, look
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.power.conflicts import Rival
from tests.unit.power.process import started
from tests.unit.power.tree import machine

STATUS = {
    "state": "acting",
    "stopped_by": "",
    "reason": "decode",
    "is_postponed": False,
    "max_w": 15.0,
    "max_c": 80.0,
    "clocks": {
        "policy0": {"wanted_hz": 1e9, "in_force_hz": 1e9},
        "policy4": {"wanted_hz": 2e9, "in_force_hz": 1.5e9},
        "policy6": {"wanted_hz": None, "in_force_hz": 1e9},
    },
    "faults": ["/a: write: EBUSY, not now"],
}


def test_what_powerd_does_is_shown() -> None:
    rival = Rival("thermald", "process 7", False, "none")
    assert list(lines(Setter(status=STATUS, reason="", rivals=(rival,)))) == [
        "acting, decode",
        "keeps below 15 W and 80 °C",
        "policy0: up to 1.00 GHz",
        "policy4: up to 1.50 GHz, 2.00 GHz wanted",
        "fails: /a: write: EBUSY, not now",
        "thermald (process 7) acts in heat. Remedy: none",
    ]
    stopped = {"state": "stopped", "stopped_by": "tuned runs", "is_postponed": True}
    assert list(lines(Setter(status=stopped, reason="", rivals=()))) == [
        "stopped: tuned runs",
        "waits until the chip has cooled: until then the user's own limits cannot be read",
    ]


def test_no_powerd_is_said_with_the_reason(tmp_path: Path) -> None:
    files = KernelFiles(str(tmp_path))
    (line,) = lines(look(str(tmp_path / "p"), files))
    assert line.startswith("none: no daemon answers on")
    assert list(lines(look("", files))) == ["none: power.socket_path is empty"]


def test_a_real_powerd_is_asked(socket_dir: Path) -> None:
    machine(socket_dir)
    with started(socket_dir, enabled=False) as powerd:
        powerd.heard("READY=1")
        assert next(lines(look(powerd.socket, KernelFiles(str(socket_dir))))).startswith("dry-run, ")


@pytest.mark.parametrize(
    ("state", "takes", "n_at_work", "end"),
    [
        ("acting", True, 1, "together at most"),
        ("acting", False, 1, "together at most (nobody at work takes it)"),
        ("acting", False, 0, "together at most (nobody is at work)"),
        ("dry-run", True, 1, "together at most (shown only)"),
    ],
)
def test_advice_is_shown_with_whether_it_is_taken(state: str, takes: bool, n_at_work: int, end: str) -> None:
    advice = {"n_prefill_threads": 4, "n_decode_threads": 1, "max_batch": 6}
    status = {"state": state, "reason": "decode", "advice": advice, "takes_advice": takes, "n_at_work": n_at_work}
    last = list(lines(Setter(status=status, reason="", rivals=())))[-1]
    assert last == f"advises prefill on 4 threads, decode on 1 thread, 6 answers {end}"


NO_ADVICE = {"n_prefill_threads": None, "n_decode_threads": None, "max_batch": None}


def test_that_several_at_work_get_no_advice_is_said() -> None:
    status = {"state": "acting", "reason": "decode", "advice": NO_ADVICE, "takes_advice": False, "n_at_work": 2}
    assert list(lines(Setter(status=status, reason="", rivals=())))[-1] == "advises nothing: 2 daemons are at work"


def test_no_advice_is_no_line() -> None:
    for told in ({}, {"advice": NO_ADVICE, "n_at_work": 1}, {"advice": None}):
        assert len(list(lines(Setter(status={"state": "acting", "reason": "idle"} | told, reason="", rivals=())))) == 1
