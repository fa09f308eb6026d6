from __future__ import annotations

import io
from pathlib import Path

import pytest

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.power.conflicts import rivals
from edge_rt.power.log import Log
from tests.fakes import FakeClock


def process(root: Path, pid: int, comm: str, *command: str) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "comm").write_text(f"{comm}\n")
    (folder / "cmdline").write_text("\0".join(command) + "\0")


@pytest.mark.parametrize(
    ("comm", "command", "name", "writes"),
    [
        ("power-profiles-", ("/usr/libexec/power-profiles-daemon",), "power-profiles-daemon", True),
        ("tuned", ("/usr/bin/python3", "-Es", "/usr/sbin/tuned", "-l", "-P"), "tuned", True),
        ("python3", ("/usr/bin/python3", "-Es", "/usr/sbin/tuned", "-l", "-P"), "tuned", True),
        ("auto-cpufreq", ("/opt/auto-cpufreq/venv/bin/python", "/usr/bin/auto-cpufreq"), "auto-cpufreq", True),
        ("python", ("python", "/usr/bin/auto-cpufreq", "--daemon"), "auto-cpufreq", True),
        ("python3", ("python3", "/opt/throttled/throttled.py"), "throttled", True),
        ("thermald", ("/usr/sbin/thermald", "--systemd"), "thermald", False),
    ],
)
def test_rivals_are_found_by_their_processes(
    tmp_path: Path, comm: str, command: tuple[str, ...], name: str, writes: bool
) -> None:
    process(tmp_path, 7, "bash", "-bash")
    process(tmp_path, 8, comm, *command)
    (found,) = rivals(KernelFiles(str(tmp_path)))
    assert (found.name, found.writes, found.evidence) == (name, writes, "process 8")
    assert found.remedy


@pytest.mark.parametrize(
    "command",
    [
        ("python3", "-m", "http.server"),
        ("python3", "edit.py", "/etc/tuned"),
        ("python3",),
        ("vim", "/usr/bin/auto-cpufreq"),
    ],
)
def test_a_word_in_an_argument_is_no_rival(tmp_path: Path, command: tuple[str, ...]) -> None:
    process(tmp_path, 8, command[0], *command)
    assert rivals(KernelFiles(str(tmp_path))) == ()


def test_tlp_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "run/tlp").mkdir(parents=True)
    process(tmp_path, 9, "thermald", "thermald")
    assert [(found.name, found.evidence) for found in rivals(KernelFiles(str(tmp_path)))] == [
        ("TLP", "/run/tlp"),
        ("thermald", "process 9"),
    ]


def test_processes_that_end_and_a_proc_that_is_not_there_are_nothing(tmp_path: Path) -> None:
    assert rivals(KernelFiles(str(tmp_path))) == ()
    (tmp_path / "proc/12").mkdir(parents=True)
    assert rivals(KernelFiles(str(tmp_path))) == ()
    assert all(found.name for found in rivals(KernelFiles()))  # whatever runs here


def test_each_matter_is_told_once_a_minute(clock: FakeClock) -> None:
    out = io.StringIO()
    log = Log(clock, out)
    for _ in range(60):
        log.say(4, "a", "one\nof\tmany")
        clock.advance(2)
    log.say(3, "b", "another")
    assert out.getvalue().splitlines() == [
        "<4>one?of?many",
        "<4>one?of?many (29 times more since the last line)",
        "<3>another",
    ]


def test_a_log_of_ever_new_matters_does_not_grow(clock: FakeClock) -> None:
    log = Log(clock, io.StringIO())
    for i in range(10_000):
        log.say(4, str(i), "text")
    assert len(log._told) <= 256


def test_nobody_who_reads_is_no_reason_to_fail(clock: FakeClock) -> None:
    out = io.StringIO()
    out.close()
    Log(clock, out).say(4, "a", "text")
