from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.devices.kernel_files import DryFiles
from edge_rt.power.actuators import Actuators
from edge_rt.power.faults import fault
from edge_rt.power.knob import Knob
from edge_rt.power.snapshot import Snapshot, put_back
from edge_rt.power.state import Decision, Domain
from tests.unit.power.fake_kernel import BOOT, CPUFREQ, FakeKernel, Policy, domain

MAX = f"{CPUFREQ}/policy0/scaling_max_freq"
EPP = f"{CPUFREQ}/policy0/energy_performance_preference"
RAPL = "sys/class/powercap/intel-rapl:0"


def want(hz: float, reason: str = "decode", name: str = "policy0") -> Decision:
    return Decision(max_hz={name: hz}, reason=reason)


def never() -> bool:
    return False


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    return Snapshot(str(tmp_path / "snapshot"), BOOT)


@pytest.fixture
def actuators(kernel: FakeKernel, snapshot: Snapshot) -> Actuators:
    return Actuators(kernel, [domain()], snapshot)


# One file.


def test_an_equal_value_is_not_written_again(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    for now_s in range(5):
        knob.look(now_s, never)
        assert knob.set("1000000", now_s)
    assert kernel.writes == [(MAX, "1000000")]
    assert (knob.in_force, knob.n_writes, knob.n_clamped) == ("1000000", 1, 0)


def test_silent_clamping_is_noticed_and_not_fought(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    for now_s in range(5):
        assert knob.look(now_s, never) == "same"
        knob.set("100", now_s)
    assert kernel.writes == [(MAX, "100")]
    assert (knob.in_force, knob.n_clamped) == ("600000", 1)


def test_a_file_is_not_written_all_the_time(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    for i in range(100):  # within a second
        knob.look(i / 100, never)
        knob.set("1000000" if i % 2 else "1500000", i / 100)
    assert 10 <= len(kernel.writes) <= 15


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EBUSY, "busy"),
        (errno.EINVAL, "refused"),
        (errno.EACCES, "denied"),
        (errno.EPERM, "denied"),
        (errno.EROFS, "denied"),
        (errno.ENODEV, "gone"),
        (errno.ENOENT, "gone"),
        (errno.ENOTCONN, "broken"),
        (errno.EIO, "broken"),
        (errno.ENODATA, "broken"),
        (errno.ELOOP, "broken"),
    ],
)
def test_each_error_has_a_name_and_a_pause(kernel: FakeKernel, number: int, kind: str) -> None:
    knob = Knob(kernel, MAX)
    knob.look(0.0, never)
    kernel.faults[MAX, "write"] = number
    n_tries = 0
    for i in range(1000):  # 50 s of looks
        knob.look(i / 20, never)
        if knob.wants("600000", i / 20):
            n_tries += 1
            assert not knob.set("600000", i / 20)
    assert knob.fault is not None
    assert (knob.fault.code, knob.fault.kind, knob.fault.doing) == (errno.errorcode[number], kind, "write")
    assert MAX in str(knob.fault)
    assert n_tries == 1 if kind == "denied" else 1 < n_tries < 15
    assert knob.in_force == "2400000"
    kernel.faults.clear()
    knob.look(100.0, never)
    assert knob.wants("600000", 100.0) is (kind != "denied")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EBUSY, errno.EIO, errno.ENOTCONN])
def test_a_file_that_cannot_be_read_is_unknown_until_it_can(kernel: FakeKernel, number: int) -> None:
    knob = Knob(kernel, MAX)
    knob.look(0.0, never)
    knob.set("600000", 0.0)
    kernel.faults[MAX, "read"] = number
    assert knob.look(1.0, never) == "fault"
    assert knob.in_force is None
    n_before = kernel.n_reads
    assert knob.look(1.05, never) == "fault"
    assert kernel.n_reads == n_before  # it is left alone for a while
    assert not knob.wants("1000000", 1.05)
    kernel.faults.clear()
    kernel.policies["policy0"] = Policy()  # plugged in again, with limits of its own: nobody has fought us
    assert knob.look(2.0, never) == "same"
    assert (knob.in_force, knob.fault) == ("2400000", None)


