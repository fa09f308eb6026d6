"""The native engine's kernels: each instruction set against portable C, and portable C against numpy."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends.native_library import KV_TYPES, TYPES, Tensor, isa_names, load_native
from edge_rt.catalog.ggml_types import GGML_TYPES
from edge_rt.errors import BackendUnavailableError

try:
    LIB: Any = load_native()
except BackendUnavailableError as exc:
    pytest.skip(f"the native engine is not here: {exc.reason}", allow_module_level=True)

ISAS = isa_names(LIB)
NUMBERS = [i for i in range(LIB.en_isa_count()) if LIB.en_isa_usable(i)]
GGML = ctypes.CDLL(str(Path(find_spec("llama_cpp").submodule_search_locations[0]) / "lib" / "libggml-base.so"))
PORTABLE = 0
OTHERS = NUMBERS[1:]
QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
WITH_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
LAYOUT = {t.name: t for t in GGML_TYPES.values()}
ENDS = (0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F)
FILLS = ("random", "extreme", "zero scales")


def half(values: NDArray[Any]) -> NDArray[np.uint8]:
    return values.astype(np.float16).view(np.uint8).reshape(*values.shape, 2)


def weights(quant: str, n_rows: int, n_cols: int, rng: np.random.Generator, fill: str) -> NDArray[np.uint8]:
    """Random GGUF blocks; extreme ones have all weights at one end or the other."""
    if quant in ("F32", "F16"):
        values = rng.standard_normal((n_rows, n_cols)).astype(np.float16 if quant == "F16" else np.float32)
        return values.view(np.uint8).ravel()
    layout = LAYOUT[quant]
    n_blocks = n_rows * n_cols // layout.block_size
    if fill == "extreme":
        blocks = rng.choice(np.array(ENDS, np.uint8), (n_blocks, 1)).repeat(layout.block_bytes, axis=1)
    else:
        blocks = rng.integers(0, 256, (n_blocks, layout.block_bytes), dtype=np.uint8)
    scale = np.zeros(n_blocks) if fill == "zero scales" else rng.standard_normal(n_blocks) * 0.1
    at = 208 if quant == "Q6_K" else 0
    blocks[:, at : at + 2] = half(scale)
    if quant in WITH_MINIMA:
        blocks[:, 2:4] = half(rng.standard_normal(n_blocks))
    return blocks.ravel()


def activations(m: int, n_cols: int, rng: np.random.Generator, fill: str) -> NDArray[np.float32]:
    if fill == "extreme":
        x = np.repeat(rng.choice([-3.0, 3.0], (m, n_cols // 32 or 1)), 32, axis=1)[:, :n_cols]
        return np.ascontiguousarray(x, dtype=np.float32)
    x = rng.standard_normal((m, n_cols)).astype(np.float32)
    x[:, :32] = 0.0  # a block of nothing
    return x


def matmul(isa: int, quant: str, w: NDArray[np.uint8], x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
    """Add x times w to y."""
    tensor = Tensor(w.ctypes.data, w.nbytes, x.shape[1], y.shape[1], TYPES[quant], 0)
    assert LIB.en_matmul(isa, ctypes.byref(tensor), x.ctypes.data, len(x), y.ctypes.data, 1) == 0


def dequantised(quant: str, w: NDArray[np.uint8], n_rows: int) -> NDArray[np.float32]:
    """What llama.cpp takes the blocks for."""
    layout = LAYOUT[quant]
    n_elements = w.nbytes // layout.block_bytes * layout.block_size
    if quant == "F32":
        return w.view(np.float32).reshape(n_rows, -1)
    if quant == "F16":
        return w.view(np.float16).reshape(n_rows, -1).astype(np.float32)
    out = np.empty(n_elements, np.float32)
    getattr(GGML, f"dequantize_row_{quant[:3].lower()}{quant[3:]}")(
        ctypes.c_void_p(w.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(n_elements)
    )
    return out.reshape(n_rows, -1)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("quant", ["F32", "F16", *QUANTS])
def test_a_row_is_what_llama_cpp_takes_it_for(quant: str, fill: str) -> None:
    w = weights(quant, 7, 512, np.random.default_rng(3), fill)
    tensor = Tensor(w.ctypes.data, w.nbytes, 512, 7, TYPES[quant], 0)
    out = np.empty((7, 512), np.float32)
    for row in range(7):
        assert LIB.en_dequantize(ctypes.byref(tensor), row, out[row].ctypes.data) == 0
        unpacked = np.empty_like(out[row])
        assert LIB.en_dequantize_packed(ctypes.byref(tensor), row, unpacked.ctypes.data) == 0
        np.testing.assert_array_equal(unpacked, out[row])  # as the embedding of a model without an output is read
    expected = dequantised(quant, w, 7)
    assert np.abs(out - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max())
    assert LIB.en_dequantize(ctypes.byref(tensor), 7, out.ctypes.data) != 0


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("quant", ["F32", "F16", *QUANTS])
def test_portable_product_is_numpys(quant: str, fill: str) -> None:
    rng = np.random.default_rng(5)
    n_cols = 3 * max(32, LAYOUT[quant].block_size)
    w, x = weights(quant, 35, n_cols, rng, fill), activations(3, n_cols, rng, fill)
    y = np.zeros((3, 35), np.float32)
    matmul(PORTABLE, quant, w, x, y)
    exact = x.astype(np.float64) @ dequantised(quant, w, 35).T.astype(np.float64)
    # int8 activations: half a step of a block's peak / 127 each
    error = 1e-5 if quant in ("F32", "F16") else np.abs(x).max() / 254
    bound = error * np.abs(dequantised(quant, w, 35)).sum(axis=1) + 1e-4
    assert (np.abs(y - exact) <= bound).all()
    assert fill == "zero scales" or np.abs(exact).max() > 1.0


@pytest.mark.parametrize("isa", OTHERS, ids=ISAS[1:])
@pytest.mark.parametrize("quant", ["F32", "F16", *QUANTS])
@given(
    n_rows=st.integers(1, 70),
    n_blocks=st.integers(1, 60),
    m=st.integers(1, 40),
    fill=st.sampled_from(FILLS),
    seed=st.integers(0, 2**32 - 1),
)
def test_product_is_bit_equal_to_portable(
    isa: int, quant: str, n_rows: int, n_blocks: int, m: int, fill: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n_cols = 256 * (n_blocks % 8 + 1) if quant.endswith("K") else 32 * n_blocks
    w, x = weights(quant, n_rows, n_cols, rng, fill), activations(m, n_cols, rng, fill)
    start = rng.standard_normal((m, n_rows)).astype(np.float32)
    ours, reference = start.copy(), start.copy()
    matmul(isa, quant, w, x, ours)
    matmul(PORTABLE, quant, w, x, reference)
    assert ours.tobytes() == reference.tobytes()


@pytest.mark.parametrize("isa", NUMBERS, ids=ISAS)
@pytest.mark.parametrize("quant", ["F32", "F16", *QUANTS])
def test_a_row_does_not_depend_on_its_batch(isa: int, quant: str) -> None:
    rng = np.random.default_rng(11)
    w, x = weights(quant, 48, 1024, rng, "random"), activations(11, 1024, rng, "random")
    together = np.zeros((11, 48), np.float32)
    matmul(isa, quant, w, x, together)
    for t in range(11):
        alone = np.zeros((1, 48), np.float32)
        matmul(isa, quant, w, x[t : t + 1].copy(), alone)
        assert alone.tobytes() == together[t].tobytes()


@pytest.mark.parametrize("isa", OTHERS, ids=ISAS[1:])
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-44, 38), n_blocks=st.integers(1, 5))
def test_quantised_activations_are_bit_equal_to_portable(isa: int, seed: int, exponent: int, n_blocks: int) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        x = np.clip(rng.uniform(-1, 1, 32 * n_blocks) * 10.0**exponent, -3e38, 3e38).astype(np.float32)
    results = []
    for which in (PORTABLE, isa):
        q, d = np.zeros(x.size, np.int8), np.zeros(n_blocks, np.float32)
        sums, half_sums = np.zeros(n_blocks, np.int32), np.zeros(2 * n_blocks, np.int16)
        outputs = (q.ctypes.data, d.ctypes.data, sums.ctypes.data, half_sums.ctypes.data)
        assert LIB.en_quantize(which, x.ctypes.data, x.size, *outputs) == 0
        assert (sums == q.reshape(-1, 32).sum(axis=1, dtype=np.int32)).all()
        assert (half_sums == q.reshape(-1, 16).sum(axis=1, dtype=np.int32)).all()
        assert np.abs(q.astype(int)).max() <= 127
        results.append(q.tobytes() + d.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("isa", NUMBERS, ids=ISAS)
@pytest.mark.parametrize(("n_queries", "head_dim"), [(1, 64), (3, 16), (7, 128), (24, 64), (32, 80)])
def test_attention_by_blocks_is_the_softmax_over_all(isa: int, n_queries: int, head_dim: int) -> None:
    rng = np.random.default_rng(n_queries)
    n_blocks = 4
    q = rng.standard_normal((n_queries, head_dim)).astype(np.float32)
    k = rng.standard_normal((n_blocks * 32, head_dim)).astype(np.float32)
    v = rng.standard_normal((n_blocks * 32, head_dim)).astype(np.float32)
    limits = np.sort(rng.integers(1, n_blocks * 32 + 1, n_queries).astype(np.int32))
    hidden_k, hidden_v = k.copy(), v.copy()
    hidden_k[limits[-1] :] = np.nan  # what no query may see, as a block's former owner may have left it
    hidden_v[limits[-1] :] = np.nan
    transposed = np.ascontiguousarray(hidden_k.reshape(n_blocks, 32, head_dim).transpose(0, 2, 1))
    out = np.zeros((n_queries, head_dim), np.float32)
    status = LIB.en_softmax_attention(
        isa,
        q.ctypes.data,
        n_queries,
        limits.ctypes.data,
        transposed.ctypes.data,
        hidden_v.ctypes.data,
        n_blocks,
        head_dim,
        out.ctypes.data,
    )
    assert status == 0
    for i, limit in enumerate(limits):
        scores = k[:limit].astype(np.float64) @ q[i].astype(np.float64)
        weight = np.exp(scores - scores.max())
        expected = weight @ v[:limit].astype(np.float64) / weight.sum()
        assert np.abs(out[i] - expected).max() < 2e-5


def kept(isa: int, kv_type: str, k: NDArray[np.float32], v: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
    """Put the tokens of k and v, row after row, into a block and read it back; what is not written is zero."""
    head_dim = k.shape[1]
    k_back, v_back = np.empty((head_dim, 32), np.float32), np.empty((32, head_dim), np.float32)
    status = LIB.en_keep_and_spread(
        isa,
        KV_TYPES[kv_type],
        k.ctypes.data,
        v.ctypes.data,
        len(k),
        head_dim,
        k_back.ctypes.data,
        v_back.ctypes.data,
    )
    assert status == 0
    return np.ascontiguousarray(k_back.T), v_back


def kept_by_numpy(kv_type: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if kv_type == "f16":
        return x.astype(np.float16).astype(np.float32)
    peak = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak > np.float32(1e-36), np.float32(127) / peak, np.float32(0)).astype(np.float32)
    return np.asarray(np.rint(x * inverse).astype(np.int8) * (peak / np.float32(127)), np.float32)


@pytest.mark.parametrize("isa", NUMBERS, ids=ISAS)
@pytest.mark.parametrize("kv_type", list(KV_TYPES))
@given(head_dim=st.sampled_from([16, 64, 80, 512]), n_tokens=st.integers(0, 32), seed=st.integers(0, 2**32 - 1))
def test_kept_keys_and_values_come_back_rounded_once(
    isa: int, kv_type: str, head_dim: int, n_tokens: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # tokens of very different size, some of them nothing, and one value that stands out of its token
    sizes = 10.0 ** rng.integers(-6, 4, (2, n_tokens, 1)) * rng.integers(0, 2, (2, n_tokens, 1))
    k, v = (rng.standard_normal((2, n_tokens, head_dim)) * sizes).astype(np.float32)
    k[:, 3] *= 8
    for ours, x in zip(kept(isa, kv_type, k, v), (k, v), strict=True):
        assert ours[:n_tokens].tobytes() == kept_by_numpy(kv_type, x).tobytes()
        assert not ours[n_tokens:].any()
