"""Hold a small ONNX INT4 model on the engine's golden model to float, beside onnxruntime's own INT8 arithmetic.

    python benchmarks/fpga_onnx.py [--quick] [--check] [--json FILE]

Four times MatMulNBits 512 x 512 in blocks of 32, Tanh, and the sum with the input; weights and inputs are random, and
other inputs have 8 outliers 30 times as large. Errors are root mean squares of the output's over those of
onnxruntime's with float activations. They grow with the weights, whose size is chosen so that onnxruntime's
accuracy_level 4 has the 0.0052 that the bar of 0.0055 was set against. The first row is the product's own way: the file
is planned, walked, and multiplied through descriptors, a ring and a cache; the other rows say where its error comes
from. No RTL runs here: tests hold it to the golden model bit for bit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_rt.backends import fpga_onnx
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.fpga_engine import FpgaEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import encode_activations
from edge_rt.backends.fpga_pack import Matrix, from_matmul_nbits
from edge_rt.backends.fpga_products import place
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort

_K, _BLOCK, _N_LAYERS, _N_ROWS = 512, 32, 4, 64
_BAR = 0.0055
_SIZE = 0.76  # of a product's elements, for inputs of size 1

Floats = NDArray[np.float32]


def layers(seed: int) -> list[tuple[NDArray[np.uint8], Floats]]:
    """Give bytes and scales of each layer: Gaussian weights rounded to 4 bits."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(_N_LAYERS):
        weights = random.standard_normal((_K, _K // _BLOCK, _BLOCK)) * _SIZE / np.sqrt(_K)
        scales = np.abs(weights).max(axis=2) / 7
        u = (np.rint(weights / scales[..., None]) + 8).astype(np.uint8)
        found.append((u[:, :, 0::2] | u[:, :, 1::2] << 4, scales.astype(np.float32).reshape(-1)))
    return found


def model(found: list[tuple[NDArray[np.uint8], Floats]], accuracy_level: int) -> bytes:
    nodes, constants, value = [], [], "x"
    for i, (b, scales) in enumerate(found):
        constants += [numpy_helper.from_array(b, f"b{i}"), numpy_helper.from_array(scales, f"s{i}")]
        nodes += [
            helper.make_node(
                "MatMulNBits",
                [value, f"b{i}", f"s{i}"],
                [f"p{i}"],
                domain="com.microsoft",
                K=_K,
                N=_K,
                bits=4,
                block_size=_BLOCK,
                accuracy_level=accuracy_level,
            ),
            helper.make_node("Tanh", [f"p{i}"], [f"t{i}"]),
            helper.make_node("Add", [f"t{i}", value], [f"x{i}"]),
        ]
        value = f"x{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", _K]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return onnx.ModelProto.SerializeToString(helper.make_model(graph, opset_imports=imports, ir_version=9))


def session(found: list[tuple[NDArray[np.uint8], Floats]], accuracy_level: int) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model(found, accuracy_level), providers=["CPUExecutionProvider"])


def on_the_engine(found: list[tuple[NDArray[np.uint8], Floats]], x: Floats) -> Floats:
    """Run the file as the back end does, and see to it that the engine did the work."""
    engines: list[FpgaEngine] = []

    def opener(matrices: Mapping[str, Matrix]) -> FpgaEngine:
        config = CONFIGS["kv260-gemm"]
        memory_bytes = place(matrices, Layout(config.beat_bits), config.n_vectors).memory_bytes
        engines.append(FpgaEngine.load(GoldenPort(config, np.zeros(memory_bytes, np.uint8)), matrices))
        return engines[-1]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        path.write_bytes(model(found, 0))
        file = ModelFile(model="chain", variant="", path=path, quant="INT4")
        loaded = fpga_onnx.load(file, TensorOptions(n_threads=1), opener)
    (out,) = loaded.run({"x": x}).values()
    report = engines[0].report()
    if (report.n_products, report.n_on_cpu, report.n_faults) != (_N_LAYERS, 0, 0):
        raise RuntimeError(f"the engine did not compute the {_N_LAYERS} products: {report}")
    loaded.close()
    return out


def chain(products: list[Callable[[Floats], Floats]], x: Floats) -> Floats:
    for product in products:
        x = np.tanh(product(x)) + x
    return x


def rounded(x: Floats) -> Floats:
    return encode_activations(x).to_float().astype(np.float32)


def in_floats(x: Floats) -> Floats:
    """Round to INT8 with a float scale per 32: the best that 8 bits do in groups."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.maximum(np.abs(groups).max(axis=2, keepdims=True) / 127, 1e-30)
    return (np.rint(groups / scale) * scale).reshape(x.shape).astype(np.float32)


def relative_rms(found: Floats, wanted: Floats) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def main() -> None:
    arguments = harness.parse(__doc__)
    rows: dict[tuple[str, str], list[float]] = {}
    for seed in range(3 if arguments.quick else 10):
        found = layers(seed)
        matrices = [from_matmul_nbits(b, scales, None, n=_K, k=_K, bits=4, block_size=_BLOCK) for b, scales in found]
        exact = [
            (np.stack([b & 15, b >> 4], axis=3).reshape(_K, -1, _BLOCK) - 8.0) * s.reshape(_K, -1, 1) for b, s in found
        ]
        plain = [w.reshape(_K, _K).astype(np.float32) for w in exact]
        fields = [matrix.to_float().astype(np.float32) for matrix in matrices]
        random = np.random.default_rng(1000 + seed)
        inputs = {"Gaussian": random.standard_normal((_N_ROWS, _K)).astype(np.float32)}
        inputs["8 outliers"] = inputs["Gaussian"].copy()
        inputs["8 outliers"][:, random.choice(_K, 8, replace=False)] *= 30
        sessions = {level: session(found, level) for level in (0, 4)}
        for kind, x in inputs.items():
            (wanted,) = sessions[0].run(None, {"x": x})
            ways = {
                "engine": on_the_engine(found, x),
                "onnxruntime, accuracy_level 4": sessions[4].run(None, {"x": x})[0],
                "engine's weights, float activations": chain([lambda v, w=w: v @ w.T for w in fields], x),
                "weights as they are, engine's activations": chain([lambda v, w=w: rounded(v) @ w.T for w in plain], x),
                "weights as they are, INT8 by float scales": chain(
                    [lambda v, w=w: in_floats(v) @ w.T for w in plain], x
                ),
                "no rounding, numpy": chain([lambda v, w=w: v @ w.T for w in plain], x),
            }
            for name, out in ways.items():
                rows.setdefault((name, kind), []).append(relative_rms(out, wanted))
    table = [["computed by", "inputs", "relative RMS", "least", "most"]]
    table += [
        [name, kind, f"{np.median(each):.5f}", f"{min(each):.5f}", f"{max(each):.5f}"]
        for (name, kind), each in rows.items()
    ]
    print(harness.draw(table, n_names=2), end="\n\n")
    samples = tuple(1000 * each for each in rows["engine", "Gaussian"])
    figure = harness.Figure(name="relative RMS, Gaussian", unit="thousandths", samples=samples, at_most=1000 * _BAR)
    harness.finish(arguments, figures=[figure])


if __name__ == "__main__":
    main()
