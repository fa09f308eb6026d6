"""Walk a plan: parts in onnxruntime, products on an engine, values handed on and dropped after use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_numbers import F_ONE, GROUP, Activations
from edge_rt.backends.fpga_onnx_patches import blocks
from edge_rt.backends.fpga_onnx_plan import Part, Plan
from edge_rt.backends.fpga_onnx_products import Product
from edge_rt.backends.tensor_feeds import MAX_ELEMENTS, shown
from edge_rt.errors import InvalidRequestError

Values = dict[str, Any]
Run = Callable[[Sequence[str], Mapping[str, Any]], Sequence[Any]]


class ProductStep:
    """A product: its input as the engine takes it, and its output as the graph wants it."""

    def __init__(self, product: Product, row_sums: NDArray[np.float64], multiply: Callable[..., Any]) -> None:
        self.product, self._multiply = product, multiply
        self._k, self._k_padded = product.weights.k, product.weights.k_padded
        self._names = product.matrix_names
        taken = product.taken
        # INT8 are taken as they are; UINT8 less 128, which turns their upper bit over.
        self._zero = 0 if taken is None else taken.zero - (0 if taken.is_signed else 128)
        self._type = None if taken is None else np.dtype(np.int8 if taken.is_signed else np.uint8)
        bias = product.bias if product.bias.size else np.zeros(product.n_rows)
        if taken is not None:
            bias = bias - self._zero * taken.scale * row_sums
        self._bias = bias.astype(np.float32) if bias.any() else None

    def __call__(self, values: Values) -> None:
        x = values[self.product.value]
        if not isinstance(x, np.ndarray) or (self._type is not None and x.dtype != self._type):
            raise self._bad(f"gets {getattr(x, 'dtype', type(x).__name__)}, not {self._type or 'floats'}")
        out = self._rows(x) if self.product.window is None else self._pictures(x)
        values[self.product.output] = self._given(out)

    def _rows(self, x: NDArray[Any]) -> NDArray[np.float32]:
        if not x.ndim or x.shape[-1] != self._k:
            raise self._bad(f"gets {shown(x.shape)}, its rows have {self._k} weights")
        self._check_size(x.size // self._k, x.shape)
        vectors = x.reshape(-1, self._k)
        if self._k_padded > self._k:
            vectors = np.pad(vectors, ((0, 0), (0, self._k_padded - self._k)), constant_values=0)
        out = self._product(self._names[0], self._whole(vectors))
        if self._bias is not None:
            out += self._bias
        return out.reshape(*x.shape[:-1], out.shape[1])

    def _pictures(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Compute a convolution of [batch, channels, ...], one picture and group after the other."""
        window = self.product.window
        assert window is not None
        weights = self.product.weights
        n_taps = window.kernel[0] * window.kernel[1]
        n_channels = weights.k // n_taps
        if x.ndim != window.rank + 2 or x.shape[1] != n_channels * weights.n_groups:
            raise self._bad(f"gets {shown(x.shape)}, its weights are for {n_channels * weights.n_groups} channels")
        pictures = x.reshape(x.shape[0], x.shape[1], *([1] * (2 - window.rank)), *x.shape[2:])
        sizes = [window.geometry(dim, size)[0] for dim, size in enumerate(pictures.shape[2:])]
        if min(sizes) < 1:
            raise self._bad(f"gets {shown(x.shape)}, less than its window")
        self._check_size(len(x) * sizes[0] * sizes[1], x.shape)
        out = np.empty((len(x), self.product.n_rows, *sizes), np.float32)
        for picture, made in zip(pictures, out, strict=True):
            last = self._whole(np.ascontiguousarray(picture.transpose(1, 2, 0)))
            for group, name in enumerate(self._names):
                own = last[:, :, group * n_channels : (group + 1) * n_channels]
                rows = made[group * weights.n : (group + 1) * weights.n]
                for block in blocks(own, window, self._zero, self._k_padded):
                    found = self._product(name, block.vectors)
                    shape = (block.bottom - block.top, block.right - block.left, weights.n)
                    rows[:, block.top : block.bottom, block.left : block.right] = found.reshape(shape).transpose(
                        2, 0, 1
                    )
        if self._bias is not None:
            out += self._bias[:, None, None]
        return out.reshape(len(x), self.product.n_rows, *sizes[2 - window.rank :])

    def _check_size(self, n_vectors: int, shape: tuple[int, ...]) -> None:
        if (n_elements := n_vectors * self.product.n_rows) > MAX_ELEMENTS:
            raise self._bad(f"would make {n_elements} elements of {shown(shape)}, the limit is {MAX_ELEMENTS}")

    def _whole(self, x: NDArray[Any]) -> NDArray[Any]:
        """Give INT8 where the input is quantised, FLOAT32 where it is not."""
        if self._type is None:
            return x.astype(np.float32, copy=False)
        return x if x.dtype == np.int8 else (x ^ np.uint8(128)).view(np.int8)

    def _product(self, name: str, vectors: NDArray[Any]) -> NDArray[np.float32]:
        m = len(vectors)
        if not m:
            return np.zeros((0, self.product.weights.n), np.float32)
        taken = self.product.taken
        try:
            if taken is None:
                found: NDArray[np.float32] = self._multiply(name, vectors)
                return found
            # A code of F_ONE for each group: the integers are multiplied as they are.
            codes = np.zeros((m, self._k_padded // GROUP), np.uint8)
            found = self._multiply(name, Activations(vectors, codes, codes, np.full(m, taken.scale / F_ONE)))
        except ValueError as exc:
            raise self._bad(f"cannot take its input: {exc}") from exc
        return found

    def _given(self, out: NDArray[np.float32]) -> NDArray[Any]:
        given = self.product.given
        if given is None:
            return out.astype(np.float16) if self.product.is_half else out
        low, high, kind = (-128, 127, np.int8) if given.is_signed else (0, 255, np.uint8)
        whole: NDArray[Any] = np.clip(np.rint(out / np.float32(given.scale)) + given.zero, low, high).astype(kind)
        return whole

    def _bad(self, problem: str) -> InvalidRequestError:
        said = f"cannot be computed by this model: {self.product.kind} {self.product.label!r} {problem}"
        return InvalidRequestError(param="inputs", problem=said)


@dataclass(frozen=True, slots=True)
class PartStep:
    """A part in onnxruntime."""

    run: Run
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, values: Values) -> None:
        found = self.run(self.outputs, {name: values[name] for name in self.inputs})
        values.update(zip(self.outputs, found, strict=True))


class Walker:
    """The steps of a plan, ready to run; one thread at a time.

    kept holds values that are there from the beginning: constants that are outputs.
    """

    def __init__(self, plan: Plan, steps: Sequence[PartStep | ProductStep], kept: Mapping[str, NDArray[Any]]) -> None:
        self._kept = dict(kept)
        self._inputs = frozenset(plan.graph.inputs)
        last: dict[str, int] = {}
        for at, step in enumerate(plan.steps):
            names = step.inputs if isinstance(step, Part) else (step.value,)
            made = step.outputs if isinstance(step, Part) else (step.output,)
            last |= dict.fromkeys((*names, *made), at)
        for name in plan.graph.outputs:
            last.pop(name, None)
        done: list[list[str]] = [[] for _ in plan.steps]
        for name, at in last.items():
            done[at].append(name)
        self._steps = [(step, tuple(names)) for step, names in zip(steps, done, strict=True)]

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Compute all steps, and give these outputs."""
        values: Values = self._kept | dict(feeds)
        for step, done in self._steps:
            step(values)
            for name in done:
                del values[name]
        return {
            name: values[name].copy() if name in self._kept or name in self._inputs else values[name]
            for name in outputs
        }
