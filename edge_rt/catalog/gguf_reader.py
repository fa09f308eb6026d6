"""Read GGUF's primitive values from an untrusted file, each length checked before anything is allocated for it.

Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import reprlib
import struct
from array import array
from dataclasses import dataclass
from typing import BinaryIO, Never

from edge_rt.errors import ModelFormatError

STRING = 8
ARRAY = 9
_BOOL = 7
_VOCABULARY = "tokenizer.ggml.tokens"  # llama.cpp aborts where two of its strings are the same
_BUCKET_ITEMS = 2**17
# GGUF's value type -> (name, struct format)
SCALARS: dict[int, tuple[str, str]] = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLimits:
    """Bounds of a header. Together they keep a hostile file below 64 MiB and a few seconds.

    max_items       of all string arrays together: each item costs a step of the parser
    max_kept_items  longer arrays are checked and skipped
    max_kept_bytes  of all values kept, roughly as Python holds them
    """

    max_pairs: int = 4096
    max_tensors: int = 16_384
    max_key_bytes: int = 256
    max_name_bytes: int = 63  # ggml's GGML_MAX_NAME with its terminator
    max_string_bytes: int = 2**20
    max_items: int = 2 * 2**20
    max_header_bytes: int = 256 * 2**20
    max_kept_items: int = 2048
    max_kept_bytes: int = 8 * 2**20
    max_alignment: int = 2**16


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """An array of a header. items is None where it was too long to keep."""

    item_type: str
    n_items: int
    items: tuple[Scalar, ...] | None


Value = Scalar | ArrayValue


class GgufReader:
    """A cursor over the file; field is where it stands, for errors."""

    def __init__(self, file: BinaryIO, path: str, size: int, limits: GgufLimits):
        self.field = "magic"
        self.position = 0
        self.size = size
        self.limits = limits
        self._file = file
        self._path = path
        self._kept_bytes = 0
        self._n_items = 0

    def fail(self, problem: str) -> Never:
        raise ModelFormatError(path=self._path, field=self.field, problem=problem)

    def take(self, n_bytes: int) -> bytes:
        """Read n_bytes; the caller has bounded it."""
        self._advance(n_bytes)
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            self.fail("the file ends here; it is truncated")
        return data

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize(code)))[0])

    def count(self, what: str, limit: int, min_item_bytes: int) -> int:
        """Read a 64-bit count of things that each take at least min_item_bytes of the file."""
        n = self.number("Q")
        if n > limit:
            self.fail(f"{n} {what}, the limit is {limit}")
        if n * min_item_bytes > self.size - self.position:
            self.fail(f"{n} {what} do not fit into the {self.size - self.position} bytes left of the file")
        return n

    def text(self, limit: int) -> str:
        raw = self.take(self.count("bytes of text", limit, 1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            self.fail(f"text is not UTF-8: {exc.reason} at byte {exc.start}")

    def label(self, limit: int) -> str:
        """Read a name that errors may show: printable ASCII, not empty."""
        label = self.text(limit)
        if not (label.isascii() and label.isprintable() and label):
            self.fail(f"{reprlib.repr(label)} is not a name of printable ASCII")
        return label

    def value(self) -> Value:
        """Read a typed value."""
        kind = self.number("I")
        if kind == ARRAY:
            return self._array()
        return self._scalar(kind)

    def _scalar(self, kind: int) -> Scalar:
        if kind == STRING:
            text = self.text(self.limits.max_string_bytes)
            # Python takes up to four bytes for each character of a string with one emoji in it.
            self._keep(128 + len(text) * (1 if text.isascii() else 4))
            return text
        if kind not in SCALARS:
            self.fail(f"unknown value type {kind}")
        code = SCALARS[kind][1]
        value: int | float = struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]
        if kind != _BOOL:
            return value
        if value > 1:
            self.fail(f"a bool of {value}")
        return bool(value)

    def _array(self) -> ArrayValue:
        kind = self.number("I")
        if kind == ARRAY:
            self.fail("nested arrays are refused")
        if kind == STRING:
            return self._string_array()
        if kind not in SCALARS:
            self.fail(f"an array of unknown value type {kind}")
        name, code = SCALARS[kind]
        item_bytes = struct.calcsize(code)
        n = self.count(f"items of {name}", self.size, item_bytes)
        if n > self.limits.max_kept_items:
            self._skip(n * item_bytes)
            return ArrayValue(name, n, None)
        self._keep(48 * n)
        return ArrayValue(name, n, struct.unpack(f"<{n}{code}", self.take(n * item_bytes)))

    def _string_array(self) -> ArrayValue:
        n = self.count("strings", self.limits.max_items - self._n_items, 8)
        self._n_items += n
        if self.field == _VOCABULARY:
            self._check_distinct(n)
            return ArrayValue("string", n, None)
        if n <= self.limits.max_kept_items:
            return ArrayValue("string", n, tuple(self._scalar(STRING) for _ in range(n)))
        for _ in range(n):
            self._skip(self._length())
        return ArrayValue("string", n, None)

    def _check_distinct(self, n: int) -> None:
        """Read n strings; those that are not empty must differ. Their hashes are compared, a part of them at a time."""
        hashes = array("q")
        for _ in range(n):
            if raw := self.take(self._length()).partition(b"\0")[0]:  # llama.cpp reads them as C strings
                hashes.append(hash(raw))
        n_buckets = 1 + len(hashes) // _BUCKET_ITEMS
        if sum(len({h for h in hashes if h % n_buckets == b}) for b in range(n_buckets)) < len(hashes):
            self.fail("two of its strings are the same")

    def _length(self) -> int:
        length = int.from_bytes(self.take(8), "little")
        if length > self.limits.max_string_bytes:
            self.fail(f"a string of {length} bytes, the limit is {self.limits.max_string_bytes}")
        return length

    def _advance(self, n_bytes: int) -> None:
        if n_bytes > self.size - self.position:
            self.fail(f"{n_bytes} bytes wanted, {self.size - self.position} are left; the file is truncated")
        self.position += n_bytes
        if self.position > self.limits.max_header_bytes:
            self.fail(f"the header is longer than {self.limits.max_header_bytes} bytes")

    def _skip(self, n_bytes: int) -> None:
        self._advance(n_bytes)
        self._file.seek(self.position)

    def _keep(self, n_bytes: int) -> None:
        self._kept_bytes += n_bytes
        if self._kept_bytes > self.limits.max_kept_bytes:
            self.fail(f"the header's values take more than {self.limits.max_kept_bytes} bytes")
