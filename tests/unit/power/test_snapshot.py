from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.kernel_files import KernelFiles
from edge_rt.power import restore as restoring
from edge_rt.power.snapshot import (
    BadSnapshotError,
    Snapshot,
    Value,
    boot_id,
    is_held_down,
    is_ours,
    parse,
    put_back,
    take,
    witness_path,
)
from tests.unit.power.fake_kernel import BOOT, CPUFREQ, FakeKernel, Policy

MAX = f"{CPUFREQ}/policy0/scaling_max_freq"
MIN = f"{CPUFREQ}/policy0/scaling_min_freq"
EPP = f"{CPUFREQ}/policy0/energy_performance_preference"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "run/snapshot")


def value(path: str = MAX, text: str = "2400000", witness: str = "acpi-cpufreq") -> Value:
    return Value(path, text, witness)


def outcomes(kernel: FakeKernel, *values: Value) -> list[str]:
    return [one.outcome for one in put_back(kernel, list(values))]


# The file.


def test_the_first_value_wins(file: str) -> None:
    snapshot = Snapshot(file, BOOT)
    snapshot.add([value(text="2400000")])
    snapshot.add([value(text="600000"), value(MIN, "600000")])
    again = Snapshot(file, BOOT)
    assert again.load()
    assert list(again.values.values()) == [value(text="2400000"), value(MIN, "600000")]


def test_the_file_is_this_users_alone_and_nothing_else_is_left(file: str) -> None:
    Snapshot(file, BOOT).add([value()])
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert [found.name for found in Path(file).parent.iterdir()] == ["snapshot"]


def test_a_half_written_file_of_a_killed_process_is_no_obstacle(file: str) -> None:
    Path(file).parent.mkdir()
    Path(f"{file}.new").write_text("edge_rt power")
    Snapshot(file, BOOT).add([value()])
    assert Snapshot(file, BOOT).load()


def test_the_last_value_that_is_back_takes_the_file_with_it(file: str) -> None:
    snapshot = Snapshot(file, BOOT)
    snapshot.add([value(), value(MIN, "600000")])
    snapshot.drop([MAX])
    assert Snapshot(file, BOOT).load()
    snapshot.drop([MIN])
    assert not Path(file).exists()
    assert not Snapshot(file, BOOT).load()
    snapshot.drop([MIN])


def test_what_another_boot_left_is_nobodys(file: str) -> None:
    Snapshot(file, BOOT).add([value()])
    assert not Snapshot(file, BOOT[:-1] + "9").load()
    assert not Path(file).exists()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_believed(file: str, mode: int) -> None:
    Snapshot(file, BOOT).add([value()])
    Path(file).chmod(mode)
    with pytest.raises(BadSnapshotError, match="another user"):
        Snapshot(file, BOOT).load()


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_file_where_others_may_put_one_is_not_believed(file: str, mode: int) -> None:
    Snapshot(file, BOOT).add([value()])
    Path(file).parent.chmod(mode)
    with pytest.raises(BadSnapshotError, match="another user"):
        Snapshot(file, BOOT).load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_root_believes_the_file_of_powerds_own_user_in_its_own_directory(file: str) -> None:
    Snapshot(file, BOOT).add([value()])
    os.chown(file, 65534, 65534)
    os.chown(Path(file).parent, 65534, 65534)
    assert Snapshot(file, BOOT).load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_believed(file: str) -> None:
    Snapshot(file, BOOT).add([value()])
    os.chown(file, 65534, 65534)
    with pytest.raises(BadSnapshotError, match="another user"):
        Snapshot(file, BOOT).load()


def test_a_link_is_not_followed(file: str, tmp_path: Path) -> None:
    Snapshot(file, BOOT).add([value()])
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(BadSnapshotError, match="cannot be read"):
        Snapshot(str(tmp_path / "link"), BOOT).load()


def test_a_directory_and_a_pipe_are_not_believed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(BadSnapshotError):
            Snapshot(str(tmp_path / name), BOOT).load()


