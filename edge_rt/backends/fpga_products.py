"""Matrices in an engine's memory, once, and the products of vectors with them, a chain of jobs each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_host import Check, Host, Task, best_host
from edge_rt.backends.fpga_layout import Layout, pack_weights, unpack_activations
from edge_rt.backends.fpga_numbers import GROUP, Activations
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.devices.fpga_jobs import Job
from edge_rt.devices.fpga_ring import OTHER_BITSTREAM, RING_BYTES, RING_LOG2, EnginePort, Ring, descriptors
from edge_rt.errors import DeviceMismatchError

_PAGE = 4096
_RESULTS_ALIGNED = 256
MAX_VECTORS = 64
# Of one start: the logits of 64 vectors would take a fifth of a small model's memory.
_RESULTS_BYTES = 4 * 2**20
WORK_BYTES = _RESULTS_BYTES + 2**20  # beside the weights, but for a matrix of more rows than that holds
# The deadline of a chain. No board's memory is so slow; the first part is for a process that has to wait for a core.
_LEAST_S = 0.05
_SLOWEST_BYTES_S = 50e6


@dataclass(frozen=True, slots=True)
class Spot:
    """One packed matrix of INT4: where it is, what its products are worth and belong to, what they must add up to."""

    at: int
    first_row: int
    n_blocks: int
    group_log2: int
    asymmetric: bool
    row_unit: NDArray[np.float64]
    check: Check

    @property
    def n_rows(self) -> int:
        return len(self.row_unit)


@dataclass(frozen=True, slots=True)
class Placed:
    """A matrix of n_rows times k as its spots; number is its place among all, and the tag of its jobs.

    max_vectors  that one start takes
    """

    number: int
    max_vectors: int
    n_rows: int
    k: int
    spots: tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything lies in memory_bytes of an engine's memory: the ring first, weights, vectors, results."""

    layout: Layout
    n_vectors: int
    matrices: dict[str, Placed]
    x_at: int
    y_at: int
    memory_bytes: int


