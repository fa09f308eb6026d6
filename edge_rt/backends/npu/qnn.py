"""Qualcomm's NPU (HTP) by onnxruntime-qnn; on x86-64 its simulator. The driver is qnn_driver.py."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import ClassVar

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.hosted import HostedVendor, Limits, Stack
from edge_rt.backends.npu.vendor import Artifact, Target, VendorSession, Versions

NAME = "npu_qnn"
EXTRA = "npu-qnn"
_MACHINES = ("x86_64", "aarch64")
_PACKAGES = ("onnxruntime", "onnxruntime_qnn", "onnx")
# What the HTP takes in and gives out; the rest has no form there.
DATATYPES = frozenset(["BOOL", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "FP16", "FP32"])


def installed() -> Absent | None:
    """Say why onnxruntime-qnn cannot be here; imports nothing."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return Absent(reason=f"onnxruntime-qnn is for Linux on {' and '.join(_MACHINES)}")
    missing = [name for name in _PACKAGES if PathFinder.find_spec(name) is None]
    if missing:
        return Absent(reason=f"{missing[0].replace('_', '-')} is not installed", extra=EXTRA)
    return None


def versions() -> Versions:
    """Tell the installed packages' versions; the driver's a probe tells."""
    return Versions(compiler=_version("onnxruntime-qnn"), runtime=_version("onnxruntime"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


STACK = Stack(
    name=NAME,
    label="QNN",
    extra=EXTRA,
    driver=Path(__file__).with_name("qnn_driver.py"),
    python=lambda: [sys.executable],
    installed=installed,
    versions=versions,
    limits=Limits(),
    noise=("# LIBNATIVE",),
)


class QnnVendor(HostedVendor):
    """QNN, as far as it is not the same for all."""

    def __init__(self, stack: Stack = STACK) -> None:
        super().__init__(stack)

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:
        target = super().target(file, device, options)
        soc = options.npu.soc.get(self.name, target.soc)
        return replace(target, soc=soc, options=dict(options.npu.options.get(self.name, {})))

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:  # noqa: ARG002 - the protocol's
        model = file.onnx
        for spec in (*model.inputs, *model.outputs):
            if spec.datatype not in DATATYPES:
                return f"{spec.name} is {spec.datatype}, which QNN does not have"
        return None

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        from edge_rt.backends.npu.bounds import bounded  # needs onnx, as file.onnx does

        return bounded(super().load(file, device, artifact), file)


class QnnBackend(NpuBackend):
    """Loads ONNX models on Qualcomm's NPU."""

    name: ClassVar[str] = NAME

    def __init__(self) -> None:
        super().__init__(QnnVendor())
