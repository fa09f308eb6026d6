from __future__ import annotations

from pathlib import Path

from edge_rt.backends.npu.chip_heat import hottest_c


def put(root: Path, number: int, name: str, reading: str) -> None:
    zone = root / f"sys/class/thermal/thermal_zone{number}"
    zone.mkdir(parents=True)
    (zone / "type").write_text(name)
    (zone / "temp").write_text(reading)


def test_the_hottest_of_a_chips_own_zones_counts(tmp_path: Path) -> None:
    zones = (("cpu", "90000"), ("nsp0", "41615\n"), ("NSP1", "43000\n"), ("nsp2", "-5"))
    for number, (name, reading) in enumerate(zones):
        put(tmp_path, number, f"{name}-thermal\n", reading)
    assert hottest_c(tmp_path, ("nsp", "cdsp")) == 43.0
    assert hottest_c(tmp_path, ("gpu",)) is None


def test_what_is_no_reading_is_left_out(tmp_path: Path) -> None:
    for number, reading in enumerate(["", "hot", "1234567", "4_1", "0" * 5000]):
        put(tmp_path, number, "npu", reading)
    (tmp_path / "sys/class/thermal/thermal_zone9").mkdir()
    assert hottest_c(tmp_path, ("npu",)) is None
    put(tmp_path, 10, "npu", "41000")
    assert hottest_c(tmp_path, ("npu",)) == 41.0
