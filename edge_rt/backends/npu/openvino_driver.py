"""Intel's OpenVINO in its host process: its NPU where there is one, and its CPU device. Never AUTO or HETERO.

AUTO computes on the CPU without a word where it was to be the NPU; so a model is compiled for one device, and the
device that it runs on is read back. Standard library and the packages named here only.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

BLOB = "model.blob"
NPU, CPU = "npu", "openvino-cpu"
_DEVICES = {NPU: "NPU", CPU: "CPU"}
_LABELS = {NPU: "OpenVINO NPU", CPU: "OpenVINO CPU"}
ACCEL = "/dev/accel"
_COMPILERS = ("libopenvino_intel_npu_compiler.so", "libopenvino_intel_npu_compiler_loader.so")
OPTIONS = frozenset(["n_threads", "precision"])
_PRECISIONS = {"": "f32", "f32": "f32", "bf16": "bf16", "f16": "f16"}
_TYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
}
DATATYPES = ("BOOL", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "FP16", "FP32")


class OpenVinoError(Exception):
    """What OpenVINO says, and what it means where that is known; kind: memory, unsupported or failed."""

    def __init__(self, said: str, kind: str = "failed") -> None:
        super().__init__(said)
        self.kind = "memory" if "bad_alloc" in said or "out of memory" in said.lower() else kind


class Driver:
    """See hosted.py for what its methods take and give."""

    def __init__(self) -> None:
        self._compiled: Any = None
        self._request: Any = None
        self._outputs: dict[str, Any] = {}

    def probe(self) -> dict[str, Any]:
        import openvino

        core = openvino.Core()
        version = openvino.__version__.partition("-")[0]
        versions = {"compiler": version, "runtime": version, "driver": ""}
        devices = []
        # What it can do it tells without a device too: AVAILABLE_DEVICES is the only test of presence.
        if _property(core, "NPU", "AVAILABLE_DEVICES"):
            versions["driver"] = str(_property(core, "NPU", "NPU_DRIVER_VERSION") or "")
            name = _property(core, "NPU", "FULL_DEVICE_NAME") or "Intel NPU"
            compiler = _property(core, "NPU", "NPU_COMPILER_VERSION")
            devices.append(
                {
                    "id": NPU,
                    "detail": f"{name} by OpenVINO {version}, compiler {compiler}",
                    "soc": str(_property(core, "NPU", "DEVICE_ARCHITECTURE") or ""),
                    "evidence": "device",
                }
            )
        if "CPU" in core.available_devices:
            name = str(_property(core, "CPU", "FULL_DEVICE_NAME") or "CPU").strip()
            without = "" if devices else f"; no NPU: {npu_absence(openvino)}"
            devices.append(
                {
                    "id": CPU,
                    "detail": f"{name}, the cores by OpenVINO {version}{without}",
                    "soc": name,
                    "evidence": "device",
                }
            )
        if not devices:
            return {"absent": f"OpenVINO {version} finds no device; no NPU: {npu_absence(openvino)}"}
        return {"devices": devices, "versions": versions}

    def capabilities(self, device: str, soc: str) -> dict[str, Any]:  # noqa: ARG002 - the device knows what it is
        """Compile a small convolution, and read in which numbers it computes; and a product with 4-bit weights."""
        import openvino

        core = openvino.Core()
        compiled = _compile(core, _tiny(openvino), device, {})
        found = Counter(str(node["precision"]) for node in _nodes(compiled) if node["kind"] == "Convolution")
        float_bits = 16 if device == NPU else 32
        precisions = [{"weight_bits": float_bits, "activation_bits": float_bits, "granularity": "tensor"}]
        for bits in (4, 8):
            try:
                _compile(core, _tiny_packed(openvino, bits), device, {})
            except OpenVinoError:
                continue  # then it has none
            precisions.append({"weight_bits": bits, "activation_bits": float_bits, "granularity": "block"})
        if found.keys() & {"u8", "i8"}:
            precisions.append({"weight_bits": 8, "activation_bits": 8, "granularity": "channel"})
        told = {"precisions": precisions, "datatypes": list(DATATYPES), "is_static": device == NPU}
        return {**told, "is_confirmed": bool(found)}

    def compile(
        self,
        model: str,
        folder: str,
        soc: str,  # noqa: ARG002 - the device knows what it is
        device: str,
        options: dict[str, str],
        rows: int,
    ) -> dict[str, Any]:
        import openvino

        core = openvino.Core()
        read = core.read_model(model)
        make_static(read, rows, needs_static=device == NPU)
        compiled = _compile(core, read, device, options)
        placement = _placement(compiled, device)
        Path(folder, BLOB).write_bytes(_exported(compiled))
        return {"files": [BLOB], "placement": placement, "facts": {"placement": placement}}

    def load(
        self,
        folder: str,
        soc: str,  # noqa: ARG002 - as above
        device: str,
        options: dict[str, str],
        rows: int,  # noqa: ARG002 - the compiled model has them
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        import openvino

        blob = Path(folder, BLOB).read_bytes()
        try:
            compiled = openvino.Core().import_model(blob, _DEVICES[device], _settings(device, options))
        except RuntimeError as exc:
            raise OpenVinoError(f"the compiled model cannot be imported: {_meaning(exc)}") from exc
        placement = _placement(compiled, device, facts["placement"])
        self._compiled, self._request = compiled, compiled.create_infer_request()
        self._outputs = {name: port for port in compiled.outputs for name in port.names}
        return {"inputs": _specs(compiled.inputs), "outputs": _specs(compiled.outputs), "placement": placement}

    def run(self, feeds: dict[str, Any], outputs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        begun_s = time.monotonic()
        try:
            answers = self._request.infer(feeds)
        except RuntimeError as exc:
            raise OpenVinoError(_meaning(exc)) from exc
        took_s = time.monotonic() - begun_s
        return {"compute_s": took_s}, {name: answers[self._outputs[name]] for name in outputs}

    def telemetry(self) -> dict[str, Any]:
        return {}  # neither device tells power or heat by OpenVINO


def npu_absence(openvino: Any, accel: str = ACCEL) -> str:
    """Say why there is no NPU, by what is missing first: the chip's device node, leave to open it, what drives it."""
    nodes = sorted(Path(accel).glob("accel*")) if Path(accel).is_dir() else []
    if not nodes:
        return f"no {accel}/accel*, so this machine has none, or its kernel lacks the driver intel_vpu (Linux 6.8)"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return f"{nodes[0]} may not be opened by this user: add it to the group render"
    libraries = Path(openvino.__file__).parent / "libs"
    has_compiler = any((libraries / name).exists() for name in _COMPILERS)
    return (
        f"{nodes[0]} is there, but OpenVINO lists none: Intel's driver for user space (intel-level-zero-npu, "
        "intel-driver-compiler-npu) is missing or of another version"
        + ("" if has_compiler else "; OpenVINO's Python package holds no NPU compiler of its own")
    )


