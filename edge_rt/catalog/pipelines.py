"""A manifest's [pipeline]: what happens to a file before a tensor model sees it, and what its outputs mean."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Score = Annotated[float, Meta(ge=0, le=1)]
_Channels = Annotated[tuple[float, ...], Meta(min_length=1, max_length=4)]


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a picture becomes a tensor: (pixel - mean) / std for pixels 0..255.

    resize  stretch: to width × height · letterbox: whole and unstretched, the rest filled with pad · crop: the shorter
            side to fit, the middle cut out
    """

    width: Annotated[int, Meta(ge=1, le=8192)]
    height: Annotated[int, Meta(ge=1, le=8192)]
    resize: Literal["stretch", "letterbox", "crop"] = "stretch"
    filter: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"
    mean: _Channels = (0.0,)
    std: _Channels = (1.0,)
    pad: Annotated[int, Meta(ge=0, le=255)] = 114
    datatype: Literal["FP32", "UINT8"] = "FP32"


class Classify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="classify"):
    """One label for a picture. labels names the asset with one label a line; softmax: the outputs are logits."""

    image: ImageInput
    labels: str
    softmax: bool = True
    top_k: Annotated[int, Meta(ge=1, le=1000)] = 5


Pipeline = Classify
