"""Intel's NPU by OpenVINO, and OpenVINO's CPU device as a back end of its own. The driver is openvino_driver.py.

The CPU device is chosen only where a manifest, a setting or a caller names npu_openvino: what it computes of an INT8
model is not onnxruntime's, bit for bit, and 64-bit integers it computes in 32 bits.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import ClassVar, Final

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.hosted import HostedVendor, Limits, Stack
from edge_rt.backends.npu.openvino_driver import CPU, DATATYPES
from edge_rt.backends.npu.vendor import Artifact, Target, VendorSession, Versions
from edge_rt.devices import cpu

NAME: Final = "npu_openvino"
EXTRA: Final = "npu-openvino"
_MACHINES: Final = ("x86_64", "aarch64")


def installed() -> Absent | None:
    """Say why OpenVINO cannot be here; imports nothing."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return Absent(reason=f"OpenVINO's packages are for Linux on {' and '.join(_MACHINES)}")
    missing = [name for name in ("openvino", "onnxruntime", "onnx") if PathFinder.find_spec(name) is None]
    return Absent(reason=f"{missing[0]} is not installed", extra=EXTRA) if missing else None


def versions() -> Versions:
    try:
        version = metadata.version("openvino")
    except metadata.PackageNotFoundError:
        return Versions()
    return Versions(compiler=version, runtime=version)


STACK: Final = Stack(
    name=NAME,
    label="OpenVINO",
    extra=EXTRA,
    driver=Path(__file__).with_name("openvino_driver.py"),
    python=lambda: [sys.executable],
    installed=installed,
    versions=versions,
    limits=Limits(),
)


def _usable_cores() -> int:
    return len(cpu.usable().compute_cpus)


class OpenVinoVendor(HostedVendor):
    """OpenVINO, as far as it is not the same for all."""

    def __init__(self, stack: Stack = STACK, *, n_cores: Callable[[], int] = _usable_cores) -> None:
        super().__init__(stack)
        self._n_cores = n_cores

    def probe(self) -> tuple[Device, ...] | Absent:
        found = super().probe()
        if isinstance(found, Absent):
            return found
        return tuple(replace(device, kind="cpu") if device.id == CPU else device for device in found)

    def n_threads(self, device: Device, options: TensorOptions) -> int:
        """Give the threads that a model gets: those of the cores on the CPU device, one that waits on the NPU."""
        return (options.n_threads or self._n_cores()) if device.id == CPU else 1

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:
        target = super().target(file, device, options)
        wanted = dict(options.npu.options.get(self.name, {}))
        if device.id == CPU:
            wanted["n_threads"] = str(self.n_threads(device, options))
        return replace(target, options=wanted)

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:
        if device.id == CPU and options.npu.require == "npu":
            return f"npu.require is npu, and {device.detail}"
        soc = self.soc(device)
        if (named := options.npu.soc.get(self.name, soc)) != soc:
            here = soc or "one that does not say what it is"
            return f"npu.soc.{self.name} is {named[:40]!r}, and OpenVINO compiles for the device that is here, {here}"
        for spec in (*file.onnx.inputs, *file.onnx.outputs):
            if spec.datatype not in DATATYPES:
                return f"{spec.name} is {spec.datatype}, which OpenVINO does not compute in"
        from edge_rt.backends.npu.bounds import UNCHECKED, read_unsafe_reason  # needs onnx, as file.onnx does

        is_unchecked = any(kind in UNCHECKED for kind, _ in file.onnx.kinds)
        return read_unsafe_reason(file.path) if is_unchecked else None

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        from edge_rt.backends.npu.bounds import bounded

        return bounded(super().load(file, device, artifact), file)


class OpenVinoBackend(NpuBackend):
    """Loads ONNX models on Intel's NPU, or on the CPU by OpenVINO."""

    name: ClassVar[str] = NAME

    def __init__(self, vendor: OpenVinoVendor | None = None) -> None:
        self.openvino = vendor or OpenVinoVendor()
        super().__init__(self.openvino)

    def is_static(self, device: Device) -> bool:
        return device.id != CPU

    def n_threads(self, device: Device, options: TensorOptions) -> int:
        return self.openvino.n_threads(device, options)