def test_a_read_back_that_fails_leaves_the_value_unknown(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    knob.look(0.0, never)
    kernel.faults[MAX, "read"] = errno.EIO
    assert not knob.set("600000", 0.0)
    assert knob.in_force is None
    assert knob.fault is not None
    assert knob.fault.doing == "read back"


def test_heat_is_not_fought(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    knob.look(0.0, never)
    knob.set("2000000", 0.0)
    kernel.heat(1_000_000)
    for i in range(10):
        assert knob.look(1.0 + i, lambda: True) == "lower"
        knob.set("2000000", 1.0 + i)
    assert kernel.writes == [(MAX, "2000000")]
    assert knob.in_force == "1000000"
    kernel.heat(1_500_000)
    assert knob.look(20.0, lambda: True) == "lower"
    kernel.heat(None)
    assert knob.look(21.0, never) == "same"
    assert knob.in_force == "2000000"
    assert not knob.is_contested(21.0)


def test_a_value_written_in_the_heat_rises_with_it_to_what_was_asked(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    kernel.heat(1_000_000)
    knob.look(0.0, lambda: True)
    knob.set("2000000", 0.0)
    assert knob.look(0.5, lambda: True) == "same"
    assert (knob.in_force, knob.n_clamped) == ("1000000", 1)
    for khz in (1_500_000, None):
        kernel.heat(khz)
        assert knob.look(1.0, never) == "same"
    assert knob.in_force == "2000000"


def test_three_foreign_values_within_a_minute_are_enough(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    knob.look(0.0, never)
    for i, at_s in enumerate((0.0, 10.0, 20.0)):
        knob.set("600000", at_s)
        kernel.policies["policy0"].max_khz = 1_500_000
        assert knob.look(at_s + 1.0, never) == "foreign"
        assert knob.is_contested(at_s + 1.0) is (i == 2)
    assert not knob.is_contested(100.0)


def test_foreign_values_now_and_then_are_overwritten(kernel: FakeKernel) -> None:
    knob = Knob(kernel, MAX)
    for i in range(10):
        knob.look(40.0 * i, never)
        knob.set("600000", 40.0 * i)
        kernel.policies["policy0"].max_khz = 1_500_000
        assert knob.look(40.0 * i + 1, never) == "foreign"
        assert not knob.is_contested(40.0 * i + 1)


def test_an_error_that_is_in_no_table_keeps_its_own_words() -> None:
    found = fault(OSError(errno.ELOOP, "Too many links"), "a", "read")
    assert str(found) == "/a: read: ELOOP, Too many links"
    assert fault(OSError("nothing"), "a", "read").code == "errno 0"


# All of them.


def test_nothing_is_written_before_the_snapshot_is_on_disk(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    actuators = Actuators(kernel, [domain()], Snapshot(str(tmp_path / "file/snapshot"), BOOT))
    actuators.look(0.0)
    found = actuators.apply(want(600e6), 0.0)
    assert kernel.writes == []
    assert [(one.doing, f"/{one.path}") for one in found.faults] == [("write", str(tmp_path / "file/snapshot"))]


def test_a_decision_is_set_and_given_back(kernel: FakeKernel, actuators: Actuators, snapshot: Snapshot) -> None:
    before = kernel.limits()
    actuators.look(0.0)
    assert actuators.apply(want(1e9), 0.0).n_writes == 1
    assert actuators.max_hz() == {"policy0": 1e9}
    assert Path(snapshot.file).exists()
    assert all(one.is_done for one in actuators.restore())
    assert kernel.limits() == before
    assert not Path(snapshot.file).exists()
    actuators.look(1.0)
    assert actuators.apply(want(1e9), 1.0).n_writes == 1  # and may be set again


def test_nothing_is_written_where_the_decision_is_what_is(kernel: FakeKernel, actuators: Actuators) -> None:
    actuators.look(0.0)
    assert actuators.apply(want(2.4e9), 0.0).n_writes == 0
    assert kernel.writes == []


def test_the_users_own_limit_is_never_passed(snapshot: Snapshot) -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=1_800_000, min_khz=1_000_000)})
    actuators = Actuators(kernel, [domain()], snapshot)
    actuators.look(0.0)
    assert actuators.domains[0].points_hz[-1] == 1.5e9
    actuators.apply(want(2.4e9), 0.0)
    actuators.look(1.0)
    assert kernel.writes == []
    assert actuators.domains[0].points_hz == (1e9, 1.5e9)
    actuators.apply(want(1e9), 1.0)
    actuators.look(2.0)
    assert actuators.domains[0].points_hz == (1e9, 1.5e9)  # by the user's limit, not by ours
    actuators.apply(want(1.5e9), 2.0)
    assert kernel.limits()["policy0"][:2] == ("1800000", "1000000")  # the highest point is all that the user allows


def test_nothing_is_kept_while_heat_hides_the_users_limit(kernel: FakeKernel, actuators: Actuators) -> None:
    kernel.heat(1_500_000)
    actuators.look(0.0)
    found = actuators.apply(want(1e9), 0.0)
    assert found.is_postponed
    assert kernel.writes == []
    kernel.heat(None)
    actuators.look(1.0)
    assert actuators.apply(want(1e9), 1.0).n_writes == 1
    actuators.restore()
    assert kernel.limits()["policy0"][0] == "2400000"


def test_one_domain_that_fails_leaves_the_others(snapshot: Snapshot) -> None:
    kernel = FakeKernel({"policy0": Policy(), "policy4": Policy()})
    actuators = Actuators(kernel, [domain(), domain("policy4")], snapshot)
    kernel.policies["policy0"].is_online = False
    found = actuators.look(0.0)
    assert [one.code for one in found.faults] == ["EBUSY"]
    assert [one.name for one in actuators.domains] == ["policy4"]
    actuators.apply(Decision(max_hz={"policy0": 1e9, "policy4": 1e9}), 0.0)
    assert actuators.max_hz() == {"policy4": 1e9}
    kernel.policies["policy0"].is_online = True
    actuators.look(1.0)
    actuators.apply(Decision(max_hz={"policy0": 1e9, "policy4": 1e9}), 1.0)
    assert actuators.max_hz() == {"policy0": 1e9, "policy4": 1e9}
    actuators.restore()
    assert {found[0] for found in kernel.limits().values()} == {"2400000"}


def test_another_driver_in_a_devices_place_has_limits_of_its_own(kernel: FakeKernel, actuators: Actuators) -> None:
    actuators.look(0.0)
    actuators.apply(want(1e9), 0.0)
    kernel.policies.clear()
    actuators.look(1.0)
    kernel.policies["policy0"] = Policy(driver="cppc_cpufreq", max_khz=2_000_000, ceiling_khz=2_000_000)
    actuators.look(3.0)
    assert actuators.domains[0].points_hz[-1] == 2e9
    actuators.apply(want(600e6), 3.0)
    actuators.restore()
    assert kernel.limits()["policy0"][0] == "2000000"


def test_domains_come_and_go(kernel: FakeKernel, actuators: Actuators) -> None:
    kernel.policies["policy4"] = Policy()
    actuators.update([domain(), domain("policy4")])
    actuators.look(0.0)
    assert [one.name for one in actuators.domains] == ["policy0", "policy4"]
    actuators.apply(want(1e9), 0.0)
    kernel.policies.clear()
    actuators.look(1.0)
    actuators.update([])
    assert actuators.domains == ()
    assert len(actuators.knobs) == 2  # both have values kept
    assert [one.outcome for one in actuators.restore()] == ["gone"] * 4
    actuators.update([])
    assert actuators.knobs == ()


def test_what_an_earlier_process_left_is_older_than_what_is_read(kernel: FakeKernel, snapshot: Snapshot) -> None:
    first = Actuators(kernel, [domain()], snapshot)
    first.look(0.0)
    first.apply(want(600e6), 0.0)
    again = Snapshot(snapshot.file, BOOT)
    assert again.load()
    second = Actuators(kernel, [domain()], again)
    second.look(0.0)
    second.apply(want(1e9), 0.0)
    second.restore()
    assert kernel.limits()["policy0"][0] == "2400000"


def test_a_dry_run_writes_nothing_and_sees_what_it_would(kernel: FakeKernel) -> None:
    dry = DryFiles(kernel)  # type: ignore[arg-type]
    actuators = Actuators(dry, [domain()], None, also=("epp",))
    actuators.look(0.0)
    actuators.apply(want(1e9, "idle"), 0.0)
    actuators.look(1.0)
    assert actuators.max_hz() == {"policy0": 1e9}
    assert kernel.writes == []
    assert dry.written == {MAX: ("2400000", "1000000"), EPP: ("balance_performance", "power")}
    actuators.restore()
    assert dry.read(MAX) == "2400000"


# Preferences, limits, other devices.


def test_preferences_are_only_set_where_asked_for_and_only_towards_saving(snapshot: Snapshot) -> None:
    kernel = FakeKernel({"policy0": Policy(), "policy1": Policy(epp="power"), "policy2": Policy(epp="default")})
    domains = [domain(name) for name in kernel.policies]
    actuators = Actuators(kernel, domains, snapshot, also=("epp",))
    everything = {one.name: 2.4e9 for one in domains}
    seen = []
    for i, reason in enumerate(("decode", "prefill", "idle", "race")):
        actuators.look(i)
        actuators.apply(Decision(max_hz=everything, reason=reason), i)
        seen.append([found[2] for found in kernel.limits().values()])
    assert seen == [
        ["balance_power", "power", "default"],
        ["balance_performance", "power", "default"],
        ["power", "power", "default"],
        ["balance_performance", "power", "default"],
    ]


def test_the_performance_governor_keeps_its_preference(snapshot: Snapshot) -> None:
    kernel = FakeKernel({"policy0": Policy(governor="performance")})
    actuators = Actuators(kernel, [domain()], snapshot, also=("epp",))
    actuators.look(0.0)
    found = actuators.apply(want(1e9, "idle"), 0.0)
    assert [one.code for one in found.faults] == ["EBUSY"]
    assert actuators.max_hz() == {"policy0": 1e9}
    assert all(one.is_done for one in actuators.restore())


def test_the_chips_own_limit_follows_the_cap_and_never_rises(snapshot: Snapshot) -> None:
    rapl = {
        f"{RAPL}/name": "package-0",
        f"{RAPL}/constraint_0_name": "long_term",
        f"{RAPL}/constraint_0_power_limit_uw": "28000000",
        f"{RAPL}:0/name": "core",
        "sys/class/powercap/intel-rapl-mmio:0/name": "package-0",
    }
    kernel = FakeKernel(others=dict(rapl))
    actuators = Actuators(kernel, [domain()], snapshot, also=("rapl",))
    limits = []
    for i, max_w in enumerate((0.0, 15.0, 50.0, 0.1, 0.0)):
        actuators.look(i)
        actuators.apply(want(2.4e9), i, max_w=max_w)
        limits.append(kernel.others[f"{RAPL}/constraint_0_power_limit_uw"])
    assert limits == ["28000000", "15000000", "28000000", "2000000", "28000000"]
    actuators.restore()
    assert kernel.others[f"{RAPL}/constraint_0_power_limit_uw"] == "28000000"


def test_a_locked_limit_costs_nothing_else(snapshot: Snapshot) -> None:
    path = f"{RAPL}/constraint_0_power_limit_uw"
    others = {f"{RAPL}/name": "package-0", f"{RAPL}/constraint_0_name": "long_term", path: "28000000"}
    kernel = FakeKernel(others=others, faults={(path, "write"): errno.ENODATA})
    actuators = Actuators(kernel, [domain()], snapshot, also=("rapl",))
    actuators.look(0.0)
    assert [one.code for one in actuators.apply(want(1e9), 0.0, max_w=10.0).faults] == ["ENODATA"]
    assert actuators.max_hz() == {"policy0": 1e9}


def test_devfreq_counts_in_hz(snapshot: Snapshot) -> None:
    folder = "sys/class/devfreq/fdab0000.npu"
    others = {f"{folder}/max_freq": "1000000000", f"{folder}/min_freq": "300000000", f"{folder}/name": "npu"}
    kernel = FakeKernel({}, others)
    npu = Domain(name="fdab0000.npu", kind="npu", points_hz=(300e6, 600e6, 1e9))
    actuators = Actuators(kernel, [npu], snapshot)
    actuators.look(0.0)
    actuators.apply(want(600e6, name="fdab0000.npu"), 0.0)
    assert kernel.others[f"{folder}/max_freq"] == "600000000"
    actuators.restore()
    assert kernel.others[f"{folder}/max_freq"] == "1000000000"


# Whatever happens.

FAULTS = (0, errno.EBUSY, errno.EIO, errno.EPERM, errno.ENOENT, errno.EINVAL, errno.ENODATA)
STEP = st.one_of(
    st.tuples(st.just("set"), st.sampled_from((600e6, 1e9, 1.5e9, 2e9, 2.4e9)), st.sampled_from(("idle", "race"))),
    st.tuples(
        st.just("fault"), st.sampled_from((MAX, EPP)), st.sampled_from(FAULTS), st.sampled_from(("read", "write"))
    ),
    st.tuples(st.just("heat"), st.sampled_from((None, 1_000_000, 1_500_000))),
    st.tuples(st.just("kill")),
    st.tuples(st.just("restore")),
    st.tuples(st.just("offline"), st.booleans()),
)


@settings(max_examples=400)
@given(
    steps=st.lists(STEP, max_size=30),
    own=st.sampled_from((2_400_000, 1_500_000, 1_700_000)),
    own_min=st.sampled_from((600_000, 1_000_000)),
)
def test_whatever_happens_the_machine_is_given_back(steps: list[tuple[object, ...]], own: int, own_min: int) -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=own, min_khz=own_min), "policy4": Policy(epp="default")})
    before = kernel.limits()
    domains = [domain(), domain("policy4")]
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Snapshot(f"{folder}/snapshot", BOOT)
        actuators = Actuators(kernel, domains, snapshot, also=("epp",))
        for i, (what, *values) in enumerate(steps):
            now_s = float(i)
            if what == "set":
                actuators.look(now_s)
                decision = Decision(max_hz={one.name: values[0] for one in domains}, reason=str(values[1]))  # type: ignore[misc]
                actuators.apply(decision, now_s)
                top = {"policy0": own, "policy4": 2_400_000}
                assert all(kernel.policies[name].max_khz <= khz for name, khz in top.items())
            elif what == "fault":
                kernel.faults[values[0], values[2]] = values[1]  # type: ignore[index,assignment]
            elif what == "heat":
                kernel.heat(values[0])  # type: ignore[arg-type]
            elif what == "kill":
                snapshot = Snapshot(f"{folder}/snapshot", BOOT)
                snapshot.load()
                actuators = Actuators(kernel, domains, snapshot, also=("epp",))
            elif what == "restore":
                actuators.restore()
            else:
                kernel.policies["policy0"].is_online = bool(values[0])
        kernel.faults.clear()
        kernel.heat(None)
        kernel.policies["policy0"].is_online = True
        left = Snapshot(f"{folder}/snapshot", BOOT)
        left.load()
        assert all(one.is_done for one in put_back(kernel, list(left.values.values())))
    assert kernel.limits() == before
