from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power import calibration
from edge_rt.power.assemble import Chooser, groups, make_meter, make_policy, settable
from edge_rt.power.calibration import CalibratedDomain, Calibration, Phase, Point, ThreadPoint
from edge_rt.power.settings import Settings
from edge_rt.power.state import Domain, Hint, Limits, Observation
from tests.unit.power.fake_kernel import POINTS_KHZ, domain
from tests.unit.power.tree import machine

NPU = {
    "sys/class/devfreq/fdab0000.npu/max_freq": "1000000000",
    "sys/class/devfreq/fdab0000.npu/min_freq": "300000000",
    "sys/class/devfreq/fdab0000.npu/available_frequencies": "300000000 1000000000",
}
Said = list[tuple[int, str, str]]


def calibrated(name: str = "policy0") -> Calibration:
    points = tuple(
        Point(
            max_hz=khz * 1e3, prefill_s_per_token=1e6 / khz, decode_s_per_token=1e5 / khz, prefill_w=4.0, decode_w=3.0
        )
        for khz in POINTS_KHZ
    )
    return Calibration(
        board="a board",
        made_at="2026-11-30T08:00:00Z",
        boundary="board",
        quality="measured",
        idle_w=2.0,
        domains=(CalibratedDomain(name=name, points=points),),
    )


def observed(now_s: float = 0.0) -> Observation:
    return Observation(now_s=now_s, hint=Hint(work="decode", n_running=1, sent_s=now_s), temperature_c=50.0)


@pytest.mark.parametrize(
    ("actuators", "names"),
    [
        (("cpufreq",), ["policy0"]),
        (("devfreq",), ["fdab0000.npu"]),
        (("cpufreq", "devfreq"), ["policy0", "fdab0000.npu"]),
        (("epp",), []),
    ],
)
def test_only_what_the_settings_name_is_set(tmp_path: Path, actuators: tuple[str, ...], names: list[str]) -> None:
    machine(tmp_path, NPU)
    assert [one.name for one in settable(SysfsRoot(tmp_path), actuators)] == names
    assert groups(SysfsRoot(tmp_path)) == {"policy0": (0, 1)}


def test_the_policy_chooses_points_of_its_domains() -> None:
    said: Said = []
    chooser = Chooser(None, lambda *line: said.append(line))
    for domains in ([domain(), domain("policy4")], [domain(points_khz=(600_000, 1_000_000))]):
        chooser.domains_changed(domains)
        decision = chooser.decide(observed(), Limits())
        assert set(decision.max_hz) == {one.name for one in domains}
        assert all(decision.max_hz[one.name] in one.points_hz for one in domains)
    assert said == []


def test_without_a_cpu_clock_nothing_is_decided() -> None:
    chooser = Chooser(None, lambda *_: None)
    assert chooser.decide(observed(), Limits()).max_hz == {}
    chooser.domains_changed([Domain(name="npu", kind="npu", points_hz=(1e8, 1e9))])
    assert chooser.decide(observed(), Limits()).reason == "no CPU clock can be set"


def test_without_a_cpu_clock_threads_are_advised_where_they_were_measured() -> None:
    points = tuple(
        ThreadPoint(
            phase=phase,
            max_hz=POINTS_KHZ[-1] * 1e3,
            n_threads=n,
            n_streams=1,
            s_per_token=0.02 * (4 / n if phase == "prefill" else max(1.0, 2 / n)),
            power_w=2.5 + 0.5 * n,
        )
        for phase in get_args(Phase)
        for n in (1, 2, 3, 4)
    )
    chooser = Chooser(replace(calibrated(), threads=points), lambda *_: None)
    chooser.domains_changed([])
    takes = Hint(work="decode", n_running=1, max_threads=4, max_batch=8, sent_s=0.0)
    decision = chooser.decide(replace(observed(), hint=takes), Limits())
    assert decision.max_hz == {}
    assert decision.advice.n_decode_threads == 2
    assert decision.advice.n_prefill_threads == 4


def test_a_calibration_of_another_machine_is_said_and_left(tmp_path: Path) -> None:
    said: Said = []
    for name in ("policy0", "policy9"):
        chooser = Chooser(calibrated(name), lambda *line: said.append(line))
        chooser.domains_changed([domain()])
        assert chooser.decide(observed(), Limits()).max_hz["policy0"] in domain().points_hz
    ((priority, _, text),) = said
    assert priority == 4
    assert "the calibration of a board has no clock of this machine" in text


def test_a_calibrated_cap_holds_without_a_meter() -> None:
    chooser = Chooser(calibrated(), lambda *_: None)
    chooser.domains_changed([domain()])
    decision = chooser.decide(observed(), Limits(max_w=1.0))
    assert decision.max_hz == {"policy0": 600e6}


def test_the_calibration_file_is_read_or_said(tmp_path: Path) -> None:
    said: Said = []
    path = tmp_path / "power.json"
    settings = Settings(model_file=str(path))
    make_policy(settings, lambda *line: said.append(line))
    assert said[-1][0] == 6
    assert "there is no" in said[-1][2]
    path.write_text("{")
    make_policy(settings, lambda *line: said.append(line))
    assert said[-1][0] == 3
    assert str(path) in said[-1][2]
    calibration.write(path, calibrated())
    make_policy(settings, lambda *line: said.append(line))
    assert len(said) == 2


def test_which_meter_is_taken(tmp_path: Path) -> None:
    said: Said = []
    machine(tmp_path)
    root = SysfsRoot(tmp_path)

    def chosen(meter: str) -> str | None:
        found = make_meter(Settings(meter=meter), root, lambda *line: said.append(line))
        return found.name if found is not None else None

    assert chosen("auto") is None
    assert "nothing measures power here" in said[-1][2]
    chip = "sys/class/hwmon/hwmon0"
    machine(tmp_path, {f"{chip}/name": "power_meter", f"{chip}/power1_average": "6000000"})
    name = chosen("auto")
    assert name is not None
    assert chosen(name) == name
    assert chosen("none") is None
    assert chosen("serial:/dev/ttyACM0:tc66") == name
    assert said[-1][:2] == (5, "meter serial")
    assert chosen("no such meter") is None
    assert said[-1][0] == 3
    assert "which is no meter here" in said[-1][2]
