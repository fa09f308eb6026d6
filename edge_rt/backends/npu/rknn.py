"""Rockchip's NPU (RKNPU): compiled and simulated by rknn-toolkit2, run on a board by rknn-toolkit-lite2.

Both live in environments of their own (`edge_rt npu setup rknn`, `rknn-lite`). The drivers are rknn_driver.py for the
toolkit and rknnlite_driver.py for the board.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu import calibration, environments, stacks
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.hosted import HostedVendor, Limits, Stack
from edge_rt.backends.npu.vendor import Artifact, Capabilities, Target, VendorSession, Versions
from edge_rt.catalog.part import hash_rest
from edge_rt.errors import BackendLoadError
from edge_rt.regular import open_regular

NAME: Final = "npu_rknn"
FLOAT: Final = "fp16"  # the only dtype that wants no calibration data
DATATYPES: Final = frozenset(["UINT8", "INT8", "INT32", "INT64", "FP16", "FP32"])
# A simulated layer takes its time; but who hangs is to be found out here, before worker.step_timeout_s ends the worker.
_LIMITS: Final = Limits(probe_s=30.0, compile_s=3600.0, load_s=300.0, run_s=45.0)


def _stack(name: str, driver: str) -> Stack:
    wanted = stacks.stack(name)

    kept: list[Path] = []

    def python() -> list[str]:
        if not kept or not kept[0].exists():  # it may have been made again, elsewhere
            kept[:] = [found.python for found in (environments.find(wanted),) if found is not None]
        return [*map(str, kept), "-I"]

    def installed() -> Absent | None:
        if platform.machine() not in wanted.machines:
            return Absent(reason=f"{wanted.packages[0]} is for {' and '.join(wanted.machines)}")
        reason = environments.missing(wanted)
        return None if reason is None else Absent(reason=reason)

    def versions() -> Versions:
        version = wanted.packages[0].partition("==")[2]
        return Versions(compiler=version, runtime=version)

    return Stack(
        name=NAME,
        label="RKNN",
        extra="",
        driver=Path(__file__).with_name(driver),
        python=python,
        installed=installed,
        versions=versions,
        limits=_LIMITS,
        noise=("I ", "D ", "W "),
    )


TOOLKIT: Final = _stack("rknn", "rknn_driver.py")
LITE: Final = _stack("rknn-lite", "rknnlite_driver.py")


def stack_here(machine: str = platform.machine()) -> Stack:
    """Give the stack of this machine: a board has the runtime, others the toolkit with its simulator."""
    return LITE if machine == "aarch64" else TOOLKIT


class RknnVendor(HostedVendor):
    """RKNN, as far as it is not the same for all."""

    def __init__(self, stack: Stack | None = None) -> None:
        super().__init__(stack or stack_here())
        self._capabilities: dict[tuple[str, str], Capabilities] = {}

    def target(self, file: ModelFile, device: Device, options: TensorOptions) -> Target:
        """Say for which chip; what ranges are found with is part of it, wherever it lies."""
        target = super().target(file, device, options)
        own = dict(options.npu.options.get(self.name, {}))
        beside = file.path.with_name(f"{file.path.stem}.calibration.npz")
        if own.get("dtype", FLOAT) != FLOAT and not own.get("dataset") and beside.exists():
            own["dataset"] = str(beside)
        # A simulator has every chip: the form's first, where none is named.
        needs = options.npu.needs
        simulated = needs.socs[0] if needs is not None and needs.socs and device.reference else target.soc
        soc = options.npu.soc.get(self.name, simulated)
        calibration = _digest(file, own["dataset"]) if own.get("dataset") else ""
        return replace(target, soc=soc, options=own, calibration=calibration)

    def capabilities(self, device: Device, soc: str = "") -> Capabilities:
        """Try what a chip computes; that takes a while, and is asked once."""
        if (device.id, soc) not in self._capabilities:
            self._capabilities[device.id, soc] = super().capabilities(device, soc)
        return self._capabilities[device.id, soc]

    def load(self, file: ModelFile, device: Device, artifact: Artifact) -> VendorSession:
        from edge_rt.backends.npu.bounds import bounded  # needs onnx, as file.onnx does

        return bounded(super().load(file, device, artifact), file, has_int64=True)

    def refusal(self, file: ModelFile, device: Device, options: TensorOptions) -> str | None:  # noqa: ARG002 - the protocol's
        model = file.onnx
        if any(kind in {"QuantizeLinear", "MatMulNBits"} for kind, _ in model.kinds):
            return (
                "it is quantised already, and RKNN quantises float models itself: take its FP32 form, or one that is "
                "named npu-rknn-…"
            )
        for spec in (*model.inputs, *model.outputs):
            if spec.datatype not in DATATYPES:
                return f"{spec.name} is {spec.datatype}, which RKNN does not have"
        return None


def _digest(file: ModelFile, dataset: str) -> str:
    path = Path(dataset)
    try:
        with open_regular(path) as data:
            calibration.check(data)
            data.seek(0)
            return hash_rest(data)
    except OSError as exc:
        reason = f"the calibration data {path} cannot be read: {exc.strerror}"
        raise BackendLoadError(model=file.model, reason=reason) from exc
    except calibration.CalibrationDataError as exc:
        raise BackendLoadError(model=file.model, reason=f"the calibration data {path}: {exc}") from exc


class RknnBackend(NpuBackend):
    """Loads ONNX models on Rockchip's NPU."""

    name: ClassVar[str] = NAME

    def __init__(self) -> None:
        super().__init__(RknnVendor())
