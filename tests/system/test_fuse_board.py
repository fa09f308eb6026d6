"""The board as it is mounted: what only a file system can show.

The values are modelled by tests/plants; nothing here says anything about a real device.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_rt.devices.sysfs import SysfsRoot
from tests.plants.board import POLICIES
from tests.plants.fuse_board import FuseBoard, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

_POLICY = f"{POLICIES}/policy0"
_MAX = f"{_POLICY}/scaling_max_freq"


@pytest.fixture
def pi(tmp_path: Path) -> Iterator[FuseBoard]:
    with FuseBoard("pi_5", tmp_path / "root", is_stepped=True) as board:
        yield board


@pytest.fixture
def x86(socket_dir: Path) -> Iterator[FuseBoard]:
    socket_dir.chmod(0o755)  # another user is to reach the board
    with FuseBoard("x86", socket_dir / "root", is_stepped=True) as board:
        yield board


def code_of(error: pytest.ExceptionInfo[OSError]) -> str:
    return errno.errorcode[error.value.errno or 0]


def test_files_are_a_page_long_and_read_short(pi: FuseBoard) -> None:
    assert pi.path(_MAX).stat().st_size == 4096
    fd = os.open(pi.path(_MAX), os.O_RDONLY)
    try:
        assert (os.read(fd, 100), os.read(fd, 100)) == (b"2400000\n", b"")
        pi.write(_MAX, "1000000")
        assert os.pread(fd, 100, 0) == b"1000000\n"
    finally:
        os.close(fd)
    assert pi.path(_MAX).read_text() == "1000000\n"
    assert pi.path("proc/stat").stat().st_size == 0
    assert pi.path("proc/stat").read_text().startswith("cpu  ")


def test_a_shells_echo_works_and_truncates_nothing(pi: FuseBoard) -> None:
    subprocess.run(["sh", "-c", f"echo 1500000 > {pi.path(_MAX)}"], check=True)
    assert pi.read(_MAX) == "1500000"
    assert pi.tell("writes")[-1][1:] == [_MAX, "1500000\n", ""]


def test_errors_reach_the_caller(pi: FuseBoard) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        pi.write(_MAX, "abc")
    assert code_of(caught) == "EINVAL"
    with pytest.raises(OSError, match=r".") as caught:
        pi.write(f"{_POLICY}/cpuinfo_max_freq", "1")
    assert code_of(caught) == "EACCES"
    with pytest.raises(OSError, match=r".") as caught:
        os.open(pi.path(f"{_POLICY}/new"), os.O_CREAT | os.O_WRONLY, 0o644)
    assert code_of(caught) == "EACCES"


@pytest.mark.parametrize("name", ["EBUSY", "EIO", "ENODATA", "EPERM", "EROFS", "EAGAIN", "ENODEV", "EINVAL"])
def test_faults_reach_the_caller(pi: FuseBoard, name: str) -> None:
    pi.tell("add_fault", pattern=_MAX, on="write", errno_name=name)
    pi.tell("add_fault", pattern="*/temp", on="read", errno_name=name)
    with pytest.raises(OSError, match=r".") as caught:
        pi.write(_MAX, "1000000")
    assert code_of(caught) == name
    with pytest.raises(OSError, match=r".") as caught:
        pi.read("sys/class/thermal/thermal_zone0/temp")
    assert code_of(caught) == name
    assert SysfsRoot(pi.root).text("sys/class/thermal/thermal_zone0/temp").value is None
    pi.tell("clear_faults")
    assert pi.write(_MAX, "1000000") == 7


def test_what_is_unplugged_is_gone_at_once_and_enodev_to_who_holds_it(pi: FuseBoard) -> None:
    fd = os.open(pi.path(_MAX), os.O_RDWR)
    try:
        pi.tell("unplug", top=_POLICY)
        assert not pi.path(_POLICY).exists()
        for call in (lambda: os.pread(fd, 10, 0), lambda: os.write(fd, b"1000000")):
            with pytest.raises(OSError, match=r".") as caught:
                call()
            assert code_of(caught) == "ENODEV"
        pi.tell("plug", top=_POLICY)
        assert pi.read(_MAX) == "2400000"
        with pytest.raises(OSError, match=r".") as caught:
            os.pread(fd, 10, 0)
        assert code_of(caught) == "ENODEV"
    finally:
        os.close(fd)


def test_a_dead_server_is_enotconn_and_the_mount_goes_away(tmp_path: Path) -> None:
    with FuseBoard("pi_5", tmp_path / "root") as board:
        board.kill()
        with pytest.raises(OSError, match=r".") as caught:
            board.read(_MAX)
        assert code_of(caught) == "ENOTCONN"
        assert SysfsRoot(board.root).text(_MAX).value is None
    assert list((tmp_path / "root").iterdir()) == []


def test_a_slow_file_keeps_only_its_own_reader_waiting(pi: FuseBoard) -> None:
    pi.tell("add_fault", pattern="*/temp", delay_s=0.2)
    started_s = time.monotonic()
    reader = subprocess.Popen(["cat", str(pi.path("sys/class/thermal/thermal_zone0/temp"))], stdout=subprocess.PIPE)
    assert pi.read(_MAX) == "2400000"
    text, _ = reader.communicate()
    assert int(text) == 35_000
    assert time.monotonic() - started_s >= 0.2


@pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")
def test_modes_bind_other_users_and_a_new_driver_forgets_them(x86: FuseBoard) -> None:
    energy = x86.path("sys/class/powercap/intel-rapl:0/energy_uj")

    def as_nobody(*command: str) -> str:
        nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
        return subprocess.run(command, capture_output=True, text=True, check=False, **nobody).stderr

    if as_nobody("ls", str(x86.root)):
        pytest.skip("another user cannot reach this test's directory")
    assert "Permission denied" in as_nobody("cat", str(energy))
    assert as_nobody("cat", str(x86.path(_MAX))) == ""
    os.chown(x86.path(_MAX), -1, 65534)
    x86.path(_MAX).chmod(0o664)
    assert as_nobody("sh", "-c", f"echo 1400000 > {x86.path(_MAX)}") == ""
    assert x86.read(_MAX) == "1400000"
    x86.tell("recreate", name="policy0", low_khz=400_000, high_khz=3_400_000)
    assert "Permission denied" in as_nobody("sh", "-c", f"echo 1400000 > {x86.path(_MAX)}")