def whole() -> str:
    lines = ["edge_rt power snapshot 1", f"boot\t{BOOT}", str(value()), str(value(MIN, "600000")), "end\t2", ""]
    return "\n".join(lines)


def test_a_whole_text_is_read() -> None:
    assert parse(whole()) == (BOOT, [value(), value(MIN, "600000")])


@pytest.mark.parametrize("n", range(len(whole())))
def test_a_text_that_is_cut_off_anywhere_is_refused(n: int) -> None:
    with pytest.raises(BadSnapshotError):
        parse(whole()[:n])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("snapshot 1", "snapshot 2"),
        (f"boot\t{BOOT}", "boot\t"),
        (f"boot\t{BOOT}", "boot\ta b"),
        ("end\t2", "end\t3"),
        ("end\t2", "end\t 2"),
        (MAX, "etc/passwd"),
        (MAX, f"{CPUFREQ}/../../../../../etc/passwd"),
        (MAX, f"/{MAX}"),
        (MAX, MIN),
        ("\t2400000", "\t2400000 "),
        ("\t2400000", "\t"),
        ("acpi-cpufreq\nvalue", "\nvalue"),
        ("acpi-cpufreq\nvalue", "a\tb\nvalue"),
        ("value\t", "other\t"),
    ],
)
def test_anything_unexpected_is_refused(old: str, new: str) -> None:
    assert old in whole()
    with pytest.raises(BadSnapshotError):
        parse(whole().replace(old, new, 1))


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode("latin-1")))
def test_no_text_brings_the_reader_down(text: str) -> None:
    for candidate in (text, whole().replace("acpi", text, 1), whole()[:60] + text + whole()[60:]):
        try:
            _, values = parse(candidate)
        except BadSnapshotError:
            continue
        assert all(is_ours(found.path) for found in values)


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        (MAX, True),
        (MIN, True),
        (EPP, True),
        ("sys/class/devfreq/fdab0000.npu/max_freq", True),
        ("sys/class/powercap/intel-rapl:0/constraint_0_power_limit_uw", True),
        (f"{CPUFREQ}/policy0/scaling_governor", False),
        (f"{CPUFREQ}/policy/scaling_max_freq", False),
        (f"{CPUFREQ}/policy0/../scaling_max_freq", False),
        (f"{CPUFREQ}/policyx/scaling_max_freq", False),
        ("sys/class/devfreq/.hidden/max_freq", False),
        ("sys/class/devfreq//max_freq", False),
        ("sys/class/powercap/intel-rapl:0/enabled", False),
        ("sys/class/powercap/intel-rapl:0/constraint_x_power_limit_uw", False),
        ("sys/class/powercap/intel-rapl:0/constraint__power_limit_uw", False),
        ("max_freq", False),
        ("", False),
    ],
)
def test_only_limits_are_ever_written(path: str, is_one: bool) -> None:
    assert is_ours(path) is is_one


def test_a_boot_without_an_id_equals_only_itself() -> None:
    assert boot_id(FakeKernel()) == BOOT
    assert boot_id(FakeKernel(others={"proc/sys/kernel/random/boot_id": "a\tb"})) == "unknown"


def test_whose_a_limit_is() -> None:
    kernel = FakeKernel(others={"sys/class/devfreq/npu/max_freq": "1", "sys/class/devfreq/npu/name": "rk npu"})
    assert take(kernel, MAX) == value()
    assert take(kernel, "sys/class/devfreq/npu/max_freq").witness == "rk npu"
    del kernel.others["sys/class/devfreq/npu/name"]
    assert take(kernel, "sys/class/devfreq/npu/max_freq").witness == "-"
    assert witness_path(MAX).endswith("policy0/scaling_driver")
    with pytest.raises(OSError, match="no limit"):
        take(kernel, "proc/sys/kernel/random/boot_id")


