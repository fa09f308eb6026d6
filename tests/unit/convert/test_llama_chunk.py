"""Layers of a Llama as a graph of fixed shapes: chunk after chunk it gives the states that llama_math gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.llama_math import KvCache, LlamaMath
from edge_rt.backends.native_config import NativeConfig
from tests.unit.backends import test_llama_math
from tests.unit.backends.test_llama_math import LAYER, ROPE

ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from edge_rt.convert.llama_chunk import MASKED, Shape, angles, build_chunk, mask  # noqa: E402
from edge_rt.convert.npu import W8A16, quantize  # noqa: E402
from tools.activations import Statistics  # noqa: E402

CONFIG = dataclasses.replace(test_llama_math.CONFIG, norm_eps=1e-9)  # the graph has none
SHAPE = Shape(chunk=3, n_past=4)
IDS = [3, 7, 1, 19, 0, 7]
Floats = NDArray[np.float32]


def floats(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights() -> tuple[dict[str, Floats], dict[str, Floats], Floats]:
    shapes = {"output": (20, 16)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_qkv": (32, 16), f"blk.{i}.attn_output": (16, 16)}
        shapes |= {f"blk.{i}.ffn_gate_up": (24, 16), f"blk.{i}.ffn_down": (16, 12)}
    matrices = {name: floats(*shape, seed=i) * np.float32(0.3) for i, (name, shape) in enumerate(shapes.items())}
    norms = ["output_norm.weight", *(f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn"))]
    vectors = {name: 1 + np.float32(0.1) * floats(16, seed=50 + i) for i, name in enumerate(norms)}
    return matrices, vectors, floats(20, 16, seed=99)


def states(config: NativeConfig) -> list[Floats]:
    matrices, vectors, embedding = weights()
    model = LlamaMath(config, vectors, lambda ids: embedding[ids], lambda name, x: x @ matrices[name].T)
    kv = KvCache.of(config, len(IDS))
    found = list(model.states(IDS, kv))
    assert kv.n_past == len(IDS)
    np.testing.assert_allclose(
        model.logits(found[-1]), model.forward(IDS, KvCache.of(config, 6), want_all=True), atol=1e-6
    )
    return found


def feeds(config: NativeConfig, x: Floats, first: int, kept: dict[str, Floats]) -> dict[str, Floats]:
    return {"x": x[None, first : first + 3], "mask": mask(first, SHAPE), **angles(config, first, SHAPE), **kept}


def empty() -> dict[str, Floats]:
    return {f"{part}.{i}": np.zeros((1, 2, 4, 4), np.float32) for part in ("keys", "values") for i in range(2)}


def run(model: Any, feed: dict[str, Floats]) -> dict[str, Floats]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


@pytest.mark.parametrize("pairs_halves", [False, True])
def test_chunks_give_the_states_of_floats(pairs_halves: bool) -> None:
    config = dataclasses.replace(CONFIG, rope=dataclasses.replace(ROPE, pairs_halves=pairs_halves))
    matrices, vectors, _ = weights()
    expected = states(config)
    model = build_chunk(config, matrices, vectors, [0, 1], SHAPE)
    first = run(model, feeds(config, expected[0], 0, empty()))
    np.testing.assert_allclose(first["hidden"][0], expected[2][:3], atol=1e-5)
    # What the caller keeps of the first chunk stands at the end of the past, next to the second.
    kept = empty()
    for name, value in kept.items():
        value[:, :, 1:] = first[f"new_{name}"]
    second = run(model, feeds(config, expected[0], 3, kept))
    np.testing.assert_allclose(second["hidden"][0], expected[2][3:], atol=1e-5)


def test_layers_can_be_parted_into_graphs() -> None:
    matrices, vectors, _ = weights()
    expected = states(CONFIG)
    kept = {name: value for name, value in empty().items() if name.endswith(".1")}
    found = run(build_chunk(CONFIG, matrices, vectors, [1], SHAPE), feeds(CONFIG, expected[1], 0, kept))
    np.testing.assert_allclose(found["hidden"][0], expected[2][:3], atol=1e-5)
    assert set(found) == {"hidden", "new_keys.1", "new_values.1"}


def test_a_quantised_chunk_is_near() -> None:
    """With 16-bit activations, the mask's numbers among the scores."""
    matrices, vectors, _ = weights()
    expected = states(CONFIG)
    model = build_chunk(CONFIG, matrices, vectors, [0, 1], SHAPE)
    feed = feeds(CONFIG, expected[0], 0, empty())
    quantized = quantize(model, Statistics.collect(model, [feed]).ranges("minmax"), W8A16)
    found = run(quantized, feed)["hidden"][0]
    assert np.abs(found - expected[2][:3]).max() < 0.05 * np.abs(expected[2][:3]).max()


def test_mask_lets_a_token_see_what_is_there() -> None:
    found = mask(2, SHAPE)[0, 0]
    assert (found == 0).tolist() == [
        [False, False, True, True, True, False, False],
        [False, False, True, True, True, True, False],
        [False, False, True, True, True, True, True],
    ]
    assert set(np.unique(found)) == {MASKED, 0.0}


def test_layers_of_another_kind_are_refused() -> None:
    matrices, vectors, _ = weights()
    for change in ({"uses_rope": False}, {"window": 4}, {"n_ff": 0}):
        config = dataclasses.replace(CONFIG, layers=(dataclasses.replace(LAYER, **change), LAYER))
        with pytest.raises(ValueError, match="layer 0 is not one"):
            build_chunk(config, matrices, vectors, [0], SHAPE)
