"""The hand-off of a simulated board: what it says of the registers, and that its two files stay together."""

import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hw.fpga.sim.build import CONFIGS, source_hash
from hw.fpga.sim.handoff import Handoff, HandoffError, check_pair, write_handoff

REGMAP = tomllib.loads((Path(__file__).parents[2] / "hw" / "fpga" / "regmap.toml").read_text())

configs = pytest.mark.parametrize("name", list(CONFIGS))


def properties(element):
    return {entry.get("NAME"): entry.get("VALUE") for entry in element.findall("PROPERTY")}


@configs
def test_every_register_and_field_is_in_it(tmp_path, name):
    root = ET.parse(write_handoff(tmp_path, CONFIGS[name]).with_suffix(".hwh")).getroot()
    said = {entry.get("NAME"): entry for entry in root.iter("REGISTER")}
    assert list(said) == [register["name"] for register in REGMAP["register"]]
    for register in REGMAP["register"]:
        found = properties(said[register["name"]])
        assert int(found["ADDRESS_OFFSET"], 16) == register["offset"]
        assert found["ACCESS"] == ("read-only" if register["access"] == "ro" else "read-write")
        fields = {entry.get("NAME"): properties(entry) for entry in said[register["name"]].iter("FIELD")}
        assert {
            field: (int(has["BIT_OFFSET"]), int(has["BIT_OFFSET"]) + int(has["BIT_WIDTH"]) - 1)
            for field, has in fields.items()
        } == {field["name"]: tuple(field["bits"]) for field in register.get("fields", ())}


@pytest.mark.parametrize(("name", "at"), [("kv260-gemv", 0xA000_0000), ("z2-gemm", 0x4000_0000)])
def test_the_engine_lies_where_the_processor_sees_it(tmp_path, name, at):
    root = ET.parse(write_handoff(tmp_path, CONFIGS[name]).with_suffix(".hwh")).getroot()
    (place,) = root.iter("MEMRANGE")
    assert (int(place.get("BASEVALUE"), 16), int(place.get("HIGHVALUE"), 16)) == (at, at + 0xFFF)
    assert place.get("INSTANCE") == "e4"


@configs
def test_the_bit_names_its_configuration_build_and_hwh(tmp_path, name):
    bit = write_handoff(tmp_path, CONFIGS[name])
    handoff = Handoff.of(bit.read_bytes())
    assert (handoff.config_name, handoff.build) == (name, source_hash()[:8])
    assert check_pair(bit) == tmp_path / "e4.hwh"


@pytest.mark.parametrize("name", ["kv260-gemm", "z2-gemm"])
def test_the_names_are_those_of_the_boards_bitstream(tmp_path, name):
    script = (Path(__file__).parents[2] / "hw" / "fpga" / "vivado" / "build.tcl").read_text()
    bit = write_handoff(tmp_path, CONFIGS[name])
    root = ET.parse(bit.with_suffix(".hwh")).getroot()
    modules = {module.get("INSTANCE"): module.get("VLNV") for module in root.iter("MODULE")}
    assert f"-vlnv {modules['e4']} e4\n" in script
    assert f"-vlnv {modules['ps'].rpartition(':')[0]} ps]" in script
    assert f" {root.find('SYSTEMINFO').get('DEVICE')}" in script.replace("{", " ")
    assert root.find("MODULES//MEMRANGE").get("MASTERBUSINTERFACE") in script
    assert bit.name in script


def test_each_hwh_has_a_bit_of_its_own(tmp_path):
    # pynq keeps what it read of a .hwh under the hash of the .bit.
    first = write_handoff(tmp_path, CONFIGS["z2-gemv"], "one").read_bytes()
    assert write_handoff(tmp_path, CONFIGS["z2-gemv"], "two").read_bytes() != first
    assert write_handoff(tmp_path, CONFIGS["z2-gemv"], "one").read_bytes() == first


def test_a_changed_hwh_is_refused(tmp_path):
    bit = write_handoff(tmp_path, CONFIGS["z2-gemv"])
    with bit.with_suffix(".hwh").open("a") as file:
        file.write(" ")
    with pytest.raises(HandoffError, match="write the hand-off again"):
        check_pair(bit)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"edge_rt simulated hand-off, no bitstream\nz2-gemv\n"])
def test_another_bit_is_refused(data):
    with pytest.raises(HandoffError, match="runs no other"):
        Handoff.of(data)
