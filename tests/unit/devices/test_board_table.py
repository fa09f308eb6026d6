from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.devices import board_table
from edge_rt.devices.board_table import Pmic, find, load, parse
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.errors import ConfigError
from tests.device_trees import Plant

GOOD = """
name = "My board"
source = "its schematic"
board = ["IN"]
soc = ["CPU", "GPU"]

[match]
compatible = ["me,board"]

[[rail]]
name = "IN"
chip = "ina226"
device = "1-0040"
shunt_ohm = 0.02

[[rail]]
name = "CPU"

[[rail]]
name = "GPU"
number = 2
"""


def test_every_shipped_file_keeps_the_form_and_says_its_source() -> None:
    boards = load()
    assert len(boards) == len(list(board_table.SHIPPED.glob("*.toml"))) >= 8
    assert all(board.source and board.name for board in boards)
    names = [name for board in boards for name in board.compatible]
    assert len(names) == len(set(names)), "two files claim one board"


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ("orin_nano", "Jetson Orin Nano / NX"),
        ("raspberry_pi_5", "Raspberry Pi 5"),
        ("rk3588", "RK3588 board"),
        ("x86_laptop", "PC"),
        ("bare_vm", "PC"),
    ],
)
def test_each_machine_finds_its_file(request: pytest.FixtureRequest, tree: str, name: str) -> None:
    board = find(request.getfixturevalue(tree))
    assert board is not None
    assert board.name == name


def test_a_machine_that_does_not_say_what_it_is_has_no_file(container: SysfsRoot) -> None:
    assert find(container) is None


@pytest.mark.parametrize(
    ("compatible", "model", "name"),
    [
        ("nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0", "", "Jetson AGX Orin"),
        ("nvidia,p3768-0000+p3767-0000-super\0nvidia,p3767-0000\0nvidia,tegra234\0", "", "Jetson Orin Nano / NX"),
        ("acme,carrier\0nvidia,tegra234\0", "NVIDIA Jetson Orin NX on a carrier", "Jetson Orin Nano / NX"),
        ("nvidia,p2972-0000\0nvidia,tegra194\0", "", "Jetson AGX Xavier"),
        ("nvidia,p3509-0000+p3668-0000\0nvidia,tegra194\0", "", "Jetson Xavier NX"),
        ("nvidia,p3450-0000\0nvidia,tegra210\0", "NVIDIA Jetson Nano Developer Kit", "Jetson Nano"),
        ("raspberrypi,4-model-b\0brcm,bcm2711\0", "", "Raspberry Pi 4"),
        ("xunlong,orangepi-5\0rockchip,rk3588s\0", "", "RK3588 board"),
    ],
)
def test_boards_are_known_by_the_device_tree(plant: Plant, compatible: str, model: str, name: str) -> None:
    board = find(plant({"proc/device-tree/compatible": compatible, "proc/device-tree/model": model}))
    assert board is not None
    assert board.name == name


def test_the_pi_5_has_the_line_of_who_measured_it(raspberry_pi_5: SysfsRoot) -> None:
    board = find(raspberry_pi_5)
    assert board is not None
    assert board.pmic == Pmic(slope=1.1451, offset_w=0.5879)
    assert "jfikar" in board.source


def test_a_board_without_a_meter_says_what_helps(rk3588: SysfsRoot) -> None:
    board = find(rk3588)
    assert board is not None
    assert "USB meter" in board.absent


def test_an_owners_file_comes_first(plant: Plant, orin_nano: SysfsRoot) -> None:
    own = GOOD.replace("me,board", "nvidia,p3767-0005").replace("My board", "Mine")
    plant({"etc/edge_rt/boards/mine.toml": own})
    board = find(orin_nano)
    assert board is not None
    assert board.name == "Mine"
    assert board.file == "/etc/edge_rt/boards/mine.toml"


def test_a_more_special_name_wins_over_a_family(tmp_path: Path, plant: Plant) -> None:
    for i, name in enumerate(("rockchip,rk3588", "radxa,rock-5b")):
        (tmp_path / f"{i}.toml").write_text(GOOD.replace("me,board", name).replace("My board", name))
    root = plant({"proc/device-tree/compatible": "radxa,rock-5b\0rockchip,rk3588\0"})
    board = find(root, tmp_path)
    assert board is not None
    assert board.name == "radxa,rock-5b"


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        ('name = "My board"', "", "name", "is missing"),
        ('source = "its schematic"', "source = 3", "source", "one line of text"),
        ('board = ["IN"]', 'board = ["OUT"]', "board", "OUT is no [[rail]] of this file; there are IN, CPU, GPU"),
        ('board = ["IN"]', 'board = "IN"', "board", "a list"),
        ('soc = ["CPU", "GPU"]', 'soc = ["CPU", "CPU"]', "soc", "added twice"),
        ('name = "CPU"', 'name = "GPU"', "rail", "GPU stands there more than once"),
        ("shunt_ohm = 0.02", "shunt_ohm = 20", "rail[1].shunt_ohm", "a number from 0.0001 to 1"),
        ("shunt_ohm = 0.02", "shunt_ohm = nan", "rail[1].shunt_ohm", "a number from"),
        ("number = 2", "number = 2.5", "rail[3].number", "a number from 1 to 64"),
        ("number = 2", "number = true", "rail[3].number", "a number from 1 to 64"),
        ("number = 2", "chanel = 2", "rail[3].chanel", "is no key of a board file"),
        ('compatible = ["me,board"]', "", "match", "no machine is meant"),
        ("[match]", "wat = 1\n[match]", "wat", "is no key of a board file"),
        ("[match]", 'absent = "none"\n[match]', "absent", "the board has a meter"),
        ("[match]", "[pmic]\nslope = 1.0\n[match]", "pmic.slope and offset_w", "both are wanted"),
        ("[match]", "[pmic]\nslope = 9.0\noffset_w = 0.0\n[match]", "pmic.slope", "a number from 0.5 to 2"),
        ("[match]", "[match", "board", "is no TOML"),
        ('name = "My board"', 'name = "\\u001b[2J"', "name", "one line of text"),
    ],
)
def test_a_file_that_breaks_the_form_is_named_with_its_key(old: str, new: str, key: str, words: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ConfigError) as caught:
        parse(text, "/etc/edge_rt/boards/f.toml")
    assert caught.value.key == key
    assert words in caught.value.problem
    assert caught.value.origin == "/etc/edge_rt/boards/f.toml"


def test_a_file_of_a_megabyte_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 65536"):
        parse("#" * 2**20, "/f")
