from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.base import Reading, known, unknown
from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.devices.meters import Boundary, Quality, Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.actuators import Actuators
from edge_rt.power.assemble import Chooser
from edge_rt.power.governor import DECIDE_S, Governor, at_work, cap_w, has_news, merge, safe
from edge_rt.power.sensing import PowerReader, Sensing
from edge_rt.power.snapshot import Snapshot
from edge_rt.power.state import NO_ADVICE, Advice, Decision, Domain, Hint, Limits, Observation, Power
from tests.unit.power.fake_kernel import BOOT, CPUFREQ, FakeKernel, Policy, domain
from tests.unit.power.tree import machine

MAX = f"{CPUFREQ}/policy0/scaling_max_freq"


@dataclass
class Table:
    """A policy that knows three words."""

    seen: list[Observation] = field(default_factory=list)
    domains: Sequence[Domain] = ()
    error: Exception | None = None
    advice: Advice = field(default_factory=Advice)

    def domains_changed(self, domains: Sequence[Domain]) -> None:
        self.domains = domains

    def decide(self, observation: Observation, limits: Limits) -> Decision:
        self.seen.append(observation)
        if self.error is not None:
            raise self.error
        work = observation.hint.work if observation.hint is not None else "idle"
        at = {"idle": 0, "decode": 1, "prefill": -1}[work]
        max_hz = {one.name: one.points_hz[at] for one in self.domains}
        return Decision(max_hz=max_hz, reason=work, advice=self.advice)


@dataclass
class Scene:
    kernel: FakeKernel
    snapshot: Snapshot
    policy: Table
    governor: Governor
    said: list[tuple[int, str, str]]

    def step(self, now_s: float, work: str | None = "decode") -> None:
        hints = [] if work is None else [Hint(work=work, sent_s=now_s)]  # type: ignore[arg-type]
        self.governor.step(now_s, hints, Limits())

    @property
    def khz(self) -> int:
        return self.kernel.policies["policy0"].max_khz


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    machine(tmp_path)
    kernel = FakeKernel()
    snapshot = Snapshot(str(tmp_path / "snapshot"), BOOT)
    said: list[tuple[int, str, str]] = []
    policy = Table()
    sensing = Sensing(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)), None, {"policy0": (0, 1)})
    governor = Governor(
        sensing, Actuators(kernel, [domain()], snapshot), policy, is_dry=False, say=lambda *line: said.append(line)
    )
    return Scene(kernel, snapshot, policy, governor, said)


def test_each_phase_gets_its_clock(scene: Scene) -> None:
    for i, (work, khz) in enumerate((("decode", 1_000_000), ("prefill", 2_400_000), (None, 600_000))):
        scene.step(float(i), work)
        assert scene.khz == khz
    assert scene.governor.state == "acting"
    assert scene.policy.seen[1].max_hz == {"policy0": 1e9}  # what the decision before came to
    assert scene.policy.seen[0].temperature_c == 51.0
    assert scene.governor.restore()
    assert scene.khz == 2_400_000


TWO = Advice(n_decode_threads=2)


def test_advice_is_in_force_once_it_was_given_to_who_takes_it(scene: Scene) -> None:
    scene.policy.advice = TWO
    for i, max_threads in enumerate((4, 4, 0)):
        scene.governor.step(float(i), [Hint(work="decode", max_threads=max_threads, sent_s=float(i))], Limits())
    assert [seen.advice for seen in scene.policy.seen] == [Advice(), TWO, Advice()]
    assert scene.governor.advice == TWO


def test_in_a_dry_run_advice_is_told_and_not_in_force(scene: Scene) -> None:
    scene.policy.advice, scene.governor.is_dry = TWO, True
    for i in range(3):
        scene.governor.step(float(i), [Hint(work="decode", max_threads=4, sent_s=float(i))], Limits())
    assert {seen.advice for seen in scene.policy.seen} == {Advice()}
    assert scene.governor.advice == TWO


def test_who_stops_acting_or_fails_gives_no_advice(scene: Scene) -> None:
    scene.policy.advice = TWO
    scene.step(0.0)
    scene.policy.error = ZeroDivisionError("division by zero")
    scene.step(1.0)
    assert scene.governor.advice == Advice()
    scene.policy.error = None
    scene.step(2.0)
    assert scene.governor.advice == TWO
    scene.governor.stop("a test")
    assert scene.governor.advice == Advice()


