from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edge_rt import config
from edge_rt.cli import power_plan
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.assemble import groups, settable
from edge_rt.power.calibration import write
from edge_rt.power.plan import Change, Plan, plan
from edge_rt.power.sensing import Sensing
from edge_rt.power.settings import Settings
from edge_rt.power.snapshot import Snapshot, Value
from edge_rt.power.state import Advice, Decision, Domain, Limits, Observation
from edge_rt.power.wire import TakesAdvice
from tests.unit.power.fake_kernel import BOOT, CPUFREQ
from tests.unit.power.test_calibration import FOUND, THREADS
from tests.unit.power.tree import MAX, limits, machine


class Careful:
    """A policy that a test can foretell."""

    domains: Sequence[Domain] = ()

    def domains_changed(self, domains: Sequence[Domain]) -> None:
        self.domains = domains

    def decide(self, seen: Observation, limits: Limits) -> Decision:
        work = seen.hint.work if seen.hint is not None else "idle"
        is_hot = (seen.temperature_c or 0.0) > limits.max_c
        is_above = seen.power is not None and (seen.power.power_w or 0.0) > limits.max_w > 0
        reason = "heat" if is_hot else "cap" if is_above else work
        at = {"idle": 0, "decode": 1, "heat": 1, "cap": 2}.get(reason, -1)
        return Decision(max_hz={one.name: one.points_hz[at] for one in self.domains}, reason=reason)


def planned(root: Path, own: dict[str, Value] | None = None, **settings: object) -> Plan:
    sysfs, files, chosen = SysfsRoot(root), KernelFiles(str(root)), Settings(**settings)  # type: ignore[arg-type]
    sensing = Sensing(sysfs, files, None, groups(sysfs))
    return plan(chosen, files, settable(sysfs, chosen.actuators), sensing, Careful, 0.0, own or {}, TakesAdvice(4, 8))


def test_each_situation_has_its_writes_and_none_is_made(tmp_path: Path) -> None:
    machine(tmp_path)
    before = limits(tmp_path)
    found = planned(tmp_path, enabled=True, max_w=10.0)
    assert found.obstacles == ()
    assert {one.situation: (one.reason, one.changes) for one in found.situations} == {
        "idle": ("idle", (Change(path=MAX, now="2400000", then="600000"),)),
        "prefill": ("prefill", ()),
        "decode": ("decode", (Change(path=MAX, now="2400000", then="1000000"),)),
        "hot": ("heat", (Change(path=MAX, now="2400000", then="1000000"),)),
        "cap": ("cap", (Change(path=MAX, now="2400000", then="1500000"),)),
    }
    assert limits(tmp_path) == before


def test_why_nothing_would_be_written(tmp_path: Path) -> None:
    machine(tmp_path)
    found = planned(tmp_path)
    assert {one.situation: one.nothing for one in found.situations} == {
        "idle": "",
        "prefill": "all is as it should be",
        "decode": "",
        "hot": "",
        "cap": "power.max_w is 0: there is no cap; this is prefill",
    }
    assert found.obstacles == ("power.enabled is false: powerd only says what it would do",)


def test_what_keeps_it_from_writing(tmp_path: Path) -> None:
    cooling = "sys/class/thermal/cooling_device0"
    machine(tmp_path, {f"{cooling}/type": "cpufreq-cpu0", f"{cooling}/cur_state": "1", "proc/7/comm": "tuned"})
    found = planned(tmp_path, enabled=True)
    assert [obstacle.partition(" ")[0] for obstacle in found.obstacles] == ["tuned", "the"]
    waiting = {one.situation for one in found.situations if "cannot be read" in one.nothing}
    assert waiting == {"idle", "decode", "hot"}  # the others would write nothing
    assert planned(tmp_path, enabled=True, force=True).obstacles == found.obstacles[1:]


def test_a_machine_without_clocks_says_so(tmp_path: Path) -> None:
    found = planned(tmp_path, enabled=True)
    assert {one.nothing for one in found.situations} == {"no clock can be set here"}
    assert "no clock can be set (power.actuators is cpufreq)" in found.obstacles[0]
    machine(tmp_path)
    empty = planned(tmp_path, enabled=True, actuators=()).obstacles
    assert empty == ("no clock can be set (power.actuators is empty)",)


def test_the_users_own_limits_are_those_before_powerd(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / MAX).write_text("600000\n")
    own = {MAX: Value(MAX, "2000000", "cpufreq-dt")}
    found = {one.situation: one.changes for one in planned(tmp_path, own).situations}
    assert found["prefill"] == (Change(path=MAX, now="600000", then="2000000"),)
    assert found["idle"] == ()


def loaded(**power: object) -> config.Loaded:
    return config.load(environ={}, flags={f"power.{name}": value for name, value in power.items()})


@pytest.fixture
def example(tmp_path: Path) -> Path:
    machine(tmp_path, n_policies=2)
    return tmp_path


def test_the_command_shows_every_file(example: Path) -> None:
    shown = power_plan.text(power_plan.take(example, loaded(), str(example / "run/snapshot")))
    assert f"/{CPUFREQ}/policy2/scaling_max_freq" in shown
    assert shown.splitlines()[-1] == "! power.enabled is false: powerd only says what it would do"
    for situation in ("idle", "prefill", "decode", "hot", "cap"):
        assert f"\n{situation} " in shown


def test_the_command_reads_the_snapshot_and_leaves_it(example: Path) -> None:
    snapshot = Snapshot(str(example / "run/snapshot"), BOOT)
    snapshot.add([Value(MAX, "2000000", "cpufreq-dt")])
    found = power_plan.take(example, loaded(enabled=True), snapshot.file)
    assert Change(path=MAX, now="2400000", then="2000000") in found.situations[1].changes
    assert Path(snapshot.file).exists()
    other = Snapshot(snapshot.file, BOOT[:-1] + "9")
    assert not other.load(keep=True)
    assert Path(snapshot.file).exists()
    Path(snapshot.file).chmod(0o666)
    assert "another user" in power_plan.take(example, loaded(enabled=True), snapshot.file).obstacles[-1]


def test_what_the_daemon_would_be_advised_is_shown(tmp_path: Path) -> None:
    threads = [
        replace(THREADS[0], phase=phase, n_threads=n, n_streams=1, s_per_token=seconds, power_w=3.0 + n)
        for phase, times_s in (("prefill", (0.02, 0.01)), ("decode", (0.02, 0.019)))
        for n, seconds in enumerate(times_s, 1)
    ]
    write(tmp_path / "power.json", replace(FOUND, threads=tuple(threads)))
    flags = {"power.model_file": str(tmp_path / "power.json"), "engine.n_threads": 2, "engine.n_parallel": 3}
    found = power_plan.take(tmp_path, config.load(environ={}, flags=flags), str(tmp_path / "run/snapshot"))
    advised = {one.situation: one.advice for one in found.situations}
    assert advised["idle"] == Advice()
    assert advised["decode"] == Advice(n_prefill_threads=2, n_decode_threads=1, max_batch=3)
    rows = power_plan.text(found).splitlines()
    assert sum("advice to the daemon" in row and "decode on 1 thread, 3 answers" in row for row in rows) == 4
