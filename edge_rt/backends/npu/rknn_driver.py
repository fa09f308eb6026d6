"""Rockchip's compiler and simulator (rknn-toolkit2) in their host process, under their own environment's Python.

The simulator runs only what has been built in its own process, never an exported file: load builds the model again,
from the files that compile has built it from, ranges included. So the file that goes to a board is never what ran here.
Standard library, numpy and the environment's packages only.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import calibration
from .rknn_layers import placement, read_layers
from .rknn_toolkit import RknnError, Said, called, inside, must, stopping_adb, toolkit

# As boards' device trees name them, too: the first that fits.
SOCS = ("rk3588", "rk3576", "rk3568", "rk3566", "rk3562", "rv1126b")
COMPILED = "model.rknn"
SOURCE = "source.onnx"
BUILT = ("source.model", "source.data", "source.quantization.cfg")  # what step 2 of a quantised build wants
DTYPES = ("fp16", "w8a8", "w8a16", "w16a16i_dfp", "w4a16")
ALGORITHMS = ("normal", "mmse", "kl_divergence")  # gdq wants PyTorch
OPTIONS = frozenset(["dtype", "algorithm", "method", "dataset", "float", "cores", "contexts"])
MAX_SAMPLES = 512
# What convert/rknn.py writes into a form: its options as JSON in the metadata, an .npz file as a constant.
FORM_KEY, SAMPLES_KEY = "edge_rt.rknn", "edge_rt.samples"
_DATATYPES = {1: "FP32", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 10: "FP16"}


class Driver:
    """See hosted.py for what its methods take and give."""

    def __init__(self) -> None:
        self._rknn: Any = None
        self._facts: dict[str, Any] = {}

    def probe(self) -> dict[str, Any]:
        from importlib.metadata import version

        found = version("rknn-toolkit2")
        toolkit()
        device = {
            "id": "sim",
            "detail": f"simulator of {SOCS[0]} and others by rknn-toolkit2 {found}; it runs no exported file",
            "soc": SOCS[0],
            "evidence": "simulator",
            "reference": True,
        }
        return {"devices": [device], "versions": {"compiler": found, "runtime": found, "driver": ""}}

    def capabilities(self, device: str, soc: str) -> dict[str, Any]:
        """Build a small model in each precision: which a chip has differs, and the toolkit lists them nowhere."""
        check_soc(soc)
        found = []
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder, inside(folder):
                Path("try.onnx").write_bytes(tiny_model())
                np.savez("try.npz", x=np.random.default_rng(0).standard_normal((2, 32, 8, 8)).astype(np.float32))
                options = {"dtype": dtype} | ({} if dtype == "fp16" else {"dataset": f"{folder}/try.npz"})
                try:
                    self.compile(f"{folder}/try.onnx", folder, soc, device, options, 0)
                except Exception:  # noqa: BLE001, S112 - then it does not compute in it
                    continue
            bits = re.findall(r"\d+", dtype)
            weight_bits, activation_bits = (int(bits[0]), int(bits[-1])) if dtype != "fp16" else (16, 16)
            granularity = "tensor" if dtype == "fp16" else "channel"
            found.append({"weight_bits": weight_bits, "activation_bits": activation_bits, "granularity": granularity})
        return {
            "precisions": found,
            "datatypes": sorted(_DATATYPES.values()),
            "is_static": True,
            "is_confirmed": True,
        }

    def compile(
        self,
        model: str,
        folder: str,
        soc: str,
        device: str,  # noqa: ARG002 - the chip says all
        options: dict[str, str],
        rows: int,
    ) -> dict[str, Any]:
        import onnx

        check_soc(soc)
        proto = onnx.load(model)
        options = take_form(proto, options, folder)
        check_options(options)
        inputs, outputs = specs(proto, rows)
        plan = cut_input(proto, rows)
        dtype = options.get("dtype", "fp16")
        facts = {
            "soc": soc,
            "dtype": dtype,
            "algorithm": options.get("algorithm", "normal"),
            "method": options.get("method", "channel"),
            "inputs": inputs,
            "outputs": outputs,
            "plan": plan,
        }
        with inside(folder), stopping_adb(), Said() as said:
            onnx.save(proto, SOURCE)
            if dtype != "fp16":
                _find_ranges(facts, options)
            rknn, text = build(facts)
            must(rknn.export_rknn(COMPILED), said, "export_rknn")
            rknn.release()
        layers = read_layers(text)
        if not layers:
            raise RknnError("the compiler told of no layers")
        kept = [COMPILED, *([SOURCE] if dtype == "fp16" else BUILT)]
        for path in Path(folder).iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        facts["placement"] = placement(layers)
        facts["cycles"] = sum(layer["cycles"] for layer in layers)  # the compiler's own estimate
        return {"files": kept, "placement": facts["placement"], "facts": facts}

    def load(
        self,
        folder: str,
        soc: str,  # noqa: ARG002 - facts say for what it was built
        device: str,  # noqa: ARG002
        options: dict[str, str],  # noqa: ARG002 - likewise
        rows: int,  # noqa: ARG002
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch, inside(scratch), stopping_adb(), Said() as said:
            for name in (SOURCE, *BUILT):
                if Path(folder, name).exists():
                    shutil.copyfile(Path(folder, name), name)
            self._rknn, _ = build(facts)
            must(self._rknn.init_runtime(target=None), said, "init_runtime")  # None: the simulator
        self._facts = facts
        return {name: facts[name] for name in ("inputs", "outputs", "placement")}

    def run(self, feeds: dict[str, Any], outputs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        begun_s = time.monotonic()
        arrays, formats = ordered(feeds, self._facts)
        with Said() as said:
            # The first run after a build prepares the graph, and says so.
            answers = self._rknn.inference(inputs=arrays, data_format=formats)
        if answers is None:
            raise RknnError("inference gave nothing: " + said.words())
        return {"compute_s": time.monotonic() - begun_s}, named(answers, self._facts, outputs)

    def telemetry(self) -> dict[str, Any]:
        return {}  # a simulator takes what the host takes


def take_form(proto: Any, options: dict[str, str], folder: str) -> dict[str, str]:
    """Take out of a model what its form says: options, before which the given ones go, and samples."""
    told = {entry.key: entry.value for entry in proto.metadata_props}
    del proto.metadata_props[:]
    try:
        own = json.loads(told.get(FORM_KEY, "{}"))
        if not isinstance(own, dict) or not all(isinstance(value, str) for value in own.values()):
            raise ValueError("no table of texts")
    except (ValueError, RecursionError) as exc:
        raise RknnError(f"its metadata {FORM_KEY} is no form: {exc}") from exc
    merged = {**own, **options}
    constants = list(proto.graph.initializer)
    samples = next((tensor for tensor in constants if tensor.name == SAMPLES_KEY), None)
    if samples is not None:
        proto.graph.initializer.remove(samples)
        if merged.get("dtype", "fp16") != "fp16" and not merged.get("dataset"):
            merged["dataset"] = str(Path(folder, "samples.npz"))
            Path(merged["dataset"]).write_bytes(samples.raw_data)
    return merged


def check_soc(soc: str) -> None:
    """Raise RknnError for a chip that there is not."""
    if soc not in SOCS:
        raise RknnError(f"there is no chip {soc[:40]}; there are {', '.join(SOCS)}")


def check_options(options: dict[str, str]) -> None:
    """Raise RknnError for options that are not known, or want what is not here."""
    if unknown := sorted(set(options) - OPTIONS):
        raise RknnError(f"option {unknown[0]} is not known; there are {', '.join(sorted(OPTIONS))}")
    dtype = options.get("dtype", "fp16")
    if dtype not in DTYPES:
        raise RknnError(f"dtype {dtype} is not known; there are {', '.join(DTYPES)}")
    if (algorithm := options.get("algorithm", "normal")) not in ALGORITHMS:
        raise RknnError(f"algorithm {algorithm} is not offered; there are {', '.join(ALGORITHMS)}")
    if dtype != "fp16" and not options.get("dataset"):
        where = "put calibration data beside the model as NAME.calibration.npz, or name it as option dataset"
        raise RknnError(f"{dtype} needs ranges: {where}")


def build(facts: dict[str, Any]) -> tuple[Any, str]:
    """Build what lies in the working folder, and give what was said meanwhile.

    Raises RknnError; the toolkit itself gives -1 or raises, by the call.
    """
    rknn = toolkit()(verbose=True)
    settings: dict[str, Any] = {"target_platform": facts["soc"]}
    if any("mean" in each for each in facts["plan"]):
        settings["mean_values"] = [each.get("mean", []) for each in facts["plan"]]
        settings["std_values"] = [each.get("std", []) for each in facts["plan"]]
    is_float = facts["dtype"] == "fp16"
    if not is_float:
        settings["quantized_dtype"] = facts["dtype"]
        settings["quantized_algorithm"] = facts["algorithm"]
        settings["quantized_method"] = facts["method"]
    with Said() as said:
        must(called(rknn.config, **settings), said, "config")
        if is_float:
            must(called(rknn.load_onnx, model=SOURCE), said, "load_onnx")
            must(called(rknn.build, do_quantization=False), said, "build")
        elif Path(BUILT[0]).exists():
            names = dict(zip(("model_input", "data_input", "model_quantization_cfg"), BUILT))  # noqa: B905 - Python 3.8
            must(called(rknn.hybrid_quantization_step2, **names), said, "hybrid_quantization_step2")
        else:
            must(called(rknn.load_onnx, model=SOURCE), said, "load_onnx")
            must(called(rknn.hybrid_quantization_step1, dataset="dataset.txt"), said, "hybrid_quantization_step1")
    return rknn, said.text


def _find_ranges(facts: dict[str, Any], options: dict[str, str]) -> None:
    """Quantise, and write down what step 2 makes the model of; layers named as float are left out."""
    write_dataset(options["dataset"], facts["plan"])
    rknn, _ = build(facts)
    rknn.release()
    config = Path(BUILT[2])
    text = config.read_text()
    wanted = list(dict.fromkeys(name for name in options.get("float", "").split(",") if name))
    known = set(re.findall(r"^    (\S.*):$", text, re.MULTILINE))
    if missing := [name for name in wanted if name not in known]:
        raise RknnError(f"option float: the compiler has no tensor {missing[0]}: it may have fused it into the next")
    if wanted:
        lines = "".join(f"    {json.dumps(name)}: float16\n" for name in wanted)
        text, n_found = re.subn(r"custom_quantize_layers: *\{\}\n", f"custom_quantize_layers:\n{lines}", text)
        if n_found != 1:
            raise RknnError(f"{config.name} has no place for layers that stay float")
        config.write_text(text)


def write_dataset(path: str, plan: list[dict[str, Any]]) -> None:
    """Write the samples of an .npz file, as the model's own inputs are, for the toolkit: NCHW, a line each."""
    lines = []
    try:
        found = calibration.read(path, [each["name"] for each in plan])
    except calibration.CalibrationDataError as exc:
        raise RknnError(f"{path}: {exc}") from exc
    n_samples = {len(array) for array in found.values()}
    if len(n_samples) != 1 or not 0 < max(n_samples) <= MAX_SAMPLES:
        raise RknnError(f"{path} holds {sorted(n_samples)} samples; 1 to {MAX_SAMPLES} of each input are taken")
    for index in range(n_samples.pop()):
        names = []
        for i, each in enumerate(plan):
            sample = found[each["name"]][index : index + 1]
            name = f"sample{index}-{i}.npy"
            np.save(name, np.ascontiguousarray(sample.transpose(0, 3, 1, 2) if each["layout"] == "nhwc" else sample))
            names.append(name)
        lines.append(" ".join(names))
    Path("dataset.txt").write_text("\n".join(lines) + "\n")


