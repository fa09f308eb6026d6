"""Serial NPUs: microcontrollers with edge_rt's own firmware behind a serial line (hw/npu/serial).

Only ports that npu.serial_ports names are ever opened: a stranger on another port would take what is said for its own.
A port belongs to one model at a time; while a model has it, a probe tells what it told before.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.machinery import PathFinder
from typing import ClassVar, Final

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.serial_ports import NAME, PortSpec, PortWatch, configured_ports
from edge_rt.backends.npu.vendor import (
    Artifact,
    Capabilities,
    Compiled,
    CompileRequest,
    Precision,
    Target,
    VendorSession,
    Versions,
)
from edge_rt.devices.serial_npu import SerialNpu, SerialWire, Wire, is_pseudo_terminal
from edge_rt.devices.serial_npu_messages import DeviceFacts, SerialNpuError, SerialNpuRefusalError
from edge_rt.errors import AcceleratorLostError, BackendLoadError
from edge_rt.tensor_types import Datatype, NodePlacement

LABEL: Final = "serial NPU"
EXTRA: Final = "npu-serial"
COMPILER: Final = "1"  # a change of what it makes compiles models anew

_PACKAGES: Final = ("serial", "onnx", "onnxruntime")
_DATATYPES: Final[frozenset[Datatype]] = frozenset(["UINT8", "INT8", "FP32"])
_PROBE_S: Final = 2.0
_BUSY_S: Final = 1.5  # another process of ours may look at the port just now
_KINDS: Final = frozenset(  # as ONNX names them
    [
        "Add",
        "AveragePool",
        "Clip",
        "Concat",
        "Conv",
        "DequantizeLinear",
        "Flatten",
        "Gemm",
        "GlobalAveragePool",
        "MatMul",
        "MaxPool",
        "QuantizeLinear",
        "ReduceMean",
        "Relu",
        "Reshape",
        "Resize",
    ]
)


def _open_wire(spec: PortSpec) -> Wire:
    return SerialWire(spec.port, spec.baud)


class SerialVendor:
    """Boards on configured ports. Tests pass in everything."""

    name = NAME
    label = LABEL
    extra = EXTRA

    def __init__(
        self,
        ports: Callable[[], tuple[PortSpec, ...]] = configured_ports,
        open_wire: Callable[[PortSpec], Wire] = _open_wire,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        self._ports, self._open_wire = ports, open_wire
        self._clock, self._pause, self._exists = clock, pause, exists
        self._facts: dict[str, DeviceFacts] = {}

    def installed(self) -> Absent | None:
        missing = [name for name in _PACKAGES if PathFinder.find_spec(name) is None]
        if missing:
            return Absent(reason=f"{missing[0].replace('serial', 'pyserial')} is not installed", extra=EXTRA)
        if not self._ports():
            return Absent(reason='no port is configured: npu.serial_ports = ["/dev/ttyACM0"]')
        return None

    def versions(self) -> Versions:
        return Versions(compiler=COMPILER)

    def probe(self) -> tuple[Device, ...] | Absent:
        if (absent := self.installed()) is not None:
            return absent
        return tuple(self._look(spec) for spec in self._ports())

    def ahead(self) -> AbstractContextManager[None]:
        return nullcontext()

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:  # noqa: ARG002 - the protocol's
        return Target(vendor=NAME, soc="", versions=self.versions())

    def capabilities(self, device: Device, soc: str = "") -> Capabilities:  # noqa: ARG002 - a board says what it has
        facts = self._facts.get(device.id)
        bits = facts.weight_bits if facts is not None else (4, 8)
        return Capabilities(
            precisions=tuple(Precision(weight_bits=n, activation_bits=8, granularity="channel") for n in bits),
            datatypes=_DATATYPES,
            kinds=_KINDS,
            max_bytes=facts.max_model_bytes if facts is not None else None,
            is_confirmed=facts is not None,
        )

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:  # noqa: ARG002 - the protocol's
        if soc := options.npu.soc.get(NAME):
            return f"npu.soc.{NAME} is {soc[:40]!r}, and a serial NPU says itself what it is: leave it out"
        if own := options.npu.options.get(NAME):
            return f"npu.options has {NAME}.{min(own)[:40]}, and serial NPUs have no options: leave it out"
        kinds = {kind for kind, _ in file.onnx.kinds}
        if "DequantizeLinear" not in kinds:
            return "it is not quantised: serial NPUs compute with integers (docs/quantize.md)"
        return None

    def compile(self, request: CompileRequest) -> Compiled:
        import onnx  # the extra's

        from edge_rt.backends.npu.serial_model import compile_model

        try:
            model = onnx.load(request.file.path)
            shapes = {
                spec.name: [request.rows if side == -1 else side for side in spec.shape]
                for spec in request.file.onnx.inputs
            }
            program = compile_model(model, shapes)
        except (ValueError, TypeError, IndexError, KeyError, OSError) as exc:
            raise BackendLoadError(model=request.file.model, reason=f"{LABEL}: {exc}"[:300]) from exc
        files = ["model.ern"]
        (request.folder / "model.ern").write_bytes(program.file)
        if program.tail is not None:
            files.append("tail.onnx")
            (request.folder / "tail.onnx").write_bytes(program.tail)
        placement = [_placed(LABEL, program.kinds)]
        if program.tail_kinds:
            placement.append(_placed("CPUExecutionProvider", program.tail_kinds, program.tail_reason[:300]))
        facts = {
            "inputs": [asdict(port) for port in program.inputs],
            "outputs": [asdict(port) for port in program.outputs],
        }
        return Compiled(files=tuple(files), placement=tuple(placement), facts=facts)

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        from edge_rt.backends.npu.serial_session import SerialSession, Tail, read_ports, timeout_s

        spec = next((spec for spec in self._ports() if spec.id == device.id), None)
        if spec is None:
            raise AcceleratorLostError(backend=NAME, reason=f"{device.id} is no longer among npu.serial_ports")
        try:
            inputs, outputs = read_ports(artifact.compiled.facts)
            data = (artifact.folder / "model.ern").read_bytes()
            has_tail = "tail.onnx" in artifact.compiled.files
            tail = Tail((artifact.folder / "tail.onnx").read_bytes()) if has_tail else None
        except (ValueError, TypeError, KeyError, OSError) as exc:
            raise BackendLoadError(model=file.model, reason=f"its compiled form cannot be read: {exc}"[:300]) from exc
        npu = self._connect(spec)
        try:
            self._facts[spec.id] = npu.facts
            npu.load(data, timeout_s(len(data), spec.baud))
        except SerialNpuError as exc:
            npu.close()
            raise AcceleratorLostError(backend=NAME, reason=f"{spec.port}: {exc.reason}") from exc
        except SerialNpuRefusalError as exc:
            npu.close()
            raise BackendLoadError(model=file.model, reason=f"{spec.port} refuses it: {exc.reason}") from exc
        return SerialSession(file.onnx, npu, spec, (inputs, outputs), tail, artifact.compiled.placement)

    def watch(self, device: Device) -> Callable[[], bool]:
        """Give what says whether a device's port has been plugged in."""
        port = next((spec.port for spec in self._ports() if spec.id == device.id), None)
        return PortWatch(port, self._exists) if port is not None else lambda: False

    def _connect(self, spec: PortSpec) -> SerialNpu:
        """Open a port and say hello. Raises AcceleratorLostError."""
        began_s = self._clock()
        while True:
            try:
                npu = SerialNpu(self._open_wire(spec), clock=self._clock)
                break
            except OSError as exc:
                if not _is_busy(exc) or self._clock() - began_s > _BUSY_S:
                    raise AcceleratorLostError(backend=NAME, reason=_reason(spec, exc)) from exc
            self._pause(0.1)
        try:
            npu.open(_PROBE_S)
        except SerialNpuError as exc:
            npu.close()
            raise AcceleratorLostError(backend=NAME, reason=f"{spec.port}: {exc.reason}") from exc
        return npu

    def _look(self, spec: PortSpec) -> Device:
        try:
            npu = self._connect(spec)
        except AcceleratorLostError as exc:
            facts = self._facts.get(spec.id)
            if facts is not None and isinstance(exc.__cause__, OSError) and _is_busy(exc.__cause__):
                return _device(spec, facts)  # a model of ours has it
            return Device(id=spec.id, kind="npu", detail=f"{LABEL} on {spec.port}", fault=exc.reason[:300])
        npu.close()
        self._facts[spec.id] = npu.facts
        return _device(spec, npu.facts)


