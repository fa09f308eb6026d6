from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_rt.errors import ConfigError
from edge_rt.power.client import HintSender, ask
from edge_rt.power.ownership import ClocksTakenError, take
from edge_rt.power.powerd import Options, Powerd, parse
from edge_rt.power.report import report
from edge_rt.power.snapshot import Snapshot, Value
from edge_rt.power.state import Hint
from edge_rt.power.wire import MAX_BYTES, encode
from tests import patience
from tests.patience import PATIENCE_S
from tests.process_signals import is_held, send_held
from tests.unit.power.fake_kernel import BOOT, CPUFREQ
from tests.unit.power.process import Process, started
from tests.unit.power.tree import MAX, limits, machine


def restore(process: Process) -> int:
    command = [sys.executable, "-m", "edge_rt.power.restore", "--root", str(process.root)]
    return subprocess.run([*command, "--snapshot", str(process.snapshot)], check=False).returncode


@pytest.fixture
def root(socket_dir: Path) -> Path:
    machine(socket_dir, n_policies=2)
    return socket_dir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_life_from_ready_to_the_end(root: Path, number: int) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.heard("WATCHDOG=1")
        assert "acting" in powerd.heard("STATUS=")
        powerd.lower()
        assert powerd.snapshot.exists()
        found = powerd.status()
        assert (found["state"], found["work"], found["temperature_c"]) == ("acting", "decode", 51.0)
        assert powerd.end(number) == 0
        powerd.heard("STOPPING=1")
        assert limits(root) == before
        assert not powerd.snapshot.exists()
        assert not Path(powerd.socket).exists()


def test_killed_it_leaves_what_restores(root: Path) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        assert powerd.end(signal.SIGKILL) == -signal.SIGKILL
        assert limits(root) != before
        assert restore(powerd) == 0
        assert limits(root) == before
        assert not powerd.snapshot.exists()
        assert restore(powerd) == 0


def test_killed_and_started_again_it_restores_first(root: Path) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        powerd.end(signal.SIGKILL)
    (root / "n").unlink()
    with started(root, enabled=False) as powerd:
        powerd.heard("READY=1")
        assert limits(root) == before
        assert f"<4>/{MAX} = 2400000: is back" in powerd.said()
        assert powerd.end() == 0


