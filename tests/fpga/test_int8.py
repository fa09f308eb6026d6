"""Activations of the whole INT8, -128 among them, on the RTL: what quantised convolutions hand over. Simulated."""

import shutil

import numpy as np
import pytest

from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_numbers import Activations, encode_weights
from edge_rt.backends.fpga_pack import Matrix
from edge_rt.backends.fpga_products import FpgaProducts, place
from hw.fpga.sim.build import CONFIGS, build
from hw.fpga.sim.engine import RtlEngine
from hw.fpga.sim.port import CheckedPort

pytestmark = pytest.mark.skipif(shutil.which("verilator") is None, reason="needs verilator: apt-get install verilator")


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("asymmetric", [False, True])
def test_every_int8_is_multiplied_as_the_golden_model_does(name, asymmetric):
    random = np.random.default_rng(1)
    n, k, m = 24, 96, 64
    zero = np.full((n, k // 32), -8.0) if asymmetric else None
    q_w = random.integers(-8, 8, (n, k)).astype(np.int8)
    q_w[:2] = [[-8], [7]]
    matrices = {"a": Matrix.of(encode_weights(q_w, np.full((n, k // 32), 0.5), zero))}
    placement = place(matrices, Layout(CONFIGS[name].beat_bits), CONFIGS[name].n_vectors)
    engine = RtlEngine.open(build(CONFIGS[name]), placement.memory_bytes)
    port = CheckedPort(engine, layout=placement.layout)
    q = random.choice(np.array([-128, -127, -1, 0, 1, 127], np.int8), (m, k))
    q[:8] = random.choice(np.array([-128, 127], np.int8), (8, 1))
    codes = np.zeros((m, k // 32), np.uint8)
    found = FpgaProducts(port, placement, matrices).multiply("a", Activations(q, codes, codes, np.full(m, 1 / 16)))
    assert (port.n_wrong, port.n_sums) == (0, n * m)
    exact = 0.5 * (q.astype(int) @ (q_w.astype(int) + (8 if asymmetric else 0)).T)
    np.testing.assert_allclose(found, exact, rtol=3e-7)
    engine.close()
