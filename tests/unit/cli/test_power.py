from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_rt import config
from edge_rt.cli import main, power_status, power_watch
from edge_rt.cli.plot import ceiling, plot
from edge_rt.devices.base import Reading
from edge_rt.devices.meter_choice import Absent, Found, Source, find
from edge_rt.devices.meters import Sample
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from tests.device_trees import (
    Plant,
    amd_machine,
    bare_vm,
    orin_nano,
    plant,
    raspberry_pi_5,
    rk3588,
    x86_laptop,
)
from tests.fakes import FakeClock
from tests.faulty_root import FaultyRoot

__all__ = ["amd_machine", "bare_vm", "orin_nano", "plant", "raspberry_pi_5", "rk3588", "x86_laptop"]


def loaded(meter: str = "auto") -> config.Loaded:
    return config.Loaded(config=config.Config(power=config.Power(meter=meter)), origins={"power.meter": "flag"})


def status(root: SysfsRoot, meter: str = "auto") -> str:
    clock = FakeClock()
    return power_status.text(power_status.take(root, loaded(meter), 1.0, clock=clock, sleep=clock.advance))


def test_an_orin_shows_its_total_its_chip_and_its_clocks(orin_nano: SysfsRoot) -> None:
    shown = status(orin_nano)
    assert "board     NVIDIA Jetson Orin Nano Developer Kit (board file: Jetson Orin Nano / NX)" in shown
    assert "power     ina3221 VDD_IN: 6.02 W (board, measured, every 0.1 s, used for board and energy)" in shown
    assert "ina3221 VDD_CPU_GPU_CV + VDD_SOC: 3.41 W (soc, derived, every 0.1 s, used for soc)" in shown
    assert "ina3221 VDD_SOC: 1.40 W (rail, measured, every 0.1 s)" in shown
    assert "clocks    policy0, policy4, cpu 0-5: now 1.51 GHz, 0.12–1.51 GHz, 3 steps, schedutil, tegra194" in shown
    assert "17000000.gpu (gpu): now 0.31 GHz, 0.31–0.62 GHz, nvhost_podgov" in shown
    assert "cpu-thermal 48.5 °C" in shown
    assert "nothing tells a power" not in shown


def test_the_example_in_the_docs_is_what_is_shown(orin_nano: SysfsRoot) -> None:
    page = (Path(__file__).parents[3] / "docs" / "power.md").read_text()
    example = page.partition("```text\n")[2].partition("```")[0]
    shown = status(orin_nano)
    for line in example.splitlines():
        assert line.removesuffix("…").strip() in shown


def test_a_laptop_shows_alternatives_doubts_and_its_battery(plant: Plant, x86_laptop: SysfsRoot) -> None:
    clock = FakeClock()

    def sleep(span_s: float) -> None:
        clock.advance(span_s)
        plant(
            {
                "sys/class/powercap/intel-rapl:0/energy_uj": "9000000",
                "sys/class/powercap/intel-rapl:1/energy_uj": "29000000",
            }
        )

    shown = power_status.text(power_status.take(x86_laptop, loaded(), 2.0, clock=clock, sleep=sleep))
    assert (
        "rapl psys: 10.00 W (board, measured, every 0.05 s, used for board and energy, disagrees with battery)" in shown
    )
    assert "rapl package-0: 2.00 W (soc, measured, every 0.05 s, used for soc)" in shown
    assert "battery: 7.35 W (board, measured, every 1 s, disagrees with rapl psys)" in shown
    assert "doubt: rapl psys tells 10.00 W and battery tells 7.35 W for the same board: one of them is wrong" in shown
    assert "policy0 … policy3, cpu 0-3: now 3.90 GHz, 0.40–3.90 GHz, powersave" in shown
    assert "powersave, EPP balance_performance, boost on, intel_pstate" in shown
    assert "driver intel_pstate active" in shown
    assert "battery   64%, discharging or idle" in shown


def test_what_is_unknown_is_shown_with_its_reason(bare_vm: SysfsRoot) -> None:
    shown = status(bare_vm)
    assert "power     rapl: none, no RAPL counter" in shown
    assert "hwmon: none, no chip below /sys/class/hwmon measures power" in shown
    assert "clocks    cpu: unknown, no cpufreq policy: the platform or hypervisor sets the clock" in shown
    assert "battery   unknown: no battery tells its charge" in shown
    assert "nothing tells a power here: put a USB meter between plug and board" in shown
    assert " 0.00 W" not in shown


