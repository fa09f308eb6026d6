"""The engine's numbers: what encoding keeps, what packing keeps, and the golden model against plain whole numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.fpga_layout import Layout, pack_activations, pack_weights, unpack_weights
from edge_rt.backends.fpga_numbers import GROUP, encode_activations, encode_weights, to_products
from hw.fpga.model.golden import multiply


def random_weights(n, k, group_log2, asymmetric, seed):
    random = np.random.default_rng(seed)
    n_groups = k // (GROUP << group_log2)
    scale = random.uniform(0.01, 1, (n, n_groups)) * (1 if asymmetric else random.choice([-1, 1], (n, n_groups)))
    zero = random.uniform(-8, 7.96, (n, n_groups)) if asymmetric else None
    return encode_weights(random.integers(-8, 8, (n, k)).astype(np.int8), scale, zero, group_log2), scale, zero


matrices = st.tuples(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 2**32),
    st.sampled_from([64, 128]),
)


@given(matrices)
@settings(deadline=None)
def test_encoding_keeps_weights_to_a_thousandth_of_the_row(case):
    n, n_groups, group_log2, asymmetric, seed, _ = case
    weights, scale, zero = random_weights(n, n_groups * (GROUP << group_log2), group_log2, asymmetric, seed)
    steps = weights.q.reshape(n, n_groups, -1) - (0 if zero is None else zero[..., None])
    wanted = (steps * scale[..., None]).reshape(weights.q.shape)
    largest = np.abs(scale).max(axis=1, keepdims=True)
    # Half a step of the scale's 8 or 15 bits times 16 steps, and a 32nd of a step of z.
    allowed = largest * (16 / 510 + 0.0315 if asymmetric else 9 / 65534)
    assert (np.abs(weights.to_float() - wanted) <= allowed).all()


@given(matrices, st.sampled_from([4, 8, 16]))
@settings(deadline=None)
def test_packing_is_lossless(case, block_rows):
    n, n_groups, group_log2, asymmetric, seed, beat_bits = case
    weights, _, _ = random_weights(n, n_groups * (GROUP << group_log2), group_log2, asymmetric, seed)
    layout = Layout(beat_bits, block_rows)
    data = pack_weights(weights, layout)
    assert data.nbytes == layout.weight_bytes(n, weights.k, group_log2)
    back = unpack_weights(data, weights.row_unit, weights.k, group_log2, asymmetric, layout)
    for name in ("q", "scale", "z"):
        assert np.array_equal(getattr(back, name), getattr(weights, name)), name


@given(matrices, st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_the_golden_model_is_the_formula(case, m):
    n, n_groups, group_log2, asymmetric, seed, _ = case
    weights, _, _ = random_weights(n, n_groups * (GROUP << group_log2), group_log2, asymmetric, seed)
    x = encode_activations(np.random.default_rng(seed).standard_normal((m, weights.k)) * 10)
    sums = multiply(weights, x)
    row, vector = seed % n, seed % m
    total = 0
    for g in range(weights.k // GROUP):
        span = slice(g * GROUP, (g + 1) * GROUP)
        q_w, q_x = [int(q) for q in weights.q[row, span]], [int(q) for q in x.q[vector, span]]
        t = sum(a * b for a, b in zip(q_w, q_x, strict=True))
        field = g >> group_log2
        if asymmetric:
            t = 16 * t - int(weights.z[row, field]) * sum(q_x)
        total += t * int(weights.scale[row, field]) * (16 + int(x.f[vector, g])) << int(x.e[vector, g])
    assert sums[row, vector] == total


@given(st.integers(0, 2**32), st.floats(-30, 30))
@settings(deadline=None)
def test_products_are_those_of_the_numbers_they_stand_for(seed, log2_size):
    weights, _, _ = random_weights(5, 256, 0, asymmetric=True, seed=seed)
    x = encode_activations(np.random.default_rng(seed).standard_normal((3, 256)) * 2**log2_size)
    wanted = x.to_float() @ weights.to_float().T
    got = to_products(multiply(weights, x).astype(np.float32), weights.row_unit, x)
    assert np.allclose(got, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@given(st.integers(0, 2**32), st.sampled_from([np.float32, np.float64]))
@settings(deadline=None)
def test_activations_lose_at_most_half_a_step_of_their_group(seed, dtype):
    random = np.random.default_rng(seed)
    x = random.standard_normal((2, 128)) * np.exp(random.standard_normal((2, 4)) * 2).repeat(32, axis=1)
    x = (x * 10.0 ** random.integers(-40, 30)).astype(dtype)
    found = encode_activations(x)
    largest = np.abs(x.reshape(2, -1, GROUP)).max(axis=2).astype(np.float64)
    # A step is the group's largest by 127, up to two sixteenths more; or one of the vector's two smallest steps.
    smallest = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 127 / (31 * 8)
    step = np.maximum(largest / 127 * (18 / 16), smallest * (17 / 16))
    off = np.abs(found.to_float() - x).reshape(2, -1, GROUP).max(axis=2)
    assert (off <= step * 0.5001).all()


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_no_code_of_those_that_hold_a_group_is_passed_over_for_a_worse_one(seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((1, 128)) * np.exp(random.standard_normal((1, 4)) * 2).repeat(32, axis=1)
    found = encode_activations(x)
    codes = sorted((16 + f) << e for f in range(16) for e in range(8))
    for g, group in enumerate(x.reshape(-1, GROUP)):
        holding = [code for code in codes if code * found.unit[0] * 127 >= np.abs(group).max() * (1 - 1e-9)][:2]
        steps = [code * found.unit[0] for code in holding]
        least = min(float(((np.rint(group / step) * step - group) ** 2).sum()) for step in steps)
        mine = float(((found.to_float().reshape(-1, GROUP)[g] - group) ** 2).sum())
        assert mine <= least * (1 + 1e-9)


def test_records_carry_the_negative_sums_and_scales_of_groups():
    x = encode_activations(np.linspace(-3, 5, 192)[None])
    layout = Layout(64)
    data = pack_activations(x, layout)
    records = data[192 : 192 + 24].reshape(-1, 4)
    assert np.array_equal(records[:, :2].copy().view("<i2")[:, 0], -x.q.reshape(6, 32).sum(axis=1))
    assert np.array_equal(records[:, 2], x.e[0])
    assert np.array_equal(records[:, 3], x.f[0])
    assert not data[192 + 24 :].any()


def test_zeros_are_zeros():
    weights = encode_weights(np.zeros((2, 32), np.int8), np.zeros((2, 1)), None)
    x = encode_activations(np.zeros((1, 32)))
    assert not multiply(weights, x).any()
    assert not to_products(multiply(weights, x).astype(np.float32), weights.row_unit, x).any()


@pytest.mark.parametrize(
    ("q", "scale", "zero", "problem"),
    [
        (np.full((1, 32), 8), np.ones((1, 1)), None, r"outside \[-8, 7\]"),
        (np.zeros((1, 32)), np.full((1, 1), np.nan), None, "not a finite number"),
        (np.zeros((1, 32)), np.full((1, 1), -1.0), np.zeros((1, 1)), "negative beside a zero point"),
        (np.zeros((1, 32)), np.ones((1, 2)), None, "groups of 32"),
        (np.zeros((1, 40)), np.ones((1, 1)), None, "groups of 32"),
    ],
)
def test_what_does_not_fit_is_refused(q, scale, zero, problem):
    with pytest.raises(ValueError, match=problem):
        encode_weights(q.astype(np.int8), scale, zero)


def test_activations_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="not a finite number"):
        encode_activations(np.full((1, 32), np.inf))
    with pytest.raises(ValueError, match="not a multiple of 32"):
        encode_activations(np.zeros((1, 33)))


@pytest.mark.parametrize(("group_log2", "bits"), [(0, 4.5), (2, 4.125)])
@pytest.mark.parametrize("beat_bits", [64, 128])
def test_a_weight_takes_the_bits_that_the_format_promises(group_log2, bits, beat_bits):
    assert Layout(beat_bits).weight_bytes(64, 2048, group_log2) * 8 / (64 * 2048) == bits