def test_several_daemons_workingtake_no_advice() -> None:
    one = Hint(work="decode", max_threads=4, max_batch=8, sent_s=9.0)
    assert merge([one], 9.1) == one
    joined = merge([one, one], 9.1)
    assert joined is not None
    assert (joined.max_threads, joined.max_batch) == (0, 0)


def test_a_daemon_that_rests_takes_nobodys_advice_away() -> None:
    working = Hint(work="decode", n_running=1, max_threads=4, max_batch=8, sent_s=9.0)
    resting = Hint(work="idle", max_threads=4, max_batch=8, sent_s=9.05)
    for hints in ([working, resting], [resting, working]):
        assert merge(hints, 9.1) is working
    assert merge([resting, resting], 9.1) is resting
    assert at_work([working, resting], 9.1) == [working]


DECODING = Hint(work="decode", n_running=1)
SEEN = Observation(
    now_s=5.0,
    hint=DECODING,
    power=Power(power_w=4.0, boundary="board", quality="measured", age_s=0.0),
    temperature_c=50.0,
    utilisation=0.5,
    max_hz={"policy0": 1e9},
)


@pytest.mark.parametrize(
    ("changes", "is_news"),
    [
        ({}, False),
        ({"power": replace(SEEN.power, age_s=0.05)}, False),
        ({"power": replace(SEEN.power, power_w=4.1)}, True),
        ({"power": None}, True),
        ({"now_s": 5.05 + DECIDE_S}, True),
        ({"hint": replace(DECODING)}, True),
        ({"hint": None}, True),
        ({"temperature_c": None}, True),
        ({"throttled": True}, True),
        ({"utilisation": 0.6}, True),
        ({"is_on_battery": True}, True),
        ({"max_hz": {"policy0": 2e9}}, True),
        ({"advice": Advice(max_batch=4)}, True),
    ],
    ids=str,
)
def test_what_may_change_a_decision_is_news(changes: Mapping[str, Any], is_news: bool) -> None:
    assert has_news(SEEN, replace(SEEN, **{"now_s": 5.05, **changes})) is is_news


@pytest.mark.parametrize(
    "hint", [Hint(work="prefill"), Hint(work="idle", n_waiting=1), Hint(work="decode", ttft_left_s=0.1)], ids=str
)
def test_time_alone_is_news_to_a_prompt_and_to_whoever_waits(hint: Hint) -> None:
    seen = replace(SEEN, hint=hint)
    assert has_news(seen, replace(seen, now_s=5.001))


def test_a_look_without_news_costs_no_decision_and_another_programs_write_is_news(scene: Scene) -> None:
    hint, limits = Hint(work="decode", sent_s=0.0), Limits()
    for i in range(10):
        scene.governor.step(i * 0.01, [hint], limits)
    n_decided = len(scene.policy.seen)
    assert n_decided == 2  # at first, and once its own write was seen
    scene.kernel.policies["policy0"].max_khz = 2_000_000
    scene.governor.step(0.1, [hint], limits)
    assert (scene.khz, len(scene.policy.seen)) == (1_000_000, n_decided + 1)


def test_work_makes_it_look_often(scene: Scene) -> None:
    scene.step(0.0, "decode")
    assert scene.governor.is_busy
    scene.step(1.0, "idle")
    assert not scene.governor.is_busy
    scene.step(2.0, None)
    assert not scene.governor.is_busy


def test_a_policy_that_fails_leaves_safe_clocks_and_is_asked_again(scene: Scene) -> None:
    scene.policy.error = ZeroDivisionError("division by zero")
    scene.step(0.0, "prefill")
    assert scene.khz == 1_000_000
    assert scene.governor.decision.reason == "safe"
    assert "ZeroDivisionError: division by zero" in scene.said[-1][2]
    scene.policy.error = None
    scene.step(1.0, "prefill")
    assert scene.khz == 2_400_000


