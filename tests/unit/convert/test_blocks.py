"""MatMulNBits weights in GGUF's blocks: what they stand for, and what the native kernels make of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf", reason="the extra onnx is not installed")

from edge_rt.backends.native_library import TYPES, Tensor, isa_names, load_native  # noqa: E402
from edge_rt.convert.blocks import BLOCK_SIZES, NBits, is_symmetric, reblock, unpack_zero_points  # noqa: E402
from edge_rt.errors import BackendUnavailableError  # noqa: E402
from tests.onnx_models import Quantised  # noqa: E402

_HALF_STEP = 2.0**-11  # of F16, relative
_SUBNORMAL = 2.0**-25  # half of F16's smallest step


def dequantised(raw: NDArray[np.uint8], quant: str) -> NDArray[np.float64]:
    """What the gguf library takes the blocks for."""
    return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[quant]), float)


@settings(deadline=None, max_examples=60)
@given(
    n_rows=st.integers(1, 40),
    n_blocks_of_32=st.integers(1, 13),
    block_size=st.sampled_from(BLOCK_SIZES),
    zeros=st.sampled_from(["none", "whole", "fraction", "eight"]),
    scale_type=st.sampled_from([np.float16, np.float32]),
    log_scale=st.floats(-6, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_stand_for_the_same_weights(
    n_rows: int, n_blocks_of_32: int, block_size: int, zeros: str, scale_type: type, log_scale: float, seed: int
) -> None:
    """s * (q - z), but for the rounding of s and of s * z to F16: 2^-11 of either, or F16's smallest step."""
    rng = np.random.default_rng(seed)
    n_cols = 32 * n_blocks_of_32
    n_blocks = -(-n_cols // block_size)
    quants = rng.integers(0, 256, (n_rows, n_blocks, block_size // 2), np.uint8)
    scales = (rng.standard_normal((n_rows, n_blocks)) * 10**log_scale).astype(scale_type).astype(np.float32)
    z = {
        "none": None,
        "whole": rng.integers(0, 16, (n_rows, n_blocks)).astype(np.float32),
        "fraction": rng.uniform(0, 15, (n_rows, n_blocks)).astype(np.float32),
        "eight": np.full((n_rows, n_blocks), 8, np.float32),
    }[zeros]
    quant = "Q4_0" if is_symmetric(z) else "Q4_1"
    assert zeros in ("whole", "fraction") or quant == "Q4_0"
    out = dequantised(reblock(NBits(n_cols, quants, scales, z), quant), quant)

    q = np.empty((n_rows, n_blocks * block_size))
    q[:, 0::2], q[:, 1::2] = (quants & 15).reshape(n_rows, -1), (quants >> 4).reshape(n_rows, -1)
    wide = lambda a: np.repeat(a.astype(float), block_size, axis=1)  # noqa: E731
    s, zp = wide(scales), wide(z) if z is not None else np.full_like(q, 8.0)
    error = np.abs(out - (s * (q - zp))[:, :n_cols])
    bound = np.abs(s) * (np.abs(q - zp) + zp) * _HALF_STEP * 1.001 + (np.abs(q - zp) + 1) * _SUBNORMAL
    assert (error <= bound[:, :n_cols] + 1e-6 * np.abs(out)).all()  # the library dequantises in F32
    if scale_type is np.float16 and quant == "Q4_0":
        assert error.max() <= 1e-6 * np.abs(out).max()


def test_zero_points_of_an_odd_number_of_blocks() -> None:
    packed = np.array([[0x21, 0x03], [0xF4, 0xF5]], np.uint8)
    assert unpack_zero_points(packed.ravel(), 2, 3).tolist() == [[1, 2, 3], [4, 15, 5]]


def test_a_scale_beyond_f16_is_refused() -> None:
    matrix = NBits(32, np.zeros((1, 1, 16), np.uint8), np.array([[1e5]], np.float32), None)
    with pytest.raises(OverflowError, match="100000"):
        reblock(matrix, "Q4_0")
    matrix = NBits(32, np.zeros((1, 1, 16), np.uint8), np.array([[6e4]], np.float32), np.array([[9]], np.float32))
    with pytest.raises(OverflowError, match="-540000"):
        reblock(matrix, "Q4_1")


def test_numbers_that_are_none_are_refused() -> None:
    matrix = NBits(32, np.zeros((1, 1, 16), np.uint8), np.array([[np.nan]], np.float32), None)
    with pytest.raises(OverflowError, match="nan"):
        reblock(matrix, "Q4_0")


def onnxruntime_product(made: Quantised, x: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    ort = pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    inputs = ["x", "b", "s"] + (["z"] if made.zero_points is not None else [])
    tensors = [numpy_helper.from_array(made.quants, "b"), numpy_helper.from_array(made.scales, "s")]
    if made.zero_points is not None:
        tensors.append(numpy_helper.from_array(made.zero_points, "z"))
    n, k = len(made.values), x.shape[1]
    facts = {"K": k, "N": n, "bits": 4, "block_size": block_size, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **facts)
    float_info = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    graph = helper.make_graph([node], "g", [float_info("x", [None, k])], [float_info("y", [None, n])], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": x})[0])


@pytest.mark.parametrize("zero_points", ["none", "packed"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_products_are_onnxruntimes(block_size: int, zero_points: str) -> None:
    """Both round the activations to 8 bits, by blocks of 32 here and of block_size there, and nothing else.

    So they may differ by half a step of each, times the weights; with random signs that is below 1 % of the products.
    """
    try:
        lib = load_native()
    except BackendUnavailableError as exc:
        pytest.skip(str(exc))
    rng = np.random.default_rng(block_size)
    n, k, m = 96, 384, 5
    made = Quantised.of(rng.standard_normal((n, k)) / np.sqrt(k), block_size, zero_points, np.float32)
    x = rng.standard_normal((m, k)).astype(np.float32)
    theirs = onnxruntime_product(made, x, block_size)
    zeros = made.zero_points
    unpacked = None if zeros is None else unpack_zero_points(zeros, n, k // block_size)
    quant = "Q4_0" if unpacked is None else "Q4_1"
    raw = reblock(NBits(k, made.quants, made.scales, unpacked), quant)

    def half_steps(width: int) -> NDArray[np.float64]:
        top = np.abs(x.reshape(m, -1, width)).max(axis=-1).repeat(width, axis=1)
        return np.asarray((top / 254) @ np.abs(made.values.T))

    worst = half_steps(32) + half_steps(block_size)
    typical = np.sqrt(((x @ made.values.T) ** 2).mean())
    usable = [i for i in range(lib.en_isa_count()) if lib.en_isa_usable(i)]
    assert len(usable) == len(isa_names(lib))
    for isa in usable:
        ours = np.zeros((m, n), np.float32)
        tensor = Tensor(raw.ctypes.data, raw.nbytes, k, n, TYPES[quant], 0)
        assert lib.en_matmul(isa, ctypes.byref(tensor), x.ctypes.data, m, ours.ctypes.data, 1) == 0
        difference = np.abs(ours - theirs)
        # Q4_1's minimum is s * z in F16
        assert (difference <= worst + 15 * _HALF_STEP * np.abs(x).sum(axis=1)[:, None] * made.scales.max()).all()
        assert np.sqrt((difference**2).mean()) < 0.01 * typical
