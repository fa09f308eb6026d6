from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from edge_rt.errors import NoSystemdError, UnitError
from edge_rt.service.installation import Wish, install, uninstall
from edge_rt.service.system import Done, Host
from tests.unit.service.fake_machine import FakeMachine

WISH = Wish(python="/opt/edge_rt/bin/python")
SERVICE = PurePosixPath("/etc/systemd/system/edge_rt.service")
POWERD = PurePosixPath("/etc/systemd/system/edge_rt-powerd.service")


def with_powerd(**fields: bool) -> Wish:
    return Wish(python=WISH.python, powerd=True, **fields)


def test_it_writes_the_files_and_opens_the_socket() -> None:
    machine = FakeMachine()
    lines = list(install(machine, WISH))
    assert f"wrote  {SERVICE}" in lines
    assert POWERD not in machine.files
    assert machine.ran[-4:] == [
        "systemd-sysusers /etc/sysusers.d/edge_rt.conf",
        "systemd-tmpfiles --create /etc/tmpfiles.d/edge_rt.conf",
        "systemctl daemon-reload",
        "systemctl enable --now edge_rt.socket",
    ]
    assert [line for line in lines if line.startswith("ran")] == [f"ran  {command}" for command in machine.ran[-4:]]


def test_a_second_time_changes_nothing() -> None:
    machine = FakeMachine()
    list(install(machine, WISH))
    files = dict(machine.files)
    lines = list(install(machine, WISH))
    assert machine.files == files
    assert {line.partition(" ")[0] for line in lines} == {"unchanged", "ran"}
    assert not any("restart" in command for command in machine.ran)


def test_a_running_daemon_is_restarted_only_where_its_unit_changes() -> None:
    machine = FakeMachine({"systemctl is-active edge_rt.service": Done(status=0, out="active\n", err="")})
    list(install(machine, WISH))
    assert machine.ran[-1] == "systemctl restart edge_rt.service"
    lines = list(install(machine, Wish(python="/opt/other/bin/python")))
    assert f"changed  {SERVICE}" in lines
    machine.ran.clear()
    lines = list(install(machine, Wish(python="/opt/other/bin/python")))
    assert "systemctl restart edge_rt.service" not in machine.ran
    assert lines[-1].endswith("after an upgrade: systemctl restart edge_rt.service")


def test_powerd_comes_where_it_is_asked_for() -> None:
    machine = FakeMachine()
    list(install(machine, with_powerd()))
    assert POWERD in machine.files
    assert "systemctl enable --now edge_rt-powerd.service" in machine.ran


def test_no_start_arms_nothing_before_the_next_boot() -> None:
    machine = FakeMachine()
    list(install(machine, with_powerd(starts=False)))
    assert machine.ran[-1] == "systemctl enable edge_rt.socket edge_rt-powerd.socket"
    assert not any("--now" in command for command in machine.ran)


def test_a_dry_run_says_all_of_it_and_does_nothing() -> None:
    machine = FakeMachine()
    lines = list(install(machine, with_powerd(is_dry=True)))
    assert machine.files == {}
    assert {line.partition("  ")[0] for line in lines} == {"would write", "would run"}
    assert all(command.startswith(("systemctl --version", "systemctl is-active")) for command in machine.ran)


def test_without_systemd_it_says_so() -> None:
    with pytest.raises(NoSystemdError, match="systemctl is not on PATH"):
        list(install(FakeMachine(has=False), WISH))
    with pytest.raises(NoSystemdError, match="does not run this machine"):
        list(install(FakeMachine(is_live=False), WISH))
    odd = FakeMachine({"systemctl --version": Done(status=0, out="runit\n", err="")})
    with pytest.raises(NoSystemdError, match="'runit"):
        list(install(odd, WISH))


def test_a_program_that_fails_is_an_error_with_its_words() -> None:
    machine = FakeMachine({"systemctl enable": Done(status=1, out="", err="Failed to enable unit:\n denied\n")})
    with pytest.raises(UnitError, match=r"enable --now edge_rt.socket` ended with 1: Failed to enable unit: denied"):
        list(install(machine, WISH))


def test_into_a_tree_nothing_is_run(tmp_path: Path) -> None:
    lines = list(install(Host(tmp_path), with_powerd(), into_tree=True))
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == [
        "etc/systemd/system/edge_rt-powerd.service",
        "etc/systemd/system/edge_rt-powerd.socket",
        "etc/systemd/system/edge_rt.service",
        "etc/systemd/system/edge_rt.socket",
        "etc/sysusers.d/edge_rt.conf",
        "etc/tmpfiles.d/edge_rt.conf",
    ]
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o644 for name in written)
    assert lines[-1].startswith("nothing is started")
    removed = [line for line in uninstall(Host(tmp_path)) if line.startswith("removed")]
    assert len(removed) == 6
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_uninstall_stops_sockets_with_services_and_keeps_what_is_the_users() -> None:
    machine = FakeMachine()
    list(install(machine, WISH))
    drop_in, key = PurePosixPath("/etc/systemd/system/edge_rt.service.d"), PurePosixPath("/etc/edge_rt")
    machine.files |= {drop_in: "", key: ""}
    machine.ran.clear()
    lines = list(uninstall(machine))
    assert machine.ran[0] == "systemctl disable --now edge_rt.socket edge_rt.service"
    assert set(machine.files) == {drop_in, key}
    assert f"removed  {SERVICE}" in lines


def test_purge_removes_what_is_the_users_too() -> None:
    machine = FakeMachine()
    list(install(machine, WISH))
    machine.files[PurePosixPath("/etc/edge_rt")] = ""
    list(uninstall(machine, purge=True))
    assert machine.files == {}
    assert "groupdel edge_rt" in machine.ran


def test_uninstalling_what_is_not_there_says_so() -> None:
    machine = FakeMachine()
    assert list(uninstall(machine)) == ["nothing to remove: edge_rt is not installed as a service"]
    assert machine.ran == []


def test_a_dry_uninstall_removes_nothing() -> None:
    machine = FakeMachine()
    list(install(machine, WISH))
    files = dict(machine.files)
    machine.ran.clear()
    lines = list(uninstall(machine, is_dry=True))
    assert (machine.files, machine.ran) == (files, [])
    assert f"would remove  {SERVICE}" in lines
