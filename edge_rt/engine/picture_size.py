"""Whether a picture's file holds as many pixels as its header says, told without decoding them twice.

Decoders fill what a file does not hold with grey and say nothing, so that a model would judge a picture nobody took.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

# What ends the compressed data of a scan: a marker that is no stuffed byte, no restart and no filling.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_EOI, _SOS, _DHT = 0xD9, 0xDA, 0xC4
_FRAMES = frozenset(range(0xC0, 0xD0)) - {_DHT, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_READ_AHEAD = b"\xff\x00" * 16  # the decoder looks some bytes ahead; more than these it must not want

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_INFLATED_BYTES = 2**20


def whole_jpeg(data: bytes) -> bytes:
    """Give a JPEG file as its decoder must have it to fail where its compressed data ends before its pixels do.

    Of one scan, as cameras write it, that is the scan without the end marker, at which a decoder would fill up with
    grey. Of several scans (progressive) the first must hold at least the shortest code for each block: less exact, but
    a header that is far from the truth is found. Raises ValueError saying what is wrong.
    """
    frame, shortest = b"", 16
    for marker, start, end in _segments(data):
        if marker in _FRAMES:
            frame = data[start:end]
        elif marker == _DHT:
            shortest = min(shortest, _shortest_code(data[start:end]))
        elif marker == _SOS:
            if (found := _END_OF_SCAN.search(data, end)) is None:
                raise ValueError("it ends within its pixels")
            n_in_scan = data[start] if end > start else 0
            if len(frame) < 6 or not n_in_scan:
                raise ValueError("its pixels come before its header")
            if n_in_scan == frame[5] and data[found.end() - 1] == _EOI:
                return data[: found.start()] + _READ_AHEAD
            need_bytes = _n_blocks(frame, n_in_scan) * shortest // 8
            if found.start() - end < need_bytes:
                raise ValueError(f"its header tells of {need_bytes} bytes at least, it holds {found.start() - end}")
            return data
    raise ValueError("it holds no pixels")


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Give the markers with where their contents begin and end, up to the first that cannot be read."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        else:
            n_bytes = struct.unpack_from(">H", data, at + 2)[0]
            if n_bytes < 2 or at + 2 + n_bytes > len(data):
                return
            yield marker, at + 4, at + 2 + n_bytes
            at += 2 + n_bytes


def _shortest_code(tables: bytes) -> int:
    """Give the bits of the shortest code of the tables for whole blocks (class 0)."""
    shortest, at = 16, 0
    while at + 17 <= len(tables):
        counts = tables[at + 1 : at + 17]
        if tables[at] >> 4 == 0:
            shortest = min([shortest, *(n for n, count in enumerate(counts, 1) if count)])
        at += 17 + sum(counts)
    return shortest


def _n_blocks(frame: bytes, n_components: int) -> int:
    """Count the blocks of a scan at least: those of 8 x 8 pixels of the components, sampled at their rates."""
    height, width = struct.unpack_from(">HH", frame, 1)
    factors = [(byte >> 4, byte & 15) for byte in frame[7::3]]
    across, down = (max((f[i] for f in factors), default=1) or 1 for i in (0, 1))
    sizes = sorted((width * h // across // 8) * (height * v // down // 8) for h, v in factors)
    return sum(sizes[:n_components])


def check_png(data: bytes) -> None:
    """Raise ValueError for a PNG file whose compressed data holds less or more pixels than its header tells.

    No more than what the header tells is inflated, a megabyte at a time.
    """
    if len(data) < 33 or data[12:16] != b"IHDR" or data[25] not in _PNG_CHANNELS:
        raise ValueError("its header cannot be read")
    width, height, bits, kind, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    row_bits = bits * _PNG_CHANNELS[kind]
    passes = _ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    sizes = ((-((left - width) // across), -((top - height) // down)) for left, top, across, down in passes)
    need = sum(n_rows * (1 + -(-n_columns * row_bits // 8)) for n_columns, n_rows in sizes if n_columns > 0 < n_rows)
    have = 0
    inflating = zlib.decompressobj()
    for part in _png_data(data):
        rest = part
        while rest and not inflating.eof and have <= need:
            have += len(inflating.decompress(rest, min(_INFLATED_BYTES, need - have + 1)))
            rest = inflating.unconsumed_tail
    if have != need:
        amount = "more" if have > need else f"{have}"
        raise ValueError(f"its header tells of {need} bytes of pixels, it holds {amount}")


def _png_data(data: bytes) -> Iterator[bytes]:
    at = 8
    while at + 8 <= len(data):
        n_bytes, name = struct.unpack_from(">I4s", data, at)
        if name == b"IDAT":
            yield data[at + 8 : at + 8 + n_bytes]
        elif name == b"IEND":
            return
        at += 12 + n_bytes
