"""The modelled board against what the kernel was measured to do: each of its facts is a line here."""

from __future__ import annotations

import errno

import pytest

from tests.fakes import FakeClock
from tests.plants.board import POLICIES, Board
from tests.plants.facts import FACTS, POINTS_KHZ, broken
from tests.plants.kernel import kstrtoul, scan_number
from tests.plants.sensors import RAPL_RANGE_UJ, RAPL_UNIT_UJ

_POLICY = f"{POLICIES}/policy0"
_RAPL = "sys/devices/virtual/powercap/intel-rapl/intel-rapl:0"


@pytest.fixture
def pi(clock: FakeClock) -> Board:
    return Board("pi_5", clock)


@pytest.fixture
def x86(clock: FakeClock) -> Board:
    return Board("x86", clock)


def read(board: Board, path: str) -> str:
    return board.tree.read(board.tree.resolve(path)).rstrip("\n")


def write(board: Board, path: str, text: str) -> int:
    return board.tree.write(board.tree.resolve(path), text)


def refuses(board: Board, path: str, text: str) -> str:
    with pytest.raises(OSError, match=r".") as caught:
        write(board, path, text)
    return errno.errorcode[caught.value.errno or 0]


# -- cpufreq ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", FACTS)
def test_a_policy_does_what_a_real_one_does(pi: Board, fact: str) -> None:
    def attempt(name: str, text: str) -> str:
        try:
            path = f"{_POLICY}/{name}"
            pi.tree.write(path, text, pi.tree.opened(path, for_writing=True))
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        return ""

    assert broken(FACTS[fact], lambda name: read(pi, f"{_POLICY}/{name}"), attempt) == []


def test_the_facts_are_about_the_boards_points(pi: Board) -> None:
    assert tuple(round(hz / 1e3) for hz, _ in pi.profile.clocks[0].points) == POINTS_KHZ


@pytest.mark.parametrize("junk", ["", "1.5e6", "1000000 kHz", "1_000_000", " 1000000", "0x"])
def test_junk_is_einval_and_changes_nothing(pi: Board, junk: str) -> None:
    assert refuses(pi, f"{_POLICY}/scaling_max_freq", junk) == "EINVAL"
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "2400000"


def test_a_number_beyond_64_bits_is_erange(pi: Board) -> None:
    assert refuses(pi, f"{_POLICY}/scaling_max_freq", "9" * 30) == "ERANGE"


@pytest.mark.parametrize(
    ("governor", "busy", "khz"),
    [
        ("performance", 0.0, 2_400_000),
        ("powersave", 1.0, 600_000),
        ("schedutil", 0.0, 600_000),
        ("schedutil", 0.4, 1_500_000),  # 1.25 * 0.4 * 2.4 GHz = 1.2 GHz, rounded up
        ("ondemand", 1.0, 2_400_000),
    ],
)
def test_governors_choose_the_clock(pi: Board, governor: str, busy: float, khz: int) -> None:
    write(pi, f"{_POLICY}/scaling_governor", governor)
    pi.load(busy)
    assert read(pi, f"{_POLICY}/scaling_cur_freq") == str(khz)


def test_the_thermal_framework_lowers_the_maximum_and_gives_the_request_back(pi: Board, clock: FakeClock) -> None:
    write(pi, f"{_POLICY}/scaling_max_freq", "2000000")
    pi.set(cooling=3)
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "1000000"
    write(pi, f"{_POLICY}/scaling_max_freq", "1500000")
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "1000000"
    assert read(pi, "sys/class/thermal/cooling_device0/cur_state") == "3"
    pi.set(cooling=0)
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "1500000"


def test_a_cpu_off_line_leaves_affected_cpus_and_a_policy_without_cpus_is_busy() -> None:
    orin = Board("orin_nano", FakeClock())
    policy = f"{POLICIES}/policy4"
    assert refuses(orin, "sys/devices/system/cpu/cpu5/online", "2") == "EINVAL"
    write(orin, "sys/devices/system/cpu/cpu5/online", "0")
    assert (read(orin, f"{policy}/affected_cpus"), read(orin, f"{policy}/related_cpus")) == ("4", "4 5")
    write(orin, "sys/devices/system/cpu/cpu4/online", "0")
    assert refuses(orin, f"{policy}/scaling_max_freq", "1000000") == "EBUSY"
    assert "sys/devices/system/cpu/cpu0/online" not in orin.tree.nodes


