"""Pictures and models for the tests of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_rt.engine.infer import Inferred
from edge_rt.tensor_types import TensorTimings

Compute = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]


def encoded(pixels: NDArray[Any] | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Give pixels as a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Give a picture that no other looks like."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class FakeInfer:
    """A model in the tests' hands; it keeps what it was fed."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.calls: list[tuple[Mapping[str, NDArray[Any]], str, bool]] = []

    def __call__(self, feeds: Mapping[str, NDArray[Any]], *, stream: str = "", is_last: bool = False) -> Inferred:
        self.calls.append((feeds, stream, is_last))
        return Inferred(outputs=self._compute(feeds), timings=TensorTimings(queue_s=0.5, compute_s=0.25, batch_size=1))
