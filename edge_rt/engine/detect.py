"""Detection: labelled boxes in a picture, from a model's rows or from its peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import Centers, Detect, Rows
from edge_rt.engine.facts import ModelFacts, check_tensor, read_labels
from edge_rt.engine.feeds import PictureFeeds
from edge_rt.engine.images import turn_for
from edge_rt.engine.infer import Infer, sum_timings
from edge_rt.errors import BackendStepError
from edge_rt.tensor_types import Box, MediaAnswer, MediaRequest

_MAX_CANDIDATES = 3000  # that overlaps are looked for among, best first
_MAX_LOG_SIZE = 12.0


@dataclass(frozen=True, slots=True)
class Found:
    """Candidates: corners [n, 4] as x1 y1 x2 y2 in the input's pixels, scores [n] and classes [n]."""

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.intp]

    def take(self, index: NDArray[Any]) -> Found:
        return Found(self.corners[index], self.scores[index], self.classes[index])


class DetectPipeline:
    """Boxes in a picture or in each of its regions, beside a reference where the manifest asks for one."""

    task = "detect"

    def __init__(self, spec: Detect, model: ModelFacts, assets: Mapping[str, Path], *, max_pixels: int) -> None:
        self._spec = spec
        self._max_pixels = max_pixels
        self._labels = read_labels(spec.labels, assets)
        self._feeds = PictureFeeds(spec.image, model, spec.reference, spec.reference_input)
        self._outputs = _check_outputs(spec.decode, model, len(self._labels))

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        with turn_for(request.data, request.reference):
            return self._run(request, infer)

    def _run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        picture, reference = self._feeds.pictures(request, max_pixels=self._max_pixels)
        boxes, timings = [], []
        for part in request.regions or (None,):
            feeds, fit = self._feeds.make(picture, reference, part)
            answer = infer(feeds)
            timings.append(answer.timings)
            found = self._decode(answer.outputs, request.min_score)
            boxes += self._boxes(found, fit.boxes(found.corners, picture.width, picture.height))
        boxes.sort(key=lambda box: -box.score)
        return MediaAnswer(
            task=self.task,
            boxes=tuple(boxes[: min(request.top_k or self._spec.max_boxes, self._spec.max_boxes)]),
            width=picture.width,
            height=picture.height,
            timings=sum_timings(timings),
        )

    def _decode(self, outputs: Mapping[str, NDArray[Any]], min_score: float | None) -> Found:
        spec, image = self._spec, self._spec.image
        floor = spec.min_score if min_score is None else min_score
        arrays = {name: np.asarray(outputs[name], np.float32) for name in self._outputs}
        if any(not np.isfinite(array).all() for array in arrays.values()):
            raise BackendStepError(reason="the model's boxes are not finite")
        if isinstance(spec.decode, Rows):
            (rows,) = arrays.values()
            found = from_rows(rows, spec.decode, image.width, image.height)
        else:
            found = from_centers(arrays, spec.decode, image.width, image.height)
        if found.classes.size and int(found.classes.max()) >= len(self._labels):
            raise BackendStepError(reason=f"class {int(found.classes.max())} has no label among {len(self._labels)}")
        found = found.take(np.flatnonzero(found.scores >= floor))
        found = found.take(np.argsort(-found.scores, kind="stable")[:_MAX_CANDIDATES])
        return found.take(suppress(found, spec.max_iou)[: spec.max_boxes])

    def _boxes(self, found: Found, corners: NDArray[np.float32]) -> list[Box]:
        boxes = []
        for (left, top, right, bottom), score, kind in zip(
            corners.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True
        ):
            if right > left and bottom > top:
                box = Box(x=left, y=top, width=right - left, height=bottom - top, label=self._labels[kind], score=score)
                boxes.append(box)
        return boxes


