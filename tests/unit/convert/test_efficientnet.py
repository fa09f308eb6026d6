from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply
from tests.torch_files import torch_file

pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from edge_rt.convert.efficientnet import Stage, build  # noqa: E402

SIDE = 17  # odd, so that "same" padding differs between the ends
STAGES = (Stage(1, 3, 1), Stage(2, 5, 2))
State = dict[str, NDArray[Any]]


def small_state(seed: int = 0) -> State:
    """Weights of a stem of 8 channels, three blocks of 6, 10 and 10, a head of 12 and 5 classes."""
    rng = np.random.default_rng(seed)
    state: State = {}

    def conv(name: str, norm: str, n_out: int, n_in: int, kernel: int) -> None:
        state[f"{name}.weight"] = rng.normal(size=(n_out, n_in, kernel, kernel)).astype("<f4")
        for part in ("weight", "bias", "running_mean"):
            state[f"{norm}.{part}"] = rng.normal(size=n_out).astype("<f4")
        state[f"{norm}.running_var"] = rng.uniform(0.5, 2, size=n_out).astype("<f4")

    def block(index: int, n_in: int, n_out: int, kernel: int, expand: int) -> None:
        prefix = f"_blocks.{index}"
        if expand > 1:
            conv(f"{prefix}._expand_conv", f"{prefix}._bn0", n_in * expand, n_in, 1)
        conv(f"{prefix}._depthwise_conv", f"{prefix}._bn1", n_in * expand, 1, kernel)
        conv(f"{prefix}._project_conv", f"{prefix}._bn2", n_out, n_in * expand, 1)

    conv("_conv_stem", "_bn0", 8, 3, 3)
    block(0, 8, 6, 3, 1)
    block(1, 6, 10, 5, 2)
    block(2, 10, 10, 5, 2)
    conv("_conv_head", "_bn1", 12, 10, 1)
    state["_fc.weight"] = rng.normal(size=(5, 12)).astype("<f4")
    state["_fc.bias"] = rng.normal(size=5).astype("<f4")
    return state


def convolve(x: NDArray[Any], weights: NDArray[Any], stride: int, *, depthwise: bool) -> NDArray[Any]:
    """Of [channels, side, side], as TensorFlow pads, one output at a time."""
    kernel, side = weights.shape[-1], -(-x.shape[1] // stride)
    padding = max(0, (side - 1) * stride + kernel - x.shape[1])
    ends = (padding // 2, padding - padding // 2)
    x = np.pad(x, ((0, 0), ends, ends))
    out = np.zeros((weights.shape[0], side, side))
    for row in range(side):
        for column in range(side):
            patch = x[:, row * stride : row * stride + kernel, column * stride : column * stride + kernel]
            product = patch * weights[:, 0] if depthwise else patch[None] * weights
            out[:, row, column] = product.reshape(len(weights), -1).sum(axis=1)
    return out


def reference(state: State, pixels: NDArray[np.uint8]) -> NDArray[Any]:
    """The network as PyTorch runs it: normalisations by themselves, in double precision."""

    def layer(x: NDArray[Any], conv: str, norm: str, stride: int = 1, *, active: bool = True) -> NDArray[Any]:
        weights = state[f"{conv}.weight"].astype(float)
        x = convolve(x, weights, stride, depthwise=weights.shape[1] == 1 and x.shape[0] > 1)
        gamma, beta, mean, variance = (
            state[f"{norm}.{part}"].astype(float)[:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        x = (x - mean) / np.sqrt(variance + 1e-3) * gamma + beta
        return np.clip(x, 0, 6) if active else x

    x = layer((pixels.transpose(2, 0, 1) - 127.0) / 128.0, "_conv_stem", "_bn0", 2)
    for index, stride in enumerate((1, 2, 1)):
        prefix, start = f"_blocks.{index}", x
        if f"{prefix}._expand_conv.weight" in state:
            x = layer(x, f"{prefix}._expand_conv", f"{prefix}._bn0")
        x = layer(x, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride)
        x = layer(x, f"{prefix}._project_conv", f"{prefix}._bn2", active=False)
        if x.shape == start.shape:
            x = x + start
    x = layer(x, "_conv_head", "_bn1").mean(axis=(1, 2))
    return np.asarray(state["_fc.weight"] @ x + state["_fc.bias"])


def test_graph_computes_what_pytorch_would() -> None:
    state = small_state()
    session = ort.InferenceSession(build(state, STAGES, SIDE).SerializeToString())
    pictures = np.random.default_rng(1).integers(0, 256, size=(3, SIDE, SIDE, 3), dtype=np.uint8)
    logits = session.run(None, {"image": pictures})[0]
    expected = np.stack([reference(state, picture) for picture in pictures])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    assert np.abs(expected - expected[0]).max() > 0.1  # the pictures matter


def test_same_weights_same_bytes() -> None:
    first, second = (build(small_state(), STAGES, SIDE).SerializeToString(deterministic=True) for _ in range(2))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_conv_stem.weight", np.zeros((8, 4, 3, 3), "<f4")),
        ("_conv_stem.weight", np.zeros((8, 3, 3), "<f4")),
        ("_conv_stem.weight", np.full((8, 3, 3, 3), np.nan, "<f4")),
        ("_bn0.running_var", np.full(8, -1, "<f4")),
        ("_bn0.bias", np.zeros(7, "<f4")),
        ("_blocks.1._depthwise_conv.weight", np.zeros((12, 1, 3, 3), "<f4")),
        ("_blocks.3._project_conv.weight", np.zeros((10, 20, 1, 1), "<f4")),
        ("_fc.weight", np.zeros((5, 11), "<f4")),
        ("_fc.bias", np.zeros(5, "<f8")),
    ],
)
def test_weights_that_do_not_fit(name: str, value: NDArray[Any]) -> None:
    state = small_state()
    state[name] = value
    with pytest.raises(ValueError, match=r".+"):
        build(state, STAGES, SIDE)


def test_the_recipe_names_what_is_missing(tmp_path: Path) -> None:
    """In a process of its own, whose error crosses to this one."""
    src = tmp_path / "m.pth"
    src.write_bytes(torch_file({"other": np.zeros(3, "<f4")}))
    with pytest.raises(ModelFormatError, match=r"_conv_stem\.weight.*no such tensor"):
        apply("efficientnet-lite0", src, tmp_path / "m.onnx")
    with pytest.raises(ModelFormatError, match=r"no recipe 'lite9', there are: .*efficientnet-lite0"):
        apply("lite9", src, tmp_path / "m.onnx")
