"""Weights of files in the engine's numbers, against the formats' own dequantisers."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_rt.backends.fpga_pack import BLOCK_BYTES, Matrix, dequantise, from_gguf, from_matmul_nbits, fuse

cases = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32))


def random_tensor(quant, n, n_blocks, seed, minimum=None):
    """Random bytes with sound scales: of either sign, and for Q4_1 with the 0 anywhere between the ends."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (n, n_blocks, BLOCK_BYTES[quant])).astype(np.uint8)
    scale = (random.uniform(0.1, 1, (n, n_blocks)) * random.choice([-1, 1], (n, n_blocks))).astype("<f2")
    data[:, :, :2] = scale[..., None].view(np.uint8)
    if quant == "Q4_1":
        zero = random.uniform(0, 15, (n, n_blocks)) if minimum is None else minimum
        data[:, :, 2:4] = (-scale * zero).astype("<f2")[..., None].view(np.uint8)
    return data.reshape(n, -1), np.abs(scale.astype(np.float64)).max(axis=1)[:, None]


def dequantised(data, quant):
    return gguf.dequantize(data, gguf.GGMLQuantizationType[quant]).astype(np.float64)


@given(cases)
@settings(deadline=None)
def test_q4_0_keeps_weights_to_15_bits_of_the_rows_largest_scale(case):
    n, n_blocks, seed = case
    data, largest = random_tensor("Q4_0", n, n_blocks, seed)
    off = np.abs(from_gguf(data, "Q4_0", n, n_blocks * 32).to_float() - dequantised(data, "Q4_0"))
    assert (off <= largest * 8.01 / 65534).all()


@given(cases)
@settings(deadline=None)
def test_q4_1_keeps_weights_to_8_bits_of_scale_and_a_32nd_of_a_step(case):
    n, n_blocks, seed = case
    data, largest = random_tensor("Q4_1", n, n_blocks, seed)
    off = np.abs(from_gguf(data, "Q4_1", n, n_blocks * 32).to_float() - dequantised(data, "Q4_1"))
    assert (off <= largest * (15.9 / 510 + 0.0314)).all()


@given(cases)
@settings(deadline=None)
def test_q8_0_is_two_matrices_with_every_bit_of_its_int8(case):
    n, n_blocks, seed = case
    data, largest = random_tensor("Q8_0", n, n_blocks, seed)
    matrix = from_gguf(data, "Q8_0", n, n_blocks * 32)
    upper, lower = (piece.weights for piece in matrix.pieces)
    stored = data.reshape(n, n_blocks, 34)[:, :, 2:].copy().view(np.int8).reshape(n, -1)
    # Under a negative scale the lower half is counted from its other end.
    scale = data.reshape(n, n_blocks, 34)[:, :, :2].copy().view("<f2")[:, :, 0]
    low = np.where(np.repeat(scale < 0, 32, axis=1), ~lower.q, lower.q)
    assert np.array_equal(16 * upper.q.astype(int) + low + 8, stored)
    # Half a step of 15 bits times 16 * 8, and half a step of 8 bits times 15: 3 % of a step of INT8.
    off = np.abs(matrix.to_float() - dequantised(data, "Q8_0"))
    assert (off <= largest * (128.1 / 65534 + 15.1 / 510)).all()


@pytest.mark.parametrize("quant", list(BLOCK_BYTES))
def test_dequantising_is_the_formats_own(quant):
    data, _ = random_tensor(quant, 3, 4, 11)
    assert np.allclose(dequantise(data, quant, 3, 128), dequantised(data, quant), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("minimum", [-40.0, -1.0, 15.9, 60.0])
def test_groups_on_one_side_of_0_are_rounded_to_4_bits_between_0_and_their_end(minimum):
    data, _ = random_tensor("Q4_1", 4, 3, 7, minimum)
    wanted = dequantised(data, "Q4_1")
    found = from_gguf(data, "Q4_1", 4, 96).to_float()
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(found - wanted) <= largest * (0.5 / 15 + 15.9 / 15 / 510 + 0.0022)).all()


def test_a_group_of_equal_weights_is_kept():
    data, _ = random_tensor("Q4_1", 1, 2, 3)
    blocks = data.reshape(2, 20)
    blocks[0, :2], blocks[0, 2:4] = 0, np.array([-0.75], "<f2").view(np.uint8)
    found = from_gguf(data, "Q4_1", 1, 64).to_float()
    assert found[0, :32] == pytest.approx(-0.75, rel=0.02)