@pytest.mark.parametrize("text", ["<unsupported>", "", "a\tb", "x" * 65])
def test_a_value_that_could_not_be_written_back_is_not_kept(text: str) -> None:
    kernel = FakeKernel(others={"sys/class/devfreq/npu/max_freq": text})
    with pytest.raises(OSError, match="no plain value"):
        take(kernel, "sys/class/devfreq/npu/max_freq")


# The way back.


def test_limits_are_put_back_and_read_back() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, epp="power")})
    assert outcomes(kernel, value(EPP, "balance_performance"), value(MIN, "600000"), value()) == [
        "put_back",
        "as_it_was",
        "put_back",
    ]
    assert kernel.limits() == {"policy0": ("2400000", "600000", "balance_performance")}
    kernel.writes.clear()
    assert outcomes(kernel, value(), value(EPP, "balance_performance")) == ["as_it_was", "as_it_was"]
    # A clock's limit may have another one on its way, which is in force a moment later: it is asked for again.
    assert kernel.writes == [(MAX, "2400000")]


def test_the_lower_limit_that_ours_pulled_down_is_back_too() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, min_khz=1_000_000)})
    assert kernel.limits()["policy0"][1] == "600000"
    assert set(outcomes(kernel, value(), value(MIN, "1000000"))) <= {"put_back", "as_it_was"}
    assert kernel.limits()["policy0"][:2] == ("2400000", "1000000")


def test_upper_limits_come_first_and_preferences_last() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, min_khz=700_000, epp="power")})
    put_back(kernel, [value(EPP, "balance_power"), value(MIN, "1000000"), value()])
    assert [path for path, _ in kernel.writes][:3] == [MAX, MIN, EPP]


def test_a_device_that_is_gone_or_another_is_left_alone() -> None:
    kernel = FakeKernel({"policy0": Policy(driver="cppc_cpufreq", max_khz=600_000)})
    assert outcomes(kernel, value()) == ["replaced"]
    assert kernel.writes == []
    kernel.policies.clear()
    assert outcomes(kernel, value()) == ["gone"]


def test_a_file_that_is_missing_for_a_moment_is_not_given_up() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000)}, faults={(MAX, "read"): errno.ENOENT})
    assert outcomes(kernel, value()) == ["failed"]
    kernel.faults.clear()
    assert outcomes(kernel, value()) == ["put_back"]


def test_an_offline_policy_is_tried_again_later() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, is_online=False)})
    (found,) = put_back(kernel, [value()])
    assert (found.outcome, found.reason) == ("failed", os.strerror(errno.EBUSY))
    kernel.policies["policy0"].is_online = True
    assert outcomes(kernel, value()) == ["put_back"]


def test_a_limit_that_heat_holds_down_counts_as_back() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000)})
    kernel.heat(1_000_000)
    assert outcomes(kernel, value()) == ["limited"]
    kernel.heat(None)
    assert kernel.limits()["policy0"][0] == "2400000"


def test_a_ceiling_that_came_down_counts_as_back() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, ceiling_khz=1_500_000)})
    assert outcomes(kernel, value()) == ["limited"]
    assert kernel.limits()["policy0"][0] == "1500000"


def test_a_value_that_reads_back_otherwise_has_failed() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000, floor_khz=600_000)})
    (found,) = put_back(kernel, [value(text="500000")])
    assert (found.outcome, found.reason) == ("as_it_was", "") if found.is_done else ("failed", "reads back as '600000'")
    assert not found.is_done


def test_a_preference_that_the_performance_governor_overrules_counts_as_back() -> None:
    kernel = FakeKernel({"policy0": Policy(governor="performance", epp="power")})
    assert outcomes(kernel, value(EPP, "balance_power")) == ["limited"]


def test_a_fault_that_passes_is_waited_out() -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000)}, faults={(MAX, "write"): errno.EBUSY})
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        kernel.faults.clear()

    (found,) = put_back(kernel, [value()], pause)
    assert found.outcome == "put_back"
    assert len(pauses) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.EPERM, errno.EROFS, errno.EACCES, errno.ENODATA])