def make_static(model: Any, rows: int, *, needs_static: bool) -> None:
    """Set first dimensions that take any size, and check that nothing else of the shapes is open."""
    shapes = {}
    for port in model.inputs:
        shape = port.partial_shape
        if rows and shape.rank.get_length() and shape[0].is_dynamic:
            shape[0] = rows
            shapes[port] = shape
    if shapes:
        model.reshape(shapes)
    if needs_static and model.is_dynamic():
        open_ = [port.any_name for port in (*model.inputs, *model.outputs) if port.partial_shape.is_dynamic]
        said = f"the shapes of {', '.join(open_)} are not fixed, and the NPU takes fixed ones only"
        raise OpenVinoError(said, "unsupported")


def _settings(device: str, options: dict[str, str]) -> dict[str, Any]:
    if unknown := sorted(options.keys() - OPTIONS):
        raise OpenVinoError(f"no option {unknown[0]}; there are {', '.join(sorted(OPTIONS))}", "unsupported")
    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    precision = options.get("precision", "")
    if precision not in _PRECISIONS:
        raise OpenVinoError(f"no precision {precision}; there are f32, bf16 and f16", "unsupported")
    if device == CPU:
        # Left to itself it computes floats in bf16 where the cores can, and says nothing.
        settings["INFERENCE_PRECISION_HINT"] = _PRECISIONS[precision]
        settings["INFERENCE_NUM_THREADS"] = int(options.get("n_threads", "0"))
    elif precision:
        settings["INFERENCE_PRECISION_HINT"] = _PRECISIONS[precision]
    return settings


def _compile(core: Any, model: Any, device: str, options: dict[str, str]) -> Any:
    settings = _settings(device, options)
    try:
        return core.compile_model(model, _DEVICES[device], settings)
    except RuntimeError as exc:
        raise OpenVinoError(_meaning(exc)) from exc