def test_epp_under_performance_is_busy(x86: Board) -> None:
    preference = f"{_POLICY}/energy_performance_preference"
    write(x86, preference, "power\n")
    assert read(x86, preference) == "power"
    assert refuses(x86, preference, "cheap") == "EINVAL"
    write(x86, f"{_POLICY}/scaling_governor", "performance")
    assert refuses(x86, preference, "balance_power") == "EBUSY"
    write(x86, preference, "performance")


def test_an_active_mode_has_two_governors_no_table_and_takes_any_value(x86: Board) -> None:
    assert read(x86, f"{_POLICY}/scaling_available_governors") == "performance powersave"
    assert f"{_POLICY}/scaling_available_frequencies" not in x86.tree.nodes
    write(x86, f"{_POLICY}/scaling_max_freq", "1234567")
    assert read(x86, f"{_POLICY}/scaling_max_freq") == "1234567"
    x86.load(1.0)
    assert read(x86, f"{_POLICY}/scaling_cur_freq") == "1234567"  # its powersave follows the load


def test_a_driver_made_anew_has_its_own_limits_and_forgets_what_was_set(pi: Board) -> None:
    path = f"{_POLICY}/scaling_max_freq"
    opened = pi.tree.opened(path, for_writing=True)
    pi.tree.write(path, "1000000", opened)
    pi.recreate("policy0", 1_000_000, 2_000_000)
    with pytest.raises(OSError, match="No such device"):
        pi.tree.write(path, "1500000", opened)
    assert [read(pi, f"{_POLICY}/scaling_{name}_freq") for name in ("min", "max")] == ["1000000", "2000000"]
    assert read(pi, f"{_POLICY}/scaling_available_frequencies") == "1000000 1500000 2000000 "


# -- devfreq, in Hz ---------------------------------------------------------------------------------------------------


def test_devfreq_counts_in_hertz_and_takes_nought_for_no_limit() -> None:
    orin = Board("orin_nano", FakeClock())
    gpu = "sys/class/devfreq/17000000.gpu"
    orin.load(1.0, "17000000.gpu")
    write(orin, f"{gpu}/max_freq", "510000000")
    assert (read(orin, f"{gpu}/max_freq"), read(orin, f"{gpu}/cur_freq")) == ("510000000", "510000000")
    write(orin, f"{gpu}/min_freq", "624750000")
    assert read(orin, f"{gpu}/min_freq") == "510000000"
    write(orin, f"{gpu}/max_freq", "0")
    assert read(orin, f"{gpu}/max_freq") == "624750000"
    assert refuses(orin, f"{gpu}/max_freq", "fast") == "EINVAL"


# -- sensors ----------------------------------------------------------------------------------------------------------


def test_rapl_integrates_the_power_in_its_own_steps(x86: Board, clock: FakeClock) -> None:
    x86.load(1.0)
    before = (int(read(x86, f"{_RAPL}/energy_uj")), x86.state()["energy_j"]["soc"])
    clock.advance(3.0)
    after = (int(read(x86, f"{_RAPL}/energy_uj")), x86.state()["energy_j"]["soc"])
    assert (after[0] - before[0]) * 1e-6 == pytest.approx(after[1] - before[1], abs=2 * RAPL_UNIT_UJ * 1e-6)
    assert after[1] - before[1] > 3.0 * 5.0


def test_rapl_wraps_at_its_range_and_can_be_reset(x86: Board, clock: FakeClock) -> None:
    x86.load(1.0)
    x86.set_counter("intel-rapl:0", RAPL_RANGE_UJ - 1_000_000)
    assert int(read(x86, f"{_RAPL}/energy_uj")) == pytest.approx(RAPL_RANGE_UJ - 1_000_000, abs=100)
    clock.advance(2.0)
    assert 0 < int(read(x86, f"{_RAPL}/energy_uj")) < 200_000_000
    x86.set_counter("intel-rapl:0", 0)
    assert int(read(x86, f"{_RAPL}/energy_uj")) < 100


