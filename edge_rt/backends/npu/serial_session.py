"""A model on a serial NPU, and what of it the host computes: conversions at its ports, and the tail for the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge_rt.backends.npu.serial_model import Port
from edge_rt.backends.npu.serial_ports import NAME, PortSpec
from edge_rt.backends.npu.vendor import Telemetry
from edge_rt.backends.onnx_facts import OnnxModel
from edge_rt.devices.serial_npu import RunTimes, SerialNpu
from edge_rt.devices.serial_npu_messages import SerialNpuError, SerialNpuRefusalError
from edge_rt.errors import AcceleratorLostError, BackendStepError
from edge_rt.tensor_types import NodePlacement, TensorSpec

Fault = onnxruntime.capi.onnxruntime_pybind11_state

_MIN_S: Final = 20.0  # of a load or run, beside what its bytes take on the line
_SLOWNESS: Final = 10  # times what a clean line takes


class Tail:
    """The nodes that the device does not take, in onnxruntime."""

    def __init__(self, data: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a few small nodes
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except (RuntimeError, ValueError, Fault.Fail, Fault.InvalidGraph, Fault.InvalidProtobuf) as exc:
            raise ValueError(str(exc)[:300]) from exc
        self._names = [value.name for value in self._session.get_inputs()]

    def run(self, values: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Compute outputs. Raises BackendStepError."""
        feeds = {name: np.asarray(values[name]) for name in self._names}
        try:
            found = self._session.run(list(outputs), feeds)
        except (RuntimeError, ValueError, Fault.Fail, Fault.InvalidArgument, Fault.RuntimeException) as exc:
            raise BackendStepError(reason=str(exc)[:300]) from exc
        return dict(zip(outputs, found, strict=True))


class SerialSession:
    """A compiled model on a board."""

    def __init__(
        self,
        model: OnnxModel,
        npu: SerialNpu,
        spec: PortSpec,
        ports: tuple[tuple[Port, ...], tuple[Port, ...]],
        tail: Tail | None,
        placement: tuple[NodePlacement, ...],
    ) -> None:
        self.inputs: tuple[TensorSpec, ...] = model.inputs
        self.outputs: tuple[TensorSpec, ...] = model.outputs
        self.placement = placement
        self._npu, self._spec = npu, spec
        self._device_inputs, self._device_outputs = ports
        self._tail = tail
        n_bytes = sum(port.n_bytes for side in ports for port in side)
        self._timeout_s = timeout_s(n_bytes, spec.baud)
        self._times: RunTimes | None = None

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        sent = [port.to_device(np.asarray(feeds[port.name])) for port in self._device_inputs]
        sizes = [port.n_bytes for port in self._device_outputs]
        try:
            received, self._times = self._npu.run(sent, sizes, self._timeout_s)
        except SerialNpuError as exc:
            raise AcceleratorLostError(backend=NAME, reason=f"{self._spec.port}: {exc.reason}") from exc
        except SerialNpuRefusalError as exc:
            raise BackendStepError(reason=f"{self._spec.port}: {exc.reason}") from exc
        values: dict[str, NDArray[Any]] = {
            port.name: port.from_device(data) for port, data in zip(self._device_outputs, received, strict=True)
        }
        left = [name for name in outputs if name not in values]
        if left:
            if self._tail is None:
                raise BackendStepError(reason=f"its compiled form does not give {left[0]}")
            values |= self._tail.run({**feeds, **values}, left)
        return {name: values[name] for name in outputs}

    def telemetry(self) -> Telemetry:
        if self._times is None:
            return Telemetry()
        return Telemetry(
            upload_s=self._times.upload_s, compute_s=self._times.compute_s, download_s=self._times.download_s
        )

    def close(self) -> None:
        self._npu.close()


def timeout_s(n_bytes: int, baud: int) -> float:
    """Say how long an exchange of so many bytes may take."""
    return _MIN_S + _SLOWNESS * n_bytes * 10 / baud


def read_ports(facts: Mapping[str, Any]) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Read the ports that a compiled model's facts tell of. Raises KeyError, TypeError or ValueError."""
    inputs, outputs = (
        tuple(Port(**{**port, "shape": tuple(port["shape"])}) for port in facts[side]) for side in ("inputs", "outputs")
    )
    for port in (*inputs, *outputs):
        if port.n_bytes != int(np.prod(port.shape)):
            raise ValueError(f"{port.name} has two sizes")
    return inputs, outputs
