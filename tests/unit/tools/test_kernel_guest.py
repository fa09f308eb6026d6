"""What `make test-kernel` puts into its guest; the guest itself is not run here."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.run import VERDICT, copy_modules


def module(folder: Path, name: str, depends: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.ko").write_bytes(b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0")


def test_modules_come_after_what_they_need_once_each_and_those_built_in_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "modules"
    module(source / "drivers/cpufreq", "acpi-cpufreq", "processor,msr-safe")
    module(source / "drivers/acpi", "processor")
    module(source / "drivers/hwmon", "acpi_power_meter", "processor,hwmon")
    module(source / "drivers/net", "unneeded")
    target = tmp_path / "guest"
    assert copy_modules(source, target) == ["processor.ko", "acpi-cpufreq.ko", "acpi_power_meter.ko"]
    assert sorted(path.name for path in target.iterdir()) == ["acpi-cpufreq.ko", "acpi_power_meter.ko", "processor.ko"]


def test_a_verdict_is_a_line_of_its_own() -> None:
    assert VERDICT.search("check: a: ok\r\nverdict: 19 checks, 0 failed\r\n[ 7.4] reboot: Power down\n")
    assert VERDICT.search("note: the verdict: 19 checks, 0 failed\n") is None
