"""A GGUF model of the llama family as the INT4 engine computes it: its matrices packed, Q, K, V and gate, up fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_pack import BLOCK_BYTES, Matrix, dequantise, from_gguf, fuse
from edge_rt.backends.llama_math import ATTENTION_OUTPUT, DOWN, GATE_UP, OUTPUT, QKV, Linear, LlamaMath, unsupported
from edge_rt.backends.native_config import NativeConfig, read_config
from edge_rt.catalog.gguf import GgufHeader, TensorInfo
from edge_rt.errors import BackendLoadError

_EMBEDDING = "token_embd.weight"
_PARTS = {
    QKV: ("attn_q", "attn_k", "attn_v"),
    ATTENTION_OUTPUT: ("attn_output",),
    GATE_UP: ("ffn_gate", "ffn_up"),
    DOWN: ("ffn_down",),
}


@dataclass(frozen=True, slots=True)
class FpgaLlama:
    """matrices by the names of llama_math, vectors by those of GGUF; embedding: the tensor's bytes, a row per token."""

    config: NativeConfig
    matrices: dict[str, Matrix]
    vectors: dict[str, NDArray[np.float32]]
    embedding: NDArray[np.uint8]
    embedding_quant: str

    def embed(self, ids: NDArray[np.intp]) -> NDArray[np.float32]:
        return dequantise(self.embedding[ids], self.embedding_quant, len(ids), self.config.n_embd)

    def with_linear(self, linear: Linear) -> LlamaMath:
        """Give the model whose matrices this function multiplies."""
        return LlamaMath(self.config, self.vectors, self.embed, linear)


def read_llama(file: ModelFile) -> FpgaLlama:
    """Read and pack a model. Raises BackendLoadError naming what the engine, or llama_math, cannot do."""
    header = file.header
    config = read_config(file.model, str(file.path), header)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if reason := unsupported(config) or _beyond_llama_math(tensors):
        raise BackendLoadError(model=file.model, reason=f"the FPGA's engine does not support {reason}")
    matrices, raw = dict(GgufMatrices(file)), _reader(file)
    vectors = {name: raw(t).view("<f4").astype(np.float32) for name, t in tensors.items() if t.type == "F32"}
    embedding = raw(tensors[_EMBEDDING]).reshape(header.n_vocab, -1)
    return FpgaLlama(config, matrices, vectors, embedding, tensors[_EMBEDDING].type)


class GgufMatrices(Mapping[str, Matrix]):
    """A model's matrices by the names of llama_math, each packed from the file whenever it is asked for.

    Raises BackendLoadError.
    """

    def __init__(self, file: ModelFile) -> None:
        if reason := unsupported_matrices(file.header):
            raise BackendLoadError(model=file.model, reason=reason)
        self._model, self._raw = file.model, _reader(file)
        self._tensors = {tensor.name: tensor for tensor in file.header.tensors}
        self._parts = dict(_fused(self._tensors, file.header.n_layers)) | {OUTPUT: [_output(self._tensors)]}

    def __getitem__(self, name: str) -> Matrix:
        return fuse([self._matrix(part) for part in self._parts[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _matrix(self, name: str) -> Matrix:
        k, n_rows = self._tensors[name].shape
        try:
            return from_gguf(self._raw(self._tensors[name]), self._tensors[name].type, n_rows, k)
        except ValueError as exc:
            raise BackendLoadError(model=self._model, reason=f"the FPGA's engine cannot take {name}: {exc}") from exc


def packed_bytes(header: GgufHeader, layout: Layout) -> int:
    """Give the size of a model's matrices in the engine's memory, to a page a matrix. Reads no weights."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [_output(tensors), *(part for _, parts in _fused(tensors, header.n_layers) for part in parts)]
    found = [tensors[name] for name in names if name in tensors]
    return sum((1 + (t.type == "Q8_0")) * layout.weight_bytes(t.shape[1], t.shape[0], 0) for t in found)


def unsupported_matrices(header: GgufHeader) -> str | None:
    """Say why the engine cannot hold a model's matrices; None if it can. Reads no weights."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for _, parts in [*_fused(tensors, header.n_layers), (OUTPUT, [_output(tensors)])]:
        for name in parts:
            if (tensor := tensors.get(name)) is None:
                return f"the FPGA's engine finds no {name}"
            if tensor.type not in BLOCK_BYTES:
                return f"the FPGA's engine takes {', '.join(BLOCK_BYTES)}, and {name} is {tensor.type}"
    return None


def read_exact(file: ModelFile) -> dict[str, NDArray[np.float32]]:
    """Read the matrices of read_llama as the float32 [n_rows, k] that their file stands for, without any rounding."""
    tensors, raw = {tensor.name: tensor for tensor in file.header.tensors}, _reader(file)

    def floats(name: str) -> NDArray[np.float32]:
        k, n_rows = tensors[name].shape
        return dequantise(raw(tensors[name]), tensors[name].type, n_rows, k)

    fused = _fused(tensors, file.header.n_layers)
    matrices = {name: np.concatenate([floats(p) for p in parts]) for name, parts in fused}
    return matrices | {OUTPUT: floats(_output(tensors))}


def _reader(file: ModelFile) -> Callable[[TensorInfo], NDArray[np.uint8]]:
    data = np.memmap(file.path, np.uint8, mode="r", offset=file.header.data_offset)
    return lambda tensor: data[tensor.offset : tensor.offset + tensor.size_bytes]


def _output(tensors: dict[str, TensorInfo]) -> str:
    return "output.weight" if "output.weight" in tensors else _EMBEDDING


def _fused(tensors: Mapping[str, TensorInfo], n_layers: int) -> Iterator[tuple[str, list[str]]]:
    """Name each matrix with its parts; a layer may lack some."""
    for i in range(n_layers):
        for name, parts in _PARTS.items():
            found = [f"blk.{i}.{part}.weight" for part in parts]
            if any(part in tensors for part in found):
                yield f"blk.{i}.{name}", found


def _beyond_llama_math(tensors: Mapping[str, TensorInfo]) -> str | None:
    for tensor in tensors.values():
        if tensor.name.endswith(".bias"):
            return f"biases ({tensor.name})"
        if tensor.name.endswith(("_q_norm.weight", "_k_norm.weight")):
            return f"normalised heads ({tensor.name})"
        if len(tensor.shape) == 1 and tensor.type != "F32":
            return f"norms of type {tensor.type} ({tensor.name})"
    return None
