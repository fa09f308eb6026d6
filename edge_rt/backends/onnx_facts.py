"""What onnx_model.py has found of an ONNX file, to be kept. The package onnx, which takes 13 MiB, stays out of this."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edge_rt.tensor_types import TensorSpec

_CHECKS = ("onnx_model.py", "onnx_scan.py", "onnx_tensors.py", "onnx_facts.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """The facts of a checked file.

    inputs, outputs  an output without a shape in the file is written [-1]
    file_bytes       of the file itself; external_bytes of external, the files in its folder that it names
    activation_bytes of the values between its nodes as far as the file tells their shapes, any size counted as 1
    custom_domains   of operators that neither onnxruntime nor the file's own functions bring
    kinds            operators by number, those of subgraphs and functions too
    n_slow           MatMulNBits nodes that ask for other than 8-bit arithmetic (accuracy_level 4)
    """

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    file_bytes: int
    external_bytes: int
    external: tuple[str, ...] = ()
    activation_bytes: int
    custom_domains: tuple[str, ...]
    kinds: tuple[tuple[str, int], ...]
    n_slow: int

    @property
    def is_dynamic(self) -> bool:
        return any(-1 in spec.shape for spec in self.inputs)

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)


def from_bytes(raw: bytes, path: Path) -> OnnxModel | None:
    """Read the facts of the file at path as to_bytes wrote them; None where they are none."""
    try:
        model = msgspec.json.decode(raw, type=OnnxModel, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return replace(model, path=path)


def checks_digest(folder: Path = Path(__file__).parent) -> str:
    """Tell which checks a file passes here: facts that other ones have found are found anew."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in _CHECKS)).hexdigest()
