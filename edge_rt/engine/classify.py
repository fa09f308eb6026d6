"""Classification: a picture's labels with their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import Classify
from edge_rt.engine.facts import ModelFacts, misfit, read_labels
from edge_rt.engine.feeds import PictureFeeds
from edge_rt.engine.images import turn_for
from edge_rt.engine.infer import Infer, Inferred, sum_timings
from edge_rt.errors import BackendStepError
from edge_rt.tensor_types import Label, MediaAnswer, MediaRequest, TensorTimings


class ClassifyPipeline:
    """Labels for a picture or for each of its regions, which then come back as boxes with their best label."""

    task = "classify"

    def __init__(self, spec: Classify, model: ModelFacts, assets: Mapping[str, Path], *, max_pixels: int) -> None:
        self._spec = spec
        self._max_pixels = max_pixels
        self._labels = read_labels(spec.labels, assets)
        self._feeds = PictureFeeds(spec.image, model, spec.reference, spec.reference_input)
        self._output = model.output(spec.output)
        if spec.exit_output and model.output(spec.exit_output, "exit_output").datatype != "BOOL":
            raise misfit("exit_output", f"{spec.exit_output} must be BOOL")
        n_classes = [size for size in self._output.shape[1:] if size != 1]
        if len(n_classes) > 1 or any(size not in {-1, len(self._labels)} for size in n_classes):
            shape = " x ".join(map(str, self._output.shape))
            raise misfit("labels", f"has {len(self._labels)} labels, the model's {self._output.name} is {shape}")

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        with turn_for(request.data, request.reference):
            return self._run(request, infer)

    def _run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        picture, reference = self._feeds.pictures(request, max_pixels=self._max_pixels, with_turns=True)
        is_early = bool(self._spec.exit_output)
        found: list[tuple[Label, ...]] = []
        timings: list[TensorTimings] = []
        for part in request.regions or (None,):
            answer = infer(self._feeds.make(picture, reference, part)[0])
            is_early = is_early and bool(answer.outputs[self._spec.exit_output].all())
            timings.append(answer.timings)
            scores = self._scores(answer)
            found.append(best_labels(scores, self._labels, request.top_k or self._spec.top_k, request.min_score or 0.0))
        return MediaAnswer(
            task=self.task,
            labels=found[0],
            boxes=tuple(
                replace(region, label=labels[0].label, score=labels[0].score)
                for region, labels in zip(request.regions, found, strict=False)
                if labels
            ),
            width=picture.width,
            height=picture.height,
            stage=("early" if is_early else "full") if self._spec.exit_output else "",
            timings=sum_timings(timings),
        )

    def _scores(self, answer: Inferred) -> NDArray[np.float32]:
        scores = np.asarray(answer.outputs[self._output.name], np.float32).ravel()
        if scores.size != len(self._labels):
            reason = f"{self._output.name} holds {scores.size} scores for {len(self._labels)} labels"
            raise BackendStepError(reason=reason)
        return softmax(scores) if self._spec.softmax else scores


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give the softmax over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def best_labels(scores: NDArray[np.float32], labels: Sequence[str], top_k: int, min_score: float) -> tuple[Label, ...]:
    """Give the top_k labels with at least min_score, best first; of equals the lower index is first."""
    if not np.isfinite(scores).all():
        raise BackendStepError(reason="the model's scores are not finite")
    order = np.argsort(-scores, kind="stable")[:top_k]
    return tuple(
        Label(index=int(i), label=labels[i], score=float(scores[i])) for i in order if float(scores[i]) >= min_score
    )