def test_a_board_that_cannot_measure_says_what_helps(rk3588: SysfsRoot) -> None:
    shown = status(rk3588)
    assert "RK3588 board: none, boards with the RK3588 measure no current: use a USB meter" in shown
    assert "fdab0000.npu (npu): now 0.30 GHz, 0.30–1.00 GHz, rknpu_ondemand, busy 45%" in shown


def test_amds_policies_of_one_cpu_each_are_one_line(amd_machine: SysfsRoot) -> None:
    (line,) = [line for line in status(amd_machine).splitlines() if "policy" in line]
    assert "policy0 … policy3, cpu 0-3" in line


def test_a_clock_that_is_held_below_the_hardwares_says_so(plant: Plant, raspberry_pi_5: SysfsRoot) -> None:
    plant({"sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq": "1800000"})
    assert "held to 1.50–1.80 GHz of 1.50–2.40 GHz" in status(raspberry_pi_5)


def test_a_counter_that_may_not_be_read_says_how_to_allow_it(plant: Plant, tmp_path: Path) -> None:
    zone = "sys/class/powercap/intel-rapl:0"
    plant({f"{zone}/name": "package-0", f"{zone}/energy_uj": "1", f"{zone}/max_energy_range_uj": "1000000"})
    shown = status(FaultyRoot(tmp_path, {f"{zone}/energy_uj": 13}))
    assert "rapl package-0: unknown: " in shown
    assert "only root may read it" in shown
    assert "/etc/tmpfiles.d" in shown


def test_a_meter_that_is_not_here_is_a_problem_that_hides_nothing(orin_nano: SysfsRoot) -> None:
    shown = status(orin_nano, "rapl")
    assert "problem: power.meter: is 'rapl', which is no meter here; there are: ina3221 VDD_IN" in shown
    assert "ina3221 VDD_IN: 6.02 W (board, measured, every 0.1 s)" in shown


def test_a_board_file_that_breaks_the_form_ends_the_command(plant: Plant) -> None:
    with pytest.raises(ConfigError, match=r"name: is missing \(from /etc/edge_rt/boards/x.toml\)"):
        status(plant({"etc/edge_rt/boards/x.toml": ""}))


