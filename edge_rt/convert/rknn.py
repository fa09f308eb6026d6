"""Prepare float models for Rockchip's compiler, which quantises by itself: each file says how, and holds samples.

The compiler runs on another machine than the model, and wants inputs to find ranges with. So a form for it is a float
ONNX file with an entry of metadata, FORM_KEY, its options as JSON, and a constant that no node takes, SAMPLES_KEY: the
bytes of a compressed .npz with an array for each input. backends/npu/rknn_driver.py reads both.

The compiler rounds to nearest, each group by its largest weight. For 4 bit the weights are put on that grid here.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper

from edge_rt.backends.npu import calibration
from edge_rt.backends.npu.rknn_driver import FORM_KEY, SAMPLES_KEY
from edge_rt.catalog.pipelines import ImageInput
from edge_rt.convert.bert import text_feeds
from edge_rt.convert.qdq import read_ranges
from edge_rt.convert.round_weights import round_model
from edge_rt.convert.static_shapes import make_static
from edge_rt.convert.unquantized import dequantize_inputs_first, is_quantized, unquantize
from edge_rt.engine.images import decode, prepare
from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.regular import open_regular, read_regular

_MAX_FILE_BYTES: Final = 64 * 2**20
_MAX_PIXELS: Final = 50_000_000
_MAX_ROUNDING: Final = 48  # samples; more of them change little
_OPSET, _IR_VERSION = 17, 8  # the compiler takes 19 at most, and has no GELU of ONNX's
_GROUP: Final = 32
_VIEWS, _SEED, _LEAST_VIEW = 10, 7, 0.35  # of a photograph; the least as a share of its shorter side
_LITE0: Final = ImageInput(
    width=224, height=224, resize="crop", crop_fraction=0.875, filter="bicubic", layout="nhwc", datatype="UINT8"
)

Samples = dict[str, NDArray[Any]]  # by input, a sample at each index of the first axis
Reader = Callable[[tuple[Path, ...]], Samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the compiler shall compute a model.

    dtype, method  as npu_rknn's options have them
    kept           what stays in 16 bit, by the names of the compiler's own graph
    kept_nodes     nodes of these layers, whose weights are not rounded
    """

    dtype: str
    method: str = "channel"
    kept: tuple[str, ...] = ()
    kept_nodes: frozenset[str] = frozenset()

    def options(self) -> dict[str, str]:
        told = {"dtype": self.dtype}
        if self.method != "channel":
            told["method"] = self.method
        if self.kept:
            told["float"] = ",".join(self.kept)
        return told


def convert(form: Form, read: Reader, src: Path, dst: Path, beside: tuple[Path, ...]) -> None:
    """Write src as a form for Rockchip's compiler; beside holds samples as read takes them. Raises ModelFormatError."""
    if not beside:
        raise ModelFormatError(path=dst.name, field="derive_with", problem="the recipe needs samples of the inputs")
    samples = read(beside)
    model = _as_float(onnx.load(src, load_external_data=False), samples, src.name)
    samples = _typed(model, samples)
    if form.dtype == "w4a16":
        n = len(next(iter(samples.values())))
        chosen = np.unique(np.linspace(0, n - 1, min(n, _MAX_ROUNDING)).astype(int))
        feeds = [{name: values[at : at + 1] for name, values in samples.items()} for at in chosen]
        group = _GROUP if form.method == f"group{_GROUP}" else 0
        model = round_model(model, feeds, but=form.kept_nodes, group=group, name=src.name)
    entry = model.metadata_props.add()
    entry.key, entry.value = FORM_KEY, json.dumps(form.options(), sort_keys=True)
    if form.dtype != "fp16":
        model.graph.initializer.append(numpy_helper.from_array(_packed(samples), SAMPLES_KEY))
    dst.write_bytes(model.SerializeToString(deterministic=True))


