"""The Open Inference Protocol's messages, and what HTTP and gRPC make of them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from edge_rt.api.schemas import encode
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.tensor_types import ITEM_BYTES, Datatype, TensorAnswer

Parameter = bool | int | float | str
Parameters = dict[str, Parameter]
Name = Annotated[str, Meta(max_length=256)]
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_NO_PARAMETERS: Final[Parameters] = {}
_MAX_TIMEOUT_US: Final = 2**53


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body or a part of one."""


class WireInput(_Message, kw_only=True):
    name: Name
    shape: Annotated[list[Size], Meta(max_length=8)]
    datatype: Name
    parameters: Parameters = _NO_PARAMETERS
    data: Raw | UnsetType = UNSET


class WireOutput(_Message, kw_only=True):
    name: Name
    parameters: Parameters = _NO_PARAMETERS


class InferRequest(_Message, kw_only=True):
    inputs: Annotated[list[WireInput], Meta(max_length=256)]
    id: Name = ""
    parameters: Parameters = _NO_PARAMETERS
    outputs: Annotated[list[WireOutput], Meta(max_length=256)] = []


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an answer."""


class AnswerTensor(_Answer, kw_only=True):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: Parameters = _NO_PARAMETERS
    data: Raw | UnsetType = UNSET


class InferAnswer(_Answer, kw_only=True):
    model_name: str
    outputs: list[AnswerTensor]
    model_version: str = ""
    id: str = ""
    parameters: Parameters = _NO_PARAMETERS


def answer_parameters(answer: TensorAnswer) -> Parameters:
    """Say where an answer was computed, how many calls of its sequence the state behind it knows, and what it took."""
    told: Parameters = {"place": answer.place} if answer.place else {}
    if answer.n_stream_calls:
        told["sequence_calls"] = answer.n_stream_calls
    if (energy := answer.energy) is not None:
        told["energy_total_j"] = round(energy.total_j, 6)
        if energy.above_idle_j is not None:
            told["energy_above_idle_j"] = round(energy.above_idle_j, 6)
        told |= {
            "energy_boundary": energy.boundary,
            "energy_quality": energy.quality,
            "energy_source": energy.source,
            "energy_coverage": round(energy.coverage, 4),
        }
    return told


class MetadataTensor(_Answer, kw_only=True):
    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(_Answer, kw_only=True):
    name: str
    platform: str
    inputs: tuple[MetadataTensor, ...]
    outputs: tuple[MetadataTensor, ...]
    versions: tuple[str, ...] = ()


class ServerMetadata(_Answer, kw_only=True):
    name: str
    version: str
    extensions: tuple[str, ...]


class IndexRequest(msgspec.Struct, kw_only=True):
    ready: bool = False


class IndexEntry(msgspec.Struct, kw_only=True):
    name: str
    version: str
    state: str
    reason: str


class LoadRequest(msgspec.Struct, kw_only=True):
    parameters: dict[str, Raw] = {}


DECODERS: Final[dict[type[Any], msgspec.json.Decoder[Any]]] = {
    cls: msgspec.json.Decoder(cls) for cls in (InferRequest, IndexRequest, LoadRequest)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a request's parameters ask for; the fields are TensorRequest's."""

    stream: str = ""
    is_first: bool = False
    is_last: bool = False
    deadline_s: float | None = None


def options(parameters: Mapping[str, Parameter]) -> Options:
    """Read the parameters of the sequence extension and timeout, which is in microseconds as Triton has it.

    A stream's name is its sequence_id as JSON writes it: 7 and "7" are two sequences. Parameters that the protocol
    leaves to implementations and this one does not know are passed over, as the protocol wants; those that would change
    the answer are refused.
    """
    if parameters.get("priority", 0) != 0:
        raise UnsupportedFeatureError(feature="parameters.priority", remedy="requests are fair among their callers")
    stream = ""
    sequence_id = parameters.get("sequence_id", 0)
    if isinstance(sequence_id, bool | float) or (isinstance(sequence_id, str) and len(sequence_id) > 256):
        raise InvalidRequestError(
            param="parameters.sequence_id", problem="must be an integer or a string of up to 256 characters"
        )
    if sequence_id not in (0, ""):
        stream = encode(sequence_id).decode()
    return Options(
        stream=stream,
        is_first=flag("", parameters, "sequence_start", False) and stream != "",
        is_last=flag("", parameters, "sequence_end", False) and stream != "",
        deadline_s=_deadline_s(parameters),
    )


def flag(param: str, parameters: Mapping[str, Parameter], name: str, default: bool) -> bool:
    """Read a boolean parameter; param names what it belongs to, "" the request."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(param=f"{param}.parameters.{name}".lstrip("."), problem="must be true or false")
    return value


def number(param: str, parameters: Mapping[str, Parameter], name: str) -> int | None:
    """Read a parameter that counts bytes; None where it is absent."""
    value = parameters.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidRequestError(param=f"{param}.parameters.{name}", problem="must be an integer, 0 or more")
    return value


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of shared memory as a request names it."""

    region: str
    offset: int
    size_bytes: int


def region(param: str, parameters: Mapping[str, Parameter]) -> RegionPart | None:
    """Read the parameters of the shared memory extension; None where a tensor has none."""
    name = parameters.get("shared_memory_region")
    offset = number(param, parameters, "shared_memory_offset")
    size_bytes = number(param, parameters, "shared_memory_byte_size")
    if name is None and offset is None and size_bytes is None:
        return None
    if not isinstance(name, str) or not name or size_bytes is None:
        problem = "needs a string shared_memory_region and an integer shared_memory_byte_size"
        raise InvalidRequestError(param=f"{param}.parameters", problem=problem)
    return RegionPart(name, offset or 0, size_bytes)


def region_parameters(name: str, offset: int, size_bytes: int) -> Parameters:
    """Write what region reads. Of an output that was put there, the size may be less than there is room."""
    told: Parameters = {"shared_memory_region": name, "shared_memory_byte_size": size_bytes}
    if offset:
        told["shared_memory_offset"] = offset
    return told


def _deadline_s(parameters: Mapping[str, Parameter]) -> float | None:
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= _MAX_TIMEOUT_US:
        raise InvalidRequestError(
            param="parameters.timeout", problem=f"must be an integer of microseconds, 0 to {_MAX_TIMEOUT_US}"
        )
    return value / 1e6 if value else None


def datatype(param: str, text: str) -> Datatype:
    """Check a datatype's name. Raises InvalidRequestError, for BF16 saying what to send instead."""
    if text in ITEM_BYTES:
        return cast("Datatype", text)
    if text == "BF16":
        raise UnsupportedFeatureError(feature=f"{param}: datatype BF16", remedy="send FP32 or FP16")
    raise InvalidRequestError(
        param=f"{param}.datatype", problem=f"must be one of {', '.join(ITEM_BYTES)}, got {text[:40]!r}"
    )
