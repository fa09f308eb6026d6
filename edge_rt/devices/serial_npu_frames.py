"""Frames of the serial NPU's link, to bytes and back. hw/npu/serial/PROTOCOL.md describes them; link.c is the same.

    DATA, up to 192 bytes   A5  n                 offset u16  payload  check u32
    DATA, 256 to 4224       C3  (n - 192) / 64    offset u16  header check u8  payload  check u32
    ACK                     5A  tail and size     next u16    mended u8  [gap  length] …, size bytes  check u32
    CONTROL                 3C  what  epoch u32   version u8  segment / 64 u8  window / 64 u16  check u24

Numbers are little-endian. The check is CRC-32, begun with the epoch, so that a frame of another session is none;
CONTROL's is the low 24 bits of one that begins with 0, as in version 1, so that every version can read it. A short DATA
frame in which one byte is garbled or lost is mended. A byte that begins no sound frame is passed over, and the search
goes on.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from edge_rt.devices.serial_npu_mending import mend

VERSION: Final = 2
SHORT: Final = 0xA5
LONG: Final = 0xC3
ACK: Final = 0x5A
CONTROL: Final = 0x3C

RESET: Final = 1  # begin a session with this epoch
ACCEPT: Final = 2  # it has begun
NO_SESSION: Final = 3  # said by a device that has started, or does not know what it hears
CLOSE: Final = 4

MAX_SHORT: Final = 192
STEP: Final = 64  # a long payload is 192 and a multiple of this
MAX_PAYLOAD: Final = MAX_SHORT + 63 * STEP
SHORT_OVERHEAD: Final = 8
LONG_OVERHEAD: Final = 9
_ACK_OVERHEAD: Final = 9
MAX_RANGES: Final = 16
_MAX_RANGES_BYTES: Final = 6 * MAX_RANGES  # gaps and lengths of up to 3 bytes
CONTROL_BYTES: Final = 13
STALE_US: Final = 150_000  # a frame that was begun and does not go on for as long is none

_BEGINS: Final = re.compile(b"[\xa5\xc3\x5a\x3c]")
_CONTROL: Final = struct.Struct("<BBIBBH")


@dataclass(frozen=True, slots=True)
class Data:
    offset: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """What has come: everything before next, and the ranges, which leave nothing out between the first and the last.

    ranges    (start, end), counted from next on; ascending, with gaps between
    n_mended  frames that were mended since the session began, modulo 256
    is_tail   the ranges are the last ones, and nothing is said of what lies between next and the first of them
    """

    next: int
    ranges: tuple[tuple[int, int], ...]
    is_tail: bool
    n_mended: int = 0


@dataclass(frozen=True, slots=True)
class Control:
    what: int
    epoch: int
    version: int = VERSION
    max_segment: int = 2048
    window: int = 24_576


Frame = Data | Ack | Control


def allowed(size: int) -> int:
    """Give the largest payload of at most size bytes that a frame can have."""
    if size < MAX_SHORT + STEP:
        return min(size, MAX_SHORT)
    return min(size - (size - MAX_SHORT) % STEP, MAX_PAYLOAD)


def wire_bytes(size: int) -> int:
    """Give the bytes that a DATA frame with a payload of size bytes takes on the wire."""
    return size + (SHORT_OVERHEAD if size <= MAX_SHORT else LONG_OVERHEAD)


def _check(head: bytes, seed: int) -> bytes:
    return zlib.crc32(head, seed).to_bytes(4, "little")


def pack_data(offset: int, payload: bytes, epoch: int) -> bytes:
    n = len(payload)
    if n <= MAX_SHORT:
        frame = struct.pack("<BBH", SHORT, n, offset & 0xFFFF) + payload
    else:
        head = struct.pack("<BBH", LONG, (n - MAX_SHORT) // STEP, offset & 0xFFFF)
        frame = head + bytes([zlib.crc32(head) & 0xFF]) + payload
    return frame + _check(frame, epoch)


def pack_ack(ack: Ack, epoch: int) -> bytes:
    ranges = bytearray()
    before = 0
    for start, end in ack.ranges:
        _put_number(ranges, start - before)
        _put_number(ranges, end - start)
        before = end
    size = len(ranges) | (0x80 if ack.is_tail else 0)
    frame = struct.pack("<BBHB", ACK, size, ack.next & 0xFFFF, ack.n_mended & 0xFF) + bytes(ranges)
    return frame + _check(frame, epoch)


def _put_number(out: bytearray, value: int) -> None:
    """Put a number in 7 bits a byte, the lower ones first."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _ranges(data: bytes) -> tuple[tuple[int, int], ...] | None:
    """Read gaps and lengths as ranges; None where they are none."""
    edges: list[int] = []
    value = shift = last = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift > 14:
                return None
            continue
        if value == 0:
            return None
        last += value
        edges.append(last)
        value = shift = 0
    if shift or len(edges) % 2 or len(edges) > 2 * MAX_RANGES:
        return None
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def pack_control(control: Control) -> bytes:
    frame = _CONTROL.pack(
        CONTROL,
        control.what,
        control.epoch,
        control.version,
        control.max_segment // 64,
        control.window // 64,
    )
    return frame + _check(frame, 0)[:3]


