from __future__ import annotations

import struct

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.devices.serial_meter import MeterProtocolError
from edge_rt.devices.tc66 import ANSWER_BYTES, KEY, Tc66Dialogue, crc16, power_w
from tests.fakes import FakeClock


def answer(
    volts: float, amperes: float, watts: float, *, names: tuple[bytes, ...] = (b"pac1", b"pac2", b"pac3")
) -> bytes:
    """Make what a meter would send."""
    blocks = b""
    for at, name in enumerate(names):
        block = bytearray(60)
        block[:4] = name
        if at == 0:
            block[4:12] = b"TC661.14"
            struct.pack_into("<III", block, 48, round(volts * 1e4), round(amperes * 1e5), round(watts * 1e4))
        blocks += bytes(block) + struct.pack("<I", crc16(bytes(block)))
    encryptor = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    return encryptor.update(blocks) + encryptor.finalize()


def test_the_checksum_is_modbus() -> None:
    assert crc16(b"123456789") == 0x4B37  # the catalogue's check value


def test_an_answer_is_read() -> None:
    assert power_w(answer(5.1609, 0.734, 3.788)) == pytest.approx(3.788)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        answer(5.0, 1.0, 5.0)[:-1],
        answer(5.0, 1.0, 5.0, names=(b"pac1", b"pac3", b"pac2")),
        bytes(ANSWER_BYTES),
        answer(5.0, 1.0, 9.0),
        answer(60.0, 6.0, 360.0),
        answer(5.0, 1.0, 5.0)[:-1] + b"\0",
    ],
)
def test_what_is_no_answer(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        power_w(raw)


@given(st.binary(min_size=ANSWER_BYTES, max_size=ANSWER_BYTES))
def test_noise_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="pac1"):
        power_w(raw)


class FakePort:
    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.written: list[bytes] = []

    def read(self, size: int = 1) -> bytes:
        return self.answers.pop(0)[:size] if self.answers else b""

    def write(self, data: bytes) -> int:
        self.written.append(data)
        return len(data)

    def close(self) -> None: ...


def test_it_is_asked_ten_times_a_second() -> None:
    clock = FakeClock()
    port = FakePort([answer(5.0, 0.5, 2.5)] * 3)
    dialogue = Tc66Dialogue(clock=clock, sleep=clock.advance)
    begun_s = clock()
    watts = [dialogue.listen(port) for _ in range(4)]
    assert watts == [(2.5,)] * 3 + [()]
    assert port.written == [b"getva"] * 4
    assert clock() - begun_s == pytest.approx(0.3)


def test_a_damaged_answer_is_passed_over_and_several_are_no_tc66() -> None:
    clock = FakeClock()
    port = FakePort([b"\0" * ANSWER_BYTES, b"", answer(5.0, 0.5, 2.5)])
    dialogue = Tc66Dialogue(clock=clock, sleep=clock.advance)
    assert [dialogue.listen(port) for _ in range(2)] == [(), (2.5,)]
    port.answers = [b"\1" * ANSWER_BYTES, b""] * 5
    for _ in range(4):
        dialogue.listen(port)
    with pytest.raises(MeterProtocolError, match="TC66"):
        dialogue.listen(port)
