"""Tensor models with random weights, made when they are measured, and a catalog that has them.

classifier   EfficientNet-Lite0's layers and sizes: uint8 [n, 224, 224, 3] to 1,000 logits, 18.5 MB
inspection   a small CNN as inspection cameras run it: fp32 [n, 1, 128, 128] to 6 logits
square       y = x · x and t = s + 1, of any number of rows and columns; stateful is the same with s kept as a state
dense        three layers of 1,024: fp32 [n, 512] to 256, as sensors and scoring have it; 8 MB, which caches hold
wide         the same with layers of 4,096: fp32 [n, 1024] to 1,024, 101 MB of weights that are read once a run
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge_rt import config
from edge_rt.catalog.store import Store

_MANIFEST = """
id = "{name}"
name = "{name} with random weights"
license = "Apache-2.0"
kind = "tensor"
n_params = 1

[batching]
max_batch = {max_batch}
max_delay_s = 0.002

[[variants]]
id = "fp32"
quant = "FP32"
file = "{name}.onnx"
source = "file:{path}"
size_bytes = {size_bytes}
sha256 = "{sha256}"
{more}"""
_STATE = """
[[state]]
input = "s"
output = "t"
shape = [1, 64]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How a model is made, what it takes, and how many rows of it are joined."""

    write: Callable[[Path], None]
    input: str
    dtype: str
    shape: tuple[int, ...]
    max_batch: int
    more: str = ""  # of its manifest

    def feeds(self, n_rows: int = 1, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
        noise = np.random.default_rng(seed)
        shape = (n_rows, *self.shape)
        if self.dtype == "uint8":
            return {self.input: noise.integers(0, 256, shape, dtype=np.uint8)}
        return {self.input: noise.random(shape, dtype=np.float32)}


class Graph:
    """Writes a graph node by node."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int, fan_in: int) -> str:
        values = self._noise.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32)
        return self.constant(values)

    def constant(self, values: np.ndarray[Any, Any]) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def conv(self, x: str, n_in: int, n_out: int, kernel: int, stride: int = 1, *, is_depthwise: bool = False) -> str:
        n_group_in = 1 if is_depthwise else n_in
        return self.add(
            "Conv",
            x,
            self.weight(n_out, n_group_in, kernel, kernel, fan_in=n_group_in * kernel * kernel),
            self.constant(np.zeros(n_out, np.float32)),
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[kernel // 2] * 4,
            group=n_in if is_depthwise else 1,
        )

    def save(self, path: Path, model: Model, output: str, n_out: int) -> None:
        """Write the model with `output` renamed to "y"."""
        self._nodes.append(helper.make_node("Identity", [output], ["y"]))
        number = TensorProto.UINT8 if model.dtype == "uint8" else TensorProto.FLOAT
        graph = helper.make_graph(
            self._nodes,
            path.stem,
            [helper.make_tensor_value_info(model.input, number, ["n", *model.shape])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", n_out])],
            self._weights,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


# EfficientNet-Lite0's stages: expansion, kernel, first stride, channels, blocks.
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def _write_classifier(path: Path) -> None:
    g = Graph()
    zero, six = g.constant(np.float32(0)), g.constant(np.float32(6))  # type: ignore[arg-type]
    pixels = g.add("Cast", g.add("Transpose", "image", perm=[0, 3, 1, 2]), to=TensorProto.FLOAT)
    scaled = g.add("Sub", pixels, g.constant(np.full(1, 127, np.float32)))
    x = g.add("Mul", scaled, g.constant(np.full(1, 1 / 128, np.float32)))

    def act(name: str) -> str:
        return g.add("Clip", name, zero, six)

    x, n = act(g.conv(x, 3, 32, 3, 2)), 32
    for expansion, kernel, first_stride, n_out, n_blocks in _STAGES:
        for block in range(n_blocks):
            stride, n_wide = first_stride if block == 0 else 1, n * expansion
            y = act(g.conv(x, n, n_wide, 1)) if expansion > 1 else x
            y = act(g.conv(y, n_wide, n_wide, kernel, stride, is_depthwise=True))
            y = g.conv(y, n_wide, n_out, 1)
            x, n = g.add("Add", x, y) if stride == 1 and n == n_out else y, n_out
    x = g.add("Flatten", g.add("GlobalAveragePool", act(g.conv(x, n, 1280, 1))))
    logits = g.add("Gemm", x, g.weight(1280, 1000, fan_in=1280), g.constant(np.zeros(1000, np.float32)))
    g.save(path, MODELS["classifier"], logits, 1000)


def _write_inspection(path: Path) -> None:
    g, x, n = Graph(), "x", 1
    for n_out in (16, 32, 32, 64):
        x, n = g.add("Relu", g.conv(x, n, n_out, 3, 2)), n_out
    x = g.add("Flatten", g.add("GlobalAveragePool", x))
    logits = g.add("Gemm", x, g.weight(n, 6, fan_in=n), g.constant(np.zeros(6, np.float32)))
    g.save(path, MODELS["inspection"], logits, 6)


def _write_dense(path: Path, sizes: tuple[int, ...] = (512, 1024, 1024, 256)) -> None:
    g, x = Graph(), "x"
    for n_in, n_out in itertools.pairwise(sizes):
        layer = g.add("Gemm", x, g.weight(n_in, n_out, fan_in=n_in), g.constant(np.zeros(n_out, np.float32)))
        x = g.add("Relu", layer)
    g.save(path, MODELS[path.stem], x, sizes[-1])


def _write_wide(path: Path) -> None:
    _write_dense(path, (1024, 4096, 4096, 1024))


def _write_square(path: Path) -> None:
    x, s, y, t = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
        for name, size in (("x", "m"), ("s", 64), ("y", "m"), ("t", 64))
    )
    nodes = [helper.make_node("Mul", ["x", "x"], ["y"]), helper.make_node("Add", ["s", "one"], ["t"])]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    graph = helper.make_graph(nodes, path.stem, [x, s], [y, t], [one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


MODELS = {
    "classifier": Model(write=_write_classifier, input="image", dtype="uint8", shape=(224, 224, 3), max_batch=4),
    "inspection": Model(write=_write_inspection, input="x", dtype="float32", shape=(1, 128, 128), max_batch=8),
    "square": Model(write=_write_square, input="x", dtype="float32", shape=(512,), max_batch=8),
    "stateful": Model(write=_write_square, input="x", dtype="float32", shape=(512,), max_batch=1, more=_STATE),
    "dense": Model(write=_write_dense, input="x", dtype="float32", shape=(512,), max_batch=16),
    "wide": Model(write=_write_wide, input="x", dtype="float32", shape=(1024,), max_batch=16),
}


def catalog(folder: Path, *names: str) -> dict[str, Any]:
    """Write models and their manifests, take them into a store, and give the settings that find them."""
    flags = {"catalog.store_dir": str(folder / "store"), "catalog.manifest_dirs": [str(folder)]}
    for name in names:
        path = folder / f"{name}.onnx"
        MODELS[name].write(path)
        text = _MANIFEST.format(
            name=name,
            max_batch=MODELS[name].max_batch,
            more=MODELS[name].more,
            path=path,
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    store = Store.open(config.load(environ={}, flags=flags).config.catalog, os.environ)
    for name in names:
        store.pull(name, progress=lambda _: None, offline=False, derive=_nothing_derived)
    return flags


def _nothing_derived(*_: object) -> None:
    sys.exit("these models are derived from nothing")