def nbits(n, k, block, seed, has_zero_points):
    random = np.random.default_rng(seed)
    n_blocks = k // block
    b = random.integers(0, 256, (n, n_blocks, block // 2)).astype(np.uint8)
    scales = (random.uniform(0.1, 1, n * n_blocks) * random.choice([-1, 1], n * n_blocks)).astype(np.float32)
    points = random.integers(0, 256, n * ((n_blocks + 1) // 2)).astype(np.uint8) if has_zero_points else None
    return b, scales, points


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([32, 64, 128]), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None)
def test_matmul_nbits_is_what_the_operator_says(n, n_blocks, block, has_zero_points, seed):
    b, scales, points = nbits(n, n_blocks * block, block, seed, has_zero_points)
    wanted = np.empty((n, n_blocks * block))
    for row in range(n):
        for i in range(n_blocks):
            at = row * ((n_blocks + 1) // 2) + i // 2
            point = 8 if points is None else int(points[at]) >> 4 * (i % 2) & 15
            for j in range(block):
                u = int(b[row, i, j // 2]) >> 4 * (j % 2) & 15
                wanted[row, i * block + j] = (u - point) * float(scales[row * n_blocks + i])
    matrix = from_matmul_nbits(b, scales, points, n=n, k=n_blocks * block, bits=4, block_size=block)
    largest = np.abs(scales.reshape(n, -1)).max(axis=1, keepdims=True)
    off = np.abs(matrix.to_float() - wanted)
    assert (off <= largest * (15.1 / 510 if has_zero_points else 8.1 / 65534)).all()


def test_zero_points_of_8_are_none():
    b, scales, _ = nbits(2, 64, 32, 0, has_zero_points=False)
    plain = from_matmul_nbits(b, scales, None, n=2, k=64, bits=4, block_size=32)
    eights = from_matmul_nbits(b, scales, np.full(2, 0x88, np.uint8), n=2, k=64, bits=4, block_size=32)
    assert not eights.pieces[0].weights.asymmetric
    assert np.array_equal(plain.to_float(), eights.to_float())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"has_g_idx": True}, "g_idx"),
        ({"bits": 8}, "8 bits"),
        ({"block_size": 16}, "blocks of 16"),
        ({"block_size": 256}, "blocks of 256"),
        ({"k": 48}, "not whole blocks"),
        ({"n": 3}, "3 x 64"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(change, problem):
    b, scales, points = nbits(2, 64, 32, 0, has_zero_points=True)
    with pytest.raises(ValueError, match=problem):
        from_matmul_nbits(b, scales, points, **{"n": 2, "k": 64, "bits": 4, "block_size": 32} | change)


def test_tensors_of_other_types_and_sizes_are_refused():
    data, _ = random_tensor("Q4_1", 2, 2, 0)
    with pytest.raises(ValueError, match="Q6_K: the engine takes Q4_0, Q4_1, Q8_0"):
        from_gguf(data, "Q6_K", 2, 64)
    with pytest.raises(ValueError, match="80 bytes for 2 rows of 96"):
        from_gguf(data, "Q4_1", 2, 96)
    data[0, 2:4] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="not a finite number"):
        from_gguf(data, "Q4_1", 2, 64)


@given(st.lists(st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), min_size=1, max_size=5), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_fused_matrices_are_the_matrices_under_each_other(quants, seed):
    matrices = [
        from_gguf(random_tensor(quant, i + 1, 2, seed + i)[0], quant, i + 1, 64) for i, quant in enumerate(quants)
    ]
    fused = fuse(matrices)
    assert np.array_equal(fused.to_float(), np.concatenate([matrix.to_float() for matrix in matrices]))
    if len(set(quants)) == 1:
        assert len(fused.pieces) == len(matrices[0].pieces)


def test_rows_of_different_length_are_not_fused():
    matrices = [from_gguf(random_tensor("Q4_0", 1, k, 0)[0], "Q4_0", 1, 32 * k) for k in (1, 2)]
    with pytest.raises(ValueError, match=r"\[32, 64\]"):
        fuse(matrices)
    assert isinstance(fuse(matrices[:1]), Matrix)
