"""Inference requests as the client writes them, and their answers as it reads them: binary, and without numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from edge_rt.api.kserve_wire import Parameters, RegionPart, region_parameters
from edge_rt.api.shm_client import SharedTensor
from edge_rt.errors import DaemonLostError
from edge_rt.tensor_types import Data, Datatype, Tensor

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_DTYPES: Final[Mapping[str, Datatype]] = {
    "b1": "BOOL",
    "u1": "UINT8",
    "u2": "UINT16",
    "u4": "UINT32",
    "u8": "UINT64",
    "i1": "INT8",
    "i2": "INT16",
    "i4": "INT32",
    "i8": "INT64",
    "f2": "FP16",
    "f4": "FP32",
    "f8": "FP64",
}


_Described = tuple[str, str, tuple[int, ...], RegionPart | int]  # name, datatype, shape and where it is


class Array(Protocol):
    """What is used of a numpy array, beside its buffer."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InferResult:
    """outputs by name; those that were put into shared memory have empty data. parameters as docs/kserve.md tells."""

    outputs: Mapping[str, Tensor]
    model_version: str = ""
    parameters: Mapping[str, Any]


class _Output(msgspec.Struct):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: Parameters = {}


class _Answer(msgspec.Struct):
    outputs: list[_Output]
    model_version: str = ""
    parameters: dict[str, Any] = {}


def to_wire(value: Array | Tensor) -> Tensor:
    """Give an array's datatype, shape and bytes. Raises ValueError for an array of a type that no tensor has."""
    if isinstance(value, Tensor):
        return value
    order, code = value.dtype.str[0], value.dtype.str[1:]
    if code not in _DTYPES or order == ">":
        raise ValueError(f"no tensor has elements of {value.dtype.str}")
    return Tensor(name="", datatype=_DTYPES[code], shape=tuple(value.shape), data=_elements(value))


def _elements(value: Array) -> Data:
    """Give an array's bytes, uncopied where they lie one after the other and memoryview knows their type."""
    try:
        return memoryview(value).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return value.tobytes()


def write(
    inputs: Mapping[str, Array | Tensor | SharedTensor],
    outputs: Sequence[str],
    regions: Mapping[str, RegionPart],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, str], list[Data]]:
    """Give a request's headers and its body's parts; its outputs come back binary, or into their regions."""
    described: list[_Described] = []
    data: list[Data] = []
    for name, value in inputs.items():
        if isinstance(value, SharedTensor):
            described.append((name, value.datatype, tuple(value.shape), value.part))
        else:
            tensor = to_wire(value)
            data.append(tensor.data)
            described.append((name, tensor.datatype, tensor.shape, len(tensor.data)))
    if regions or parameters:
        head = _head(described, outputs, regions, parameters)
    else:
        head = _plain_head(tuple(described), tuple(outputs))
    return {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}, [head, *data]


@lru_cache(maxsize=64)
def _plain_head(described: tuple[_Described, ...], outputs: tuple[str, ...]) -> bytes:
    """Write a request's JSON as _head does; most are like the one before."""
    return _head(described, outputs, {}, {})


def _head(
    described: Sequence[_Described],
    outputs: Sequence[str],
    regions: Mapping[str, RegionPart],
    parameters: Mapping[str, Any],
) -> bytes:
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": _where(where)}
        for name, datatype, shape, where in described
    ]
    wanted: list[dict[str, Any]] = [{"name": name} for name in outputs if name not in regions]
    wanted += [{"name": name, "parameters": _where(part)} for name, part in regions.items()]
    return msgspec.json.encode(
        {"inputs": inputs, "outputs": wanted, "parameters": {**parameters, "binary_data_output": True}}
    )


def _where(where: RegionPart | int) -> Parameters:
    """Tell where a tensor's bytes are: in shared memory, or so many behind the JSON."""
    if isinstance(where, int):
        return {"binary_data_size": where}
    return region_parameters(where.region, where.offset, where.size_bytes)


def read(address: str, header_length: str | None, body: bytes) -> InferResult:
    """Read an answer whose outputs are binary. Raises DaemonLostError for what is none."""
    try:
        n_bytes = len(body) if header_length is None else int(header_length)
        answer = msgspec.json.decode(body[:n_bytes], type=_Answer)
        found: dict[str, Tensor] = {}
        for output in answer.outputs:
            size = output.parameters.get("binary_data_size", 0)
            if not isinstance(size, int) or n_bytes + size > len(body):
                raise ValueError(f"output {output.name} is cut short")
            found[output.name] = Tensor(
                name=output.name, datatype=output.datatype, shape=output.shape, data=body[n_bytes : n_bytes + size]
            )
            n_bytes += size
    except ValueError as exc:  # msgspec's errors are some
        raise DaemonLostError(address=address, reason=f"its answer cannot be read: {exc}") from exc
    return InferResult(outputs=found, model_version=answer.model_version, parameters=answer.parameters)