def place(matrices: Mapping[str, Matrix], layout: Layout, n_vectors: int) -> Placement:
    """Lay matrices out for an engine of n_vectors; says before anything is loaded how much memory it takes."""
    placed: dict[str, Placed] = {}
    at, x_bytes, y_bytes = RING_BYTES, 0, 0
    for name, matrix in matrices.items():
        spots = []
        for piece in matrix.pieces:
            weights = piece.weights
            n_blocks, group_log2 = layout.n_blocks(weights.n_rows), weights.group_log2
            own = (piece.first_row, n_blocks, group_log2, weights.asymmetric, weights.row_unit, Check.of(weights))
            spots.append(Spot(at, *own))
            at = _page(at + layout.weight_bytes(weights.n_rows, weights.k, group_log2))
        chunk_bytes = sum(_result_bytes(spot, layout, layout.result_places(n_vectors)) for spot in spots)
        n_chunks = min(MAX_VECTORS // n_vectors, (1 << RING_LOG2) // len(spots), _RESULTS_BYTES // chunk_bytes)
        n_chunks = max(1, n_chunks)
        placed[name] = Placed(len(placed), n_chunks * n_vectors, matrix.n_rows, matrix.k, tuple(spots))
        x_bytes = max(x_bytes, n_chunks * n_vectors * layout.vector_bytes(matrix.k))
        y_bytes = max(y_bytes, n_chunks * chunk_bytes)
    y_at = _page(at + x_bytes)
    return Placement(layout, n_vectors, placed, at, y_at, _page(y_at + y_bytes))


@dataclass(frozen=True, slots=True)
class _Chain:
    """What one start does for m vectors: jobs as descriptors, their results as a Host wants them, where they end."""

    descriptors: NDArray[np.uint8]
    results: Any
    x_bytes: int
    y_end: int
    limit_s: float


class FpgaProducts:
    """The matrices of a placement on one engine. One thread calls it.

    Raises DeviceMismatchError where the engine is another than the placement is for, OSError where it cannot be
    reached.
    """

    def __init__(
        self,
        port: EnginePort,
        placement: Placement,
        matrices: Mapping[str, Matrix],
        device: str = "the FPGA's engine",
        host: Host | None = None,
    ) -> None:
        self._port, self._placement, self._host = port, placement, host or best_host()
        self._chains: dict[tuple[int, int], _Chain] = {}
        self.ring = Ring(port, 0, device)
        caps, layout = self.ring.caps, placement.layout
        longest = max(placed.k for placed in placement.matrices.values())
        has_bytes, needs_bytes = port.memory.nbytes, placement.memory_bytes
        for what, found, wanted, fits in (
            ("bits of a port", caps.beat_bits, layout.beat_bits, caps.beat_bits == layout.beat_bits),
            ("vectors", caps.n_vectors, placement.n_vectors, caps.n_vectors >= placement.n_vectors),
            ("weights a row", caps.k_max, longest, caps.k_max >= longest),
            ("bytes of memory", has_bytes, needs_bytes, has_bytes >= needs_bytes),
        ):
            if not fits:
                raise DeviceMismatchError(
                    device=device, what=what, found=str(found), wanted=str(wanted), remedy=OTHER_BITSTREAM
                )
        for name, matrix in matrices.items():
            self.write(name, matrix)

    def write(self, name: str, matrix: Matrix) -> None:
        """Pack a matrix into its place in the engine's memory."""
        for spot, piece in zip(self._placement.matrices[name].spots, matrix.pieces, strict=True):
            self._write(spot.at, pack_weights(piece.weights, self._placement.layout))

    def multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
        """Multiply vectors [m, k], as floats or in the engine's numbers, with a matrix: float32 [m, n_rows].

        Up to 64 jobs a start. Numbers of the engine are taken as they are, so whole ones lose nothing. Raises
        ValueError for vectors that are not finite, DeviceTimeoutError and DeviceFaultError as Ring.run does, and
        DeviceFaultError for products that do not add up.
        """
        matrix = self._placement.matrices[name]
        out = np.zeros((len(x), matrix.n_rows), np.float32)
        for first in range(0, len(x), matrix.max_vectors):
            some = slice(first, first + matrix.max_vectors)
            self._run(matrix, x[some], out[some])
        return out

    def rounded(self, name: str, x: NDArray[np.float32] | Activations) -> Activations:
        """Give vectors as multiply rounds them."""
        if isinstance(x, Activations):
            return x
        layout, k = self._placement.layout, self._placement.matrices[name].k
        vectors = np.empty(len(x) * layout.vector_bytes(k), np.uint8)
        units = self._host.encode(x, layout, vectors)
        return dataclasses.replace(unpack_activations(vectors, k, layout), unit=units)

    def _run(self, matrix: Placed, x: NDArray[np.float32] | Activations, out: NDArray[np.float32]) -> None:
        port, layout = self._port, self._placement.layout
        chain, x_at, y_at = self._chain(matrix, len(x)), self._placement.x_at, self._placement.y_at
        vectors = port.memory[x_at : x_at + chain.x_bytes]
        units = self._host.encode(x, layout, vectors)
        port.flush(x_at, chain.x_bytes)
        self.ring.run(chain.descriptors, chain.limit_s)
        port.invalidate(y_at, chain.y_end - y_at)
        if not self._host.finish(chain.results, vectors, layout, matrix.k, units, out):
            raise self.ring.fault("what it computed does not add up")

    def _chain(self, matrix: Placed, m: int) -> _Chain:
        if (found := self._chains.get((matrix.number, m))) is None:
            found = self._chains[matrix.number, m] = self._new_chain(matrix, m)
        return found

    def _new_chain(self, matrix: Placed, m: int) -> _Chain:
        placement, layout = self._placement, self._placement.layout
        x_bytes, y_at = layout.vector_bytes(matrix.k), placement.y_at
        tasks, jobs, n_bytes = [], [], m * x_bytes
        for first in range(0, m, placement.n_vectors):
            n = min(placement.n_vectors, m - first)
            n_places = layout.result_places(n)
            for spot in matrix.spots:
                y_bytes = spot.n_blocks * layout.block_rows * n_places * 4
                tasks.append(Task(spot.first_row, spot.row_unit, spot.check, first, n, n_places, y_at, y_bytes))
                jobs.append(self._job(matrix, spot, n, placement.x_at + first * x_bytes, y_at))
                y_at += _result_bytes(spot, layout, n_places)
                n_bytes += y_bytes + layout.weight_bytes(spot.n_rows, matrix.k, spot.group_log2)
        results = self._host.prepare(tasks, self._port.memory)
        return _Chain(descriptors(jobs), results, m * x_bytes, y_at, _LEAST_S + n_bytes / _SLOWEST_BYTES_S)

    def _job(self, matrix: Placed, spot: Spot, m: int, x_at: int, y_at: int) -> Job:
        base = self._port.base
        return Job(
            weights=base + spot.at,
            activations=base + x_at,
            results=base + y_at,
            n_blocks=spot.n_blocks,
            n_groups=matrix.k // GROUP,
            n_vectors=m,
            group_log2=spot.group_log2,
            block_log2=self._placement.layout.block_rows.bit_length() - 1,
            asymmetric=spot.asymmetric,
            tag=matrix.number,
        )

    def _write(self, at: int, data: NDArray[np.uint8]) -> None:
        self._port.memory[at : at + data.nbytes] = data
        self._port.flush(at, data.nbytes)


def _result_bytes(spot: Spot, layout: Layout, n_places: int) -> int:
    n_bytes = spot.n_blocks * layout.block_rows * n_places * 4
    return -(-n_bytes // _RESULTS_ALIGNED) * _RESULTS_ALIGNED


def _page(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
