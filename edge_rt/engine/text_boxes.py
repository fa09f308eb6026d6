"""Text detection: boxes around the lines of a picture, from a map of how likely each pixel is text.

Lines may be tilted; boxes come in reading order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_rt.catalog.pipelines import DetectText, ImageInput
from edge_rt.engine.facts import ModelFacts, check_tensor
from edge_rt.engine.images import Fit, decode_request, is_inside, prepare, turn_for, whole
from edge_rt.engine.infer import Infer, sum_timings
from edge_rt.errors import BackendStepError
from edge_rt.tensor_types import Box, MediaAnswer, MediaRequest

_MAX_PARTS = 1000  # of a map that are looked at, the highest first: noise may have a hundred thousand


class DetectTextPipeline:
    """Boxes around lines of text in a picture or in its regions.

    A model for pictures of one size, as NPUs have them, gets each one filled up to it.
    """

    task = "detect-text"

    def __init__(self, spec: DetectText, model: ModelFacts, *, max_pixels: int) -> None:
        self._spec = spec
        self._max_pixels = max_pixels
        self._input = model.input(spec.input)
        self._output = model.output(spec.output)
        n_channels = 1 if spec.color == "gray" else 3
        check_tensor("input", self._input, (-1, n_channels, -1, -1), "FP32")
        check_tensor("output", self._output, (-1, 1, -1, -1), "FP32")
        height, width = self._input.shape[2:]
        self._fixed = (height, width) if min(height, width) > 0 else None

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        with turn_for(request.data):
            return self._run(request, infer)

    def _run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        picture = decode_request(request, max_pixels=self._max_pixels)
        boxes, timings = [], []
        for part in request.regions or (None,):
            pixels, fit = self._prepare(picture, part or whole(picture))
            answer = infer({self._input.name: pixels[np.newaxis]})
            timings.append(answer.timings)
            likely = np.asarray(answer.outputs[self._output.name], np.float32)
            if likely.shape != (1, 1, *pixels.shape[1:]) or not np.isfinite(likely).all():
                raise BackendStepError(reason=f"{self._output.name} is no map of {pixels.shape[1:]}: {likely.shape}")
            rectangles, scores = text_rectangles(likely[0, 0], self._spec, request.min_score)
            for rectangle, score in zip(rectangles.tolist(), scores.tolist(), strict=True):
                box = _box(rectangle, score, fit, picture)
                if is_inside(box, picture):  # what is found beside the picture is in what it was filled up with
                    boxes.append(box)
        boxes.sort(key=lambda box: -box.score)
        return MediaAnswer(
            task=self.task,
            boxes=in_reading_order(boxes[: request.top_k]),
            width=picture.width,
            height=picture.height,
            timings=sum_timings(timings),
        )

    def _prepare(self, picture: Image.Image, area: Box) -> tuple[NDArray[Any], Fit]:
        """Scale the area to fit, without enlarging it, and fill it up to whole steps at its right and bottom."""
        spec = self._spec
        most_height, most_width = self._fixed or (spec.max_side, spec.max_side)
        scale = min(1.0, most_height / area.height, most_width / area.width)
        width, height = max(1, round(area.width * scale)), max(1, round(area.height * scale))
        sides = ImageInput(width=width, height=height, color=spec.color, mean=spec.mean, std=spec.std, layout="nchw")
        pixels, fit = prepare(picture, sides, area)
        sides_wanted = self._fixed or [-(-side // spec.side_step) * spec.side_step for side in (height, width)]
        grow = [wanted - side for wanted, side in zip(sides_wanted, (height, width), strict=True)]
        return np.pad(pixels, ((0, 0), (0, grow[0]), (0, grow[1])), mode="edge"), fit


def _box(rectangle: list[float], score: float, fit: Fit, picture: Image.Image) -> Box:
    """Put a map's rectangle into the picture; a turned one may hang over its edge, an upright one is cut there."""
    x, y, width, height, turn_deg = rectangle
    around = np.array([[x - width / 2, y - height / 2, x + width / 2, y + height / 2]], np.float32)
    if turn_deg:
        ((left, top, right, bottom),) = fit.boxes(around, None, None).tolist()
        box = Box(x=left, y=top, width=right - left, height=bottom - top, label="text", score=score, turn_deg=turn_deg)
        if is_inside(box, picture):
            return box
        # It is larger than the picture: all of the picture that it holds, as that lies.
        cos, sin = abs(np.cos(np.radians(turn_deg))), abs(np.sin(np.radians(turn_deg)))
        half_width, half_height = (width * cos + height * sin) / 2, (width * sin + height * cos) / 2
        around = np.array([[x - half_width, y - half_height, x + half_width, y + half_height]], np.float32)
    ((left, top, right, bottom),) = fit.boxes(around, picture.width, picture.height).tolist()
    return Box(x=left, y=top, width=right - left, height=bottom - top, label="text", score=score)