@pytest.mark.parametrize("hz", [0.0, -1.0, float("nan"), 2.5e9, 999e6])
def test_a_clock_that_no_domain_has_is_not_set(scene: Scene, hz: float) -> None:
    scene.step(0.0, "prefill")
    scene.policy.decide = lambda *_: Decision(max_hz={"policy0": hz})  # type: ignore[method-assign]
    scene.step(1.0, "prefill")
    assert scene.khz == 1_000_000
    scene.policy.decide = lambda *_: Decision(max_hz={"policy9": 1e9})  # type: ignore[method-assign]
    scene.step(2.0, "prefill")
    assert scene.governor.decision.reason == "safe"


def test_a_limit_that_somebody_sets_meanwhile_is_overwritten_and_told(scene: Scene) -> None:
    scene.step(0.0)
    scene.kernel.policies["policy0"].max_khz = 1_500_000
    scene.step(1.0)
    assert scene.khz == 1_000_000
    assert scene.said[-1][:2] == (4, f"foreign {MAX}")
    assert scene.said[-1][2].startswith(f"another program set /{MAX} to 1500000: powerd sets its own again")
    n_said = len(scene.said)
    scene.step(2.0)
    assert len(scene.said) == n_said


def test_a_rival_that_keeps_writing_is_left_the_field(scene: Scene) -> None:
    for i in range(3):
        scene.step(i * 10.0)
        assert scene.khz == 1_000_000
        scene.kernel.policies["policy0"].max_khz = 1_500_000
    scene.step(30.0)
    assert scene.governor.state == "stopped"
    assert scene.governor.stopped_by == f"another program keeps writing /{MAX}"
    assert scene.khz == 2_400_000
    n_writes = len(scene.kernel.writes)
    scene.step(40.0)
    assert len(scene.kernel.writes) == n_writes
    assert not Path(scene.snapshot.file).exists()
    scene.governor.resume()
    scene.step(100.0)
    assert scene.khz == 1_000_000


def test_an_actuator_that_fails_costs_its_clock_and_nothing_else(scene: Scene) -> None:
    scene.kernel.faults[MAX, "write"] = errno.EPERM
    for i in range(5):
        scene.step(float(i))
    assert scene.governor.state == "acting"
    assert {line[:2] for line in scene.said} == {(4, f"{MAX} write EPERM")}  # one matter for the log
    assert scene.governor.n_writes == 1  # tries
    assert f"/{MAX}: write: EPERM" in scene.said[0][2]


def test_a_machine_that_loses_its_clocks_goes_on(scene: Scene) -> None:
    scene.step(0.0)
    scene.kernel.policies.clear()
    for i in range(1, 20):
        scene.step(float(i))
    assert scene.governor.decision.max_hz == {}
    assert scene.governor.restore()


def test_a_snapshot_that_cannot_be_changed_is_said(scene: Scene, tmp_path: Path) -> None:
    scene.step(0.0)
    Path(scene.snapshot.file).unlink()
    (tmp_path / "snapshot/inside").mkdir(parents=True)
    assert not scene.governor.restore()
    assert "the snapshot cannot be changed" in scene.said[-1][2]
    assert scene.khz == 2_400_000


def test_heat_postpones(scene: Scene) -> None:
    scene.kernel.heat(1_500_000)
    scene.step(0.0)
    assert scene.governor.applied.is_postponed
    assert scene.kernel.writes == []
    assert "waits" in scene.said[-1][2]


# Hints.

HINT = Hint(work="decode", n_running=2, tpot_s=0.02, n_threads=2, sent_s=10.0)


def test_hints_of_several_daemons_are_joined() -> None:
    other = Hint(
        work="prefill", n_waiting=1, n_running=1, n_prompt_tokens=30, ttft_left_s=0.5, n_threads=4, sent_s=10.5
    )
    late = replace(other, ttft_left_s=0.4, sent_s=10.0)
    found = merge([HINT, other, late], 11.0)
    assert found is not None
    assert (found.work, found.n_waiting, found.n_running, found.n_threads) == ("prefill", 2, 4, 10)
    assert found.ttft_left_s == pytest.approx(-0.6)
    assert found.tpot_s == 0.02


def test_old_hints_say_nothing() -> None:
    assert merge([HINT], 12.0) is HINT
    assert merge([HINT], 12.1) is None
    assert merge([], 0.0) is None


def test_safe_clocks_are_some_way_below_the_highest() -> None:
    npu = Domain(name="npu", kind="npu", points_hz=(1e8, 1e9))
    one = domain("policy4", (2_000_000,))
    assert safe([domain(), npu, one]).max_hz == {"policy0": 1e9, "npu": 1e9, "policy4": 2e9}


