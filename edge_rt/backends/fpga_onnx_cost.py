"""What an ONNX model would take of a board's FPGA engine, product by product: cycles projected, the rest measured.

The model runs with zeros for weights, on an engine that answers at once. All of the host's work is done: parts in
onnxruntime, patches, packing, results read and checked; so its time is measured, on the machine that this runs on. The
jobs that the engine would have got are counted, and their cycles are those of the cycle model, each job by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends import fpga_onnx
from edge_rt.backends.base import DTYPES, ModelFile, TensorOptions, TensorSession
from edge_rt.backends.fpga_cycles import Board, job_cycles
from edge_rt.backends.fpga_engine import FpgaEngine
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import GROUP
from edge_rt.backends.fpga_onnx_plan import DEFAULT_RULE, Rule
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import place
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.devices import fpga_regs as regs
from edge_rt.devices.fpga_jobs import Job
from edge_rt.tensor_types import NodePlacement, TensorSpec

_N_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCost:
    """One product of a run. engine_s is projected; n_macs are multiplications without padding."""

    label: str
    kind: str
    n_rows: int
    k: int
    n_vectors: int
    n_jobs: int
    n_macs: int
    cycles: float
    engine_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """What a run of the model takes.

    engine_s  projected, of all products
    n_starts  of the engine
    host_s    measured here: everything but the engine
    cpu_s     measured here: the whole model in onnxruntime, with as many threads
    """

    board: str
    products: tuple[ProductCost, ...]
    placement: tuple[NodePlacement, ...]
    n_starts: int
    engine_s: float
    host_s: float
    cpu_s: float


@dataclass(slots=True)
class IdlePort:
    """An engine of a board's kind that is always done at once; while is_counting it notes its jobs."""

    board: Board
    memory: NDArray[np.uint8]
    base: int = 0
    is_counting: bool = True
    n_starts: int = 0
    jobs: list[Job] = field(default_factory=list)
    _registers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine, caps = self.board.engine, 0
        for place_of, value in (
            (regs.CAPS_BEAT_BYTES, engine.beat_bits // 8),
            (regs.CAPS_PORTS, engine.n_ports),
            (regs.CAPS_VECTORS, engine.n_vectors),
            (regs.CAPS_K_MAX_LOG2, DEFAULT_RULE.k_max.bit_length() - 1),
            (regs.CAPS_VERSION, regs.MAP_VERSION),
        ):
            caps |= value << place_of[0]
        self._registers = {regs.ID: regs.ENGINE_ID, regs.CAPS: caps, regs.BUILD: regs.BUILD_HASH}

    def read(self, offset: int) -> int:
        return self._registers.get(offset, 0)

    def write(self, offset: int, value: int) -> None:
        if offset != regs.CTRL:  # it stops at once
            self._registers[offset] = self.read(offset) & ~value if offset == regs.IRQ_STATUS else value

    def flush(self, at: int, n_bytes: int) -> None:
        """Nothing to do: nobody reads."""

    def invalidate(self, at: int, n_bytes: int) -> None:
        """Nothing to do: nobody writes."""

    def pause(self, seconds: float) -> None:
        """Nothing to do: it needs no time."""

    def wait(self, limit_s: float) -> bool:  # noqa: ARG002 - the protocol's
        self.n_starts += 1
        head, tail = self.read(regs.HEAD), self.read(regs.TAIL)
        ring = self.read(regs.RING_LO) | self.read(regs.RING_HI) << 32
        for i in range((tail - head & 0xFFFF) * self.is_counting):
            at = ring + regs.DESCRIPTOR_BYTES * ((head + i) % (1 << self.read(regs.RING_LOG2)))
            if (job := Job.of(self.memory[at : at + regs.DESCRIPTOR_BYTES])) is not None:
                self.jobs.append(job)
        self._registers[regs.HEAD] = tail
        self._registers[regs.IRQ_STATUS] = 1
        return True


def measure(
    file: ModelFile,
    options: TensorOptions,
    board: Board,
    rule: Rule = DEFAULT_RULE,
    *,
    free_size: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> PlanCost:
    """Run a model with zeros and count. free_size is taken for sizes that the model leaves open, 1 for the first.

    Raises as fpga_onnx.load does, and InvalidRequestError where the model does not take these sizes.
    """
    ports: list[IdlePort] = []

    def opener(matrices: Mapping[str, Matrix]) -> FpgaEngine:
        layout = Layout(board.engine.beat_bits)
        n_bytes = place(matrices, layout, board.engine.n_vectors).memory_bytes
        ports.append(IdlePort(board, np.zeros(n_bytes, np.uint8)))
        return FpgaEngine.load(ports[-1], {name: _empty(matrix) for name, matrix in matrices.items()})

    feeds = {spec.name: _zeros(spec, free_size) for spec in file.onnx.inputs}
    session = fpga_onnx.load(file, options, opener, rule)
    try:
        session.run(feeds)
        ports[0].is_counting, n_starts = False, ports[0].n_starts
        host_s = _fastest(session, feeds, now)
    finally:
        session.close()
    on_cpu = OnnxCpuBackend().load_tensor(file, options)
    try:
        cpu_s = _fastest(on_cpu, feeds, now)
    finally:
        on_cpu.close()
    products = _costs(session, ports[0].jobs, board)
    return PlanCost(
        board=board.name,
        products=products,
        placement=session.info.placement,
        n_starts=n_starts,
        engine_s=sum(each.engine_s for each in products),
        host_s=host_s,
        cpu_s=cpu_s,
    )


def _costs(session: fpga_onnx.FpgaOnnxSession, jobs: list[Job], board: Board) -> tuple[ProductCost, ...]:
    """Give each product its jobs: their tags are the places of its matrices among all."""
    by_tag: dict[int, list[Job]] = {}
    for job in jobs:
        by_tag.setdefault(job.tag, []).append(job)
    found, tag = [], 0
    for product in session.plan.products:
        weights = product.weights
        numbers = range(tag, tag + weights.n_groups)
        own = [job for number in numbers for job in by_tag.get(number, ())]
        tag += weights.n_groups
        cycles = sum(
            job_cycles(
                board.engine,
                board.memory,
                n_rows=job.n_blocks << job.block_log2,
                k=job.n_groups * GROUP,
                n_vectors=job.n_vectors,
                group_log2=job.group_log2,
                block_rows=1 << job.block_log2,
            )
            for job in own
        )
        # A matrix of two pieces, at two addresses, takes a job for each of its pieces.
        n_vectors = sum(
            sum(job.n_vectors for job in each) // len({job.weights for job in each})
            for each in (by_tag.get(number, []) for number in numbers)
            if each
        )
        found.append(
            ProductCost(
                label=product.label,
                kind=product.kind,
                n_rows=product.n_rows,
                k=weights.k,
                n_vectors=n_vectors,
                n_jobs=len(own),
                n_macs=n_vectors * weights.n * weights.k,
                cycles=cycles,
                engine_s=cycles / board.clock_hz,
            )
        )
    return tuple(found)


def _empty(matrix: Matrix) -> Matrix:
    """Give a matrix of this shape and kind whose products are what the idle engine leaves in memory: zeros."""
    pieces = (
        replace(
            piece, weights=replace(piece.weights, q=np.zeros_like(piece.weights.q), z=np.zeros_like(piece.weights.z))
        )
        for piece in matrix.pieces
    )
    return replace(matrix, pieces=tuple(pieces))


def _fastest(session: TensorSession, feeds: Mapping[str, NDArray[Any]], now: Callable[[], float]) -> float:
    session.run(feeds)
    took = []
    for _ in range(_N_RUNS):
        start = now()
        session.run(feeds)
        took.append(now() - start)
    return min(took)


def _zeros(spec: TensorSpec, free_size: int) -> NDArray[Any]:
    shape = [(1 if at == 0 else free_size) if size < 0 else size for at, size in enumerate(spec.shape)]
    return np.full(shape, b"" if spec.datatype == "BYTES" else 0, DTYPES[spec.datatype])