def text_rectangles(
    likely: NDArray[np.float32], spec: DetectText, min_score: float | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Find lines in a map [height, width]: [n, 5] of middle x, y, width, height, turn_deg; the mean of the map in each.

    A model marks the core of each line only; spec.unclip lets the rectangles grow to the whole.
    """
    floor = spec.min_score if min_score is None else min_score
    found, scores = [], []
    parts = [points for points in components(likely > spec.threshold) if np.ptp(points, axis=0).min() >= spec.min_side]
    for points in sorted(parts, key=len, reverse=True)[:_MAX_PARTS]:
        rectangle = smallest_rectangle(points)
        width, height = rectangle[2:4]
        if min(width, height) < spec.min_side:
            continue
        score = _mean_inside(likely, rectangle)
        if score >= floor:
            grow = spec.unclip * width * height / (width + height)
            found.append((*rectangle[:2], width + grow, height + grow, rectangle[4]))
            scores.append(score)
    best = np.argsort(-np.array(scores), kind="stable")[: spec.max_boxes]
    return np.array(found, np.float32).reshape(-1, 5)[best], np.array(scores, np.float32)[best]


def components(mask: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Find the sets of True that touch at sides or corners: of each the corners [n, 2] as x, y of its pixels' rows."""
    width = mask.shape[1] + 2  # so that runs of different rows never meet
    flat = np.zeros((mask.shape[0], width), np.int8)
    flat[:, 1:-1] = mask
    edges = np.flatnonzero(np.diff(flat.ravel(), prepend=0))
    starts, ends = edges[::2], edges[1::2]  # of runs of True, in one long row
    if not len(starts):
        return []
    # Of the runs in the next row those touch that begin by this one's end and end by its beginning.
    first = np.searchsorted(ends, starts + width, "left")
    n_touching = np.maximum(np.searchsorted(starts, ends + width, "right") - first, 0)
    upper = np.repeat(np.arange(len(starts)), n_touching)
    before = np.repeat(n_touching.cumsum() - n_touching, n_touching)
    group = _groups(len(starts), upper, np.arange(len(upper)) - before + np.repeat(first, n_touching))
    order = np.argsort(group, kind="stable")
    row, left = np.divmod(starts, width)
    left, right = left - 1, left - 1 + ends - starts
    corners = np.stack(
        [np.stack(point, axis=1) for point in ((left, row), (right, row), (left, row + 1), (right, row + 1))], axis=1
    )[order]
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    return [part.reshape(-1, 2) for part in np.split(corners, cuts)]


def _groups(n: int, a: NDArray[np.intp], b: NDArray[np.intp]) -> NDArray[np.intp]:
    """Give each of n things the lowest number among those that pairs a[i], b[i] tie it to, over however many pairs."""
    group = np.arange(n)
    while True:
        low = np.minimum(group[a], group[b])
        new = group.copy()
        np.minimum.at(new, group[a], low)
        np.minimum.at(new, group[b], low)
        while not np.array_equal(new[new], new):
            new = new[new]
        if np.array_equal(new, group):
            return group
        group = new


def smallest_rectangle(points: NDArray[np.intp]) -> tuple[float, float, float, float, float]:
    """Give the rectangle around points [n, 2] with the smallest area: middle x, y, width, height, turn_deg in -45..45.

    One that would rise by less than an eighth of its height along its width is upright: so much is chance.
    """
    hull = _hull(points)
    sides = np.diff(hull, axis=0, append=hull[:1])
    angles = np.arctan2(sides[:, 1], sides[:, 0])
    angles = np.append(0.0, (angles + np.pi / 4) % (np.pi / 2) - np.pi / 4)  # a rectangle repeats every 90 degrees
    along = np.stack((np.cos(angles), np.sin(angles)), axis=1)
    across = np.stack((-along[:, 1], along[:, 0]), axis=1)
    spans = np.stack((hull @ along.T, hull @ across.T))  # [2, points, angles]
    low, high = spans.min(axis=1), spans.max(axis=1)
    width, height = high - low
    best = int((width * height).argmin())
    if abs(np.sin(angles[best])) * width[best] < height[best] / 8:
        best = 0
    u, v = (low[:, best] + high[:, best]) / 2
    x, y = u * along[best] + v * across[best]
    return float(x), float(y), float(width[best]), float(height[best]), float(np.degrees(angles[best]))


def _hull(points: NDArray[np.intp]) -> NDArray[np.float64]:
    """Give the corners of the convex hull, in order (Andrew's monotone chain)."""
    x, y = points[:, 0], points[:, 1] - points[:, 1].min()
    low, high = np.full(int(y.max()) + 1, np.iinfo(np.intp).max), np.zeros(int(y.max()) + 1, np.intp)
    np.minimum.at(low, y, x)  # of a row only its ends can be corners
    np.maximum.at(high, y, x)
    rows = np.flatnonzero(low <= high)
    ends = np.concatenate((np.stack((low[rows], rows), axis=1), np.stack((high[rows], rows), axis=1)))
    unique = sorted(set(map(tuple, (ends + np.array([0, points[:, 1].min()])).tolist())))
    halves: list[list[tuple[int, ...]]] = []
    for ordered in (unique, unique[::-1]):
        chain: list[tuple[int, ...]] = []
        for point in ordered:
            while len(chain) >= 2 and _turns_right(chain[-2], chain[-1], point):
                chain.pop()
            chain.append(point)
        halves.append(chain[:-1])
    return np.array(halves[0] + halves[1], np.float64)


def _turns_right(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


def _mean_inside(likely: NDArray[np.float32], rectangle: tuple[float, float, float, float, float]) -> float:
    """Give the mean of a map at points all over a rectangle, about one for each pixel."""
    x, y, width, height, turn_deg = rectangle
    cos, sin = np.cos(np.radians(turn_deg)), np.sin(np.radians(turn_deg))
    n_along, n_across = int(np.ceil(width)), int(np.ceil(height))
    u = ((np.arange(n_along) + 0.5) / n_along - 0.5) * width
    v = (((np.arange(n_across) + 0.5) / n_across - 0.5) * height)[:, np.newaxis]
    column = np.clip(np.floor(x + u * cos - v * sin).astype(np.intp), 0, likely.shape[1] - 1)
    row = np.clip(np.floor(y + u * sin + v * cos).astype(np.intp), 0, likely.shape[0] - 1)
    return float(likely[row, column].mean())


def in_reading_order(boxes: list[Box]) -> tuple[Box, ...]:
    """Sort from top to bottom; those whose middles lie within each other's heights are one line, from left to right."""
    lines: list[list[Box]] = []
    for box in sorted(boxes, key=lambda box: box.y + box.height / 2):
        middle = box.y + box.height / 2
        if lines and middle - (lines[-1][0].y + lines[-1][0].height / 2) < min(box.height, lines[-1][0].height) / 2:
            lines[-1].append(box)
        else:
            lines.append([box])
    return tuple(box for line in lines for box in sorted(line, key=lambda box: box.x))