@pytest.mark.parametrize(
    ("on_battery", "max_w", "battery_w", "expected"),
    [(None, 15, 5, 15), (False, 15, 5, 15), (True, 15, 5, 5), (True, 0, 5, 5), (True, 4, 5, 4), (True, 15, 0, 15)],
)
def test_which_cap_holds(on_battery: bool | None, max_w: float, battery_w: float, expected: float) -> None:
    seen = Observation(now_s=0.0, is_on_battery=on_battery)
    assert cap_w(seen, Limits(max_w=max_w, battery_w=battery_w)) == expected


# Sensing.


@dataclass
class FakeMeter:
    readings: list[Reading[Sample]]
    name: str = "fake"
    boundary: Boundary = "board"
    quality: Quality = "measured"
    interval_s: float = 0.1
    n_reads: int = 0

    def read(self, now_s: float) -> Reading[Sample]:
        self.n_reads += 1
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def close(self) -> None: ...


def test_watts_of_a_meter_age() -> None:
    reader = PowerReader(FakeMeter([known(Sample(power_w=5.0, age_s=0.02), "m"), unknown("m", "gone")]))
    assert reader.read(0.0).power_w == 5.0
    found = reader.read(0.05)
    assert (found.power_w, found.age_s) == (5.0, pytest.approx(0.07))
    assert reader.read(0.2).power_w == 5.0
    assert reader.reason == "m: gone"
    assert reader.read(0.31).power_w is None
    assert reader.read(5.0).age_s == 5.0


def test_joules_become_watts() -> None:
    samples = [known(Sample(energy_j=100.0 + 0.7 * i), "m") for i in range(20)]
    reader = PowerReader(FakeMeter(samples))
    assert reader.read(0.0).power_w is None
    assert reader.read(0.1).power_w == pytest.approx(7.0)
    assert reader.read(0.2).power_w == pytest.approx(7.0)


def test_joules_that_were_read_late_make_no_wrong_watts() -> None:
    # 7 W all the time; the second reading waits for its turn for 80 ms, and stands for no moment in particular.
    moments = iter([0.0, 0.0, 0.1, 0.18, 0.2, 0.2, 0.3, 0.3])
    joules = [100.0, 100.0 + 7.0 * 0.18, 100.0 + 7.0 * 0.2, 100.0 + 7.0 * 0.3]
    reader = PowerReader(FakeMeter([known(Sample(energy_j=value), "m") for value in joules]), lambda: next(moments))
    found = [reader.read(now_s).power_w for now_s in (0.0, 0.1, 0.2, 0.3)]
    assert found == [None, None, pytest.approx(7.0), pytest.approx(7.0)]


def test_a_meter_is_read_no_more_often_than_it_has_news() -> None:
    meter = FakeMeter([known(Sample(power_w=5.0), "m")], interval_s=1.0)
    reader = PowerReader(meter)
    for i in range(100):
        reader.read(i / 20)
    assert meter.n_reads == 6


@pytest.mark.parametrize("power_w", [-3.0, float("nan"), float("inf")])
def test_watts_that_cannot_be_are_unknown(power_w: float) -> None:
    reader = PowerReader(FakeMeter([known(Sample(power_w=power_w), "m")]))
    assert reader.read(0.0).power_w is None
    assert "cannot be" in reader.reason


def test_a_temperature_that_is_lost_is_unknown_after_three_readings(tmp_path: Path) -> None:
    machine(tmp_path)
    sensing = Sensing(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)), None, {})
    assert sensing.observe(0.0, None, {}).temperature_c == 51.0
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("-273000\n")
    found = [sensing.observe(0.25 * i, None, {}).temperature_c for i in range(1, 5)]
    assert found == [51.0, 51.0, None, None]
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("60000\n")
    assert sensing.observe(2.0, None, {}).temperature_c == 60.0


def test_a_machine_that_tells_nothing_is_unknown_throughout(tmp_path: Path) -> None:
    sensing = Sensing(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)), None, {})
    assert sensing.observe(0.0, None, {}) == Observation(now_s=0.0)