def test_a_fault_that_stays_keeps_the_value(number: int) -> None:
    kernel = FakeKernel({"policy0": Policy(max_khz=600_000)}, faults={(MAX, "write"): number})
    (found,) = put_back(kernel, [value()])
    assert found.outcome == "failed"
    assert os.strerror(number) in found.reason


def test_heat_is_seen_by_the_cooling_devices_of_clocks_only() -> None:
    kernel = FakeKernel()
    assert not is_held_down(kernel)
    kernel.heat(1_000_000)
    assert is_held_down(kernel)
    kernel.others["sys/class/thermal/cooling_device0/type"] = "pwm-fan"
    assert not is_held_down(kernel)
    kernel.others["sys/class/thermal/cooling_device0/type"] = "Processor"
    kernel.others["sys/class/thermal/cooling_device0/cur_state"] = "junk"
    assert not is_held_down(kernel)


# The program.


def plant(root: Path, max_khz: int) -> None:
    folder = root / CPUFREQ / "policy0"
    folder.mkdir(parents=True)
    (folder / "scaling_max_freq").write_text(f"{max_khz}\n")
    (folder / "scaling_driver").write_text("acpi-cpufreq\n")
    random = root / "proc/sys/kernel/random"
    random.mkdir(parents=True)
    (random / "boot_id").write_text(f"{BOOT}\n")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_rt.power.restore", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_program_gives_the_machine_back(tmp_path: Path, file: str) -> None:
    plant(tmp_path, 600_000)
    Snapshot(file, BOOT).add([value()])
    done = run("--root", str(tmp_path), f"--snapshot={file}")
    assert (done.returncode, done.stderr) == (0, f"<6>/{MAX} = 2400000: is back\n")
    assert (tmp_path / MAX).read_text() == "2400000\n"
    assert not Path(file).exists()
    done = run("--root", str(tmp_path), f"--snapshot={file}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_keeps_what_it_could_not_put_back(tmp_path: Path, file: str) -> None:
    plant(tmp_path, 600_000)
    Snapshot(file, BOOT).add([value(), value("sys/class/devfreq/npu/max_freq", "1000000000", "-")])
    (tmp_path / MAX).unlink()
    (tmp_path / MAX).mkdir()  # neither read nor written
    done = run("--root", str(tmp_path), "--snapshot", file)
    assert done.returncode == 1
    assert "<3>" in done.stderr
    assert "IS NOT BACK: Is a directory" in done.stderr
    left = Snapshot(file, BOOT)
    assert left.load()
    assert list(left.values) == [MAX]


def test_the_program_refuses_what_is_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "snapshot").write_text("value\tetc/passwd\tx\ty\n")
    done = run("--root", str(tmp_path), "--snapshot", str(tmp_path / "snapshot"))
    assert done.returncode == 2
    assert "is no snapshot" in done.stderr
    assert run("--nonsense", "x").returncode == 2
    assert run("--root").returncode == 2


def test_the_program_needs_next_to_nothing() -> None:
    code = "import sys, edge_rt.power.restore; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lacking = {"json", "dataclasses", "socket", "ctypes", "logging", "pathlib", "tomllib", "importlib.metadata"}
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print('\\n'.join(sys.modules))"], capture_output=True, text=True, check=True
    )
    brought = set(done.stdout.split()) - set(plain.stdout.split())
    assert not brought & lacking
    assert {name for name in brought if name.startswith("edge_rt")} == {
        "edge_rt",
        "edge_rt.devices",
        "edge_rt.devices.kernel_files",
        "edge_rt.power",
        "edge_rt.power.restore",
        "edge_rt.power.snapshot",
    }


def test_restoring_forgets_what_is_back(file: str, tmp_path: Path) -> None:
    plant(tmp_path, 600_000)
    snapshot = Snapshot(file, BOOT)
    snapshot.add([value()])
    (found,) = restoring.restore(snapshot, KernelFiles(str(tmp_path)))
    assert found.outcome == "put_back"
    assert snapshot.values == {}
