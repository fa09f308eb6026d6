"""What the host computes at each product: vectors in the engine's numbers, its sums as products, and their totals.

In numpy, and where the native engine's library is there in C: with numpy alone the host takes longer than the engine.

A wrong sum shows in the total of all: the products of a vector with a matrix add up to its product with the sum of the
matrix' rows, which is computed here from numbers that never left the host (Huang and Abraham, Algorithm-based fault
tolerance for matrix operations, 1984). The engine rounds its sums to float32 and nothing else, so what may be between
both totals is known, and a right result never looks wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_layout import Layout, pack_activations, unpack_activations
from edge_rt.backends.fpga_numbers import E_MAX, F_ONE, GROUP, Z_STEPS, Activations, Weights, encode_activations
from edge_rt.backends.native_library import load_native
from edge_rt.errors import BackendUnavailableError

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_HALF_ULP = 2.0**-24  # of float32: what rounding a sum may cost, as a share of it
_EPS = float(np.finfo(np.float64).eps)
_LARGEST = 128 * ((2 * F_ONE - 1) << E_MAX)  # an activation in units of its vector
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """What a matrix' products must add up to: columns float64 [k], the sums of its rows' weights.

    share  of the sum of the products' sizes, and unit_share of a vector's unit, that right totals may be apart
    """

    columns: Doubles
    share: float
    unit_share: float

    @classmethod
    def of(cls, weights: Weights) -> Check:
        columns, size = np.zeros(weights.k), 0.0
        for first in range(0, weights.n_rows, _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            scale = weights.scale[rows] * weights.row_unit[rows, None]
            q = weights.q[rows].reshape(*scale.shape, GROUP << weights.group_log2).astype(np.float64)
            if weights.asymmetric:
                q *= Z_STEPS
                q -= weights.z[rows, :, None]
            q *= scale[..., None]
            columns += q.sum(axis=0).reshape(-1)
            size += float(np.abs(q).sum())
        n_added = weights.n_rows + weights.k + 8
        return cls(columns, _HALF_ULP * (1 + 2.0**-20) + n_added * _EPS, n_added * _EPS * size * _LARGEST)

    def is_right(self, products: Doubles, expected: Doubles, units: Doubles) -> bool:
        """Compare the totals of products [m, n_rows] with what is expected [m]."""
        size = np.abs(products).sum(axis=1)
        apart, allowed = np.abs(products.sum(axis=1) - expected), size * self.share + units * self.unit_share
        # An infinity may be as far apart as it is large; the engine has none.
        return bool((np.isfinite(size) & (apart <= allowed)).all())


@dataclass(frozen=True, slots=True)
class Task:
    """One job's results: sums of rows from first_row on, each n_places wide, with m vectors of a call from first on.

    They lie from y_at on in the engine's memory.
    """

    first_row: int
    row_unit: Doubles
    check: Check
    first: int
    m: int
    n_places: int
    y_at: int
    y_bytes: int

    def sums(self, memory: Bytes) -> Floats:
        """Give the sums as they lie there, float32 [n_rows, n_places]."""
        data: Floats = memory[self.y_at : self.y_at + self.y_bytes].view("<f4").reshape(-1, self.n_places)
        return data[: len(self.row_unit)]


class Host(Protocol):
    """Computes for one thread."""

    def encode(self, x: Floats | Activations, layout: Layout, out: Bytes) -> Doubles:
        """Write vectors [m, k] as the engine reads them into out, UINT8 [m * vector_bytes]; gives their units [m].

        Raises ValueError for vectors that are not finite.
        """
        ...

    def prepare(self, tasks: Sequence[Task], memory: Bytes) -> Any:
        """Make what finish takes of tasks whose results lie in this memory; it may be kept."""
        ...

    def finish(self, prepared: Any, vectors: Bytes, layout: Layout, k: int, units: Doubles, out: Floats) -> bool:
        """Add the products of encoded vectors to out, float32 [m, n]; False if those of a vector do not add up."""
        ...


class NumpyHost:
    """In numpy."""

    def encode(self, x: Floats | Activations, layout: Layout, out: Bytes) -> Doubles:
        encoded = x if isinstance(x, Activations) else encode_activations(x)
        out[:] = pack_activations(encoded, layout)
        return encoded.unit

    def prepare(self, tasks: Sequence[Task], memory: Bytes) -> Any:
        return [(task, task.sums(memory)) for task in tasks]

    def finish(self, prepared: Any, vectors: Bytes, layout: Layout, k: int, units: Doubles, out: Floats) -> bool:
        x = unpack_activations(vectors, k, layout).to_float() * units[:, None]
        for task, sums in prepared:
            some = slice(task.first, task.first + task.m)
            products = sums[:, : task.m].T * task.row_unit * units[some, None]
            out[some, task.first_row : task.first_row + len(task.row_unit)] += products.astype(np.float32)
            if not task.check.is_right(products, x[some] @ task.check.columns, units[some]):
                return False
        return True


class _Task(ctypes.Structure):
    """en_fpga_task."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "row_units", "columns")),
        *((name, ctypes.c_double) for name in ("share", "unit_share")),
        *((name, ctypes.c_int32) for name in ("n_rows", "n_places", "m", "first", "first_row", "pad")),
    )


class NativeHost(NumpyHost):
    """In C. Raises AttributeError where the library has no such functions."""

    def __init__(self, lib: Any) -> None:
        pointer, c_int, c_long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self._encode, self._finish = lib.en_fpga_encode, lib.en_fpga_finish
        self._encode.restype = self._finish.restype = c_int
        self._encode.argtypes = (pointer, c_int, c_int, pointer, c_long, pointer)
        self._finish.argtypes = (pointer, c_int, pointer, c_long, c_int, pointer, pointer, c_long)

    def encode(self, x: Floats | Activations, layout: Layout, out: Bytes) -> Doubles:
        if isinstance(x, Activations):
            return super().encode(x, layout, out)
        m, k = x.shape
        if k % GROUP:
            raise ValueError(f"vectors of {k} numbers, not a multiple of {GROUP}")
        x, units = np.ascontiguousarray(x, np.float32), np.empty(m)
        if self._encode(_at(x), m, k, _at(out), layout.vector_bytes(k), _at(units)):
            raise ValueError("an activation is not a finite number")
        return units

    def prepare(self, tasks: Sequence[Task], memory: Bytes) -> Any:
        array = (_Task * len(tasks))()
        for to, task in zip(array, tasks, strict=True):
            to.sums, to.row_units = _at(task.sums(memory)), _at(task.row_unit)
            to.columns, to.share, to.unit_share = _at(task.check.columns), task.check.share, task.check.unit_share
            to.n_rows, to.n_places, to.m = len(task.row_unit), task.n_places, task.m
            to.first, to.first_row = task.first, task.first_row
        return array, ctypes.addressof(array), tasks, memory  # what it points to must stay

    def finish(self, prepared: Any, vectors: Bytes, layout: Layout, k: int, units: Doubles, out: Floats) -> bool:
        array, address, _, _ = prepared
        stride = layout.vector_bytes(k)
        return bool(
            self._finish(address, len(array), _at(vectors), stride, k, _at(units), _at(out), out.strides[0] // 4)
        )


def _at(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]  # a third of what ctypes.data takes
    return address


def best_host() -> Host:
    """Give the fastest host that is here."""
    try:
        return NativeHost(load_native())
    except BackendUnavailableError:
        return NumpyHost()