def _check_outputs(decoder: Rows | Centers, model: ModelFacts, n_labels: int) -> tuple[str, ...]:
    """Give the names of the outputs that are decoded. Raises ModelFormatError."""
    if isinstance(decoder, Rows):
        tensor = model.output(decoder.output, "decode.output")
        n_columns = n_labels + (5 if decoder.objectness else 4)
        check_tensor("decode", tensor, (-1, n_columns, -1) if decoder.transposed else (-1, -1, n_columns), "FP32")
        return (tensor.name,)
    heatmap = model.output(decoder.heatmap, "decode.heatmap")
    check_tensor("decode.heatmap", heatmap, (-1, n_labels, -1, -1), "FP32")
    names = [heatmap.name]
    for field in ("sizes", "offsets"):
        if name := getattr(decoder, field):
            tensor = model.output(name, f"decode.{field}")
            check_tensor(f"decode.{field}", tensor, (-1, 2, *heatmap.shape[2:]), "FP32")
            names.append(name)
    return tuple(names)


def from_rows(rows: NDArray[np.float32], spec: Rows, width: int, height: int) -> Found:
    """Decode [1, n, 4 + classes], or what spec says it is instead; each row has its best class."""
    table = rows[0].T if spec.transposed else rows[0]
    scores = _sigmoid(table[:, 4:]) if spec.sigmoid else table[:, 4:]
    if spec.objectness:
        scores = scores[:, 1:] * scores[:, :1]
    classes = scores.argmax(axis=1)
    corners = table[:, :4].copy()
    if spec.is_relative:
        corners *= np.array([width, height] * 2, np.float32)
    if spec.boxes == "center":
        half = corners[:, 2:] / 2
        corners = np.concatenate((corners[:, :2] - half, corners[:, :2] + half), axis=1)
    return Found(corners, scores[np.arange(len(scores)), classes], classes)


def from_centers(arrays: Mapping[str, NDArray[np.float32]], spec: Centers, width: int, height: int) -> Found:
    """Decode a heatmap: each cell that is the highest of the nine around it is a box's centre."""
    heat = arrays[spec.heatmap][0]
    n_rows, n_columns = heat.shape[1:]
    around = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    near = [around[:, dy : dy + n_rows, dx : dx + n_columns] for dy in range(3) for dx in range(3)]
    classes, row, column = np.nonzero(heat >= np.maximum.reduce(near))
    scores = heat[classes, row, column]
    best = np.argsort(-scores, kind="stable")[:_MAX_CANDIDATES]
    classes, row, column, scores = classes[best], row[best], column[best], scores[best]
    sizes = arrays[spec.sizes][0][:, row, column].T
    sizes = np.exp(np.minimum(sizes, _MAX_LOG_SIZE)) if spec.log_sizes else sizes
    offsets = arrays[spec.offsets][0][:, row, column].T if spec.offsets else np.float32(0.5)
    centers = np.stack((column, row), axis=1).astype(np.float32) + offsets
    cell = np.array([width / n_columns, height / n_rows] * 2, np.float32)
    corners = np.concatenate((centers - sizes / 2, centers + sizes / 2), axis=1) * cell
    return Found(corners.astype(np.float32), _sigmoid(scores) if spec.sigmoid else scores, classes)


def suppress(found: Found, max_iou: float) -> NDArray[np.intp]:
    """Give the indexes of those that stay, for candidates ordered best first: no two of a class overlap by more."""
    left, top, right, bottom = found.corners.T
    area = np.maximum(right - left, 0) * np.maximum(bottom - top, 0)
    open_ = np.ones(len(area), bool)
    kept: list[int] = []
    for i in range(len(area)):
        if not open_[i]:
            continue
        kept.append(i)
        wide = np.minimum(right, right[i]) - np.maximum(left, left[i])
        high = np.minimum(bottom, bottom[i]) - np.maximum(top, top[i])
        shared = np.maximum(wide, 0) * np.maximum(high, 0)
        union = area + area[i] - shared
        open_ &= ~((shared > max_iou * union) & (found.classes == found.classes[i]))
    return np.array(kept, np.intp)


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    halves: NDArray[np.float32] = np.float32(0.5) * (1 + np.tanh(logits / 2))  # where exp would overflow, this does not
    return halves
