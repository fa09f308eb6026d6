"""What a Llama computes beside its matrices, each against the formula written out."""

import dataclasses
import math

import numpy as np
import pytest

from edge_rt.backends.llama_math import KvCache, LlamaMath, attention, rms_norm, rotate, swiglu, unsupported
from edge_rt.backends.native_config import LayerConfig, NativeConfig, Rope

ROPE = Rope(
    base=100.0,
    n_rot=4,
    pairs_halves=False,
    scale=1.0,
    yarn_ramp=None,
    attention_factor=1.0,
    n_ctx_original=64,
    has_factors=False,
    is_longrope=False,
)
LAYER = LayerConfig(n_heads=4, n_kv_heads=2, n_ff=12, window=0, uses_rope=True)
CONFIG = NativeConfig(
    layers=(LAYER, LAYER),
    n_embd=16,
    head_dim=4,
    n_vocab=20,
    norm_eps=1e-5,
    rope=ROPE,
    temperature_scale=0.0,
    temperature_length=64,
)


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tiny_model():
    shapes = {"output": (20, 16)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_qkv": (32, 16), f"blk.{i}.attn_output": (16, 16)}
        shapes |= {f"blk.{i}.ffn_gate_up": (24, 16), f"blk.{i}.ffn_down": (16, 12)}
    matrices = {name: floats(*shape, seed=i) * 0.3 for i, (name, shape) in enumerate(shapes.items())}
    norms = ["output_norm.weight", *(f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn"))]
    vectors = {name: 1 + 0.1 * floats(16, seed=50 + i) for i, name in enumerate(norms)}
    embedding = floats(20, 16, seed=99)
    return LlamaMath(CONFIG, vectors, lambda ids: embedding[ids], lambda name, x: x @ matrices[name].T)


def test_tokens_one_by_one_give_what_all_at_once_do():
    model, ids = tiny_model(), [3, 7, 1, 19, 0, 7]
    whole = model.forward(ids, KvCache.of(CONFIG, 8), want_all=True)
    kv = KvCache.of(CONFIG, 8)
    parts = [model.forward(part, kv) for part in ([3, 7, 1], [19], [0], [7])]
    assert kv.n_past == 6
    assert np.allclose(np.concatenate(parts), whole[2:], atol=1e-5)
    # A later token changes nothing before it.
    other = model.forward([3, 7, 1, 19, 0, 2], KvCache.of(CONFIG, 8), want_all=True)
    assert np.allclose(other[:5], whole[:5], atol=1e-5)
    assert not np.allclose(other[5], whole[5], atol=1e-2)


def test_rms_norm():
    x, weight = floats(3, 8), floats(8, seed=1)
    for i in range(3):
        rms = math.sqrt(sum(float(v) ** 2 for v in x[i]) / 8 + 1e-5)
        assert np.allclose(rms_norm(x, weight, 1e-5)[i], x[i] / rms * weight, atol=1e-6)


@pytest.mark.parametrize("pairs_halves", [False, True])
def test_rotation_turns_pairs_and_leaves_the_rest(pairs_halves):
    x, angles = floats(2, 3, 6), np.array([[0.3, -1.1], [2.0, 0.5]])
    out = rotate(x, angles, pairs_halves=pairs_halves)
    pairs = [(0, 2), (1, 3)] if pairs_halves else [(0, 1), (2, 3)]
    for m in range(2):
        for i, (a, b) in enumerate(pairs):
            turned = (x[m, :, a] + 1j * x[m, :, b]) * np.exp(1j * angles[m, i])
            assert np.allclose(out[m, :, a], turned.real, atol=1e-6)
            assert np.allclose(out[m, :, b], turned.imag, atol=1e-6)
    assert np.array_equal(out[..., 4:], x[..., 4:])


def test_attention_of_heads_that_share_a_kv_head():
    q, keys, values = floats(2, 4, 3), floats(5, 2, 3, seed=1), floats(5, 2, 3, seed=2)
    out = attention(q, keys, values, np.array([3, 4]))
    for m, position in enumerate((3, 4)):
        for head in range(4):
            scores = np.exp(keys[: position + 1, head // 2] @ q[m, head] / math.sqrt(3))
            wanted = scores / scores.sum() @ values[: position + 1, head // 2]
            assert np.allclose(out[m, head], wanted, atol=1e-5)


def test_swiglu_of_any_size_is_a_number():
    gate = np.array([[-1e4, -2, 0, 3, 1e4]], np.float32)
    up = np.full((1, 5), 2, np.float32)
    wanted = [0, -4 / (1 + math.exp(2)), 0, 6 / (1 + math.exp(-3)), 2e4]
    assert np.allclose(swiglu(gate, up), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (LAYER, dataclasses.replace(LAYER, window=8))}, "layer 1 with a window of 8"),
        ({"layers": (dataclasses.replace(LAYER, n_ff=0),)}, "layer 0 without"),
        ({"temperature_scale": 0.1}, "scaled by their position"),
        ({"rope": dataclasses.replace(ROPE, has_factors=True)}, "list of factors"),
    ],
)
def test_what_is_not_computed_is_named(change, reason):
    assert unsupported(CONFIG) is None
    assert reason in unsupported(dataclasses.replace(CONFIG, **change))