@pytest.mark.parametrize(("arguments", "status"), [(("--once", "--dry-run"), 0), (("--once",), 1), ((), 1)])
def test_a_second_one_touches_nothing_of_the_first_one_s(root: Path, arguments: tuple[str, ...], status: int) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        kept = powerd.snapshot.read_text()
        second = [sys.executable, "-m", "edge_rt.power.powerd", "--root", str(root), "--config", str(powerd.config)]
        done = subprocess.run(
            [*second, "--snapshot", str(powerd.snapshot), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        if status:
            assert f"another process sets clocks already (process {powerd.process.pid}): stop it first" in done.stderr
        assert powerd.snapshot.read_text() == kept
        assert powerd.status()["n_writes"] > 0
        assert limits(root) != before
        powerd.end(signal.SIGKILL)
        assert restore(powerd) == 0
        assert limits(root) == before


def test_one_that_is_not_enabled_leaves_the_clocks_to_others_until_it_is(root: Path) -> None:
    with started(root, enabled=False) as powerd:
        powerd.heard("READY=1")
        other = take(str(powerd.snapshot))  # as `edge_rt power calibrate` does
        powerd.set(enabled=True)
        for state in ("stopped", "acting"):
            powerd.process.send_signal(signal.SIGHUP)
            powerd.heard("RELOADING=1")
            powerd.heard("READY=1")
            found = powerd.status()
            assert (found["state"], "another process sets clocks" in found["stopped_by"]) == (state, state == "stopped")
            if state == "stopped":
                os.close(other)
        with pytest.raises(ClocksTakenError):
            take(str(powerd.snapshot))


def test_limits_given_back_by_hand_meanwhile_are_not_forgotten(root: Path) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        powerd.process.send_signal(signal.SIGSTOP)  # or it lowers them again before they are looked at
        assert restore(powerd) == 0
        assert (powerd.snapshot.exists(), limits(root)) == (False, before)
        powerd.process.send_signal(signal.SIGCONT)
        powerd.lower()
        powerd.end(signal.SIGKILL)
        assert limits(root) != before
        assert restore(powerd) == 0
        assert limits(root) == before


def test_a_snapshot_that_was_wrong_and_is_removed_counts_no_more_after_a_reload(root: Path) -> None:
    (root / "run").mkdir()
    (root / "run/snapshot").write_text("nothing of powerd's\n")
    with started(root) as powerd:
        powerd.heard("READY=1")
        assert powerd.status()["stopped_by"].endswith("If it holds none of powerd's, remove it and reload")
        for state in ("stopped", "acting"):
            powerd.process.send_signal(signal.SIGHUP)
            powerd.heard("RELOADING=1")
            powerd.heard("READY=1")
            assert powerd.status()["state"] == state
            powerd.snapshot.unlink(missing_ok=True)


def test_until_it_is_enabled_it_only_says_what_it_would_do(root: Path) -> None:
    before = limits(root)
    with started(root, enabled=False) as powerd:
        powerd.heard("READY=1")
        sender = HintSender(powerd.socket)

        def wants_less() -> bool:
            sender.send(Hint(work="decode", n_running=1, tpot_s=0.01, sent_s=time.monotonic()))
            found = powerd.status()
            assert found["state"] == "dry-run"
            return (found["clocks"]["policy0"]["wanted_hz"] or 2.4e9) < 2.4e9

        patience.until(wants_less, every_s=patience.POWERD_S)
        sender.close()
        assert limits(root) == before
        assert not powerd.snapshot.exists()
        assert powerd.end() == 0


def test_a_reload_asked_for_before_it_can_hear_is_done_later(root: Path) -> None:
    with started(root) as powerd:
        send_held(powerd.process, signal.SIGHUP)
        powerd.heard("RELOADING=1")
        powerd.heard("READY=1")
        assert not is_held(powerd.process.pid, signal.SIGHUP)
        assert powerd.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_asked_for_before_it_can_hear_is_a_clean_one(root: Path, number: signal.Signals) -> None:
    before = limits(root)
    with started(root) as powerd:
        send_held(powerd.process, number)
        assert powerd.process.wait(PATIENCE_S) == 0, powerd.said()
    assert limits(root) == before


def test_reload_takes_new_settings_and_keeps_old_ones_rather_than_bad_ones(root: Path) -> None:
    before = limits(root)
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        powerd.config.write_text("[power]\nmax_w = -1.0\n")
        powerd.process.send_signal(signal.SIGHUP)
        powerd.heard("RELOADING=1")
        powerd.heard("READY=1")
        assert "power.max_w: Expected `float` >= 0.0, got -1.0" in powerd.said()
        assert powerd.status()["state"] == "acting"
        powerd.set(enabled=False, max_w=12.0)
        powerd.process.send_signal(signal.SIGHUP)
        powerd.heard("RELOADING=1")
        powerd.heard("READY=1")
        found = powerd.status()
        assert (found["state"], found["max_w"]) == ("dry-run", 12.0)
        assert limits(root) == before
        assert powerd.end() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets a cap")
def test_a_cap_is_set_by_root_and_the_lower_one_holds(root: Path) -> None:
    with started(root, max_w=20.0, enabled=False) as powerd:
        powerd.heard("READY=1")
        caps = []
        for max_w in (10.0, 30.0, 0.0):
            ask(powerd.socket, "cap", max_w=max_w, timeout_s=PATIENCE_S)
            caps.append(powerd.status()["max_w"])
        assert caps == [10.0, 20.0, 20.0]


def test_another_power_manager_is_not_fought(root: Path) -> None:
    before = limits(root)
    (root / "proc/7").mkdir()
    (root / "proc/7/comm").write_text("tuned\n")
    with started(root) as powerd:
        powerd.heard("READY=1")
        assert "tuned" in powerd.heard("STATUS=stopped")
        found = powerd.status()
        assert (found["state"], found["rivals"]) == ("stopped", ["tuned"])
        assert "systemctl disable --now tuned" in found["stopped_by"]
        assert limits(root) == before
        powerd.set(force=True)
        powerd.process.send_signal(signal.SIGHUP)
        powerd.heard("RELOADING=1")
        powerd.heard("READY=1")
        powerd.lower()
        assert powerd.end() == 0
        assert limits(root) == before


def test_a_broken_snapshot_keeps_it_from_acting(root: Path) -> None:
    (root / "run").mkdir()
    (root / "run/snapshot").write_text("edge_rt power snap")
    with started(root) as powerd:
        powerd.heard("READY=1")
        found = powerd.status()
        assert found["state"] == "stopped"
        assert "is no snapshot of this version" in found["stopped_by"]
        assert powerd.end() == 0


def test_once_prints_and_gives_back(root: Path) -> None:
    before = limits(root)
    (root / "c.toml").write_text("[power]\nenabled = true\n")
    command = [sys.executable, "-m", "edge_rt.power.powerd", "--root", str(root), "--snapshot", str(root / "s")]
    done = subprocess.run(
        [*command, "--config", str(root / "c.toml"), "--once"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["state"], found["n_clocks"]) == ("acting", 2)
    assert limits(root) == before
    done = subprocess.run([*command, "--once", "--dry-run"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["state"] == "dry-run"


@pytest.mark.parametrize("text", ["[power]\nmax_w = -1.0\n", "[power"])
def test_settings_that_are_wrong_end_it_at_once(root: Path, text: str) -> None:
    (root / "c.toml").write_text(text)
    command = [sys.executable, "-m", "edge_rt.power.powerd", "--root", str(root), "--config", str(root / "c.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith("<3>")


def test_nothing_but_the_standard_library_is_loaded_and_little_memory_used(root: Path) -> None:
    code = "import sys, edge_rt.power.powerd; print('\\n'.join(sys.modules))"
    lists = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
        for text in (code, "import sys; print('\\n'.join(sys.modules))")
    ]
    brought = {name.partition(".")[0] for name in set(lists[0]) - set(lists[1])}
    assert brought - sys.stdlib_module_names == {"edge_rt"}
    assert not brought & {"asyncio", "argparse", "ctypes", "logging", "multiprocessing", "subprocess", "ssl", "sqlite3"}
    with started(root) as powerd:
        powerd.heard("READY=1")
        powerd.lower()
        status = Path(f"/proc/{powerd.process.pid}/status").read_text().splitlines()
        rss_kb = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        assert rss_kb * 1024 <= 20_000_000


# In this process.


def options(root: Path) -> Options:
    (root / "c.toml").write_text(f'[power]\nenabled = true\nsocket_path = "{root / "p"}"\n')
    return Options(config=str(root / "c.toml"), root=str(root), snapshot=str(root / "s"))


def test_a_rival_that_ends_gives_the_field_back(root: Path) -> None:
    powerd = Powerd(options(root), {})
    comm = root / "proc/7/comm"
    comm.parent.mkdir()
    comm.write_text("tuned\n")
    powerd._check_rivals()
    assert powerd.governor.state == "stopped"
    comm.unlink()
    powerd._check_rivals()
    assert powerd.governor.state == "acting"


def test_a_rival_that_was_caught_writing_is_not_forgotten(root: Path) -> None:
    powerd = Powerd(options(root), {})
    powerd.governor.stop("another program keeps writing")
    powerd._check_rivals()
    assert powerd.governor.state == "stopped"


def test_a_mistake_of_its_own_gives_the_machine_back_and_is_tried_again(root: Path) -> None:
    before = limits(root)
    powerd = Powerd(options(root), {})
    hint = Hint(work="decode", n_running=1, tpot_s=0.01, sent_s=0.0)
    for i in range(40):
        powerd._step(i / 20, [hint])
    assert limits(root) != before
    powerd.governor.sensing.observe = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    powerd._step(2.0, [hint])
    assert powerd.governor.stopped_by == "a mistake of its own: ZeroDivisionError: division by zero"
    assert limits(root) == before
    powerd._check_rivals()
    assert powerd.governor.state == "acting"


def test_clocks_that_come_later_are_taken_up(root: Path) -> None:
    folder = root / CPUFREQ / "policy2"
    folder.rename(root / "away")
    powerd = Powerd(options(root), {})
    powerd.governor.step(0.0, [], powerd.limits)
    assert set(powerd.governor.actuators.max_hz()) == {"policy0"}
    (root / "away").rename(folder)
    powerd._look_again()
    powerd.governor.step(1.0, [], powerd.limits)
    assert set(powerd.governor.actuators.max_hz()) == {"policy0", "policy2"}
    assert set(powerd.governor.sensing.groups) == {"policy0", "policy2"}
    assert powerd.governor.restore()


def test_the_longest_status_fits_into_a_message(tmp_path: Path) -> None:
    machine(tmp_path, n_policies=64)
    (tmp_path / "s").write_text("x")
    powerd = Powerd(options(tmp_path), {})
    powerd.rivals = ("power-profiles-daemon",) * 50
    powerd.governor.stopped_by = "x" * 5000
    powerd.governor.step(0.0, [], powerd.limits)
    for path in (tmp_path / CPUFREQ).glob("policy*/scaling_max_freq"):
        path.unlink()
    powerd._files.close()
    powerd.governor.step(1.0, [], powerd.limits)
    found = report(powerd.governor, powerd.limits, 1e4 / 3, powerd.rivals, powerd.settings, 1e6 / 3)
    assert found["n_faults"] == 64
    assert len(encode("status", **found)) <= MAX_BYTES
    (tmp_path / "u").mkdir()
    machine(tmp_path / "u", n_policies=64)
    other = Powerd(options(tmp_path / "u"), {})
    other.governor.step(0.0, [], other.limits)
    assert other.status()["n_clocks"] == 64
    assert len(encode("status", **other.status())) <= MAX_BYTES


def test_the_command_line() -> None:
    assert parse([]) == Options()
    assert parse(["--config", "/a", "--root=/b", "--once", "--dry-run"]) == Options(
        config="/a", root="/b", once=True, is_dry=True
    )
    for words in (["--config"], ["--nonsense"], ["--once=1"], ["config", "x"], ["--is_dry", "x"]):
        with pytest.raises(ConfigError):
            parse(words)


def test_values_of_a_snapshot_are_what_was_before(root: Path) -> None:
    """What an earlier process left behind is older than what this one reads."""
    left = Snapshot(str(root / "s"), BOOT)
    left.add([Value(MAX, "2000000", "cpufreq-dt")])
    powerd = Powerd(options(root), {})
    assert limits(root)[MAX] == "2000000"
    assert not Path(left.file).exists()
    assert powerd.governor.restore()
