"""What a board with SSCMA firmware saw with its own camera, as edge_rt's answer to a picture."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge_rt.tensor_types import Box, Label, MediaAnswer, TensorTimings

_MAX_FOUND: Final = 1000
_Pixel = Annotated[float, Meta(ge=-1e5, le=1e5)]
_Score = Annotated[float, Meta(ge=0, le=100)]
_Target = Annotated[int, Meta(ge=0, le=65535)]
_Ms = Annotated[float, Meta(ge=0, le=1e6)]
_Side = Annotated[int, Meta(ge=1, le=16384)]
_Found = Meta(max_length=_MAX_FOUND)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an INVOKE event.

    perf   milliseconds before, in and after the model
    boxes  middle x, middle y, width, height, per cent, class; points without a size, classes without a place
    image  base64 of the JPEG that was looked at, where it was asked for
    """

    count: Annotated[int, Meta(ge=0, le=2**32)] = 0
    perf: tuple[_Ms, _Ms, _Ms] = (0.0, 0.0, 0.0)
    boxes: Annotated[list[tuple[_Pixel, _Pixel, _Pixel, _Pixel, _Score, _Target]], _Found] = []
    points: Annotated[list[tuple[_Pixel, _Pixel, _Score, _Target]], _Found] = []
    classes: Annotated[list[tuple[_Score, _Target]], _Found] = []
    resolution: tuple[_Side, _Side] | None = None
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One picture that the board has looked at.

    answer       boxes or labels, as of a model that runs here; timings have what the board says of its model
    preprocess_s, infer_s, postprocess_s  as the board tells them
    jpeg         the picture, b"" where it was not asked for
    """

    count: int
    answer: MediaAnswer
    preprocess_s: float
    infer_s: float
    postprocess_s: float
    jpeg: bytes = b""


def sight(event: Event, labels: Sequence[str], *, place: str) -> Sight:
    """Read an event; classes without a label get their number. Raises ValueError for a picture that is none."""
    before_s, infer_s, after_s = (ms / 1e3 for ms in event.perf)
    width, height = event.resolution or (0, 0)
    boxes = [
        Box(x=x - w / 2, y=y - h / 2, width=w, height=h, label=_label(labels, target), score=score / 100)
        for x, y, w, h, score, target in event.boxes
    ]
    boxes += [
        Box(x=x, y=y, width=0, height=0, label=_label(labels, target), score=score / 100)
        for x, y, score, target in event.points
    ]
    found = [Label(index=target, label=_label(labels, target), score=score / 100) for score, target in event.classes]
    return Sight(
        count=event.count,
        answer=MediaAnswer(
            task="classify" if found and not boxes else "detect",
            labels=tuple(sorted(found, key=lambda label: -label.score)),
            boxes=tuple(sorted(boxes, key=lambda box: -box.score)),
            width=width,
            height=height,
            timings=TensorTimings(queue_s=0.0, compute_s=infer_s, batch_size=1, engine_s=infer_s),
            place=place,
        ),
        preprocess_s=before_s,
        infer_s=infer_s,
        postprocess_s=after_s,
        jpeg=_jpeg(event.image),
    )


def _label(labels: Sequence[str], target: int) -> str:
    return labels[target] if target < len(labels) else str(target)


def _jpeg(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("its picture is not base64") from None
    if data and not data.startswith(b"\xff\xd8"):
        raise ValueError("its picture is no JPEG")
    return data


class _Card(msgspec.Struct, frozen=True):
    classes: Annotated[list[Annotated[str, Meta(max_length=100)]], _Found] = []


def labels_of(stored: str) -> tuple[str, ...]:
    """Read the classes from what Seeed's tools store beside a model, base64 of a JSON; () from anything else."""
    try:
        card: Any = msgspec.json.decode(base64.b64decode(stored, validate=True), type=_Card)
    except (ValueError, RecursionError):
        return ()
    return tuple("".join(char for char in name if char.isprintable()) for name in card.classes)
