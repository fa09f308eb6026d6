"""Draw what was found into a copy of the picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from edge_rt.engine.images import decode
from edge_rt.errors import BackendUnavailableError
from edge_rt.tensor_types import Box

try:
    from PIL import ImageDraw, ImageFont
except ImportError as exc:
    raise BackendUnavailableError(backend="drawing", reason=str(exc), extra="onnx") from exc

# Told apart also by who sees no red or green (Okabe and Ito).
_COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw(data: bytes, boxes: Sequence[Box], output: Path, *, max_pixels: int) -> None:
    """Write the picture with numbered boxes: upright, as they were found. Raises OSError."""
    picture = decode(data, max_pixels=max_pixels).convert("RGB")
    pen = ImageDraw.Draw(picture)
    side = max(picture.size)
    width, font = max(1, round(side / 400)), ImageFont.load_default(max(10, round(side / 50)))
    labels = sorted({box.label for box in boxes})
    is_text = labels == ["text"]  # the font has few letters, so what was read stands in the list, under the number
    for i, box in reversed(list(enumerate(boxes, 1))):  # the best is drawn last, over the others
        color = _COLORS[labels.index(box.label) % len(_COLORS)]
        corners = _corners(box)
        pen.line([*corners, corners[0], corners[1]], fill=color, width=width, joint="curve")
        name = str(i) if is_text else f"{i} {box.label} {box.score:.2f}"
        _, _, right, bottom = pen.textbbox((0, 0), name, font=font)
        x = min(max(0.0, corners[0][0] - width / 2), picture.width - (right + 4))
        above = corners[0][1] - bottom - 4
        y = above if above >= 0 else min(max(p[1] for p in corners), picture.height - (bottom + 4))
        pen.rectangle((x, y, x + right + 4, y + bottom + 4), fill=color)
        pen.text((x + 2, y + 2), name, fill="white", font=font)
    kind = "PNG" if output.suffix.lower() == ".png" else "JPEG"
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        picture.save(part, kind)
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def _corners(box: Box) -> list[tuple[float, float]]:
    """Give a box's corners, clockwise from the top left, turned about its middle."""
    x, y = box.x + box.width / 2, box.y + box.height / 2
    cos, sin = math.cos(math.radians(box.turn_deg)), math.sin(math.radians(box.turn_deg))
    sides = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    return [
        (x + u * box.width / 2 * cos - v * box.height / 2 * sin, y + u * box.width / 2 * sin + v * box.height / 2 * cos)
        for u, v in sides
    ]
