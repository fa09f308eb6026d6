"""Back ends by name. Looking one up imports it; listing them all imports nothing."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from edge_rt.backends.base import Absent, Backend, BackendProbe
from edge_rt.errors import BackendUnavailableError

_BACKENDS = {
    "llama_cpu": "edge_rt.backends.llama_cpu:LlamaCpuBackend",
    "native": "edge_rt.backends.native:NativeBackend",
    "onnx_cpu": "edge_rt.backends.onnx_cpu:OnnxCpuBackend",
    "fpga": "edge_rt.backends.fpga:FpgaBackend",
    "fpga_sim": "edge_rt.backends.fpga:SimulatedFpgaBackend",
    "npu_qnn": "edge_rt.backends.npu.qnn:QnnBackend",
    "npu_openvino": "edge_rt.backends.npu.openvino:OpenVinoBackend",
    "npu_serial": "edge_rt.backends.npu.serial_vendor:SerialBackend",
    "npu_rknn": "edge_rt.backends.npu.rknn:RknnBackend",
    "null": "edge_rt.backends.null:NullBackend",
}

# Those that look for devices without a vendor's code; the others are asked in a process of their own.
OWN = ("llama_cpu", "native", "onnx_cpu", "null")


def names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def get(name: str) -> Backend:
    """Import a back end. Raises BackendUnavailableError for an unknown name or a missing package."""
    target = _BACKENDS.get(name)
    if target is None:
        raise BackendUnavailableError(backend=name, reason=f"no such back end; there are {', '.join(_BACKENDS)}")
    module, _, attribute = target.partition(":")
    return cast("Backend", getattr(import_module(module), attribute)())


def probe(name: str) -> BackendProbe:
    """Ask a back end for its devices, in this process."""
    try:
        devices = get(name).probe()
    except BackendUnavailableError as exc:
        devices = Absent(reason=exc.reason, extra=exc.extra)
    if isinstance(devices, Absent):
        return BackendProbe(name=name, absent=devices)
    return BackendProbe(name=name, devices=devices)
