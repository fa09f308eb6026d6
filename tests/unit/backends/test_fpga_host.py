"""What the host computes at a product: in C as in numpy, and a total that no right product misses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.fpga_host import Check, NativeHost, NumpyHost, Task, best_host
from edge_rt.backends.fpga_layout import Layout, unpack_activations
from edge_rt.backends.fpga_numbers import GROUP, encode_activations, encode_weights, to_products
from hw.fpga.model.golden import multiply

LAYOUT = Layout(128)


@pytest.fixture(scope="module", params=["numpy", "C"])
def host(request):
    if request.param == "numpy":
        return NumpyHost()
    if not isinstance(found := best_host(), NativeHost):
        pytest.skip("the native engine's library is not here")
    return found


def weights_of(n, k, asymmetric, seed, group_log2=0):
    random = np.random.default_rng(seed)
    shape = n, k // (GROUP << group_log2)
    zero = random.uniform(-8, 7.7, shape) if asymmetric else None
    q = random.integers(-8, 8, (n, k)).astype(np.int8)
    return encode_weights(q, random.uniform(0.01, 1, shape), zero, group_log2)


def vectors_of(m, k, seed, spread=2.0):
    random = np.random.default_rng(seed)
    sizes = np.exp(random.standard_normal((m, k // GROUP)) * spread).repeat(GROUP, axis=1)
    return (random.standard_normal((m, k)) * sizes).astype(np.float32)


def encoded(host, x):
    out = np.full(len(x) * LAYOUT.vector_bytes(x.shape[1]), 0xA5, np.uint8)
    units = host.encode(x, LAYOUT, out)
    return out, units


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 4.0]))
@settings(deadline=None, max_examples=60)
def test_c_rounds_vectors_as_numpy_does(m, n_groups, seed, spread):
    if not isinstance(native := best_host(), NativeHost):
        pytest.skip("the native engine's library is not here")
    x = vectors_of(m, GROUP * n_groups, seed, spread)
    (ours, our_units), (theirs, their_units) = encoded(native, x), encoded(NumpyHost(), x)
    assert np.array_equal(our_units, their_units)
    if not np.array_equal(ours, theirs):
        # Two codes that are as good as each other to the last bit of a sum: either may be taken.
        one, other = (unpack_activations(data, x.shape[1], LAYOUT) for data in (ours, theirs))
        off = [np.square(e.to_float() * our_units[:, None] - x).sum() for e in (one, other)]
        assert off[0] == pytest.approx(off[1], rel=1e-4)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 64)),
        np.full((1, 32), 1e-38),
        np.full((1, 32), 3e38),
        np.concatenate([np.full((1, 32), 1e-42), np.full((1, 32), -2e-42)], axis=1),
        np.array([[127.0] * 31 + [-127.0]]),
        np.array([[1.0] + [0.0] * 63]),
    ],
    ids=["zeros", "tiny", "huge", "subnormal", "ends", "one"],
)
def test_numbers_at_the_ends_are_rounded_alike(host, x):
    x = x.astype(np.float32)
    data, units = encoded(host, x)
    wanted, wanted_units = encoded(NumpyHost(), x)
    assert np.array_equal(data, wanted)
    assert np.array_equal(units, wanted_units)


def test_numbers_of_the_engine_are_taken_as_they_are(host):
    x = encode_activations(vectors_of(3, 96, 1))
    out = np.empty(3 * LAYOUT.vector_bytes(96), np.uint8)
    assert np.array_equal(host.encode(x, LAYOUT, out), x.unit)
    assert np.array_equal(unpack_activations(out, 96, LAYOUT).q, x.q)


def test_what_is_no_number_is_refused(host):
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((2, 64), np.float32)
        x[1, 40] = bad
        with pytest.raises(ValueError, match="not a finite number"):
            encoded(host, x)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        host.encode(np.ones((1, 33), np.float32), LAYOUT, np.empty(512, np.uint8))


class Product:
    """One matrix and some vectors, and the engine's sums of them in memory."""

    def __init__(self, host, weights, x):
        self.host, self.weights, self.k = host, weights, x.shape[1]
        self.vectors, self.units = encoded(host, x)
        numbers = unpack_activations(self.vectors, self.k, LAYOUT)
        self.m, n_places = len(x), LAYOUT.result_places(len(x))
        rows = LAYOUT.n_blocks(weights.n_rows) * 4
        self.memory = np.zeros(64 + rows * n_places * 4, np.uint8)
        self.sums = self.memory[64:].view("<f4").reshape(rows, n_places)
        self.sums[: weights.n_rows, : self.m] = multiply(weights, numbers).astype(np.float32)
        self.wanted = to_products(
            self.sums[: weights.n_rows, : self.m],
            weights.row_unit,
            encode_activations(x).__class__(numbers.q, numbers.f, numbers.e, self.units),
        )
        task = Task(2, weights.row_unit, Check.of(weights), 0, self.m, n_places, 64, rows * n_places * 4)
        self.prepared = host.prepare([task], self.memory)

    def finish(self):
        out = np.ones((self.m, self.weights.n_rows + 5), np.float32)
        is_right = self.host.finish(self.prepared, self.vectors, LAYOUT, self.k, self.units, out)
        return is_right, out


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_products_are_added_at_their_place(host, m, asymmetric):
    product = Product(host, weights_of(37, 192, asymmetric, 3), vectors_of(m, 192, 4))
    is_right, out = product.finish()
    assert is_right
    assert np.array_equal(out[:, 2:39], product.wanted + np.float32(1))
    assert (out[:, :2] == 1).all()
    assert (out[:, 39:] == 1).all()


@given(st.integers(1, 300), st.integers(1, 12), st.booleans(), st.integers(0, 2), st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_a_right_product_always_adds_up(n, n_groups, asymmetric, group_log2, seed):
    k = (GROUP << group_log2) * n_groups
    weights, x = weights_of(n, k, asymmetric, seed, group_log2), vectors_of(2, k, seed, spread=3.0)
    if seed % 3 == 0:  # totals that cancel out
        weights.q[1::2] = -1 - weights.q[: len(weights.q) // 2 * 2 : 2][: len(weights.q[1::2])]
    for each in (NumpyHost(), best_host()):
        assert Product(each, weights, x).finish()[0]


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_a_sum_that_is_off_by_more_than_rounding_is_noticed(seed):
    random = np.random.default_rng(seed)
    for each in (NumpyHost(), best_host()):
        product = Product(each, weights_of(400, 256, True, seed), vectors_of(2, 256, seed))
        row, vector = random.integers(400), random.integers(2)
        product.sums[row, vector] += 1e-3 * np.abs(product.sums[:400, vector]).max()
        assert not product.finish()[0]


def test_results_that_are_no_numbers_do_not_add_up(host):
    product = Product(host, weights_of(10, 64, True, 1), vectors_of(1, 64, 2))
    product.sums[3, 0] = np.nan
    assert not product.finish()[0]
