"""Text reading: each line's picture becomes a strip of one height, a model's steps along it become characters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_rt.catalog.pipelines import ImageInput, ReadText
from edge_rt.engine.classify import softmax
from edge_rt.engine.facts import ModelFacts, check_tensor, misfit, read_labels
from edge_rt.engine.images import decode_request, prepare, turn_for, whole
from edge_rt.engine.infer import Infer, sum_timings
from edge_rt.errors import BackendStepError
from edge_rt.tensor_types import Box, Label, MediaAnswer, MediaRequest

_STANDING = 1.5  # height by width from which on a line may run up the picture, as PaddleOCR sees it


class ReadTextPipeline:
    """The text of a picture of one line, or of each of its regions, whose order the texts keep.

    A region more than half as high again as wide is read upright and from bottom to top. A line that is read with less
    than min_score is an empty text with its score.
    """

    task = "read-text"

    def __init__(self, spec: ReadText, model: ModelFacts, assets: Mapping[str, Path], *, max_pixels: int) -> None:
        self._spec = spec
        self._max_pixels = max_pixels
        self._input = model.input(spec.input)
        self._output = model.output(spec.output)
        n_channels = 1 if spec.color == "gray" else 3
        check_tensor("input", self._input, (-1, n_channels, spec.height, -1), "FP32")
        self._characters = (*read_labels(spec.characters, assets, "characters"), *([" "] if spec.space else []))
        n_classes = self._output.shape[-1]
        if n_classes not in {-1, len(self._characters) + 1}:
            problem = f"has {len(self._characters)} with its space, the model tells {n_classes - 1} apart"
            raise misfit("characters", problem)

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        with turn_for(request.data):
            return self._run(request, infer)

    def _run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        picture = decode_request(request, max_pixels=self._max_pixels, with_turns=True)
        areas = request.regions or (whole(picture),)
        # A standing region is a line that runs up the picture, or a single letter: what is surer tells which.
        views = [(i, area) for i, area in enumerate(areas)]
        views += [(i, _lying(area)) for i, area in views if area.height >= _STANDING * area.width]
        by_width: dict[int, list[tuple[int, Box]]] = {}
        for i, area in views:
            by_width.setdefault(self._strip_width(area), []).append((i, area))
        best = [("", -1.0)] * len(areas)
        timings = []
        for width, members in sorted(by_width.items()):
            for start in range(0, len(members), self._spec.max_rows):
                chunk = members[start : start + self._spec.max_rows]
                strips = np.stack([self._strip(picture, area, width) for _, area in chunk])
                answer = infer({self._input.name: strips})
                timings.append(answer.timings)
                for (i, _), found in zip(chunk, self._read(answer.outputs, len(chunk)), strict=True):
                    best[i] = max(best[i], found, key=lambda text: text[1])
        floor = self._spec.min_score if request.min_score is None else request.min_score
        texts = [
            Label(index=i, label=text if score >= floor else "", score=score) for i, (text, score) in enumerate(best)
        ]
        return MediaAnswer(
            task=self.task,
            texts=tuple(texts),
            width=picture.width,
            height=picture.height,
            timings=sum_timings(timings),
        )

    def _line_width(self, area: Box) -> int:
        return max(1, min(self._spec.max_width, math.ceil(self._spec.height * area.width / area.height)))

    def _strip_width(self, area: Box) -> int:
        step = self._spec.width_step
        return min(-(-self._line_width(area) // step) * step, max(self._spec.max_width, step))

    def _strip(self, picture: Image.Image, area: Box, width: int) -> NDArray[Any]:
        """Scale a line to the height and fill it up with zeros, which is the mean."""
        spec, line_width = self._spec, min(self._line_width(area), width)
        sides = ImageInput(width=line_width, height=spec.height, color=spec.color, mean=spec.mean, std=spec.std)
        pixels, _ = prepare(picture, sides, area)
        return np.pad(pixels, ((0, 0), (0, 0), (0, width - line_width)))

    def _read(self, outputs: Mapping[str, NDArray[Any]], n_lines: int) -> list[tuple[str, float]]:
        scores = np.asarray(outputs[self._output.name], np.float32)
        n_classes = len(self._characters) + 1
        if scores.ndim != 3 or (scores.shape[0], scores.shape[2]) != (n_lines, n_classes):
            reason = f"{self._output.name} is {scores.shape}, not ({n_lines}, steps, {n_classes})"
            raise BackendStepError(reason=reason)
        if not np.isfinite(scores).all():
            raise BackendStepError(reason="the model's scores are not finite")
        return [ctc_text(line, self._characters) for line in (softmax(scores) if self._spec.softmax else scores)]


def _lying(area: Box) -> Box:
    """Turn a standing line's box, so that it is read along its longer side."""
    if area.height < _STANDING * area.width:
        return area
    x, y = area.x + area.width / 2, area.y + area.height / 2
    return Box(
        x=x - area.height / 2,
        y=y - area.width / 2,
        width=area.height,
        height=area.width,
        turn_deg=area.turn_deg - 90,
    )


def ctc_text(scores: NDArray[np.float32], characters: tuple[str, ...]) -> tuple[str, float]:
    """Read [steps, 1 + characters] by the best class of each step: repeats are one, then blanks (class 0) are none.

    The score is the mean of those of the characters; 0 for an empty text.
    """
    best = scores.argmax(axis=1)
    is_new = np.diff(best, prepend=-1) != 0
    steps = np.flatnonzero(is_new & (best != 0))
    if not len(steps):
        return "", 0.0
    return "".join(characters[i - 1] for i in best[steps].tolist()), float(scores[steps, best[steps]].mean())