class FrameReader:
    """Finds frames among bytes.

    n_bad_bytes  those that were part of none
    n_mended     frames that were mended
    """

    def __init__(self) -> None:
        self.epoch: int | None = None  # None: only CONTROL is understood
        self.n_bad_bytes = 0
        self.n_mended = 0
        self._buffer = bytearray()
        self._fed_us = 0

    def feed(self, data: bytes, now_us: int) -> list[Frame]:
        """Take bytes as they come, b"" when time has passed; give the frames that are whole."""
        frames: list[Frame] = []
        if self._buffer and now_us - self._fed_us >= STALE_US:
            size = self._size()
            if size - len(self._buffer) != 1 or not self._mend(size, frames):
                self._skip(1)
        if data:
            self._buffer += data
            self._fed_us = now_us
        while True:
            found = _BEGINS.search(self._buffer)
            self._skip(found.start() if found else len(self._buffer))
            if not found:
                return frames
            size = self._size()
            if size < 0:
                self._skip(1)
            elif size == 0 or size > len(self._buffer):
                return frames
            elif (frame := self._parse(bytes(self._buffer[:size]))) is not None:
                del self._buffer[:size]
                frames.append(frame)
            elif not self._mend(size, frames):
                self._skip(1)

    @property
    def is_within_frame(self) -> bool:
        return bool(self._buffer)

    @property
    def stale_at_us(self) -> int | None:
        """When to feed b"" because a frame has not gone on; None while none is begun."""
        return self._fed_us + STALE_US if self._buffer else None

    def _skip(self, n_bytes: int) -> None:
        self.n_bad_bytes += n_bytes
        del self._buffer[:n_bytes]

    def _size(self) -> int:
        """Give the size of the frame that begins the buffer, 0 where too little has come, -1 where none does."""
        buffer = self._buffer
        kind = buffer[0]
        if kind == CONTROL:
            return CONTROL_BYTES
        if self.epoch is None:
            return -1
        if len(buffer) < 2:
            return 0
        if kind == SHORT:
            return buffer[1] + SHORT_OVERHEAD if 1 <= buffer[1] <= MAX_SHORT else -1
        if kind == ACK:
            n_bytes = buffer[1] & 0x7F
            return _ACK_OVERHEAD + n_bytes if n_bytes <= _MAX_RANGES_BYTES else -1
        if not 1 <= buffer[1] <= 63:
            return -1
        if len(buffer) < 5:
            return 0
        if zlib.crc32(bytes(buffer[:4])) & 0xFF != buffer[4]:
            return -1
        return MAX_SHORT + STEP * buffer[1] + LONG_OVERHEAD

    def _mend(self, size: int, frames: list[Frame]) -> bool:
        """Mend the short frame that the buffer begins with, if one can be; its last byte may not have come."""
        if self._buffer[0] != SHORT:
            return False
        found = mend(bytes(self._buffer[:size]).ljust(size, b"\0"), size, self.epoch or 0)
        if found is None:
            return False
        frame, n_taken = found
        del self._buffer[:n_taken]
        self.n_mended += 1
        frames.append(Data(int.from_bytes(frame[2:4], "little"), frame[4:-4]))
        return True

    def _parse(self, frame: bytes) -> Frame | None:
        kind = frame[0]
        if kind == CONTROL:
            if _check(frame[:-3], 0)[:3] != frame[-3:]:
                return None
            _, what, epoch, version, segment, window = _CONTROL.unpack(frame[:-3])
            return Control(what, epoch, version, 64 * segment, 64 * window)
        if _check(frame[:-4], self.epoch or 0) != frame[-4:]:
            return None
        offset = int.from_bytes(frame[2:4], "little")
        if kind == SHORT:
            return Data(offset, frame[4:-4])
        if kind == LONG:
            return Data(offset, frame[5:-4])
        ranges = _ranges(frame[5:-4])
        return None if ranges is None else Ack(offset, ranges, bool(frame[1] & 0x80), frame[4])
