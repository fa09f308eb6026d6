"""TensorFlow Lite files: write tensors, operators and their options as a flatbuffer, and list a file's operators.

The packages `tflite` (the schema's accessors) and `flatbuffers` do the bytes; TensorFlow is not needed. Needs the extra
`npu-vela`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import flatbuffers
import numpy as np
import tflite
from numpy.typing import NDArray

_SCHEMA: Final = 3
_IDENTIFIER: Final = b"TFL3"
_MAX_DEPRECATED_CODE: Final = 127  # later operators are known by the new field only
_MAX_ITEMS: Final = 50_000
_KINDS: Final = {number: name for name, number in vars(tflite.BuiltinOperator).items() if isinstance(number, int)}
_ALIGNMENT: Final = 16  # of constants, which interpreters map
_TYPES: Final[Mapping[str, int]] = {
    "float32": tflite.TensorType.FLOAT32,
    "int8": tflite.TensorType.INT8,
    "int32": tflite.TensorType.INT32,
}


@dataclass(frozen=True, slots=True)
class Quant:
    """real = scale × (integer - zero_point); one of each for all of a tensor, or for each index of axis."""

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type_name: str
    quant: Quant | None
    data: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    code: str
    version: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, int | float | bool] = field(default_factory=dict)
    options_kind: str = ""


class TfliteWriter:
    """Collects a graph; numbers stand for tensors, in the order they were made."""

    def __init__(self) -> None:
        self._tensors: list[_Tensor] = []
        self._operators: list[_Operator] = []

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operators so far, as TensorFlow Lite names them."""
        return tuple(each.code for each in self._operators)

    def activation(self, name: str, shape: Sequence[int], type_name: str, quant: Quant | None = None) -> int:
        """Add a tensor that is computed or given."""
        return self._add(_Tensor(name=name, shape=tuple(shape), type_name=type_name, quant=quant, data=None))

    def constant(self, name: str, array: NDArray[Any], quant: Quant | None = None) -> int:
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        return self._add(_Tensor(name=name, shape=array.shape, type_name=array.dtype.name, quant=quant, data=data))

    def operator(
        self,
        code: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        version: int = 1,
        options_kind: str = "",
        **options: float,
    ) -> None:
        """Add an operator: code as in BuiltinOperator, options as in the schema's table options_kind."""
        self._operators.append(
            _Operator(
                code=code,
                version=version,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                options=options,
                options_kind=options_kind,
            )
        )

    def _add(self, tensor: _Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def finish(self, inputs: Sequence[int], outputs: Sequence[int], *, description: str) -> bytes:
        """Give the file's bytes, the same for the same graph."""
        builder = flatbuffers.Builder(1 << 16)
        buffers = [_table(builder, "Buffer")]  # the empty one, of tensors without data
        tensors = [self._tensor(builder, each, buffers) for each in self._tensors]
        codes = list(dict.fromkeys((each.code, each.version) for each in self._operators))
        operators = [self._operator(builder, each, codes.index((each.code, each.version))) for each in self._operators]
        graph = _table(
            builder,
            "SubGraph",
            Tensors=_offsets(builder, tensors),
            Inputs=builder.CreateNumpyVector(np.array(inputs, np.int32)),
            Outputs=builder.CreateNumpyVector(np.array(outputs, np.int32)),
            Operators=_offsets(builder, operators),
            Name=builder.CreateString("main"),
        )
        model = _table(
            builder,
            "Model",
            Version=_SCHEMA,
            OperatorCodes=_offsets(builder, [_code(builder, *each) for each in codes]),
            Subgraphs=_offsets(builder, [graph]),
            Description=builder.CreateString(description),
            Buffers=_offsets(builder, buffers),
        )
        builder.Finish(model, file_identifier=_IDENTIFIER)
        return bytes(builder.Output())

    def _tensor(self, builder: Any, tensor: _Tensor, buffers: list[int]) -> int:
        n_buffer = 0
        if tensor.data is not None:
            n_buffer = len(buffers)
            buffers.append(_table(builder, "Buffer", Data=_aligned(builder, tensor.data)))
        fields: dict[str, Any] = {}
        if tensor.quant is not None:
            fields["Quantization"] = _table(
                builder,
                "QuantizationParameters",
                Scale=builder.CreateNumpyVector(np.array(tensor.quant.scales, np.float32)),
                ZeroPoint=builder.CreateNumpyVector(np.array(tensor.quant.zero_points, np.int64)),
                QuantizedDimension=tensor.quant.axis,
            )
        return _table(
            builder,
            "Tensor",
            Shape=builder.CreateNumpyVector(np.array(tensor.shape, np.int32)),
            Type=_TYPES[tensor.type_name],
            Buffer=n_buffer,
            Name=builder.CreateString(tensor.name),
            **fields,
        )

    @staticmethod
    def _operator(builder: Any, operator: _Operator, n_code: int) -> int:
        fields: dict[str, Any] = {}
        if operator.options_kind:
            fields["BuiltinOptions"] = _table(builder, operator.options_kind, **operator.options)
            fields["BuiltinOptionsType"] = getattr(tflite.BuiltinOptions, operator.options_kind)
        return _table(
            builder,
            "Operator",
            OpcodeIndex=n_code,
            Inputs=builder.CreateNumpyVector(np.array(operator.inputs, np.int32)),
            Outputs=builder.CreateNumpyVector(np.array(operator.outputs, np.int32)),
            **fields,
        )


def _code(builder: Any, name: str, version: int) -> int:
    code = getattr(tflite.BuiltinOperator, name)
    return _table(
        builder,
        "OperatorCode",
        DeprecatedBuiltinCode=min(code, _MAX_DEPRECATED_CODE),
        Version=version,
        BuiltinCode=code,
    )


def _table(builder: Any, kind: str, **fields: Any) -> int:
    """Write a table of the schema; fields are numbers, and offsets of what was written before."""
    getattr(tflite, f"{kind}Start")(builder)
    for name, value in fields.items():
        getattr(tflite, f"{kind}Add{name}")(builder, value)
    offset: int = getattr(tflite, f"{kind}End")(builder)
    return offset


def _offsets(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    vector: int = builder.EndVector()
    return vector


def _aligned(builder: Any, data: bytes) -> int:
    builder.StartVector(1, len(data), _ALIGNMENT)
    builder.head -= len(data)
    builder.Bytes[builder.head : builder.head + len(data)] = data
    vector: int = builder.EndVector()
    return vector


@dataclass(frozen=True, slots=True)
class FileOperator:
    """An operator of a file: its kind as in BuiltinOperator, a custom one's own name, and what it gives."""

    kind: str
    output: str


def read_operators(data: bytes) -> tuple[FileOperator, ...]:
    """List the operators of a file that may be anything. Raises ValueError for one that is no TensorFlow Lite file."""
    if data[4:8] != _IDENTIFIER:
        raise ValueError("is no TensorFlow Lite file")
    try:
        model = tflite.Model.GetRootAs(data, 0)
        if model.SubgraphsLength() != 1 or model.OperatorCodesLength() > _MAX_ITEMS:
            raise ValueError(f"has {model.SubgraphsLength()} graphs, not one")
        graph = model.Subgraphs(0)
        if not 0 < graph.OperatorsLength() <= _MAX_ITEMS:
            raise ValueError(f"has {graph.OperatorsLength()} operators")
        kinds = [_kind(model.OperatorCodes(n)) for n in range(model.OperatorCodesLength())]
        return tuple(_file_operator(graph, n, kinds) for n in range(graph.OperatorsLength()))
    except (struct.error, IndexError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as exc:
        raise ValueError("is a TensorFlow Lite file whose tables lead out of it") from exc


def _kind(code: Any) -> str:
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    if number == tflite.BuiltinOperator.CUSTOM:
        name: bytes = code.CustomCode() or b""
        return name.decode()[:64]
    return str(_KINDS.get(number, f"operator {number}"))


def _file_operator(graph: Any, n: int, kinds: list[str]) -> FileOperator:
    operator = graph.Operators(n)
    output = graph.Tensors(operator.Outputs(0)).Name().decode() if operator.OutputsLength() else ""
    return FileOperator(kinds[operator.OpcodeIndex()], output[:256])