def _meaning(exc: RuntimeError) -> str:
    said = str(exc)
    if "VCL compiler" in said or "compiler loading failed" in said:
        return (
            "the NPU's compiler cannot be loaded: the Python package has none, Intel's archive of OpenVINO and its NPU "
            "driver (intel-driver-compiler-npu) have"
        )
    if "Could not find an NPU device" in said or "No available backend" in said:
        return "no NPU answers: its driver is missing, or the chip is gone"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " ".join(lines[-2:])[:500] or "nothing"


def _exported(compiled: Any) -> bytes:
    blob = compiled.export_model()
    return bytes(blob.getvalue() if hasattr(blob, "getvalue") else blob)


def _property(core: Any, device: str, name: str) -> Any:
    try:
        return core.get_property(device, name)
    except Exception:  # noqa: BLE001 - it raises what it likes for what a device does not have
        return None


def _nodes(compiled: Any) -> list[dict[str, str]]:
    """List what is computed, by the graph as it runs."""
    nodes = []
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        kind = _text(info, "layerType") or node.get_type_name()
        nodes.append({"kind": kind, "precision": _text(info, "runtimePrecision")})
    return nodes


def _text(info: Any, key: str) -> str:
    try:
        return str(info[key].astype(str))
    except Exception:  # noqa: BLE001 - of OpenVINO's own type, and not all devices give it
        return ""


_NO_WORK = frozenset(["Const", "Constant", "Input", "Output", "Parameter", "Result"])


def _placement(compiled: Any, device: str, told: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Say which device computes how much; told: what was found when it was compiled, for devices that tell no graph."""
    run_on = [str(each) for each in compiled.get_property("EXECUTION_DEVICES")]
    strange = [each for each in run_on if each.partition(".")[0] != _DEVICES[device]]
    try:
        kinds = Counter(node["kind"] for node in _nodes(compiled))
    except RuntimeError:
        kinds = Counter()
    if not kinds and told:
        kinds = Counter(dict(told[0]["kinds"]))
    if not kinds:
        kinds = Counter(Model=1)
    working = Counter({kind: n for kind, n in kinds.items() if kind not in _NO_WORK}) or kinds
    place = {
        "provider": _LABELS[device],
        "n_nodes": sum(working.values()),
        "kinds": working.most_common(),
        "reason": "",
    }
    if strange or not run_on:
        place["provider"] = ", ".join(strange) or "nobody"
        place["reason"] = f"OpenVINO was to run it on {_DEVICES[device]}, and says {', '.join(run_on) or 'nothing'}"
    return [place]


def _specs(ports: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": port.any_name,
            "datatype": _TYPES[port.element_type.get_type_name()],
            "shape": [-1 if size.is_dynamic else size.get_length() for size in port.partial_shape],
        }
        for port in ports
    ]


def _tiny_packed(openvino: Any, bits: int) -> Any:
    """A product with weights of 4 or 8 bit, which have a scale for each 16 inputs."""
    import numpy as np
    from openvino import opset13 as ops

    kind = openvino.Type.i4 if bits == 4 else openvino.Type.i8
    packed = openvino.Tensor(np.zeros(32 * 32 * bits // 8, np.uint8 if bits == 4 else np.int8), [32, 2, 16], kind)
    scaled = ops.multiply(ops.convert(ops.constant(packed), "f16"), ops.constant(np.full((32, 2, 1), 0.1, np.float16)))
    weights = ops.convert(ops.reshape(scaled, ops.constant(np.array([32, 32])), special_zero=False), "f32")
    x = ops.parameter([1, 32], np.float32, name="x")
    return openvino.Model([ops.matmul(x, weights, False, True)], [x], "tiny_packed")


def _tiny(openvino: Any) -> Any:
    """A convolution between two steps of 8 bit."""
    import numpy as np
    from openvino import opset13 as ops

    def steps(value: Any, low: float, high: float, n_levels: int) -> Any:
        ends = [ops.constant(np.float32(end)) for end in (low, high, low, high)]
        return ops.fake_quantize(value, *ends, n_levels)

    x = ops.parameter([1, 16, 8, 8], np.float32, name="x")
    weights = ops.constant(np.linspace(-1, 1, 16 * 16, dtype=np.float32).reshape(16, 16, 1, 1))
    product = ops.convolution(steps(x, 0.0, 2.0, 256), steps(weights, -1.0, 1.0, 255), [1, 1], [0, 0], [0, 0], [1, 1])
    return openvino.Model([steps(product, -8.0, 8.0, 256)], [x], "tiny")