def test_hours_pass_at_once_and_the_counter_has_wrapped(x86: Board, clock: FakeClock) -> None:
    x86.load(1.0)
    clock.advance(24 * 3600.0)
    energy_uj = x86.state()["energy_j"]["soc"] * 1e6
    assert energy_uj > 2 * RAPL_RANGE_UJ
    assert int(read(x86, f"{_RAPL}/energy_uj")) == pytest.approx(energy_uj % (RAPL_RANGE_UJ + 1), abs=200)


def test_raplss_cap_lowers_the_clock_not_the_limits(x86: Board) -> None:
    x86.load(1.0)
    hz = x86.hz("policy0")
    write(x86, f"{_RAPL}/constraint_0_power_limit_uw", "8000000")
    assert x86.hz("policy0") < hz
    assert read(x86, f"{_POLICY}/scaling_max_freq") == "3400000"
    assert x86.state()["power_w"]["soc"] <= 8.0
    write(x86, f"{_RAPL}/constraint_0_power_limit_uw", "8060000")
    assert read(x86, f"{_RAPL}/constraint_0_power_limit_uw") == "8000000"


def test_an_ina3221_has_volts_and_amperes_but_no_watts() -> None:
    orin = Board("orin_nano", FakeClock())
    orin.load(0.5)
    chip = "sys/class/hwmon/hwmon1"
    assert [read(orin, f"{chip}/in{i}_label") for i in (1, 2, 3)] == ["VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"]
    watts = [
        int(read(orin, f"{chip}/in{i}_input")) * int(read(orin, f"{chip}/curr{i}_input")) * 1e-6 for i in (1, 2, 3)
    ]
    truth = orin.state()["power_w"]
    assert watts == pytest.approx([truth["board"], truth["clocks"], truth["rest"]], abs=0.05)
    assert not any(path.endswith("power1_input") for path in orin.tree.nodes)


def test_an_ina226_counts_in_microwatts(pi: Board) -> None:
    pi.load(1.0)
    assert read(pi, "sys/class/hwmon/hwmon1/name") == "ina226"
    power_w = int(read(pi, "sys/class/hwmon/hwmon1/power1_input")) * 1e-6
    assert power_w == pytest.approx(pi.state()["power_w"]["board"], abs=0.025)


def test_heat_lowers_the_clock_and_lets_go_with_hysteresis(pi: Board, clock: FakeClock) -> None:
    write(pi, f"{_POLICY}/scaling_governor", "performance")
    pi.load(1.0)
    pi.set(ambient_c=60.0)
    clock.advance(600.0)
    hot = pi.state()
    assert hot["cooling"] > 0
    assert 77.0 < hot["temperature_c"] < 82.0
    assert int(read(pi, f"{_POLICY}/scaling_max_freq")) < 2_400_000
    assert int(read(pi, "sys/class/thermal/thermal_zone0/temp")) == round(hot["temperature_c"] * 1e3)
    pi.set(ambient_c=10.0)
    clock.advance(600.0)
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "2400000"


def test_a_battery_tells_its_watts_only_while_it_discharges(x86: Board) -> None:
    supply = "sys/class/power_supply/BAT0"
    assert (read(x86, f"{supply}/status"), read(x86, f"{supply}/power_now")) == ("Full", "0")
    x86.set(is_discharging=1, percent=40)
    assert (read(x86, f"{supply}/status"), read(x86, f"{supply}/capacity")) == ("Discharging", "40")
    assert int(read(x86, f"{supply}/power_now")) * 1e-6 == pytest.approx(x86.state()["power_w"]["board"])
    assert read(x86, "sys/class/power_supply/AC/online") == "0"


def test_proc_stat_counts_the_time_that_cpus_were_busy(pi: Board, clock: FakeClock) -> None:
    pi.load(0.25)
    clock.advance(8.0)
    fields = read(pi, "proc/stat").splitlines()[0].split()
    assert (int(fields[1]), int(fields[4])) == (800, 2400)  # of four CPUs


