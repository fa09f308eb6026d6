"""The detector's architecture, which net.py trains with PyTorch and graph.py writes as ONNX.

The two pictures go through `fine` to cells of 8 × 8 pixels; `coarse` looks further around each, its result is added to
`fine`'s, and `neck` and the head make of that, for each cell, a logit for each kind and a box.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tools.pcb.boards import KINDS
from tools.pcb.samples import STRIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv:
    """A convolution and ReLU; is_residual adds what came in before the ReLU."""

    n_in: int
    n_out: int
    kernel: int = 3
    stride: int = 1
    is_residual: bool = False
    has_relu: bool = True

    @property
    def pad(self) -> int:
        return (self.kernel - self.stride + 1) // 2 if self.stride > 1 else self.kernel // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    fine: tuple[Conv, ...]
    coarse: tuple[Conv, ...]
    neck: tuple[Conv, ...]

    @property
    def head(self) -> Conv:
        return Conv(n_in=self.neck[-1].n_out, n_out=len(KINDS) + 4, kernel=1, has_relu=False)

    def named(self) -> dict[str, Conv]:
        """All convolutions by name, in the order in which they are computed."""
        parts = (("fine", self.fine), ("coarse", self.coarse), ("neck", self.neck), ("head", (self.head,)))
        return {f"{part}.{i}": conv for part, convs in parts for i, conv in enumerate(convs)}

    @property
    def n_params(self) -> int:
        return sum(c.n_out * (c.n_in * c.kernel**2 + 1) for c in self.named().values())


def _shape(stem: tuple[Conv, ...], fine: int, n_fine: int, coarse: int, n_coarse: int, n_neck: int) -> Shape:
    shape = Shape(
        fine=(
            *stem,
            Conv(n_in=stem[-1].n_out, n_out=fine, stride=2),
            *(Conv(n_in=fine, n_out=fine, is_residual=True) for _ in range(n_fine)),
        ),
        coarse=(
            Conv(n_in=fine, n_out=coarse, stride=2),
            *(Conv(n_in=coarse, n_out=coarse, is_residual=True) for _ in range(n_coarse)),
            Conv(n_in=coarse, n_out=fine, kernel=1, has_relu=False),
        ),
        neck=tuple(Conv(n_in=fine, n_out=fine, is_residual=True) for _ in range(n_neck)),
    )
    assert prod(conv.stride for conv in shape.fine) == STRIDE
    return shape


SHAPES = {
    # most pixels are looked at once, by few channels in large strides: that makes the speed
    "large": _shape((Conv(n_in=2, n_out=16, kernel=6, stride=4),), fine=32, n_fine=1, coarse=48, n_coarse=2, n_neck=1),
    "small": _shape((Conv(n_in=2, n_out=16, kernel=4, stride=4),), fine=16, n_fine=0, coarse=32, n_coarse=2, n_neck=1),
    "tiny": _shape((Conv(n_in=2, n_out=8, kernel=4, stride=4),), fine=8, n_fine=1, coarse=8, n_coarse=1, n_neck=1),
}
