"""A stub of OpenVINO on a machine with an NPU: it says what Intel's documents say, and its NPU doubles.

STUB_RUNS_ON names the device that compiled models say they run on; STUB_NO_GRAPH: they tell no graph, as a device may.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

__version__ = "2026.4.1-stub"

_TOLD = {
    ("NPU", "AVAILABLE_DEVICES"): ["4000"],
    ("NPU", "FULL_DEVICE_NAME"): "Intel(R) AI Boost",
    ("NPU", "DEVICE_ARCHITECTURE"): "4000",
    ("NPU", "NPU_DRIVER_VERSION"): 1778,
    ("NPU", "NPU_COMPILER_VERSION"): 458752,
    ("CPU", "AVAILABLE_DEVICES"): [""],
    ("CPU", "FULL_DEVICE_NAME"): "Stub CPU",
}


class _Size:
    def __init__(self, n: int) -> None:
        self.is_dynamic, self._n = n <= 0, n

    def get_length(self) -> int:
        return self._n


class _Shape(list[Any]):
    @property
    def rank(self) -> _Size:
        return _Size(len(self))

    @property
    def is_dynamic(self) -> bool:
        return any(size.is_dynamic for size in self)

    def __setitem__(self, at: Any, n: Any) -> None:
        super().__setitem__(at, _Size(n) if isinstance(n, int) else n)


class _Port:
    def __init__(self, name: str, shape: list[int]) -> None:
        self.any_name, self.names = name, {name}
        self.partial_shape = _Shape(_Size(n) for n in shape)
        self.element_type = SimpleNamespace(get_type_name=lambda: "f32")


class _Model:
    def __init__(self, shape: list[int]) -> None:
        self.inputs, self.outputs = [_Port("x", shape)], [_Port("y", shape)]

    def is_dynamic(self) -> bool:
        return any(port.partial_shape.is_dynamic for port in self.inputs)

    def reshape(self, shapes: dict[_Port, _Shape]) -> None:
        for port in (*self.inputs, *self.outputs):
            port.partial_shape = next(iter(shapes.values()))


class _Compiled(_Model):
    def __init__(self, shape: list[int], device: str) -> None:
        super().__init__(shape)
        self._shape, self._device = shape, device

    def get_property(self, name: str) -> Any:
        assert name == "EXECUTION_DEVICES"
        return [os.environ.get("STUB_RUNS_ON", f"{self._device}.4000")]

    def get_runtime_model(self) -> Any:
        if "STUB_NO_GRAPH" in os.environ:
            raise RuntimeError("get_runtime_model is not implemented")
        info = {"layerType": np.array("Eltwise"), "runtimePrecision": np.array("f16")}
        return SimpleNamespace(get_ops=lambda: [SimpleNamespace(get_rt_info=lambda: info)])

    def export_model(self) -> bytes:
        return json.dumps({"shape": self._shape}).encode()

    def create_infer_request(self) -> Any:
        return SimpleNamespace(infer=lambda feeds: {self.outputs[0]: feeds["x"] * 2})


class Core:
    available_devices = ("CPU", "NPU")

    def get_property(self, device: str, name: str) -> Any:
        if (device, name) not in _TOLD:
            raise RuntimeError(f"unsupported property {name}")
        return _TOLD[device, name]

    def read_model(self, path: str) -> _Model:
        sizes = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
        return _Model([size.dim_value for size in sizes])

    def compile_model(self, model: _Model, device: str, settings: dict[str, Any]) -> _Compiled:
        assert device in ("CPU", "NPU"), device  # never AUTO or HETERO
        assert not model.is_dynamic()
        assert settings["PERFORMANCE_HINT"] == "LATENCY"
        return _Compiled([size.get_length() for size in model.inputs[0].partial_shape], device)

    def import_model(self, blob: bytes, device: str, settings: dict[str, Any]) -> _Compiled:
        if device not in ("CPU", "NPU") or not settings:
            raise RuntimeError("no such device")
        return _Compiled(json.loads(blob)["shape"], device)
