"""EfficientNet-Lite's weights, as a PyTorch state dict has them, into an ONNX graph that takes pictures as they are.

The input is uint8 [batch, height, width, 3]: RGB pixels. (pixel - 127) / 128, as the model was trained, is a
dequantising with zero point 127, so the quantised form of the model has the pixels themselves for its first layer's
input. Batch normalisation is folded into the convolutions, in double precision. Built from the same weights, the file
is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_rt.convert.onnx_build import OnnxBuilder, Shape
from edge_rt.convert.torch_file import read_state_dict
from edge_rt.errors import ModelFormatError

_EPSILON = 1e-3  # of batch normalisation
_MEAN, _SCALE = 127, 1 / 128

State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of one width: the first has the stride, the others follow with a shortcut."""

    n_blocks: int
    kernel: int
    stride: int


# From efficientnet/lite/efficientnet_lite_builder.py; the widths are in the weights.
LITE0 = (Stage(1, 3, 1), Stage(2, 3, 2), Stage(2, 5, 2), Stage(3, 3, 2), Stage(3, 5, 1), Stage(4, 5, 2), Stage(1, 3, 1))
LITE0_SIDE = 224


def convert_lite0(src: Path, dst: Path, beside: Path | None) -> None:  # noqa: ARG001
    """Write the ONNX file of a state dict of EfficientNet-Lite0. Raises ModelFormatError."""
    state = read_state_dict(src)
    try:
        model = build(state, LITE0, LITE0_SIDE)
    except KeyError as exc:
        raise ModelFormatError(path=src.name, field=str(exc), problem="no such tensor") from exc
    except ValueError as exc:
        raise ModelFormatError(path=src.name, field="shape", problem=str(exc)) from exc
    dst.write_bytes(model.SerializeToString(deterministic=True))


def build(state: State, stages: tuple[Stage, ...], side: int) -> onnx.ModelProto:
    """Give the graph for pictures of side × side pixels. Raises KeyError and ValueError for tensors that do not fit."""
    builder = _Builder(state, side)
    value = builder.pixels()
    value = builder.conv("stem", value, "_conv_stem", "_bn0", stride=2)
    index = 0
    for stage in stages:
        for position in range(stage.n_blocks):
            value = builder.block(index, value, stage.kernel, stage.stride if position == 0 else 1)
            index += 1
    if f"_blocks.{index}._project_conv.weight" in state:
        raise ValueError(f"more than {index} blocks")
    value = builder.conv("head", value, "_conv_head", "_bn1")
    return builder.finish(value)


class _Builder(OnnxBuilder):
    def __init__(self, state: State, side: int):
        super().__init__(state)
        self._side = side
        self._input_side = side
        self._n_channels = 3

    def pixels(self) -> str:
        self.constant("pixel_scale", np.array(_SCALE, np.float32))
        self.constant("pixel_zero", np.array(_MEAN, np.uint8))
        self.node("Transpose", ["image"], "pixels", perm=[0, 3, 1, 2])
        return self.node("DequantizeLinear", ["pixels", "pixel_scale", "pixel_zero"], "normalized")

    def block(self, index: int, value: str, kernel: int, stride: int) -> str:
        """Expand unless the block is thin, convolve each channel, project; add what came in where it fits."""
        name, prefix = f"block{index}", f"_blocks.{index}"
        start, n_channels = value, self._n_channels
        if f"{prefix}._expand_conv.weight" in self.state:
            value = self.conv(f"{name}/expand", value, f"{prefix}._expand_conv", f"{prefix}._bn0")
        value = self.conv(
            f"{name}/depthwise", value, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride=stride, kernel=kernel
        )
        value = self.conv(f"{name}/project", value, f"{prefix}._project_conv", f"{prefix}._bn2", activate=False)
        if stride == 1 and self._n_channels == n_channels:
            value = self.node("Add", [value, start], f"{name}/add")
        return value

    def conv(
        self, name: str, value: str, weight: str, norm: str, *, stride: int = 1, kernel: int = 0, activate: bool = True
    ) -> str:
        """Convolve with "same" padding as TensorFlow does it: where it is odd, the end gets the more."""
        weights, bias = self._fold(weight, norm)
        n_out, n_in, height, width = weights.shape
        if height != width or (kernel and height != kernel):
            raise ValueError(f"{weight} has a kernel of {height} × {width}")
        groups = n_out if n_in == 1 and self._n_channels > 1 else 1
        if n_in * groups != self._n_channels:
            raise ValueError(f"{weight} takes {n_in} channels where {self._n_channels} come")
        side = -(-self._side // stride)
        padding = max(0, (side - 1) * stride + height - self._side)
        before, after = padding // 2, padding - padding // 2
        self.constant(f"{name}/weight", weights)
        self.constant(f"{name}/bias", bias)
        result = self.node(
            "Conv",
            [value, f"{name}/weight", f"{name}/bias"],
            name,
            kernel_shape=[height, width],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=groups,
        )
        self._n_channels, self._side = n_out, side
        return self.node("Clip", [result, "zero", "six"], f"{name}/relu6") if activate else result

    def finish(self, value: str) -> onnx.ModelProto:
        weights, bias = self.floats("_fc.weight", 2), self.floats("_fc.bias", 1)
        if weights.shape != (bias.size, self._n_channels):
            raise ValueError(f"_fc.weight has shape {weights.shape}, {self._n_channels} channels come")
        value = self.node("GlobalAveragePool", [value], "pool")
        value = self.node("Flatten", [value], "features", axis=1)
        self.constant("classifier/weight", weights)
        self.constant("classifier/bias", bias)
        self.node("Gemm", [value, "classifier/weight", "classifier/bias"], "logits", transB=1)
        self.constant("zero", np.array(0, np.float32))
        self.constant("six", np.array(6, np.float32))
        shape: Shape = ["batch", self._input_side, self._input_side, 3]
        return self.model(
            "efficientnet-lite",
            [helper.make_tensor_value_info("image", TensorProto.UINT8, shape)],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", bias.size])],
        )

    def _fold(self, weight: str, norm: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        weights = self.floats(f"{weight}.weight", 4).astype(np.float64)
        gamma, beta, mean, variance = (
            self.floats(f"{norm}.{part}", 1).astype(np.float64)
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        if {a.shape for a in (gamma, beta, mean, variance)} != {(weights.shape[0],)}:
            raise ValueError(f"{weight} of shape {weights.shape} and {norm} of {gamma.shape} do not go together")
        if (variance < 0).any():
            raise ValueError(f"{norm}.running_var is negative")
        scale = gamma / np.sqrt(variance + _EPSILON)
        return (weights * scale[:, None, None, None]).astype(np.float32), (beta - mean * scale).astype(np.float32)
