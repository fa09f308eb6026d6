"""install, uninstall, status, and what doctor says of the service."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt import config
from edge_rt.cli import main, service_checks, status
from edge_rt.cli.checks import Group, Patient
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.service.system import Done
from tests.unit.service.fake_machine import FakeMachine
from tests.unit.service.test_inspection import shown

NOT_INSTALLED = "Id=edge_rt.socket\nLoadState=not-found\nActiveState=inactive\n"
JOURNAL = Done(status=0, out='{"MESSAGE": "server.drain_s: Expected `float`"}\n', err="")


def machine(text: str) -> FakeMachine:
    return FakeMachine({"systemctl show": Done(status=0, out=text, err=""), "journalctl": JOURNAL})


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


# install and uninstall


def test_install_into_a_tree_writes_the_units(tmp_path: Path) -> None:
    tree = ("--powerd", "--root", str(tmp_path), "--python", "/opt/there/bin/python")
    code, output = invoke("install", "--dry-run", *tree)
    assert code == 0, output
    assert "would write  /etc/systemd/system/edge_rt-powerd.service" in output
    assert list(tmp_path.iterdir()) == []
    assert invoke("install", *tree)[0] == 0
    assert "ExecStart=/opt/there/bin/python" in (tmp_path / "etc/systemd/system/edge_rt.service").read_text()
    assert invoke("install", "--root", str(tmp_path))[0] == 2
    for python in ("", "python3", "bin/python3"):  # systemd takes no such command
        code, output = invoke("install", "--root", str(tmp_path), "--python", python)
        assert (code, f"got {python!r}" in output) == (2, True)


# status

# httpcore2 leaves a socket that could not connect to the collector, which warns.
leaks = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@leaks
def test_status_tells_of_units_and_the_daemon(tmp_path: Path) -> None:
    settings = config.Config(server=config.Server(socket_path=str(tmp_path / "nobody")))
    found = status.gather(settings, machine(shown("failed", "exit-code", 0, 78)))
    lines = status.text(found).splitlines()
    assert lines[0] == "edge_rt.socket: active (running), enabled"
    assert lines[1].startswith("edge_rt.service: failed (running), not enabled, 70 MiB, restarted 2 times")
    assert "  its configuration is wrong" in lines
    assert any("no daemon answers on" in line for line in lines)
    assert lines[-1] == "last error: server.drain_s: Expected `float`"


@leaks
def test_status_without_a_service_says_how_to_get_one(tmp_path: Path) -> None:
    settings = config.Config(server=config.Server(socket_path=str(tmp_path / "nobody")))
    assert "`edge_rt install` does it" in status.text(status.gather(settings, machine(NOT_INSTALLED)))
    assert "systemd does not run" in status.text(status.gather(settings, FakeMachine(is_live=False)))


@leaks
def test_status_tells_of_slow_sensors_and_of_a_power_helper_that_is_missed(tmp_path: Path) -> None:
    told = {
        "answers": True,
        "state": "acting",
        "stopped_by": "",
        "reason": "decode",
        "power_w": 4.25,
        "boundary": "board",
        "slow_sensors": {"power": {"read_s": 0.2, "age_s": 0.31}, "battery": {"read_s": 0.04}},
    }
    line = "power: acting, decode, 4.2 W (board); slow: power, 0.2 s a reading, 0.31 s old; battery, 0.04 s a reading"
    assert status._power_line(told) == line
    nobody = config.Power(socket_path=str(tmp_path / "p"), enabled=True)
    server = config.Server(socket_path=str(tmp_path / "nobody"))
    found = status.gather(config.Config(server=server, power=nobody), machine(NOT_INSTALLED))
    assert f"power.enabled is set, but no powerd is at '{tmp_path / 'p'}'" in status.text(found)


def test_a_dry_run_says_what_is_in_the_way_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    monkeypatch.syspath_prepend(str(hidden))
    output = invoke("install", "--dry-run")[1]
    assert "in the way" in output
    assert "/usr/bin/python3 -m venv /opt/edge_rt" in output


# doctor


def test_nothing_is_said_of_a_service_that_is_not_installed() -> None:
    assert service_checks.units(Patient(machine=machine(NOT_INSTALLED))) is None
    assert service_checks.units(Patient(machine=FakeMachine(is_live=False))) is None


def test_a_failing_unit_behind_an_open_socket_is_explained_with_the_journals_words() -> None:
    check = service_checks.units(Patient(machine=machine(shown("failed", "exit-code", 0, 78))))
    assert check is not None
    assert check.status == "fail"
    assert "its configuration is wrong" in check.detail
    assert "clients wait for an answer that does not come" in check.detail
    assert "server.drain_s" in check.detail


def test_a_service_that_works_is_ok_and_one_that_restarts_often_is_not() -> None:
    check = service_checks.units(Patient(machine=machine(shown())))
    assert check is not None
    assert (check.status, "tiny in memory" in check.detail) == ("ok", True)
    often = service_checks.units(Patient(machine=machine(shown().replace("NRestarts=2", "NRestarts=9"))))
    assert often is not None
    assert (often.status, often.detail) == ("warn", "edge_rt.service was restarted 9 times")


def test_a_closed_socket_is_a_failure() -> None:
    text = shown().replace("ActiveState=active\nSubState=running\nUnitFileState=enabled", "ActiveState=inactive", 1)
    check = service_checks.units(Patient(machine=machine(text)))
    assert check is not None
    assert (check.status, check.remedy) == ("fail", "systemctl enable --now edge_rt.socket")


def with_socket(socket_dir: Path) -> SysfsRoot:
    (socket_dir / "run" / "edge_rt").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(socket_dir / "run" / "edge_rt" / "edge_rt.sock"))
    (socket_dir / "run" / "edge_rt" / "edge_rt.sock").chmod(0o660)
    return SysfsRoot(socket_dir)


@pytest.mark.parametrize(
    ("groups", "group", "status", "words"),
    [
        ({os.getgid()}, Group(gid=os.getgid(), is_member=True), "ok", "you may connect"),
        (set(), Group(gid=os.getgid(), is_member=True), "fail", "this session began before"),
        (set(), Group(gid=os.getgid(), is_member=False), "fail", "for members of group edge_rt"),
        (set(), None, "fail", "no group edge_rt"),
    ],
)
def test_who_may_connect(socket_dir: Path, groups: set[int], group: Group | None, status: str, words: str) -> None:
    patient = Patient(
        root=with_socket(socket_dir),
        uid=4_000_000,
        group_ids=lambda: frozenset(groups),
        find_group=lambda name: group,
    )
    check = service_checks.access(patient)
    assert check is not None
    assert check.status == status
    assert words in check.detail


def test_without_the_services_socket_nothing_is_said_of_access(tmp_path: Path) -> None:
    assert service_checks.access(Patient(root=SysfsRoot(tmp_path), uid=1000)) is None


RAPL: Mapping[str, str] = {
    "sys/class/powercap/intel-rapl:0/name": "package-0",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850",
    "sys/class/powercap/intel-rapl:0/energy_uj": "123456",
}


def planted(root: Path, files: Mapping[str, str]) -> SysfsRoot:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return SysfsRoot(root)


def test_counters_that_can_be_read_are_ok(tmp_path: Path) -> None:
    assert service_checks.energy(Patient(root=planted(tmp_path, RAPL))).status == "ok"
    assert service_checks.energy(Patient(root=SysfsRoot(tmp_path / "none"))).status == "ok"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_that_only_root_may_read_come_with_a_remedy(tmp_path: Path) -> None:
    root = planted(tmp_path, RAPL)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    check = service_checks.energy(Patient(root=root))
    assert check.status == "warn"
    assert "--powerd" in check.remedy


def test_another_power_manager_beside_ours_comes_with_a_remedy(tmp_path: Path) -> None:
    root = planted(tmp_path, {"proc/77/comm": "tuned\n"})
    nobody = str(tmp_path / "no.sock")
    idle = config.Config(power=config.Power(socket_path=nobody))
    wanted = config.Config(power=config.Power(socket_path=nobody, enabled=True))
    there = service_checks.clocks(Patient(root=root, config=idle))
    assert there is not None
    assert (there.status, there.detail) == ("ok", "set by tuned")
    fights = service_checks.clocks(Patient(root=root, config=wanted))
    assert fights is not None
    assert (fights.status, "tuned (process 77) sets them too" in fights.detail) == ("warn", True)
    assert "systemctl disable --now tuned" in fights.remedy
    alone = service_checks.clocks(Patient(root=planted(tmp_path / "x", {"proc/1/comm": "init\n"}), config=wanted))
    assert alone is not None
    assert (alone.status, alone.remedy) == ("warn", "edge_rt install --powerd")
    assert service_checks.clocks(Patient(root=SysfsRoot(tmp_path / "x"), config=idle)) is None
