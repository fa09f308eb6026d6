"""Mends a frame of the serial NPU's link in which one byte is another, or missing, by its CRC-32 alone.

A CRC steps from register to register, a byte at a time, and can be stepped back. What the frame's bytes give from the
front and what they must give from the back meet at the wrong byte: there is one value, if any, that leads from one to
the other. A frame of n bytes has about 512 × n such neighbours, so one that is garbled worse is taken for one of them
once in 2^32 / (512 × n) times: the messages' own CRC-32 finds that. frame_mend in hw/npu/serial/src/frames.c is the
same.
"""

from __future__ import annotations

import zlib
from typing import Final

SURE_BYTES: Final = 2  # sync and length: without them nobody knows where the frame ends

_STEP: Final = tuple(zlib.crc32(bytes([value]), 0xFFFFFFFF) ^ 0xFFFFFFFF for value in range(256))
_BACK: Final = tuple(value for _, value in sorted((step >> 24, value) for value, step in enumerate(_STEP)))
_SOUND: Final = 0xDEBB20E3  # the register behind a frame and its check, whatever it holds


def mend(data: bytes, size: int, seed: int) -> tuple[bytes, int] | None:
    """Look for one byte that makes the first size bytes of data a sound frame, in place of one or between two.

    Gives the frame, and how many bytes of data it takes: size, or one less. None where no single byte does.
    """
    front = [seed ^ 0xFFFFFFFF]
    for byte in data[: size - 1]:
        front.append(_STEP[(front[-1] ^ byte) & 0xFF] ^ front[-1] >> 8)
    for n_missing in (1, 0):  # a missing last byte is also another one, that of the next frame
        register = _SOUND  # behind the byte that is looked for
        for at in range(size - 1, SURE_BYTES - 1, -1):
            before = front[at]
            wanted = register ^ before >> 8
            step = _BACK[wanted >> 24]
            if _STEP[step] == wanted:
                found = bytes([(before ^ step) & 0xFF])
                return data[:at] + found + data[at + 1 - n_missing : size - n_missing], size - n_missing
            back = _BACK[register >> 24]
            register = ((register ^ _STEP[back]) << 8 | back ^ data[at - n_missing]) & 0xFFFFFFFF
    return None
