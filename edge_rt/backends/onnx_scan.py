"""How much of an ONNX file is structure, counted before protobuf unfolds it.

Two bytes of a file can be an empty node, which takes two hundred once parsed: a file of 40 MB would take 4 GB. Weights
and texts take what they are long. So what is neither is counted on the bytes, and limited.
"""

from __future__ import annotations

MAX_STRUCTURE_BYTES = 4 * 2**20  # the most seen in an honest model is 0.7 MB
_MAX_DEPTH = 200

# Which fields of a message hold messages of which kind; "plain" holds elements or text.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor", 10: "plain"},
    "node": {5: "attribute", 6: "plain", 9: "entry"},
    "attribute": {4: "plain", 5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {4: "plain", 5: "plain", 7: "plain", 9: "plain", 10: "plain", 11: "plain"},
    "entry": {1: "plain", 2: "plain"},
}


def structure_bytes(data: bytes) -> int:
    """Count the bytes that are neither weights nor texts, till past MAX_STRUCTURE_BYTES; -1 for what is no ONNX."""
    n_bytes = 0
    at, end, kind = 0, len(data), "model"
    outer: list[tuple[int, str]] = []  # messages that the present one is in: where they end, and what they are
    while True:
        if at == end:
            if not outer:
                return n_bytes
            end, kind = outer.pop()
            continue
        start = at
        tag, at = _varint(data, at, end)
        wire = tag & 7
        size = 0
        if at >= 0 and wire in (0, 2):
            size, at = _varint(data, at, end)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            return -1
        body = at + (size if wire == 2 else 0)
        if at < 0 or body > end:
            return -1
        child = _CHILDREN[kind].get(tag >> 3, "") if wire == 2 else ""
        n_bytes += (at if child else body) - start
        if n_bytes > MAX_STRUCTURE_BYTES:
            return n_bytes
        if child in ("", "plain"):
            at = body
        else:
            if len(outer) > _MAX_DEPTH:
                return -1
            outer.append((end, kind))
            end, kind = body, child


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number; the place behind it is -1 if there is none."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1
