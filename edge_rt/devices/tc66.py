"""RDTech TC66 and TC66C USB meters, over USB serial.

The meter answers `getva` with 192 bytes: three blocks of 64, encrypted with AES-256 in ECB mode and a key that all of
them share. Decrypted, a block begins with pac1, pac2 or pac3 and ends with the CRC-16/MODBUS of its first 60 bytes as
a little-endian uint32; pac1 has the voltage at byte 48 in 0.1 mV, the current at 52 in 10 µA and the power at 56 in
0.1 mW. Source: https://sigrok.org/wiki/RDTech_TC66C
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final

from edge_rt.devices.meters import Quality
from edge_rt.devices.serial_meter import MeterProtocolError, Port

ANSWER_BYTES: Final = 192
KEY: Final = bytes.fromhex("5821fa5601b2f02687ff1204622a4fb086f40260816f9a0ba7f106619ab87288")

_BLOCK: Final = 64
_ASK: Final = b"getva"
_INTERVAL_S: Final = 0.1
_MAX_W: Final = 200.0  # it measures 24 V and 5 A
_MAX_BAD: Final = 5


def crc16(data: bytes) -> int:
    """Compute CRC-16/MODBUS."""
    crc = 0xFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
    return crc


def power_w(answer: bytes) -> float:
    """Give the watts of an answer. Raises ValueError saying what is wrong with it, ImportError without cryptography."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    if len(answer) != ANSWER_BYTES:
        raise ValueError(f"{len(answer)} bytes are not {ANSWER_BYTES}")
    decryptor = Cipher(algorithms.AES(KEY), modes.ECB()).decryptor()  # noqa: S305 - the meter's, not ours
    plain = decryptor.update(answer) + decryptor.finalize()
    for at, name in enumerate((b"pac1", b"pac2", b"pac3")):
        block = plain[at * _BLOCK : (at + 1) * _BLOCK]
        if block[:4] != name:
            raise ValueError(f"block {at + 1} does not begin with {name.decode()}")
        if struct.unpack_from("<I", block, 60)[0] != crc16(block[:60]):
            raise ValueError(f"the checksum of block {at + 1} is wrong")
    raw_v, raw_a, raw_w = struct.unpack_from("<III", plain, 48)
    volts, amperes, watts = float(raw_v * 1e-4), float(raw_a * 1e-5), float(raw_w * 1e-4)
    if watts > _MAX_W or abs(watts - volts * amperes) > 0.05 + 0.05 * watts:
        raise ValueError(f"{watts:g} W are not {volts:g} V × {amperes:g} A")
    return watts


class Tc66Dialogue:
    """Asks ten times a second."""

    interval_s = _INTERVAL_S
    quality: Quality = "measured"

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._due_s = clock()
        self._n_bad = 0

    def begin(self, port: Port) -> None:
        """Let go of what an interrupted dialogue has left."""
        while port.read(ANSWER_BYTES):
            pass

    def listen(self, port: Port) -> tuple[float, ...]:
        now_s = self._clock()
        if now_s < self._due_s:
            self._sleep(self._due_s - now_s)
        self._due_s = max(self._due_s, now_s) + self.interval_s
        port.write(_ASK)
        answer = port.read(ANSWER_BYTES)
        if not answer:
            return ()
        try:
            watts = power_w(answer)
        except ValueError as exc:
            self._n_bad += 1
            if self._n_bad >= _MAX_BAD:
                raise MeterProtocolError(f"its answers are not a TC66's: {exc}") from exc
            self.begin(port)
            return ()
        self._n_bad = 0
        return (watts,)
