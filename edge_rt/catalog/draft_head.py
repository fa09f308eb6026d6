"""Check a draft head before it is loaded: a small GGUF that guesses from one model's hidden states and no other's."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edge_rt.catalog.gguf import GgufHeader, TensorInfo, read_tensors
from edge_rt.errors import ModelFormatError
from edge_rt.regular import open_regular

ARCH = "edge-draft-head"
KEY_SHA256, KEY_N_FF = f"{ARCH}.model_sha256", f"{ARCH}.feed_forward_length"
VOCABULARY = "vocabulary"
_HASHED_BYTES = 1 << 20
_MAX_BYTES = 1 << 28
# In the order of the native engine: whether each is a matrix.
TENSORS = (
    "state_norm.weight",
    "token_norm.weight",
    "ffn_norm.weight",
    "output_norm.weight",
    "state.weight",
    "token.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
)


def is_head(path: Path) -> bool:
    """Say whether a file is a draft head and not a model. Raises ModelFormatError where it is no GGUF file, or gone."""
    try:
        is_small = path.stat().st_size <= _MAX_BYTES
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    return is_small and read_tensors(path)[0].get("general.architecture") == ARCH


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head that belongs to its model.

    vocabulary  ids of the tokens that it may guess
    tensors     facts and data of each of TENSORS, then of the vocabulary's rows of the model's output matrix
    """

    path: Path
    n_ff: int
    vocabulary: tuple[int, ...]
    tensors: tuple[tuple[TensorInfo, bytes], ...]


def output_matrix(header: GgufHeader) -> TensorInfo | None:
    """Find a model's output matrix, which may be its embedding too."""
    named = {tensor.name: tensor for tensor in header.tensors}
    return named.get("output.weight", named.get("token_embd.weight"))


def model_sha256(path: Path, header: GgufHeader) -> str:
    """Hash what makes a model the one that a head was trained on: its output norm, and the output matrix' first MiB.

    Forms with the same output matrix have the same hash.
    """
    named = {tensor.name: tensor for tensor in header.tensors}
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for tensor in (named.get("output_norm.weight"), output_matrix(header)):
            if tensor is None:
                raise ModelFormatError(path=str(path), field="output_norm.weight", problem="is not there")
            file.seek(header.data_offset + tensor.offset)
            digest.update(file.read(min(tensor.size_bytes, _HASHED_BYTES)))
    return digest.hexdigest()


def read_head(path: Path, model: str, model_path: Path, header: GgufHeader) -> DraftHead:
    """Read and check a head for a model. Raises ModelFormatError naming the field; shapes are the engine's to check."""

    def refuse(field: str, problem: str) -> ModelFormatError:
        return ModelFormatError(path=str(path), field=field, problem=problem)

    keys, tensors, data_offset = read_tensors(path)
    if (arch := keys.get("general.architecture")) != ARCH:
        raise refuse("general.architecture", f"is {str(arch)[:40]!r}, it must be {ARCH!r}")
    found = model_sha256(model_path, header)
    if (wanted := keys.get(KEY_SHA256)) != found:
        raise refuse(
            KEY_SHA256, f"is {str(wanted)[:64]!r}, that of {model} is {found!r}: it was trained on another model"
        )
    n_ff = keys.get(KEY_N_FF)
    if not isinstance(n_ff, int) or not 32 <= n_ff <= 1 << 16:
        raise refuse(KEY_N_FF, "must be a number from 32 to 65536")
    named = {tensor.name: tensor for tensor in tensors}
    if unknown := sorted(named.keys() - {*TENSORS, VOCABULARY}):
        raise refuse(f"tensor {unknown[0]}", "has no meaning in a draft head")
    if absent := [name for name in (*TENSORS, VOCABULARY) if name not in named]:
        raise refuse(f"tensor {absent[0]}", "is missing")
    if (n_bytes := sum(tensor.size_bytes for tensor in tensors)) > _MAX_BYTES:
        raise refuse("tensors", f"take {n_bytes} bytes, at most {_MAX_BYTES} are allowed")
    vocabulary = named[VOCABULARY]
    if vocabulary.type != "I32" or len(vocabulary.shape) != 1:
        raise refuse(f"tensor {VOCABULARY}", "must be a list of I32")
    with open_regular(path) as file:

        def data(tensor: TensorInfo) -> bytes:
            file.seek(data_offset + tensor.offset)
            return file.read(tensor.size_bytes)

        ids = struct.unpack(f"<{vocabulary.shape[0]}i", data(vocabulary))
        read = [(named[name], data(named[name])) for name in TENSORS]
    if len(ids) > header.n_vocab or not all(a < b for a, b in pairwise((-1, *ids, header.n_vocab))):
        raise refuse(f"tensor {VOCABULARY}", f"the tokens do not rise, or are not among the model's {header.n_vocab}")
    return DraftHead(path, n_ff, ids, (*read, _rows(model_path, header, ids)))


def _rows(path: Path, header: GgufHeader, ids: Sequence[int]) -> tuple[TensorInfo, bytes]:
    """Take some tokens' rows of a model's output matrix."""
    output = output_matrix(header)
    if output is None or len(output.shape) != 2 or output.shape[1] != header.n_vocab:
        raise ModelFormatError(path=str(path), field="output.weight", problem="has no row for each token")
    n_bytes, start = output.size_bytes // header.n_vocab, header.data_offset + output.offset
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        rows = b"".join(mapped[start + i * n_bytes : start + (i + 1) * n_bytes] for i in ids)
    return TensorInfo("output", (output.shape[0], len(ids)), output.type, 0, len(rows)), rows