def test_utilisation_is_that_of_the_busiest_group(tmp_path: Path) -> None:
    machine(tmp_path, n_policies=2)
    sensing = Sensing(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)), None, {"policy0": (0, 1), "policy2": (2, 3)})
    assert sensing.observe(0.0, None, {}).utilisation is None
    idle, busy, half = "10 0 10 180 0 0 0 0", "80 0 40 80 0 0 0 0", "60 0 10 130 0 0 0 0"
    lines = [f"cpu{i} {text}" for i, text in enumerate((idle, idle, busy, half))]
    (tmp_path / "proc/stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0", *lines, "intr 1", ""]))
    assert sensing.observe(1.0, None, {}).utilisation == pytest.approx(0.75)


def test_battery_and_throttling_are_seen(tmp_path: Path) -> None:
    supply = "sys/class/power_supply/BAT0"
    more = {f"{supply}/type": "Battery", f"{supply}/status": "Discharging", f"{supply}/capacity": "55"}
    cooling = "sys/class/thermal/cooling_device0"
    more |= {f"{cooling}/type": "cpufreq-cpu0", f"{cooling}/cur_state": "1"}
    machine(tmp_path, more)
    found = Sensing(SysfsRoot(tmp_path), KernelFiles(str(tmp_path)), None, {}).observe(0.0, None, {})
    assert (found.is_on_battery, found.battery, found.throttled) == (True, 0.55, True)


# Whatever happens, with the real policy.


class Weather(Sensing):
    """Sensors that tell what a test says."""

    def __init__(self) -> None:
        self.groups, self.power = {}, None
        self.seen = Observation(now_s=0.0)

    def observe(
        self, now_s: float, hint: Hint | None, max_hz: Mapping[str, float], advice: Advice = NO_ADVICE
    ) -> Observation:
        return replace(self.seen, now_s=now_s, hint=hint, max_hz=max_hz, advice=advice)


POWER = st.none() | st.builds(
    Power,
    power_w=st.none() | st.floats(0.1, 100),
    boundary=st.sampled_from(("soc", "board")),
    quality=st.just("measured"),
    age_s=st.floats(0, 3),
)
MOMENT = st.tuples(
    st.floats(0.0, 2.0),  # since the last one
    st.sampled_from(("idle", "prefill", "decode", None)),
    st.integers(0, 3),
    st.none() | st.floats(-1.0, 3.0),
    st.none() | st.floats(0.001, 1.0),
    POWER,
    st.none() | st.floats(20.0, 110.0),
    st.sampled_from((0, errno.EBUSY, errno.EIO, errno.ENOENT)),
)


@given(
    moments=st.lists(MOMENT, max_size=40),
    own=st.sampled_from((2_400_000, 1_700_000)),
    own_min=st.sampled_from((600_000, 1_200_000)),
    max_w=st.sampled_from((0.0, 5.0)),
)
def test_with_the_real_policy_limits_stay_within_the_users_and_are_given_back(
    moments: list[tuple[Any, ...]], own: int, own_min: int, max_w: float
) -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=own, min_khz=own_min), "policy4": Policy()})
    before, weather, said = kernel.limits(), Weather(), []
    with tempfile.TemporaryDirectory() as folder:
        actuators = Actuators(kernel, [domain(), domain("policy4")], Snapshot(f"{folder}/snapshot", BOOT))
        chooser = Chooser(None, lambda *_: None)
        governor = Governor(weather, actuators, chooser, is_dry=False, say=lambda *line: said.append(line))
        now_s = 100.0
        for passed_s, work, n_waiting, left_s, tpot_s, power, temperature_c, fault in moments:
            now_s += passed_s
            weather.seen = Observation(now_s=now_s, power=power, temperature_c=temperature_c)
            kernel.faults = {(MAX, doing): fault for doing in ("read", "write") if fault}
            hint = Hint(
                work=work or "idle",
                n_waiting=n_waiting,
                n_running=1,
                n_prompt_tokens=50,
                ttft_left_s=left_s,
                tpot_s=tpot_s,
                sent_s=now_s,
            )
            governor.step(now_s, [hint] if work else [], Limits(max_w=max_w))
            assert own_min <= kernel.policies["policy0"].max_khz <= own
        assert [line for line in said if line[1] == "policy"] == []
        kernel.faults.clear()
        assert governor.restore()
        assert kernel.limits() == before
        assert not Path(f"{folder}/snapshot").exists()