def test_the_commands_run_on_this_machine() -> None:
    done = CliRunner().invoke(main, ["power", "status", "--interval", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"board", "power", "clocks", "heat", "battery", "powerd"}
    for meter in found["power"]["meters"]:
        assert (meter["power_w"]["value"] is None) == bool(meter["power_w"]["reason"])
    watched = CliRunner().invoke(main, ["power", "watch", "--once", "--json", "--interval", "0.1"])
    assert watched.exit_code == 0, watched.output
    assert set(json.loads(watched.stdout)) >= {"time_s", "power_w", "peak_c", "clock_hz"}


def test_help_names_the_subcommands_and_imports_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from edge_rt.cli import main\n"
        "done = CliRunner().invoke(main, ['power', '--help']); assert done.exit_code == 0, done.output\n"
        "assert 'status' in done.output and 'watch' in done.output, done.output\n"
        "assert not [name for name in sys.modules if name.startswith('edge_rt.cli.power_')]\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_mistyped_subcommand_is_told_which_it_might_be() -> None:
    done = CliRunner().invoke(main, ["power", "statsu"])
    assert done.exit_code == 2
    assert "'status'" in done.stderr


class Plug:
    """A board's meter that tells one power after the other; None is unknown."""

    name = "plug"
    boundary = "board"
    quality = "measured"
    interval_s = 0.1

    def __init__(self, *powers_w: float | None) -> None:
        self._powers_w = list(powers_w)

    def read(self, now_s: float) -> Reading[Sample]:
        power_w = self._powers_w.pop(0) if len(self._powers_w) > 1 else self._powers_w[0]
        if power_w is None:
            return Reading(value=None, source="plug", reason="unplugged")
        return Reading(value=Sample(power_w=power_w), source="plug")

    def close(self) -> None: ...


def views(root: SysfsRoot, found: Found, **settings: str) -> Iterator[power_watch.View]:
    clock = FakeClock()
    return power_watch.watch(root, found, 1.0, clock=clock, wall=lambda: 0.0, sleep=clock.advance, **settings)


def test_watch_gives_the_mean_between_two_looks(raspberry_pi_5: SysfsRoot) -> None:
    found = Found(board=None, sources=(Source(meter=Plug(4.0, 6.0, None, 8.0, 8.0)),), absent=())
    seen = list(islice(views(raspberry_pi_5, found), 4))
    assert [view.power_w["plug"].value for view in seen] == [5.0, None, 8.0, 8.0]
    assert seen[1].power_w["plug"].reason == "unplugged"
    assert (seen[0].board, seen[0].soc) == ("plug", None)
    assert seen[1].board == "plug"  # a gap of the meter that is shown
    assert seen[0].clock_hz == {"policy0": 2.4e9}
    assert seen[0].throttled == ("under-voltage", "throttled")
    assert power_watch.line(seen[0]).endswith(
        "board 5.00 W  61.8 °C  policy0 2.40 GHz  throttled: under-voltage, throttled"
    )


def test_a_named_meter_is_plotted_through_its_gaps(raspberry_pi_5: SysfsRoot) -> None:
    found = Found(board=None, sources=(Source(meter=Plug(4.0, None, 8.0, 8.0)),), absent=())
    seen = views(raspberry_pi_5, found, setting="plug")
    drawn = list(islice(power_watch.frames(seen, 1.0, (), lambda: 40), 3))
    assert drawn[0].startswith("board: unknown by plug, 1 s a column")
    assert drawn[2].startswith("board: 8.00 W by plug, 1 s a column")
    ground = drawn[2].splitlines()[8]
    assert ground.endswith("┤·██")
    assert "policy0 2.40 GHz" in drawn[2]


def test_without_a_meter_the_frame_says_so_and_shows_the_rest(amd_machine: SysfsRoot) -> None:
    absent = (Absent(kind="rapl", reason="no RAPL counter"),)
    found = Found(board=None, sources=(Source(meter=Plug(None)),), absent=absent)
    (drawn,) = islice(power_watch.frames(views(amd_machine, found), 1.0, absent, lambda: 80), 1)
    assert drawn.startswith("no meter tells the power of board or chip\nplug: unplugged\nrapl: none, no RAPL counter\n")
    assert "policy0 +3 5.14 GHz" in drawn


def test_watch_ends_with_an_error_for_a_meter_that_is_not_here(bare_vm: SysfsRoot) -> None:
    with pytest.raises(ConfigError, match="no meter here; there are: none"):
        next(views(bare_vm, find(bare_vm), setting="plug"))


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (-1.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.01, 2.0), (4.0, 5.0), (51.0, 100.0)]
)
def test_a_plots_top_is_a_round_number(value: float, top: float) -> None:
    assert ceiling(value) == pytest.approx(top)


def test_a_plot_shows_the_last_values_and_unknown_is_no_zero() -> None:
    lines = plot([9.0, 0.0, None, 5.0, 10.0], width=4, height=2, unit="W")
    assert lines == ["10 W ┤   █", " 5 W ┤ ·██", " 0 W └────"]


def test_a_plot_of_nothing_is_empty_axes() -> None:
    assert plot([], width=10, height=1, unit="W") == ["1 W ┤", "0 W └"]


@pytest.mark.parametrize("tree", ["orin_nano", "x86_laptop", "rk3588", "amd_machine"])
@pytest.mark.parametrize("fault", [5, b"", b"\x1b[2J\xff", b"9" * 5000], ids=["EIO", "empty", "escape", "huge"])
def test_whatever_the_files_hold_a_status_is_shown_and_moves_no_cursor(
    request: pytest.FixtureRequest, tmp_path: Path, tree: str, fault: int | bytes
) -> None:
    request.getfixturevalue(tree)
    paths = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    for faults in (dict.fromkeys(paths, fault), dict.fromkeys(paths[::2], fault), dict.fromkeys(paths[::3], fault)):
        shown = status(FaultyRoot(tmp_path, faults))
        assert all(line.isprintable() for line in shown.splitlines())
        assert " 0.00 W (board" not in shown
        assert " 0.00 W (soc" not in shown
