"""Matrices in an engine's memory, once, and the products of vectors with them, a chain of jobs each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_layout import Layout, pack_activations, pack_weights
from edge_rt.backends.fpga_numbers import GROUP, Activations, encode_activations, to_products
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.devices.fpga_jobs import Job
from edge_rt.devices.fpga_ring import RING_BYTES, RING_LOG2, EnginePort, Ring
from edge_rt.errors import BackendStepError

_PAGE = 4096
MAX_VECTORS = 64


@dataclass(frozen=True, slots=True)
class Spot:
    """One packed matrix of INT4: where it is, and what its products are worth and belong to."""

    at: int
    first_row: int
    n_blocks: int
    group_log2: int
    asymmetric: bool
    row_unit: NDArray[np.float64]

    @property
    def n_rows(self) -> int:
        return len(self.row_unit)


@dataclass(frozen=True, slots=True)
class Placed:
    """A matrix of n_rows times k as its spots."""

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
    at, placed, x_bytes, y_bytes = RING_BYTES, {}, 0, 0
    for name, matrix in matrices.items():
        spots = []
        for piece in matrix.pieces:
            weights = piece.weights
            n_blocks, group_log2 = layout.n_blocks(weights.n_rows), weights.group_log2
            spots.append(Spot(at, piece.first_row, n_blocks, group_log2, weights.asymmetric, weights.row_unit))
            at = _page(at + layout.weight_bytes(weights.n_rows, weights.k, group_log2))
        placed[name] = Placed(matrix.n_rows, matrix.k, tuple(spots))
        n_most = -(-MAX_VECTORS // n_vectors) * n_vectors
        x_bytes = max(x_bytes, n_most * layout.vector_bytes(matrix.k))
        n_chunks, n_places = n_most // n_vectors, layout.result_places(n_vectors)
        y_bytes = max(y_bytes, n_chunks * sum(_page(_result_bytes(spot, layout, n_places)) for spot in spots))
    y_at = _page(at + x_bytes)
    return Placement(layout, n_vectors, placed, at, y_at, _page(y_at + y_bytes))


@dataclass(frozen=True, slots=True)
class _Task:
    """One job, and what its results are: sums of the spot's rows with these vectors of a call."""

    spot: Spot
    first: int
    x: Activations
    x_at: int
    y_at: int


class FpgaProducts:
    """The matrices of a placement on one engine. One thread calls it.

    Raises BackendStepError where the engine is another than the placement is for.
    """

    def __init__(self, port: EnginePort, placement: Placement, matrices: Mapping[str, Matrix]) -> None:
        self._port, self._placement = port, placement
        self._ring = Ring(port, 0)
        caps, layout = self._ring.caps, placement.layout
        longest = max(placed.k for placed in placement.matrices.values())
        for what, has, needs, fits in (
            ("ports of so many bits", caps.beat_bits, layout.beat_bits, caps.beat_bits == layout.beat_bits),
            ("vectors", caps.n_vectors, placement.n_vectors, caps.n_vectors >= placement.n_vectors),
            ("weights a row", caps.k_max, longest, caps.k_max >= longest),
            (
                "bytes of memory",
                port.memory.nbytes,
                placement.memory_bytes,
                port.memory.nbytes >= placement.memory_bytes,
            ),
        ):
            if not fits:
                raise BackendStepError(reason=f"the FPGA's engine has {has} {what}; the model needs {needs}")
        for name, matrix in matrices.items():
            for spot, piece in zip(placement.matrices[name].spots, matrix.pieces, strict=True):
                self._write(spot.at, pack_weights(piece.weights, layout))

    def multiply(self, name: str, x: NDArray[np.float32] | Activations) -> NDArray[np.float32]:
        """Multiply vectors [m, k], as floats or in the engine's numbers, with a matrix: float32 [m, n_rows].

        Up to 64 jobs a start. Numbers of the engine are taken as they are, so whole ones lose nothing.
        """
        matrix = self._placement.matrices[name]
        out = np.zeros((len(x), matrix.n_rows), np.float32)
        n_chunks = min((1 << RING_LOG2) // len(matrix.spots), MAX_VECTORS // self._placement.n_vectors)
        for first in range(0, len(x), n_chunks * self._placement.n_vectors):
            self._chain(matrix, x[first : first + n_chunks * self._placement.n_vectors], out[first:])
        return out

    def _chain(self, matrix: Placed, x: NDArray[np.float32] | Activations, out: NDArray[np.float32]) -> None:
        tasks = list(self._tasks(matrix, x))
        self._ring.run([self._job(task, matrix.k) for task in tasks])
        for task in tasks:
            spot, m = task.spot, len(task.x.q)
            products = to_products(self._sums(task), spot.row_unit, task.x)
            out[task.first : task.first + m, spot.first_row : spot.first_row + spot.n_rows] += products

    def _tasks(self, matrix: Placed, x: NDArray[np.float32] | Activations) -> Iterator[_Task]:
        layout, n_vectors = self._placement.layout, self._placement.n_vectors
        x_at, y_at = self._placement.x_at, self._placement.y_at
        for first in range(0, len(x), n_vectors):
            part = x[first : first + n_vectors]
            encoded = part if isinstance(part, Activations) else encode_activations(part)
            packed = pack_activations(encoded, layout)
            self._write(x_at, packed)
            for spot in matrix.spots:
                yield _Task(spot, first, encoded, x_at, y_at)
                y_at = _page(y_at + _result_bytes(spot, layout, layout.result_places(len(encoded.q))))
            x_at += packed.nbytes

    def _job(self, task: _Task, k: int) -> Job:
        base, spot = self._port.base, task.spot
        return Job(
            weights=base + spot.at,
            activations=base + task.x_at,
            results=base + task.y_at,
            n_blocks=spot.n_blocks,
            n_groups=k // GROUP,
            n_vectors=len(task.x.q),
            group_log2=spot.group_log2,
            block_log2=self._placement.layout.block_rows.bit_length() - 1,
            asymmetric=spot.asymmetric,
        )

    def _sums(self, task: _Task) -> NDArray[np.float32]:
        layout, m = self._placement.layout, len(task.x.q)
        n_places = layout.result_places(m)
        n_bytes = _result_bytes(task.spot, layout, n_places)
        self._port.invalidate(task.y_at, n_bytes)
        data = self._port.memory[task.y_at : task.y_at + n_bytes].view("<f4").reshape(-1, n_places)
        return np.ascontiguousarray(data[: task.spot.n_rows, :m])

    def _write(self, at: int, data: NDArray[np.uint8]) -> None:
        self._port.memory[at : at + data.nbytes] = data
        self._port.flush(at, data.nbytes)


def _result_bytes(spot: Spot, layout: Layout, n_places: int) -> int:
    return spot.n_blocks * layout.block_rows * n_places * 4


def _page(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE
