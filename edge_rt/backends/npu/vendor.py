"""What edge_rt asks of an NPU's vendor: the protocol, and the values that cross it. No vendor's type does.

Vendor is what a back end is made of (backend.py). Where the vendor's code may crash, hang or want other packages than
ours, hosted.py makes one from a driver that runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.tensor_types import Datatype, NodePlacement, TensorSpec

NONE = "none"  # the source of a figure that nobody tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What a compiled model depends on, "" where there is no such part or nobody tells."""

    compiler: str = ""
    runtime: str = ""
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Weights and activations of so many bits that a device computes in; granularity: tensor, channel or block."""

    weight_bits: int
    activation_bits: int
    granularity: str = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a device computes.

    precisions   what vendors' own strings say of them is not believed: is_confirmed, a tiny model has been compiled
    datatypes    of a model's inputs and outputs
    kinds        operators, as ONNX names them; empty: no list, placement tells for each model
    max_bytes    that a model may take; None: not known
    """

    precisions: tuple[Precision, ...]
    datatypes: frozenset[Datatype]
    kinds: frozenset[str] = frozenset()
    is_static: bool = True  # shapes must be known when it is compiled
    max_bytes: int | None = None
    is_confirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """For what and with what a model is compiled; with the model's bytes, all that its compiled form depends on.

    soc      the chip, as its vendor names it
    options  of the compiler
    calibration  sha256 of the data that ranges were found with, "" without
    """

    vendor: str
    soc: str
    versions: Versions
    options: Mapping[str, str] = field(default_factory=dict)
    calibration: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """Compile file for target into folder, which is empty and the caller's; rows: what -1 in first dimensions becomes.

    model_bytes and what external files hold were checked by onnx_model.py where the file is an ONNX model.
    """

    file: ModelFile
    device: Device
    target: Target
    folder: Path
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler has made: files in the request's folder, and what it tells of them.

    placement  of all nodes of the graph as it was compiled, those that other devices take with the reason
    facts      that load will want, as JSON can hold them
    """

    files: tuple[str, ...]
    placement: tuple[NodePlacement, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A compiled model on disk, verified: its files in folder, and what it was made for and with."""

    key: str
    folder: Path
    target: Target
    compiled: Compiled
    rows: int
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Where the last run's time went, and the chip's power and heat; None where nobody tells.

    power_source, temp_source  sysfs, vendor, external-meter or none
    """

    upload_s: float | None = None
    compute_s: float | None = None
    download_s: float | None = None
    power_w: float | None = None
    power_source: str = NONE
    temp_c: float | None = None
    temp_source: str = NONE


class VendorSession(Protocol):
    """A compiled model on its device. One thread at a time calls it; close is idempotent and legal after any failure.

    placement  which device runs which nodes; what load found where it can tell, else what the compiler said
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    placement: tuple[NodePlacement, ...]

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Compute once with feeds that fit inputs; the arrays are the caller's.

        Raises AcceleratorLostError where the device or the process that drives it is gone or silent,
        AcceleratorMemoryError, and BackendStepError for everything else.
        """
        ...

    def telemetry(self) -> Telemetry: ...

    def close(self) -> None: ...


class Vendor(Protocol):
    """A vendor's stack. Cheap to make; nothing of the vendor's is imported before a method is called.

    name   of the back end
    label  of the vendor's stack, for people and placements: "QNN"
    extra  pip's, that brings it; "" where none does
    """

    name: str
    label: str
    extra: str

    def installed(self) -> Absent | None:
        """Say why the stack cannot be here at all, without running any of it; None if it may be."""
        ...

    def versions(self) -> Versions:
        """Tell the versions that are installed, without running any of it, and what the last probe has told."""
        ...

    def probe(self) -> tuple[Device, ...] | Absent:
        """Look for devices within a time limit. A stack that is here and fails is a Device with that as its fault."""
        ...

    def ahead(self) -> AbstractContextManager[None]:
        """Have what compiling or loading will want start by itself, while the caller does other things inside."""
        ...

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:
        """Say for what the model is to be compiled on a device that probe has found."""
        ...

    def capabilities(self, device: Device, soc: str = "") -> Capabilities:
        """Tell what a chip computes in; soc as in target, "" is the device's own. Raises as compile does."""
        ...

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:
        """Say why the model's file is nothing for the device, from its header; None if it may be."""
        ...

    def compile(self, request: CompileRequest) -> Compiled:
        """Compile a model. Raises BackendLoadError, AcceleratorLostError or AcceleratorMemoryError.

        BackendUnavailableError: no compiler is here, though what one has made elsewhere may run.
        """
        ...

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        """Load a compiled model. Raises BackendLoadError, AcceleratorLostError or AcceleratorMemoryError."""
        ...
