"""Models on an FPGA's INT4 engine: it multiplies their matrices, the CPU computes the rest.

A language model runs in the native engine (native.py) with its matrices on the FPGA; an ONNX model as fpga_onnx.py cuts
it. fpga is a board, reached through pynq; fpga_sim simulates the engine's RTL, where edge_rt runs from a checkout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from edge_rt import config
from edge_rt.backends.base import (
    Absent,
    Device,
    DeviceCounts,
    LoadOptions,
    MemoryNeed,
    ModelFile,
    TensorOptions,
    TensorSession,
)
from edge_rt.backends.fpga_engine import EngineReport, FpgaEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_llama import GgufMatrices, packed_bytes, unsupported_matrices
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import WORK_BYTES, place
from edge_rt.backends.llama_library import load_library
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.backends.native_config import NativeConfig, read_config
from edge_rt.backends.native_library import load_native
from edge_rt.backends.onnx_cpu import load_runtime
from edge_rt.devices import cpu, fpga, fpga_sim
from edge_rt.errors import BackendLoadError, BackendUnavailableError, ConfigError
from edge_rt.types import Evidence, ModelInfo

_log = logging.getLogger(__name__)

_LAYOUT = Layout(128)  # for estimates; with ports of 64 bits a model takes as much


@dataclass(frozen=True, slots=True)
class Source:
    """Where an engine comes from. look loads nothing; open gives the engine for good, and may take long."""

    device_id: str
    evidence: Evidence
    look: Callable[[], fpga.Seen]
    open: Callable[[], fpga.Board]


def _board() -> Source:
    bitstream = config.load().config.fpga.bitstream
    return Source("fpga", "device", lambda: fpga.look(bitstream), lambda: fpga.open_board(bitstream))


def _simulator() -> Source:
    name = config.load().config.fpga.simulated
    return Source(fpga_sim.DEVICE_ID, "simulator", lambda: fpga_sim.look(name), lambda: fpga_sim.open_board(name))


class FpgaBackend:
    """Loads models into the engine of a board."""

    name: ClassVar[str] = "fpga"
    _find: Callable[[], Source] = staticmethod(_board)

    def __init__(self, source: Source | None = None) -> None:
        self._given = source

    def _source(self) -> Source:
        return self._given or self._find()

    def probe(self) -> tuple[Device, ...] | Absent:
        try:
            source = self._source()
            seen = source.look()
        except ConfigError as exc:
            return Absent(reason=str(exc))
        if seen.missing:
            return Absent(reason=seen.missing, extra=seen.extra)
        return (
            Device(
                id=source.device_id,
                kind="fpga",
                detail=seen.detail,
                evidence=source.evidence,
                reference=source.evidence != "device",
                free_bytes=seen.free_bytes,
            ),
        )

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:
        """Say why not: the native engine's reasons, and types of weights that the engine does not multiply."""
        return NativeBackend().supports(file, options) or unsupported_matrices(file.header)

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:
        """Estimate from the header: the matrices in the engine's memory, and the native engine's KV and scratch."""
        need = NativeBackend().estimate(file, options)
        return replace(need, weights_bytes=packed_bytes(file.header, _LAYOUT) + WORK_BYTES)

    def load(self, file: ModelFile, options: LoadOptions) -> FpgaTokenSession:
        """Load a language model. Raises as Backend.load, DeviceNotFoundError, -MismatchError and -MemoryError."""
        if reason := self.supports(file, options):
            raise BackendLoadError(model=file.model, reason=reason)
        load_library()  # for its tokenizer; what is missing is missed before the board is loaded
        lib = load_native()
        model_config = read_config(file.model, str(file.path), file.header)
        source = self._source()
        engine = _open(source, GgufMatrices(file))
        try:
            options = replace(options, device=source.device_id)
            session = FpgaTokenSession(lib, file, model_config, options, engine, self.name)
            session.info = replace(session.info, evidence=source.evidence)
        except BaseException:
            engine.close()
            raise
        return session

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        try:
            load_runtime()  # of the extra `onnx`, which language models do not need
        except BackendUnavailableError as exc:
            return str(exc)
        from edge_rt.backends import fpga_onnx

        return fpga_onnx.supports(file, options)

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:
        load_runtime()
        from edge_rt.backends import fpga_onnx

        return fpga_onnx.estimate(file, options)

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> TensorSession:
        """Load an ONNX model. Raises as load does."""
        load_runtime()
        from edge_rt.backends import fpga_onnx

        source = self._source()
        options = replace(options, device=source.device_id)
        session = fpga_onnx.load(file, options, lambda matrices: _open(source, matrices), evidence=source.evidence)
        session.info = replace(session.info, backend=self.name)
        return session


class SimulatedFpgaBackend(FpgaBackend):
    """Loads models into the simulated engine: for whoever has no board, and for tests. Chosen only by its name."""

    name: ClassVar[str] = "fpga_sim"
    _find: Callable[[], Source] = staticmethod(_simulator)


def _open(source: Source, matrices: Mapping[str, Matrix]) -> FpgaEngine:
    board = source.open()
    try:
        placement = place(matrices, Layout(board.caps.beat_bits), board.caps.n_vectors)
        port = board.allocate(placement.memory_bytes)
        return FpgaEngine.load(port, matrices, placement, device=source.device_id, close=board.close)
    except BaseException:
        board.close()
        raise


class FpgaTokenSession(NativeSession):
    """A language model whose matrices an FPGA multiplies; all else is NativeSession's."""

    info: ModelInfo

    def __init__(
        self,
        lib: object,
        file: ModelFile,
        model_config: NativeConfig,
        options: LoadOptions,
        engine: FpgaEngine,
        backend: str,
    ) -> None:
        self.engine = engine
        super().__init__(
            lib, file, file.header, model_config, options, cpu.usable(), multiply=engine.multiply, backend=backend
        )

    def report(self) -> EngineReport:
        """Say what the FPGA has computed, and what the CPU in its place."""
        return self.engine.report()

    def device_counts(self) -> DeviceCounts:
        return self.engine.report().counts()

    def close(self) -> None:
        super().close()
        self.engine.close()
