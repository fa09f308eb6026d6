"""The router's learnt weights and their file. Needs numpy.

A file is read as if a stranger had written it: its length, checksum, names, shapes and values are checked before
anything is used, and it holds numbers only, nothing that runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.router import features
from edge_rt.router.calibration import Isotonic

MAX_FILE_BYTES = 4 * 2**20
N_SURFACE = len(features.NAMES)
N_VECTOR = 256
N_DENSE = N_SURFACE + N_VECTOR
MAX_TOPICS = 256
N_KIND_BINS = 2**13  # bins of hashed terms that the kinds are told by: terms' bins modulo this
N_VOTES = 12  # of three judges for two heads, as probabilities and as log-odds

_MAGIC = b"ERTROUT3"
_MAX_HEADER_BYTES = 2**16
_HEADS = 2  # the device's answer is good enough; the cloud's is
_DTYPES: dict[str, np.dtype[Any]] = {
    "f4": np.dtype("<f4"),
    "f2": np.dtype("<f2"),
    "i2": np.dtype("<i2"),
    "i1": np.dtype("i1"),
    "u1": np.dtype("u1"),
}

F32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Three judges for each of two heads, local and cloud, and how their log-odds are joined.

    mean, deviation   of the surface features on the rows of training
    dense             [2, N_DENSE + 1] over standardised surface features and the text's vector; the last is the bias
    rarity            [N_HASHED] inverse document frequency of hashed terms, 0 for those never met, times 16
    terms, term_scale [2, N_HASHED] times scale [2], and bias [2]: over the terms' shares
    topics            [n_topics, N_DENSE + 1] softmax over kinds of request
    topic_terms       [N_KIND_BINS, n_topics] of the same softmax times topic_scale [n_topics], over the terms' shares
    topic_odds        [2, n_topics] probability of success with each kind
    topic_names       of the kinds
    gain              [N_VOTES + n_topics + 1] what the probabilities' difference misses of the cloud's gain, over the
                      votes and the shares of kinds; the last is the bias
    blend             weight of dense, terms and topics; they sum to 1
    calibration       log-odds to probability, by head
    note              what it was trained on
    """

    mean: F32
    deviation: F32
    dense: F32
    rarity: NDArray[np.uint8]
    terms: NDArray[np.int16]
    term_scale: F32
    term_bias: F32
    topics: NDArray[np.float16]
    topic_terms: NDArray[np.int8]
    topic_scale: F32
    topic_odds: F32
    gain: F32
    blend: F32
    calibration: tuple[Isotonic, Isotonic]
    topic_names: tuple[str, ...] = ()
    note: str = field(default="")

    def save(self, path: Path) -> None:
        """Write the file at once or not at all. Raises OSError."""
        header, blobs = _pack(self)
        body = struct.pack("<I", len(header)) + header + b"".join(blobs)
        write_whole(path, _MAGIC + hashlib.sha256(body).digest() + body)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it finds the old or the new one, also after a power cut. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def load(path: Path) -> Weights:
    """Read and check a file. Raises ModelFormatError for one that is not sound, OSError where there is none."""
    with open_regular(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _misfit(path, "file", f"longer than {MAX_FILE_BYTES} bytes")
    if data[:8] != _MAGIC:
        raise _misfit(
            path, "beginning", f"must be {_MAGIC!r}, is {data[:8]!r}: no router weights, or of another version"
        )
    if len(data) < 44 or hashlib.sha256(data[40:]).digest() != data[8:40]:
        raise _misfit(path, "checksum", "does not fit the contents")
    n_header = struct.unpack("<I", data[40:44])[0]
    if not 2 <= n_header <= min(_MAX_HEADER_BYTES, len(data) - 44):
        raise _misfit(path, "header", f"{n_header} bytes long, in a file of {len(data)}")
    try:
        return _unpack(json.loads(data[44 : 44 + n_header]), data[44 + n_header :])
    except (ValueError, KeyError, TypeError, RecursionError, InvalidRequestError) as exc:
        raise _misfit(path, "contents", str(exc)[:200]) from exc


def _shapes(n_topics: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        "mean": ("f4", (N_SURFACE,)),
        "deviation": ("f4", (N_SURFACE,)),
        "dense": ("f4", (_HEADS, N_DENSE + 1)),
        "rarity": ("u1", (features.N_HASHED,)),
        "terms": ("i2", (_HEADS, features.N_HASHED)),
        "term_scale": ("f4", (_HEADS,)),
        "term_bias": ("f4", (_HEADS,)),
        "topics": ("f2", (n_topics, N_DENSE + 1)),
        "topic_terms": ("i1", (N_KIND_BINS, n_topics)),
        "topic_scale": ("f4", (n_topics,)),
        "topic_odds": ("f4", (_HEADS, n_topics)),
        "gain": ("f4", (N_VOTES + n_topics + 1,)),
        "blend": ("f4", (3,)),
    }


def _pack(weights: Weights) -> tuple[bytes, list[bytes]]:
    shapes = _shapes(len(weights.topic_names))
    header = {
        "topics": list(weights.topic_names),
        "features": list(features.NAMES),
        "calibration": [[list(each.scores), list(each.probabilities)] for each in weights.calibration],
        "note": weights.note,
    }
    blobs = []
    for name, (kind, shape) in shapes.items():
        array: NDArray[Any] = getattr(weights, name)
        if array.shape != shape:
            raise ValueError(f"{name} must be {shape}, is {array.shape}")
        blobs.append(np.ascontiguousarray(array, _DTYPES[kind]).tobytes())
    return json.dumps(header).encode(), blobs


def _unpack(header: Any, blob: bytes) -> Weights:
    names = header["topics"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > MAX_TOPICS:
        raise ValueError(f"topics must be at most {MAX_TOPICS} names")
    if header["features"] != list(features.NAMES):
        raise ValueError("was trained on other surface features")
    arrays: dict[str, NDArray[Any]] = {}
    offset = 0
    for name, (kind, shape) in _shapes(len(names)).items():
        dtype, n = _DTYPES[kind], int(np.prod(shape))
        if offset + n * dtype.itemsize > len(blob):
            raise ValueError(f"{name} is cut off")
        arrays[name] = np.frombuffer(blob, dtype, n, offset).reshape(shape)
        offset += n * dtype.itemsize
        if dtype.kind == "f" and not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} holds what is no number")
    if offset != len(blob):
        raise ValueError(f"{len(blob) - offset} bytes too many")
    if (arrays["deviation"] <= 0).any():
        raise ValueError("deviation must be positive")
    odds, blend = arrays["topic_odds"], arrays["blend"]
    if (odds < 0).any() or (odds > 1).any():
        raise ValueError("topic_odds must be 0..1")
    if (blend < 0).any() or abs(float(blend.sum()) - 1) > 1e-3:
        raise ValueError("blend must be shares of 1")
    local, cloud = (Isotonic(scores=_floats(x), probabilities=_floats(y)) for x, y in header["calibration"])
    note = header["note"]
    if not isinstance(note, str):
        raise TypeError("note must be text")
    return Weights(**arrays, calibration=(local, cloud), topic_names=tuple(names), note=note)


def _floats(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(type(v) in {int, float} for v in values):
        raise TypeError("calibration must be lists of numbers")
    return tuple(map(float, values))


def _misfit(path: Path, part: str, problem: str) -> ModelFormatError:
    return ModelFormatError(path=str(path), field=part, problem=problem)


assert {f.name for f in fields(Weights)} == {*_shapes(0), "calibration", "topic_names", "note"}
