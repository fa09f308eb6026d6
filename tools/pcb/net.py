"""The detector in PyTorch: its layers, with weights that can be held on a 4-bit grid while they are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from tools.pcb.boards import KINDS
from tools.pcb.shape import Conv, Shape

Weights = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]  # layer: [out, in, k, k] and [out]

_FIRST_GUESS = -4.0  # logit: almost nothing is a flaw


class Layer(nn.Module):
    """One Conv of a Shape, with batch normalisation where a ReLU or an addition follows."""

    def __init__(self, conv: Conv, *, is_normalised: bool) -> None:
        super().__init__()
        self.spec = conv
        self.conv = nn.Conv2d(conv.n_in, conv.n_out, conv.kernel, conv.stride, conv.pad, bias=not is_normalised)
        self.norm = nn.BatchNorm2d(conv.n_out) if is_normalised else None
        self.n_levels = 0  # steps on either side of zero that a weight may take; 0: any value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = on_grid(self.conv.weight, self.n_levels) if self.n_levels else self.conv.weight
        y = functional.conv2d(x, weight, self.conv.bias, self.spec.stride, self.spec.pad)
        if self.norm is not None:
            y = self.norm(y)
        if self.spec.is_residual:
            y = y + x
        return functional.relu(y) if self.spec.has_relu else y

    def folded(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Give weights and biases with the normalisation in them. It scales whole channels, so a grid stays a grid."""
        weight = on_grid(self.conv.weight, self.n_levels) if self.n_levels else self.conv.weight
        if self.norm is None:
            bias = self.conv.bias
        else:
            scale = self.norm.weight / torch.sqrt(self.norm.running_var + self.norm.eps)
            weight = weight * scale[:, None, None, None]
            bias = self.norm.bias - self.norm.running_mean * scale
        return weight.detach().numpy().copy(), bias.detach().numpy().copy()


class Detector(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers = {name: Layer(conv, is_normalised=name != "head.0") for name, conv in shape.named().items()}
        self.layers = nn.ModuleDict({name.replace(".", "_"): layer for name, layer in layers.items()})
        nn.init.constant_(layers["head.0"].conv.bias[: len(KINDS)], _FIRST_GUESS)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        """pair: [n, 2, height, width] as 0..1; gives [n, kinds + 4, height / 8, width / 8]."""
        fine = self._through("fine", pair)
        coarse = self._through("coarse", fine)
        merged = functional.relu(fine + functional.interpolate(coarse, scale_factor=2.0, mode="nearest"))
        return self._through("head", self._through("neck", merged))

    def _through(self, part: str, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            if name.startswith(f"{part}_"):
                x = layer(x)
        return x

    def hold_to_grid(self, n_levels: Mapping[str, int]) -> None:
        """Train on with the named layers' weights on that many steps either side of zero."""
        for name, layer in self.layers.items():
            layer.n_levels = n_levels.get(name.replace("_", "."), 0)

    def weights(self) -> Weights:
        return {name.replace("_", "."): layer.folded() for name, layer in self.layers.items()}

    def take(self, weights: Weights) -> None:
        """Become the trained model that weights are of, to teach another: not to be trained on."""
        with torch.no_grad():
            for name, (weight, bias) in weights.items():
                layer = self.layers[name.replace(".", "_")]
                layer.conv.weight.copy_(torch.tensor(weight))
                if layer.norm is None:
                    layer.conv.bias.copy_(torch.tensor(bias))
                else:
                    layer.norm.running_mean.zero_()
                    layer.norm.running_var.fill_(1 - layer.norm.eps)
                    layer.norm.weight.fill_(1)
                    layer.norm.bias.copy_(torch.tensor(bias))
        self.eval()


def on_grid(weight: torch.Tensor, n_levels: int) -> torch.Tensor:
    """Round to the nearest of -n..n steps, the largest weight of an output channel being n; the gradient passes."""
    step = weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(1e-8) / n_levels
    rounded = (weight / step).round().clamp(-n_levels, n_levels) * step
    return weight + (rounded - weight).detach()


def detector_loss(
    output: torch.Tensor, heat: torch.Tensor, box: torch.Tensor, is_near: torch.Tensor, teacher: torch.Tensor | None
) -> torch.Tensor:
    """CenterNet's focal loss on the logits, L1 on the boxes; with a teacher, the distance to its answers too."""
    logits, boxes = output[:, : len(KINDS)], output[:, len(KINDS) :]
    n_marks = (heat == 1).sum().clamp_min(1)
    n_near = is_near.sum().clamp_min(1)
    loss = _focal(logits, heat) / n_marks
    loss = loss + _box_distance(boxes, box, is_near) / n_near
    if teacher is not None:
        taught = torch.sigmoid(teacher[:, : len(KINDS)])
        weight = taught + torch.sigmoid(logits).detach()  # cells where neither sees anything teach nothing
        distance = functional.binary_cross_entropy_with_logits(logits, taught, reduction="none")
        loss = loss + (distance * weight).sum() / n_marks
        loss = loss + _box_distance(boxes, teacher[:, len(KINDS) :], is_near) / n_near
    return loss


def _focal(logits: torch.Tensor, heat: torch.Tensor) -> Any:
    score = torch.sigmoid(logits)
    found = -functional.logsigmoid(logits) * (1 - score) ** 2
    quiet = -functional.logsigmoid(-logits) * score**2 * (1 - heat) ** 4
    return torch.where(heat == 1, found, quiet).sum()


def _box_distance(boxes: torch.Tensor, wanted: torch.Tensor, is_near: torch.Tensor) -> Any:
    return (functional.smooth_l1_loss(boxes, wanted, reduction="none", beta=0.2) * is_near[:, None]).sum()
