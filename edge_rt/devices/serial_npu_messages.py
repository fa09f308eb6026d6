"""Messages in the serial NPU's streams, to bytes and back: a header, a body, and a CRC-32 over both."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from edge_rt.devices.serial_npu_frames import VERSION

HELLO: Final = 1
MODEL_BEGIN: Final = 2
MODEL_DATA: Final = 3
MODEL_END: Final = 4
INPUT: Final = 5
RUN: Final = 6
OUTPUT: Final = 7
CANCEL: Final = 8
ECHO: Final = 9
STATUS: Final = 10
REPLY: Final = 0x80

OK: Final = 0
BAD_MODEL: Final = 3
CANCELLED: Final = 4
STATUSES: Final = {1: "bad request", 2: "busy", 3: "bad model", 4: "cancelled", 5: "unknown request"}

MAX_BODY: Final = 4096 + 64
OVERHEAD: Final = 12

_HEADER: Final = struct.Struct("<BBHI")
_FACTS: Final = struct.Struct("<BBHIIHHHI2x16s32s")


class SerialNpuError(Exception):
    """The device is gone, silent, or says what nothing of this protocol says. The session is over."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SerialNpuRefusalError(Exception):
    """The device has understood and refuses, with its reason."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, f"{STATUSES.get(status, f'status {status}')}: {reason}"
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True)
class Message:
    op: int
    status: int
    id: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a device says of itself.

    is_emulated    it runs on no chip
    max_chunk      bytes of a tensor or model in one message
    max_column     inputs that one output may sum over
    weight_bits    that layers may have; kinds: of layers, by number
    kernels        helium or plain
    """

    version: int
    is_emulated: bool
    max_chunk: int
    max_model_bytes: int
    arena_bytes: int
    max_column: int
    max_channels: int
    weight_bits: tuple[int, ...]
    kinds: frozenset[int]
    kernels: str
    chip: str


def pack_message(op: int, message_id: int, body: bytes = b"") -> bytes:
    message = _HEADER.pack(op, 0, message_id, len(body)) + body
    return message + zlib.crc32(message).to_bytes(4, "little")


class MessageReader:
    """Finds the messages of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, stream: bytes) -> list[Message]:
        """Take what continues the stream. Raises SerialNpuError for what no device sends."""
        self._buffer += stream
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            op, status, message_id, n_body = _HEADER.unpack_from(self._buffer)
            if n_body > MAX_BODY:
                raise SerialNpuError(f"a message of {n_body} bytes, more than {MAX_BODY}")
            end = _HEADER.size + n_body
            if len(self._buffer) < end + 4:
                break
            if zlib.crc32(bytes(self._buffer[:end])) != int.from_bytes(self._buffer[end : end + 4], "little"):
                raise SerialNpuError("a message's CRC-32 is wrong: an error passed the link's check")
            messages.append(Message(op, status, message_id, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[: end + 4]
        return messages


def read_facts(body: bytes) -> DeviceFacts:
    """Read the answer to HELLO. Raises SerialNpuError for facts that cannot be."""
    if len(body) != _FACTS.size:
        raise SerialNpuError(f"{len(body)} bytes say what it can, not {_FACTS.size}")
    version, flags, chunk, model_bytes, arena_bytes, column, channels, bits, kinds, kernels, chip = _FACTS.unpack(body)
    if version != VERSION or not 64 <= chunk <= MAX_BODY - 64 or not model_bytes or not arena_bytes:
        raise SerialNpuError(f"version {version}, chunks of {chunk} bytes, {model_bytes} bytes for a model")
    return DeviceFacts(
        version=version,
        is_emulated=bool(flags & 1),
        max_chunk=chunk,
        max_model_bytes=model_bytes,
        arena_bytes=arena_bytes,
        max_column=column,
        max_channels=channels,
        weight_bits=tuple(sorted(value for value in (bits & 0xFF, bits >> 8) if value)),
        kinds=frozenset(kind for kind in range(32) if kinds >> kind & 1),
        kernels=printable(kernels),
        chip=printable(chip),
    )


def printable(data: bytes) -> str:
    """Read what a device says, up to a zero byte, without what would be a command to a terminal."""
    text = data.split(b"\0", 1)[0].decode("ascii", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
