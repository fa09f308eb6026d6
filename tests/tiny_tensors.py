"""Small ONNX models with pipelines, whose answers anybody can tell by looking at the file they are given.

colors, colors-large  red, green or blue, whichever a picture has most of; the large one is surer; colors-both asks both
flaws                 where a grey picture of 64 × 64 differs from its reference
speech                speech is what is loud
colors-forms          the same in two forms, by write_forms
lines, reader         bright is text, and all text reads "x"; page asks both
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSIFY = """
[pipeline]
task = "classify"
labels = ["red", "green", "blue"]
image = { width = 8, height = 8, datatype = "UINT8" }
[batching]
max_batch = 4
"""
DETECT = """
[pipeline]
task = "detect"
labels = ["flaw"]
reference = "input"
reference_input = "golden"
image = { input = "image", width = 64, height = 64, color = "gray", datatype = "UINT8" }
decode = { kind = "centers", heatmap = "heat", sizes = "sizes" }
"""
VAD = """
[pipeline]
task = "vad"
input = "x"
output = "y"
[[state]]
input = "s"
output = "t"
shape = [1]
"""
LINES = """
[pipeline]
task = "detect-text"
color = "gray"
mean = [0]
std = [255]
"""
READER = """
[pipeline]
task = "read-text"
characters = "characters"
color = "gray"
mean = [0]
std = [255]
space = false
"""
MANIFEST = """
id = "{id}"
name = "for tests"
license = "MIT"
kind = "tensor"
n_params = 1

[[variants]]
id = "fp32"
quant = "FP32"
file = "{id}.onnx"
source = "file:{path}"
size_bytes = {size_bytes}
sha256 = "{sha256}"
"""
CHAINS = {
    "colors-both": 'kind = "cascade"\nfirst = "colors"\nthen = "colors-large"\nmin_score = 0.8\n',
    "page": 'kind = "ocr"\ndetect = "lines"\nread = "reader"\n',
}


def write_models(folder: Path) -> Path:
    """Write all models with their manifests and chains; gives the directory of manifests."""
    _write(folder, "colors", _colors(0.01), CLASSIFY)
    _write(folder, "colors-large", _colors(1.0), CLASSIFY)
    _write(folder, "flaws", _flaws(), DETECT)
    _write(folder, "speech", _speech(), VAD)
    _write(folder, "lines", _lines(), LINES)
    _write(folder, "reader", _reader(), READER, {"characters": b"x\n"})
    (folder / "chains").mkdir()
    for name, text in CHAINS.items():
        (folder / "chains" / f"{name}.toml").write_text(f'id = "{name}"\nname = "{name}"\n{text}')
    return folder


def write_forms(folder: Path) -> None:
    """Write colors-forms, whose int8 is the form that runs and whose fp32 answers the same less surely."""
    text = MANIFEST.partition("[[variants]]")[0].format(id="colors-forms")
    for form, proto in (("int8", _colors(1.0)), ("fp32", _colors(0.01))):
        path = folder / f"colors-forms.{form}.onnx"
        path.write_bytes(data := proto.SerializeToString())
        text += f'[[variants]]\nid = "{form}"\nquant = "{form.upper()}"\nfile = "{path.name}"\nsource = "file:{path}"\n'
        text += f'size_bytes = {len(data)}\nsha256 = "{hashlib.sha256(data).hexdigest()}"\n'
    (folder / "colors-forms.toml").write_text(text + CLASSIFY)


def _write(folder: Path, model: str, proto: onnx.ModelProto, more: str, assets: dict[str, bytes] | None = None) -> None:
    def facts(path: Path, data: bytes) -> dict[str, Any]:
        path.write_bytes(data)
        return {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    text = MANIFEST.format(id=model, **facts(folder / f"{model}.onnx", proto.SerializeToString()))
    for name, data in (assets or {}).items():
        asset = facts(folder / f"{model}.{name}", data)
        text += f'\n[[assets]]\nid = "{name}"\nfile = "{model}.{name}"\nsource = "file:{asset["path"]}"\n'
        text += f'size_bytes = {asset["size_bytes"]}\nsha256 = "{asset["sha256"]}"\n'
    (folder / f"{model}.toml").write_text(text + more)


def _model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **constants: Any) -> onnx.ModelProto:
    kept = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def _tensor(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _colors(sureness: float) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["f"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Mul", ["m", "sureness"], ["y"]),
    ]
    picture = _tensor("x", "n", 3, 8, 8, kind=TensorProto.UINT8)
    return _model(nodes, [picture], [_tensor("y", "n", 3)], sureness=np.float32(sureness))


def _flaws() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["image"], ["a"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["golden"], ["b"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["a", "b"], ["d"]),
        helper.make_node("Abs", ["d"], ["e"]),
        helper.make_node("AveragePool", ["e"], ["p"], kernel_shape=[8, 8], strides=[8, 8]),
        helper.make_node("Div", ["p", "white"], ["heat"]),
        helper.make_node("Mul", ["heat", "nothing"], ["z"]),
        helper.make_node("Add", ["z", "side"], ["sizes"]),
    ]
    pictures = [_tensor(name, 1, 1, 64, 64, kind=TensorProto.UINT8) for name in ("image", "golden")]
    outputs = [_tensor("heat", 1, 1, 8, 8), _tensor("sizes", 1, 2, 8, 8)]
    nothing, side = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 2, 1, 1), np.float32)
    return _model(nodes, pictures, outputs, white=np.float32(255), nothing=nothing, side=side)


def _speech() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("ReduceMean", ["a"], ["m"], axes=[1], keepdims=1),
        helper.make_node("Mul", ["m", "ten"], ["t10"]),
        helper.make_node("Clip", ["t10", "zero", "one"], ["y"]),
        helper.make_node("Add", ["s", "one"], ["t"]),
    ]
    return _model(
        nodes,
        [_tensor("x", 1, 576), _tensor("s", 1)],
        [_tensor("y", 1, 1), _tensor("t", 1)],
        ten=np.float32(10),
        zero=np.float32(0),
        one=np.float32(1),
    )


def _lines() -> onnx.ModelProto:
    return _model(
        [helper.make_node("Identity", ["x"], ["y"])], [_tensor("x", "n", 1, "h", "w")], [_tensor("y", "n", 1, "h", "w")]
    )


def _reader() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["m"], axes=[2, 3], keepdims=1),
        helper.make_node("Squeeze", ["m", "last"], ["light"]),
        helper.make_node("Sub", ["one", "light"], ["dark"]),
        helper.make_node("Concat", ["dark", "light"], ["y"], axis=2),
    ]
    return _model(
        nodes, [_tensor("x", "n", 1, 48, "w")], [_tensor("y", "n", 1, 2)], last=np.array([3]), one=np.float32(1)
    )
