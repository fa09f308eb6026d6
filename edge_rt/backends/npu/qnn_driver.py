"""Qualcomm QNN in its host process: onnxruntime with the plugin EP of onnxruntime-qnn, on the HTP only.

What the EP does not take stays on onnxruntime's CPU, in this process, and is told in the placement. On x86-64 the
package has the HTP's compiler and a simulator of it, no chip. Standard library and the packages named here only.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .chip_heat import hottest_c

EP = "QNNExecutionProvider"
CONTEXT = "model.onnx"
SIMULATED_SOC = "57:75"  # Snapdragon 8 Gen 3; without a chip named, the simulator computes floats as no HTP does
NODES = ("/dev/fastrpc-cdsp", "/dev/adsprpc-smd", "/dev/fastrpc-cdsp-secure", "/dev/adsprpc-smd-secure")
NOT_TAKEN = "QNN does not take them"
# What the package's other back ends would do: no chip, and answers that are none.
_REFUSED = {
    "saver": "it computes nothing and gives back memory as it was",
    "ir": "it writes the graph down and cannot run it",
    "cpu": "the package has no libQnnCpu.so on Linux, and onnxruntime's own CPU would compute in its place",
    "gpu": "it is no NPU",
}
_ZONES = ("nsp", "cdsp", "npu")  # as kernels name the sensors of the NPU's subsystem
_SOC = re.compile(r"\d{1,6}(:\d{1,3})?")
# Each with what it may be, as the plugin takes values that it does not know without a word, or then takes no node.
OPTIONS = {
    "backend_type": "htp",
    "htp_performance_mode": "burst|balanced|default|high_performance|high_power_saver|low_balanced|low_power_saver|"
    "extreme_power_saver|power_saver|sustained_high_performance",
    "htp_graph_finalization_optimization_mode": "0|1|2|3",
    "qnn_context_priority": "low|normal|normal_high|high",
    "rpc_control_latency": r"\d{1,6}",
    "vtcm_mb": r"\d{1,3}",
}
_REFUSED_NODE = re.compile(r"Node '([^']*)' OpType:(\w+) .*was inserted using the NHWC format", re.DOTALL)
_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}
DATATYPES = ("BOOL", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "FP16", "FP32")


class QnnError(Exception):
    """What QNN or onnxruntime says; kind: memory, unsupported or failed."""

    def __init__(self, said: str) -> None:
        if node := _REFUSED_NODE.search(said):
            # The EP asked for the node's layout and then refused the node, which ends the session.
            said = (
                f"QNN does not take {node[1]} ({node[2]}) as the file has it: an input or output of it that is not "
                "quantised beside others that are, for one; docs/quantize.md says how files for NPUs are made"
            )
        super().__init__(said)
        self.kind = "unsupported" if node else "failed"
        if "MEM_ALLOC" in said or "bad_alloc" in said or "out of memory" in said.lower():
            self.kind = "memory"


class Driver:
    """See hosted.py for what its methods take and give."""

    def __init__(self) -> None:
        self._session: Any = None
        self._devices: list[Any] = []

    def preload(self) -> None:
        import onnxruntime  # noqa: F401
        import onnxruntime_qnn  # noqa: F401

    def probe(self) -> dict[str, Any]:
        import onnxruntime
        import onnxruntime_qnn as qnn

        library, htp = qnn.get_library_path(), qnn.get_qnn_htp_path()
        versions = {"compiler": qnn.__version__, "runtime": onnxruntime.__version__, "driver": ""}
        is_simulator = platform.machine() == "x86_64"
        fault = next((f"{path} is not there" for path in (library, htp) if not os.path.exists(path)), "")  # noqa: PTH110
        if not is_simulator:
            nodes = [node for node in NODES if os.path.exists(node)]  # noqa: PTH110
            if not nodes:
                return {"absent": f"no NPU of Qualcomm's is here: none of {', '.join(NODES)}"}
            if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
                fault = fault or f"{nodes[0]} may not be opened by this user: its group may, see `ls -l {nodes[0]}`"
            versions["driver"] = f"linux {platform.release()}"
        if not fault:
            try:
                self._open_library()
            except QnnError as exc:
                fault = str(exc)
        what = "HTP simulator of" if is_simulator else "HTP by"
        device = {
            "id": "htp",
            "detail": f"{what} onnxruntime-qnn {qnn.__version__}",
            "soc": SIMULATED_SOC if is_simulator else "",
            "evidence": "simulator" if is_simulator else "device",
            "reference": is_simulator,
            "temp_c": hottest_c(Path("/"), _ZONES),
            "fault": fault,
        }
        return {"devices": [device], "versions": versions}

    def capabilities(self, device: str, soc: str) -> dict[str, Any]:  # noqa: ARG002 - there is one
        """Compile a small model of each precision, and name those that QNN took whole."""
        import tempfile

        from onnx import TensorProto

        self._settings(soc, {})  # what is no chip is no answer either
        found = []
        for weights, activations, bits, granularity in (
            (TensorProto.INT8, TensorProto.UINT8, (8, 8), "channel"),
            (TensorProto.INT8, TensorProto.UINT16, (8, 16), "channel"),
            (TensorProto.INT4, TensorProto.UINT16, (4, 16), "channel"),
            (TensorProto.FLOAT, TensorProto.FLOAT, (16, 16), "tensor"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "try.onnx")  # noqa: PTH118
                Path(path).write_bytes(tiny_model(weights, activations))
                try:
                    made = self.compile(path, folder, soc, "htp", {}, 0)
                except Exception:  # noqa: BLE001, S112 - then it does not compute in these
                    continue
            if all(not part["reason"] for part in made["placement"]):
                told = {"weight_bits": bits[0], "activation_bits": bits[1], "granularity": granularity}
                found.append(told)
        return {"precisions": found, "datatypes": list(DATATYPES), "is_static": True, "is_confirmed": True}

    def compile(
        self,
        model: str,
        folder: str,
        soc: str,
        device: str,  # noqa: ARG002 - there is one
        options: dict[str, str],
        rows: int,
    ) -> dict[str, Any]:
        import onnx

        source = Path(folder, "source.onnx")
        proto = onnx.load(model)  # with what lies in files beside it
        make_static(proto, rows)
        large = proto.ByteSize() > 2**30
        onnx.save(proto, str(source), save_as_external_data=large, location="source.bin")
        del proto
        settings = self._settings(soc, options)
        context = Path(folder, CONTEXT)
        for key, value in (
            ("ep.context_enable", "1"),
            ("ep.context_file_path", str(context)),
            ("ep.context_embed_mode", "0"),
        ):
            settings.add_session_config_entry(key, value)
        placement = _placement(self._open(str(source), settings))
        for path in (source, source.with_suffix(".bin")):
            path.unlink(missing_ok=True)
        files = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("model"))
        if any(not part["reason"] for part in placement) and context.name not in files:
            raise QnnError("no context binary was written")
        return {"files": files, "placement": placement, "facts": {"placement": placement}}

    def load(
        self,
        folder: str,
        soc: str,
        device: str,  # noqa: ARG002 - there is one
        options: dict[str, str],
        rows: int,  # noqa: ARG002 - the compiled model has them
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        session = self._open(os.path.join(folder, CONTEXT), self._settings(soc, options))  # noqa: PTH118
        # A compiled part is one node by now. What runs elsewhere must be what ran elsewhere then.
        told = facts["placement"]
        now = {part["provider"]: part["n_nodes"] for part in _placement(session)}
        elsewhere = sum(part["n_nodes"] for part in told if part["reason"])
        if "QNN" not in now or sum(n for name, n in now.items() if name != "QNN") > elsewhere:
            raise QnnError(f"the compiled model was to be on QNN but for {elsewhere} nodes, and is placed as {now}")
        self._session = session
        return {"inputs": _specs(session.get_inputs()), "outputs": _specs(session.get_outputs()), "placement": told}

    def run(self, feeds: dict[str, Any], outputs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        begun_s = time.monotonic()
        try:
            answers = self._session.run(outputs, feeds)
        except Exception as exc:
            raise QnnError(str(exc)) from exc
        # The EP copies in and out inside the run, and does not tell what of it that was.
        return {"compute_s": time.monotonic() - begun_s}, dict(zip(outputs, answers))  # noqa: B905 - Python 3.8 has none

    def telemetry(self) -> dict[str, Any]:
        temp_c = hottest_c(Path("/"), _ZONES)
        return {"temp_c": temp_c, "temp_source": "none" if temp_c is None else "sysfs"}

    def _open_library(self) -> None:
        import onnxruntime
        import onnxruntime_qnn as qnn

        if self._devices:
            return
        try:
            onnxruntime.register_execution_provider_library(EP, qnn.get_library_path())
        except Exception as exc:
            raise QnnError(str(exc)) from exc
        self._devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == EP]
        if not self._devices:
            raise QnnError(f"onnxruntime {onnxruntime.__version__} finds no device of {EP}")

    def _settings(self, soc: str, options: dict[str, str]) -> Any:
        import onnxruntime

        kind = options.get("backend_type", "htp")
        if kind != "htp":
            raise QnnError(f"backend_type {kind}: {_REFUSED.get(kind, 'there is no such back end')}")
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise QnnError(f"option {unknown[0]} is not known; there are {', '.join(sorted(OPTIONS))}")
        for name, value in options.items():
            if not re.fullmatch(OPTIONS[name], value):
                may = OPTIONS[name].replace("|", ", ") if "\\" not in OPTIONS[name] else "a number"
                raise QnnError(f"option {name} is {value[:40]!r}, and may be {may}")
        if soc and not _SOC.fullmatch(soc):
            may = f"Qualcomm's number of it, with the HTP's generation behind a colon: {SIMULATED_SOC}"
            raise QnnError(f"there is no chip {soc[:40]!r}; npu.soc.npu_qnn is {may}")
        self._open_library()
        chosen = {"backend_type": "htp", "offload_graph_io_quantization": "0", **options}
        if soc:
            model, _, arch = soc.partition(":")
            chosen.update({"soc_model": model, "enable_htp_fp16_precision": "1"})
            if arch:
                chosen["htp_arch"] = arch
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = 1
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        settings.add_provider_for_devices(self._devices, chosen)
        return settings

    def _open(self, path: str, settings: Any) -> Any:
        import onnxruntime

        try:
            session = onnxruntime.InferenceSession(path, sess_options=settings, enable_fallback=0)
        except Exception as exc:
            raise QnnError(str(exc)) from exc
        session.disable_fallback()  # run would build the session anew on the CPU, without a word
        return session


def make_static(proto: Any, rows: int) -> None:
    """Give a model's inputs and outputs fixed shapes, and take out what QNN's tools stumble over."""
    del proto.metadata_props[:]
    initializers = {tensor.name for tensor in proto.graph.initializer}
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in initializers:
            continue
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = rows or 1
    del proto.graph.value_info[:]  # shapes of another number of rows; onnxruntime finds them anew


def tiny_model(weights: int, activations: int) -> bytes:
    """Write a convolution of the given element types, quantised unless they are floats."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    w = np.random.default_rng(0).standard_normal((8, 8, 3, 3)).astype(np.float32)
    nodes, constants = [], []
    shape = [1, 8, 8, 8]
    if weights == TensorProto.FLOAT:
        constants = [numpy_helper.from_array(w, "w")]
        nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    else:
        top = 7 if weights == TensorProto.INT4 else 127
        scales = np.abs(w).reshape(8, -1).max(1) / top
        q = np.clip(np.round(w / scales[:, None, None, None]), -top, top).astype(np.int8)
        zeros = np.zeros(8, np.int8)
        constants = [
            helper.make_tensor("wq", weights, q.shape, q.flatten().tolist()),
            numpy_helper.from_array(scales.astype(np.float32), "ws"),
            helper.make_tensor("wz", weights, [8], zeros.tolist()),
            helper.make_tensor(
                "s", TensorProto.FLOAT, [], [8 / (2**16 if activations == TensorProto.UINT16 else 2**8)]
            ),
            helper.make_tensor("z", activations, [], [2**15 if activations == TensorProto.UINT16 else 128]),
        ]
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
            helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["w"], axis=0),
            helper.make_node("Conv", ["xf", "w"], ["yf"], pads=[1, 1, 1, 1]),
            helper.make_node("QuantizeLinear", ["yf", "s", "z"], ["yq"]),
            helper.make_node("DequantizeLinear", ["yq", "s", "z"], ["y"]),
        ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "try", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bytes(model.SerializeToString())


def _placement(session: Any) -> list[dict[str, Any]]:
    """Say who runs which nodes, as the session itself tells: its list of providers proves nothing."""
    kinds: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        kinds.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return [
        {
            "provider": "QNN" if name == EP else name,
            "n_nodes": sum(found.values()),
            "kinds": found.most_common(),
            "reason": "" if name == EP else NOT_TAKEN,
        }
        for name, found in kinds.items()
    ]


def _specs(values: Any) -> list[dict[str, Any]]:
    return [{"name": value.name, "datatype": _TYPES[value.type], "shape": value.shape} for value in values]
