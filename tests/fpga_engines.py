"""Engines for models on the FPGA without one: `from tests.fpga_engines import FloatEngine, golden_opener`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends import fpga_onnx
from edge_rt.backends.base import Absent, Device, MemoryNeed, ModelFile, TensorOptions
from edge_rt.backends.fpga_engine import EngineReport, FpgaEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import Activations
from edge_rt.backends.fpga_onnx_plan import Rule
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import place
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort


class FloatEngine:
    """Multiplies the matrices as they are in float64, and vectors without rounding them."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self._weights = {name: matrix.to_float() for name, matrix in matrices.items()}
        self.n_vectors = 0
        self.n_products = 0
        self.is_closed = False

    def multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
        floats = x.to_float() if isinstance(x, Activations) else x.astype(np.float64)
        self.n_vectors += len(floats)
        self.n_products += 1
        return (floats @ self._weights[name].T).astype(np.float32)

    def report(self) -> EngineReport:
        return EngineReport(
            n_products=self.n_products,
            n_on_cpu=0,
            n_faults=0,
            n_retried=0,
            on_cpu=(),
            is_lost=False,
            last_fault="",
            memory_bytes=0,
        )

    def close(self) -> None:
        self.is_closed = True


def golden_port(matrices: Mapping[str, Matrix], config_name: str = "kv260-gemm", **changes: Any) -> GoldenPort:
    """Make the golden model behind a strict cache, with memory for these matrices."""
    config = CONFIGS[config_name]
    placement = place(matrices, Layout(config.beat_bits), config.n_vectors)
    return GoldenPort(config, np.zeros(placement.memory_bytes, np.uint8), **changes)


@dataclass
class Opened:
    """Opens engines and keeps them, so that a test can ask what they did."""

    make: Callable[[Mapping[str, Matrix]], Any]
    engines: list[Any] = field(default_factory=list)

    def __call__(self, matrices: Mapping[str, Matrix]) -> Any:
        self.engines.append(self.make(matrices))
        return self.engines[-1]

    @property
    def last(self) -> Any:
        return self.engines[-1]


def golden_opener(config_name: str = "kv260-gemm") -> Opened:
    return Opened(lambda matrices: FpgaEngine.load(golden_port(matrices, config_name), matrices))


def float_opener() -> Opened:
    return Opened(FloatEngine)


class SimulatedFpga:
    """A tensor back end on the golden model, which takes every product however small; engines are those it opened."""

    name: ClassVar[str] = "fpga"
    rule = Rule(min_intensity=0)

    def __init__(self, opener: Opened | None = None) -> None:
        self.engines = opener or golden_opener()

    def probe(self) -> tuple[Device, ...] | Absent:
        return (Device(id="fpga-golden", kind="fpga", detail="the golden model", evidence="simulator", reference=True),)

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        return fpga_onnx.supports(file, options, self.rule)

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:
        return fpga_onnx.estimate(file, options, self.rule)

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> fpga_onnx.FpgaOnnxSession:
        return fpga_onnx.load(file, options, self.engines, self.rule, evidence="simulator")
