from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.ppk2 import Calibration, Ppk2Dialogue, parse_metadata
from edge_rt.devices.serial_meter import MeterProtocolError

METADATA = (
    "Calibrated: 0\n"
    + "".join(f"R{i}: {r}\n" for i, r in enumerate((1000.0, 100.0, 10.0, 1.0, 0.05)))
    + "".join(f"{name}{i}: {value}\n" for name, value in (("GS", 0.0), ("GI", 1.0), ("O", 0.0)) for i in range(5))
    + "VDD: 3000\nHW: 13277\nmode: 1\nIA: 56\n"
)


def words(*values: tuple[int, int], first: int = 0) -> bytes:
    """Make samples of (converter value, range), with a running counter."""
    return b"".join(
        (adc | at << 14 | ((first + i) & 0x3F) << 18).to_bytes(4, "little") for i, (adc, at) in enumerate(values)
    )


def test_the_calibration_is_read() -> None:
    found = parse_metadata(METADATA)
    assert found.values["R"] == (1000.0, 100.0, 10.0, 1.0, 0.05)
    assert found.values["UG"] == (1.0,) * 5


@pytest.mark.parametrize(
    "text", ["", "hello", "R0: 1.0", METADATA.replace("1000.0", "nan"), METADATA.replace("1000.0", "x")]
)
def test_what_is_no_calibration(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_metadata(text)


def test_a_kit_that_was_never_calibrated_keeps_the_usual_resistors() -> None:
    assert parse_metadata(METADATA.replace("R4: 0.05", "R4: 0")).values["R"][4] == 0.043


def test_amperes_by_range() -> None:
    calibration = parse_metadata(METADATA)
    # 4096 × 4 × 1.8 / 163840 = 0.18 V at the range's resistor
    assert calibration.amperes(4096 | 3 << 14, 5.0) == pytest.approx(0.18)
    assert calibration.amperes(4096 | 0 << 14, 5.0) == pytest.approx(0.18e-3)
    assert Calibration().amperes(0, 5.0) == 0.0


def calibrated() -> Ppk2Dialogue:
    dialogue = Ppk2Dialogue(5.0)
    dialogue.begin(FakePort(METADATA.encode() + b"END\n"))
    return dialogue


def test_every_hundredth_sample_counts_however_they_come() -> None:
    samples = words(*[(4096 if i % 100 == 0 else 0, 3) for i in range(1000)])
    whole = calibrated().feed(samples)
    assert whole == (pytest.approx(0.9),)
    dialogue, pieces = calibrated(), []
    for at in range(0, len(samples), 333):
        pieces += dialogue.feed(samples[at : at + 333])
    assert pieces == [pytest.approx(0.9)] * len(pieces)
    assert len(pieces) == 10


def test_a_lost_byte_shows() -> None:
    dialogue = Ppk2Dialogue(5.0)
    samples = words(*[(100, 3)] * 400)
    with pytest.raises(MeterProtocolError, match="gap"):
        dialogue.feed(samples[:401] + samples[402:])


def test_more_than_it_measures_is_refused() -> None:
    with pytest.raises(MeterProtocolError, match="beyond"):
        Ppk2Dialogue(5.0).feed(words((0x3FFF, 4)))


class FakePort:
    def __init__(self, metadata: bytes) -> None:
        self.written: list[bytes] = []
        self._metadata, self._out = metadata, b"stale"

    def read(self, size: int = 1) -> bytes:
        data, self._out = self._out[:size], self._out[size:]
        return data

    def write(self, data: bytes) -> int:
        self.written.append(data)
        if data == b"\x19":
            self._out += self._metadata
        return len(data)

    def close(self) -> None: ...


def test_it_is_stopped_asked_for_its_calibration_and_started() -> None:
    port = FakePort(METADATA.encode() + b"END\n")
    Ppk2Dialogue(5.0).begin(port)
    assert port.written == [b"\x07", b"\x19", b"\x11\x01", b"\x0c\x01", b"\x06"]


def test_another_device_is_no_ppk2() -> None:
    with pytest.raises(MeterProtocolError, match="PPK2"):
        Ppk2Dialogue(5.0).begin(FakePort(b"\xff\xfe login:"))


@pytest.mark.parametrize("volts", [0.0, 0.5, 12.0])
def test_a_supply_that_it_cannot_be_in(volts: float) -> None:
    with pytest.raises(ValueError, match="V is not within"):
        Ppk2Dialogue(volts)


@given(st.lists(st.binary(max_size=900), max_size=10))
def test_any_bytes_are_samples_or_refused(pieces: list[bytes]) -> None:
    dialogue = Ppk2Dialogue(5.0)
    try:
        for piece in pieces:
            assert all(0 <= watts <= 6.0 for watts in dialogue.feed(piece))
    except MeterProtocolError:
        pass
