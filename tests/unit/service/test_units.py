from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_rt.service import units

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "/opt/edge_rt/bin/python"


def rendered(python: str = PYTHON, *, version: int = 252) -> dict[str, str]:
    return {file.path.name: file.text for file in units.files(python, systemd_version=version, powerd=True)}


def test_no_placeholder_is_left() -> None:
    assert [name for name, text in rendered().items() if re.search(r"@[A-Z]+@", text)] == []


def test_the_interpreter_is_the_one_that_was_given() -> None:
    assert f"ExecStart={PYTHON} -P -m edge_rt serve\n" in rendered()["edge_rt.service"]
    assert f"ExecStopPost=+{PYTHON} -P -m edge_rt.power.restore\n" in rendered()["edge_rt-powerd.service"]


def test_without_powerd_its_units_are_not_there() -> None:
    found = units.files(PYTHON, systemd_version=252, powerd=False)
    assert [file.path.name for file in found if "powerd" in file.path.name] == []


@pytest.mark.parametrize(
    ("version", "lines"), [(252, "Type=notify\nExecReload=/bin/kill -HUP $MAINPID\n"), (253, "Type=notify-reload\n")]
)
def test_a_reload_is_waited_for_where_systemd_can(version: int, lines: str) -> None:
    assert lines in rendered(version=version)["edge_rt.service"]


def test_one_that_fails_again_and_again_is_not_given_up_where_systemd_can_wait_longer() -> None:
    assert "StartLimitBurst=10\n" in rendered(version=253)["edge_rt.service"]
    newer = rendered(version=254)["edge_rt.service"]
    assert "StartLimitIntervalSec=0\n" in newer
    assert "RestartSec=0\nRestartSteps=8\nRestartMaxDelaySec=30s\n" in newer


@pytest.mark.parametrize(
    ("path", "word"),
    [("/a/python", "/a/python"), ("/a b/py", '"/a b/py"'), ("/50%/py", "/50%%/py"), ('/a"b/py', '"/a\\"b/py"')],
)
def test_a_path_is_written_so_that_systemd_reads_it_back(path: str, word: str) -> None:
    assert units.quoted(path) == word


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("systemd 252 (252.38-1~deb12u1)", 252),
        ("systemd 257.4-1-arch", 257),
        ("systemd 257~rc2 (257~rc2)", 257),
        ("systemd 249.11 (x)", 249),
        ("", None),
        ("busybox", None),
        ("systemd", None),
    ],
)
def test_version(line: str, version: int | None) -> None:
    assert units.version(line) == version


# What systemd itself says of them


@pytest.fixture
def unit_dir(tmp_path: Path) -> Path:
    """Units for an interpreter that every system has, so that systemd finds the program."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for name, text in rendered("/bin/sh").items():
        (tmp_path / name).write_text(text)
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", units.ALL_UNITS)
def test_systemd_finds_nothing_to_complain_of(unit_dir: Path, name: str) -> None:
    done = analyze("verify", "--man=no", str(unit_dir / name))
    assert (done.stdout, done.stderr) == ("", "")  # it ends with 0 on mistakes too


def test_systemd_would_complain_of_a_mistake(unit_dir: Path) -> None:
    service = unit_dir / "edge_rt.service"
    service.write_text(service.read_text().replace("ProtectSystem=strict", "ProtectSystm=strict"))
    assert "ProtectSystm" in analyze("verify", "--man=no", str(service)).stderr


@pytest.mark.parametrize("name", [units.DAEMON, units.POWERD])
def test_exposure_is_at_most_2(unit_dir: Path, name: str) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", str(unit_dir / name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "systemd" / "examples").glob("*.conf")))
def test_examples_are_drop_ins_that_systemd_takes(unit_dir: Path, example: str) -> None:
    drop_ins = unit_dir / "edge_rt.service.d"
    drop_ins.mkdir()
    (drop_ins / example).write_text(units.shipped(f"examples/{example}"))
    done = analyze("verify", "--man=no", str(unit_dir / units.DAEMON))
    assert (done.stdout, done.stderr) == ("", "")