def _device(spec: PortSpec, facts: DeviceFacts) -> Device:
    is_emulated = facts.is_emulated or is_pseudo_terminal(spec.port)
    bits = " and ".join(f"INT{n}" for n in facts.weight_bits)
    what = "emulated " if is_emulated else ""
    return Device(
        id=spec.id,
        kind="npu",
        detail=f"{what}{facts.chip} on {spec.port}: {bits} weights, {facts.kernels} kernels",
        evidence="emulated" if is_emulated else "device",
        reference=is_emulated,
        free_bytes=facts.max_model_bytes,
    )


def _is_busy(exc: OSError) -> bool:
    return exc.errno in {errno.EAGAIN, errno.EBUSY} or "exclusively lock" in str(exc)


def _reason(spec: PortSpec, exc: OSError) -> str:
    if _is_busy(exc):
        return f"{spec.port} is in use by another program, or another model"
    text = {
        errno.ENOENT: "is not plugged in",
        errno.EACCES: "may not be opened: add yourself to the group dialout (or uucp)",
    }
    return f"{spec.port} {text.get(exc.errno or 0, str(exc)[:200])}"


def _placed(provider: str, kinds: tuple[tuple[str, int], ...], reason: str = "") -> NodePlacement:
    return NodePlacement(provider=provider, n_nodes=sum(n for _, n in kinds), kinds=kinds, reason=reason)


class SerialBackend(NpuBackend):
    """Loads quantised ONNX models on microcontrollers behind serial lines."""

    name: ClassVar[str] = NAME

    def __init__(self, vendor: SerialVendor | None = None) -> None:
        self._serial = vendor or SerialVendor()
        super().__init__(self._serial)

    def watch(self, device: Device) -> Callable[[], bool]:
        return self._serial.watch(device)