def test_less_clock_is_less_power_and_an_optimum_lies_between(pi: Board) -> None:
    write(pi, f"{_POLICY}/scaling_governor", "performance")
    pi.load(1.0)
    cost_j: list[float] = []
    for hz, _ in pi.profile.clocks[0].points:
        write(pi, f"{_POLICY}/scaling_max_freq", str(round(hz / 1e3)))
        cost_j.append(pi.state()["power_w"]["board"] / hz)
    assert cost_j.index(min(cost_j)) not in (0, len(cost_j) - 1)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_fault_is_met_as_often_as_it_was_asked_for(pi: Board) -> None:
    pi.add_fault(pattern="*/scaling_max_freq", on="write", errno_name="EBUSY", n_left=2)
    path = f"{_POLICY}/scaling_max_freq"
    assert [refuses(pi, path, "1000000") for _ in range(2)] == ["EBUSY", "EBUSY"]
    write(pi, path, "1000000")
    assert pi.tree.faults[0].n_met == 2
    assert [(path, text, name) for _, path, text, name in pi.tree.writes] == [
        (path, "1000000", name) for name in ("EBUSY", "EBUSY", "")
    ]


def test_a_locked_register_takes_writes_and_keeps_its_value(x86: Board) -> None:
    x86.add_fault(pattern="*power_limit_uw", on="write", is_ignored=True)
    write(x86, f"{_RAPL}/constraint_0_power_limit_uw", "9000000")
    assert read(x86, f"{_RAPL}/constraint_0_power_limit_uw") == "28000000"


def test_a_frozen_counter_shows_what_it_showed_first(x86: Board, clock: FakeClock) -> None:
    x86.add_fault(pattern="*/energy_uj", is_frozen=True)
    before = read(x86, f"{_RAPL}/energy_uj")
    clock.advance(10.0)
    assert read(x86, f"{_RAPL}/energy_uj") == before


def test_garbage_and_short_writes(pi: Board) -> None:
    pi.add_fault(pattern="*/temp", text="\x00\xff nonsense")
    pi.add_fault(pattern="*/scaling_max_freq", on="write", max_bytes=4)
    assert read(pi, "sys/class/thermal/thermal_zone0/temp") == "\x00\xff nonsense"
    assert write(pi, f"{_POLICY}/scaling_max_freq", "1500000") == 4
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "600000"  # 1500 kHz, clamped


def test_another_program_writes_its_value_back(pi: Board, clock: FakeClock) -> None:
    pi.add_fault(pattern="*/scaling_max_freq", on="write", revert_to="2400000", revert_s=0.5)
    write(pi, f"{_POLICY}/scaling_max_freq", "1000000")
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "1000000"
    clock.advance(0.6)
    assert read(pi, f"{_POLICY}/scaling_max_freq") == "2400000"


def test_what_is_unplugged_is_gone_and_comes_back_with_another_number() -> None:
    orin = Board("orin_nano", FakeClock())
    device = orin.tree.resolve("sys/class/hwmon/hwmon1")
    opened = orin.tree.opened(f"{device}/in1_input", for_writing=False)
    orin.tree.unplug(device)
    with pytest.raises(OSError, match="No such device"):
        orin.tree.read(f"{device}/in1_input", opened)
    with pytest.raises(OSError, match="No such file"):
        orin.tree.find("sys/class/hwmon/hwmon1")
    orin.tree.plug(device, as_top=device.replace("hwmon1", "hwmon4"))
    assert read(orin, "sys/class/hwmon/hwmon4/in1_label") == "VDD_IN"
    assert orin.tree.children("sys/class/hwmon") == ["hwmon4"]
    with pytest.raises(OSError, match="No such device"):
        orin.tree.read(f"{device}/in1_input", opened)


@pytest.mark.parametrize(("text", "value"), [("12\n", 12), ("0x1F", 31), ("010", 8), ("+5", 5), ("0", 0)])
def test_kstrtoul_reads_as_the_kernel_does(text: str, value: int) -> None:
    assert kstrtoul(text) == value


def test_sscanf_stops_at_the_first_letter() -> None:
    assert scan_number("  1200000kHz\n") == 1_200_000