def _as_float(model: ModelProto, samples: Mapping[str, NDArray[Any]], name: str) -> ModelProto:
    if is_quantized(model):
        model = unquantize(model, name=name)
    model = dequantize_inputs_first(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {v.name: v.type.tensor_type.shape.dim for v in model.graph.input if v.name not in constants}
    if missing := sorted(set(inputs) - set(samples)):
        raise ModelFormatError(path=name, field=missing[0], problem="no sample has an array for this input")
    # A number of rows that is open stays open: each is a run of its own.
    if any(not dim.HasField("dim_value") for dims in inputs.values() for dim in dims[1:]):
        model = make_static(model, {given: (1, *samples[given].shape[1:]) for given in inputs}, name=name)
    return at_opset_17(model)


def _typed(model: ModelProto, samples: Samples) -> Samples:
    """Give the inputs' samples in the types that the model takes; a file may hold them in fewer bits."""
    types = {v.name: helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input}
    return {name: values.astype(types[name]) for name, values in samples.items() if name in types}


def at_opset_17(model: ModelProto) -> ModelProto:
    """Give a model of a later opset in 17: GELU as the five nodes that Rockchip's compiler knows for one.

    Of what else edge_rt's recipes write, 17 has the same operators. Raises onnx's ValidationError for others.
    """
    default = next(entry for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if default.version <= _OPSET:
        return model
    nodes = []
    numbers = {"gelu/root": math.sqrt(2.0), "gelu/one": 1.0, "gelu/half": 0.5}
    for node in model.graph.node:
        if node.op_type != "Gelu":
            nodes.append(node)
            continue
        x, y = node.input[0], node.output[0]
        nodes += [
            helper.make_node(kind, given, [out], out)
            for kind, given, out in (
                ("Div", [x, "gelu/root"], f"{y}/scaled"),
                ("Erf", [f"{y}/scaled"], f"{y}/erf"),
                ("Add", [f"{y}/erf", "gelu/one"], f"{y}/gate"),
                ("Mul", [x, f"{y}/gate"], f"{y}/gated"),
                ("Mul", [f"{y}/gated", "gelu/half"], y),
            )
        ]
    if len(nodes) > len(model.graph.node):
        model.graph.initializer.extend(
            numpy_helper.from_array(np.array(value, np.float32), name) for name, value in numbers.items()
        )
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    default.version, model.ir_version = _OPSET, _IR_VERSION
    onnx.checker.check_model(model, full_check=True)
    return model


def _packed(samples: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Pack samples to the same bytes every time: np.savez would write the time of day."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, values in sorted(samples.items()):
            raw = io.BytesIO()
            np.save(raw, np.ascontiguousarray(values), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), raw.getvalue(), zipfile.ZIP_DEFLATED, 9)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def read_arrays(beside: tuple[Path, ...]) -> Samples:
    """Read an .npz file. Raises ModelFormatError."""
    path = beside[0]
    try:
        with open_regular(path) as file:
            calibration.check(file)
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, calibration.CalibrationDataError) as exc:
        raise ModelFormatError(path=path.name, field="file", problem=str(exc)[:200]) from exc
    lengths = {len(values) if values.ndim else 0 for values in found.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ModelFormatError(path=path.name, field="arrays", problem="must hold the same number of samples, not none")
    return found


def read_texts(beside: tuple[Path, ...]) -> Samples:
    """Read the texts of a file of ranges, as a BERT takes them. Raises ModelFormatError."""
    if not (texts := read_ranges(beside[0]).texts):
        raise ModelFormatError(path=beside[0].name, field="texts", problem="holds none, and the recipe needs some")
    feeds = [feed for feed, _ in text_feeds(texts)]
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def read_photographs(beside: tuple[Path, ...]) -> Samples:
    """Cut views out of each photograph, the same every time, for EfficientNet-Lite0. Raises ModelFormatError."""
    rng = np.random.default_rng(_SEED)
    found = []
    for path in beside:
        try:
            image = decode(read_regular(path, _MAX_FILE_BYTES), max_pixels=_MAX_PIXELS).convert("RGB")
        except (OSError, ValueError) as exc:
            raise ModelFormatError(path=path.name, field="file", problem=str(exc)[:200]) from exc
        except InvalidRequestError as exc:
            raise ModelFormatError(path=path.name, field="file", problem=exc.problem) from exc
        views = [image]
        for _ in range(_VIEWS - 1):
            side = int(rng.uniform(_LEAST_VIEW, 1) * min(image.size))
            left, top = (int(rng.integers(0, size - side + 1)) for size in image.size)
            views.append(image.crop((left, top, left + side, top + side)))
        found += [prepare(view, _LITE0)[0] for view in views]
    return {"image": np.stack(found)}


# What comes of a residual sum is hundreds of times what most of it is; 8 bit would leave the rest no steps.
_MINILM_KEPT: Final = tuple(
    name
    for layer in range(6)
    for name in (
        f"layer{layer}/attention/sum-rs",
        f"encoder.layer.{layer}.attention.output.LayerNorm#1",
        f"encoder.layer.{layer}.intermediate.dense/gelu_tp-rs",
        f"encoder.layer.{layer}.output.dense/product_mm_tp_sw",
        f"layer{layer}/sum-rs",
        f"encoder.layer.{layer}.output.LayerNorm#1",
    )
)
_W8A8, _W4A16 = Form(dtype="w8a8"), Form(dtype="w4a16", method=f"group{_GROUP}")
_LITE0_W4A16 = Form(dtype="w4a16", method=f"group{_GROUP}", kept=("stem",), kept_nodes=frozenset(["stem"]))
_MINILM_W8A8 = Form(dtype="w8a8", kept=_MINILM_KEPT)

FORMS: Final = {
    "efficientnet-lite0-rknn-w4a16": partial(convert, _LITE0_W4A16, read_photographs),
    "efficientnet-lite0-rknn-w8a8": partial(convert, _W8A8, read_photographs),
    "minilm-l6-rknn-fp16": partial(convert, Form(dtype="fp16"), read_texts),
    "minilm-l6-rknn-w4a16": partial(convert, _W4A16, read_texts),
    "minilm-l6-rknn-w8a8": partial(convert, _MINILM_W8A8, read_texts),
    "rknn-w4a16": partial(convert, _W4A16, read_arrays),
    "rknn-w8a8": partial(convert, _W8A8, read_arrays),
}
