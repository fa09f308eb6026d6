"""What the plan walker adds to ONNX models on the FPGA's engine: microseconds a step, without an engine.

    python benchmarks/fpga_walker.py [--quick] [--check] [--json FILE]

A model of 64 MatMulNBits 64 x 64 with a Tanh between, one vector, is 64 steps: a product on an engine that does
nothing, and a part in onnxruntime. Measured in turns: the walker; and its rival, a loop written for this very model
that calls the same onnxruntime sessions and the same engine. The walker may add 20 µs a step to the loop. A third
figure has parts that do nothing, too: what is left is the walker. An operator in Python inside onnxruntime, the other
way to call a device from a graph, took 71 to 83 µs a call when it was measured for the design; it is not run here.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge_rt.backends import fpga_onnx
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.fpga_engine import EngineReport
from edge_rt.backends.fpga_onnx_plan import Part, Rule
from edge_rt.backends.fpga_onnx_walk import PartStep, ProductStep, Walker
from edge_rt.backends.fpga_pack import Matrix

_K, _N_STEPS = 64, 64
_BAR_US = 20.0


def chain() -> ModelProto:
    random = np.random.default_rng(0)
    constants, nodes, value = [], [], "x"
    for i in range(_N_STEPS):
        constants += [
            numpy_helper.from_array(random.integers(0, 256, (_K, _K // 32, 16)).astype(np.uint8), f"b{i}"),
            numpy_helper.from_array(random.random((_K, _K // 32)).astype(np.float32), f"s{i}"),
        ]
        nodes += [
            helper.make_node("Tanh", [value], [f"t{i}"]),
            helper.make_node(
                "MatMulNBits",
                [f"t{i}", f"b{i}", f"s{i}"],
                [f"x{i}"],
                domain="com.microsoft",
                K=_K,
                N=_K,
                bits=4,
                block_size=32,
            ),
        ]
        value = f"x{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["m", _K]) for name in ("x", value)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "chain", ends[:1], ends[1:], constants), opset_imports=imports, ir_version=9
    )


class Idle:
    """An engine that does nothing."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self._out = np.zeros((1, _K), np.float32)
        self.names = list(matrices)

    def multiply(self, name: str, x: Any) -> NDArray[np.float32]:  # noqa: ARG002 - the protocol's
        return self._out

    def report(self) -> EngineReport:
        raise NotImplementedError

    def close(self) -> None:
        pass


def us_a_step(run: Callable[[], object], seconds: float) -> float:
    """Give the median of as many runs as fit."""
    samples, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return 1e6 * float(np.median(samples)) / _N_STEPS


def main() -> None:
    arguments = harness.parse(__doc__)
    engines: list[Idle] = []

    def opener(matrices: Mapping[str, Matrix]) -> Idle:
        engines.append(Idle(matrices))
        return engines[-1]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        path.write_bytes(chain().SerializeToString())
        file = ModelFile(model="chain", variant="", path=path, quant="")
        session = fpga_onnx.load(file, TensorOptions(n_threads=1), opener, Rule(min_intensity=0))
    steps = session.steps
    parts = [step for step in steps if isinstance(step, PartStep)]
    products = [step for step in steps if isinstance(step, ProductStep)]
    if len(parts) != _N_STEPS or len(products) != _N_STEPS:
        raise RuntimeError(f"{len(parts)} parts and {len(products)} products, not {_N_STEPS} of each")
    x = np.zeros((1, _K), np.float32)
    wanted = session.plan.graph.outputs
    walker = Walker(session.plan, steps, {})
    ready = (x,)

    def idle(_outputs: object, _feeds: object) -> tuple[NDArray[np.float32]]:
        return ready

    idle_steps = [PartStep(idle, step.inputs, step.outputs) if isinstance(step, PartStep) else step for step in steps]
    assert all(len(step.outputs) == 1 for step in session.plan.steps if isinstance(step, Part))
    idle_walker = Walker(session.plan, idle_steps, {})
    multiply = engines[0].multiply
    calls = [(part.run, part.outputs, part.inputs[0], name) for part, name in zip(parts, engines[0].names, strict=True)]

    def by_hand() -> NDArray[np.float32]:
        value: NDArray[np.float32] = x
        for run, outputs, taken, name in calls:
            value = multiply(name, run(outputs, {taken: value})[0])
        return value

    ways: dict[str, Callable[[], object]] = {
        "walker": lambda: walker.run({"x": x}, wanted),
        "loop written for the model": by_hand,
        "walker, parts that do nothing": lambda: idle_walker.run({"x": x}, wanted),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.pairs(15, quick=3)):
        for name, run in ways.items():
            found[name].append(us_a_step(run, 0.2))
    table = [["a step of", "median µs", "least", "most"]]
    table += [[name, f"{np.median(u):.2f}", f"{min(u):.2f}", f"{max(u):.2f}"] for name, u in found.items()]
    print(harness.draw(table, n_names=1), end="\n\n")
    added = tuple(a - b for a, b in zip(found["walker"], found["loop written for the model"], strict=True))
    alone = tuple(found["walker, parts that do nothing"])
    figures = [
        harness.Figure(name="walker less the loop", unit="µs a step", samples=added, at_most=_BAR_US),
        harness.Figure(name="walker alone", unit="µs a step", samples=alone, at_most=_BAR_US),
    ]
    harness.finish(arguments, figures=figures)


if __name__ == "__main__":
    main()
