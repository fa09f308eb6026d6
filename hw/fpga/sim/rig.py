"""Random matrices laid out in a simulated engine's memory, and the results they must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.fpga_layout import Layout, pack_activations, pack_weights
from edge_rt.backends.fpga_numbers import GROUP, Activations, Weights, encode_activations, encode_weights
from edge_rt.devices.fpga_jobs import Job
from hw.fpga.model.golden import multiply
from hw.fpga.sim.build import CONFIGS, build
from hw.fpga.sim.engine import RtlEngine

_PAGE = 4096


def _page(offset: int) -> int:
    return -(-offset // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix and its vectors in memory; results_at counts from the memory's first byte."""

    weights: Weights
    x: Activations
    results_at: int
    results_bytes: int
    n_places: int

    def expected(self) -> NDArray[np.float32]:
        return multiply(self.weights, self.x).astype(np.float32)

    def found(self, memory: NDArray[np.uint8]) -> NDArray[np.float32]:
        data = memory[self.results_at : self.results_at + self.results_bytes].view("<f4").reshape(-1, self.n_places)
        return data[: self.weights.n_rows, : len(self.x.q)]


@dataclass(slots=True)
class Rig:
    """An engine with products in its memory, and the jobs that compute them."""

    engine: RtlEngine
    products: list[Product]
    jobs: list[Job]

    @classmethod
    def random(
        cls,
        config_name: str,
        shapes: Sequence[tuple[int, int]],
        n_vectors: int,
        *,
        group_log2: int = 0,
        asymmetric: bool = True,
        block_rows: int = 4,
        seed: int = 0,
        extreme: bool = False,
    ) -> Rig:
        """Lay out a product per (rows, length) of shapes; extreme takes the largest numbers of either sign only."""
        random = np.random.default_rng(seed)
        numbers = [_numbers(random, n, k, n_vectors, group_log2, asymmetric, extreme) for n, k in shapes]
        return cls.of(config_name, numbers, block_rows)

    @classmethod
    def of(cls, config_name: str, numbers: Sequence[tuple[Weights, Activations]], block_rows: int = 4) -> Rig:
        """Lay out a product of each matrix with its vectors."""
        config = CONFIGS[config_name]
        layout = Layout(config.beat_bits, block_rows)
        pieces: list[tuple[int, NDArray[np.uint8]]] = []
        products, places = [], []
        offset = _PAGE
        for weights, x in numbers:
            weight_bytes, x_bytes = pack_weights(weights, layout), pack_activations(x, layout)
            n_places = layout.result_places(len(x.q))
            x_at = _page(offset + weight_bytes.nbytes)
            y_at = _page(x_at + x_bytes.nbytes)
            y_bytes = layout.n_blocks(weights.n_rows) * block_rows * n_places * 4
            pieces += [(offset, weight_bytes), (x_at, x_bytes)]
            products.append(Product(weights, x, y_at, y_bytes, n_places))
            places.append((offset, x_at, y_at, layout.n_blocks(weights.n_rows), weights.k // GROUP))
            offset = _page(y_at + y_bytes)
        engine = RtlEngine.open(build(config), offset + _PAGE)
        for at, data in pieces:
            engine.memory[at : at + data.nbytes] = data
        jobs = [
            Job(
                engine.base + at,
                engine.base + x_at,
                engine.base + y_at,
                n_blocks,
                n_groups,
                len(product.x.q),
                product.weights.group_log2,
                block_rows.bit_length() - 1,
                product.weights.asymmetric,
                tag=i,
                irq=i == len(places) - 1,
            )
            for i, (product, (at, x_at, y_at, n_blocks, n_groups)) in enumerate(zip(products, places, strict=True))
        ]
        return cls(engine, products, jobs)

    def clear_results(self) -> None:
        for product in self.products:
            self.engine.memory[product.results_at : product.results_at + product.results_bytes] = 0

    def matches(self) -> list[bool]:
        """Say for each product whether every bit of its results is the golden model's."""
        return [
            np.array_equal(product.found(self.engine.memory).view(np.uint32), product.expected().view(np.uint32))
            for product in self.products
        ]


def _numbers(
    random: np.random.Generator, n: int, k: int, m: int, group_log2: int, asymmetric: bool, extreme: bool
) -> tuple[Weights, Activations]:
    n_groups = k // (GROUP << group_log2)
    if extreme:
        q = random.choice(np.array([-8, 7], np.int8), (n, k))
        scale = np.ones((n, n_groups)) if asymmetric else random.choice([-1.0, 1.0], (n, n_groups))
        zero = random.choice([-8.0, 7.9375], (n, n_groups)) if asymmetric else None
        x = random.choice([-1.0, 1.0], (m, k))
    else:
        q = random.integers(-8, 8, (n, k)).astype(np.int8)
        scale = random.uniform(0.01, 1, (n, n_groups)) * (1 if asymmetric else random.choice([-1, 1], (n, n_groups)))
        zero = random.uniform(-8, 7.96, (n, n_groups)) if asymmetric else None
        x = random.standard_normal((m, k)) * np.exp(random.standard_normal((m, k // GROUP)) * 2).repeat(GROUP, axis=1)
    encoded = encode_activations(x)
    if extreme:
        # No float becomes -128, but quantised models have it.
        encoded = replace(encoded, q=random.choice(np.array([-128, 127], np.int8), (m, k)))
    return encode_weights(q, scale, zero, group_log2), encoded
