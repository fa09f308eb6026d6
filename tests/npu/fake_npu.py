"""A back end on the driver that plays an NPU, in real host processes; and the model that it plays."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from edge_rt.backends.base import Absent, ModelFile
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.hosted import HostedVendor, Limits, Stack
from edge_rt.backends.npu.vendor import Versions
from tests import tensor_models

DRIVER = Path(__file__).with_name("fake_driver.py")


class FakeNpuBackend(NpuBackend):
    name = "npu_fake"


@dataclass
class FakeNpu:
    """The folder that tells the driver what goes wrong."""

    folder: Path
    limits: Limits = field(default_factory=lambda: Limits(probe_s=20.0, next_probe_s=20.0, load_s=20.0, run_s=20.0))

    def breaks(self, call: str, how: str) -> None:
        (self.folder / call).write_text(how)

    def works(self, call: str) -> None:
        (self.folder / call).unlink()

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().split() if log.exists() else []

    def backend(self, installed: Callable[[], Absent | None] = lambda: None) -> FakeNpuBackend:
        environ = ["env", f"FAKE_NPU={self.folder}"]
        stack = Stack(
            name="npu_fake",
            label="FAKE",
            extra="npu-fake",
            driver=DRIVER,
            python=lambda: [*environ, sys.executable],
            installed=installed,
            versions=lambda: Versions(compiler="1.0", runtime="1.0"),
            limits=self.limits,
        )
        return FakeNpuBackend(HostedVendor(stack))


def double(path: Path, *, rows: int = 2) -> ModelFile:
    """Write the model y = 2 x of FP32 [rows, 4]; rows 0 takes any number."""
    shape = [rows or "n", 4]
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "two"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [two],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return tensor_models.saved(model, path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