def specs(proto: Any, rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Describe inputs and outputs as the model has them, with its rows fixed."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    told = []
    for values in (proto.graph.input, proto.graph.output):
        some = []
        for value in values:
            if value.name in constants:
                continue
            kind = value.type.tensor_type
            if kind.elem_type not in _DATATYPES:
                raise RknnError(f"{value.name} has ONNX's element type {kind.elem_type}, which RKNN does not have")
            shape = [dim.dim_value if dim.HasField("dim_value") else rows or 1 for dim in kind.shape.dim]
            some.append({"name": value.name, "datatype": _DATATYPES[kind.elem_type], "shape": shape})
        told.append(some)
    return told[0], told[1]


def cut_input(proto: Any, rows: int) -> list[dict[str, Any]]:
    """Fix the shapes, and give the toolkit its own form of pixels: uint8 NHWC, with a mean and a deviation.

    A model's uint8 input that goes through Transpose and DequantizeLinear starts behind the two. Gives for each input
    its name, layout and, where it was cut, mean and std.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = rows or 1
    del graph.value_info[:]
    users: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    plan = []
    for position, value in enumerate(list(graph.input)):
        if value.name in constants:
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        chain, name = [], value.name
        while len(users.get(name, [])) == 1 and users[name][0].op_type in ("Transpose", "DequantizeLinear"):
            chain.append(users[name][0])
            name = chain[-1].output[0]
        order = sorted(node.op_type for node in chain)
        perm = next((list(a.ints) for node in chain if node.op_type == "Transpose" for a in node.attribute), [])
        if (
            value.type.tensor_type.elem_type != TensorProto.UINT8
            or len(shape) != 4
            or (order != ["DequantizeLinear", "Transpose"] and order != ["DequantizeLinear"])
            or perm not in ([], [0, 3, 1, 2])
        ):
            # What the toolkit makes of four dimensions is NHWC, unless it is told.
            plan.append({"name": value.name, "layout": "nchw" if len(shape) == 4 else ""})
            continue
        quantised = next(node for node in chain if node.op_type == "DequantizeLinear")
        scale, zero = ([*(numpy_helper.to_array(constants[n]).reshape(-1) for n in quantised.input[1:]), np.zeros(1)])[
            :2
        ]
        if scale.size != 1 or zero.size != 1:
            raise RknnError(f"{value.name}: one scale and one zero point are taken of pixels, not one a channel")
        is_nhwc = bool(perm)
        moved = [shape[0], shape[3], shape[1], shape[2]] if is_nhwc else shape
        for node in chain:
            graph.node.remove(node)
        graph.input.remove(value)
        graph.input.insert(position, helper.make_tensor_value_info(chain[-1].output[0], TensorProto.FLOAT, moved))
        n_channels = moved[1]
        entry = {"name": value.name, "layout": "nhwc" if is_nhwc else "nchw"}
        plan.append(dict(entry, mean=[float(zero[0])] * n_channels, std=[1 / float(scale[0])] * n_channels))
    return plan


def ordered(feeds: dict[str, Any], facts: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Give the inputs as the toolkit and the runtime take them: in the model's order, each with its layout."""
    arrays = [np.ascontiguousarray(feeds[each["name"]]) for each in facts["plan"]]
    return arrays, [each["layout"] or "nchw" for each in facts["plan"]]


def named(answers: list[Any], facts: dict[str, Any], outputs: list[str]) -> dict[str, Any]:
    """Give the wanted outputs by name, in the shapes and types that the model declares."""
    told = facts["outputs"]
    if len(answers) != len(told):
        raise RknnError(f"{len(answers)} outputs came, the model has {len(told)}")
    types = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8, "INT8": np.int8}
    types.update({"INT32": np.int32, "INT64": np.int64})
    found = {}
    for spec, answer in zip(told, answers):  # noqa: B905 - Python 3.8 has none
        size = int(np.prod(spec["shape"]))
        if np.size(answer) != size:
            raise RknnError(f"{spec['name']} came with {np.size(answer)} values, the model says {size}")
        found[spec["name"]] = np.asarray(answer).reshape(spec["shape"]).astype(types[spec["datatype"]])
    return {name: found[name] for name in outputs}


def tiny_model() -> bytes:
    """Write a convolution that every chip computes."""
    from onnx import TensorProto, helper, numpy_helper

    w = np.random.default_rng(0).standard_normal((32, 32, 1, 1)).astype(np.float32)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32, 8, 8]) for name in ("x", "y")]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "try")]
    graph = helper.make_graph(nodes, "try", values[:1], values[1:], [numpy_helper.from_array(w, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())
