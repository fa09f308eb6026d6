"""Speech in a recording: a model tells for each short window how likely it is, hysteresis makes spans of that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import FindSpeech
from edge_rt.engine.audio import decode_wav
from edge_rt.engine.facts import ModelFacts, check_tensor, misfit, refuse_picture_options
from edge_rt.engine.infer import Infer, sum_timings
from edge_rt.errors import BackendStepError
from edge_rt.tensor_types import MediaAnswer, MediaRequest, Span, TensorTimings


class SpeechPipeline:
    """Spans of speech. The windows go to the model one after the other, as one stream of its own."""

    task = "vad"

    def __init__(self, spec: FindSpeech, model: ModelFacts, *, max_audio_s: float) -> None:
        self._spec = spec
        self._max_audio_s = max_audio_s
        self._input = model.input(spec.input)
        self._output = model.output(spec.output)
        check_tensor("input", self._input, (-1, spec.context + spec.window), "FP32")
        self._rate: dict[str, NDArray[Any]] = {}
        if spec.rate_input:
            tensor = model.input(spec.rate_input, "rate_input")
            if tensor.datatype != "INT64" or len(tensor.shape) > 1:
                raise misfit("rate_input", f"must be one INT64, the model's {tensor.name} is {tensor.datatype}")
            self._rate[tensor.name] = np.full((1,) * len(tensor.shape), spec.rate_hz, np.int64)
        if spec.threshold_off > spec.threshold:
            raise misfit("threshold_off", f"{spec.threshold_off} is above threshold {spec.threshold}")

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        refuse_picture_options(request, "recordings")
        spec = self._spec
        samples = decode_wav(request.data, rate_hz=spec.rate_hz, max_audio_s=self._max_audio_s)
        scores, timings = self._scores(samples, f"look:{request.id}", infer)
        threshold = spec.threshold if request.min_score is None else request.min_score
        spans = find_spans(
            scores, spec, n_samples=len(samples), threshold=threshold, below=spec.threshold - spec.threshold_off
        )
        return MediaAnswer(
            task=self.task, spans=spans, duration_s=len(samples) / spec.rate_hz, timings=sum_timings(timings)
        )

    def _scores(
        self, samples: NDArray[np.float32], stream: str, infer: Infer
    ) -> tuple[list[float], list[TensorTimings]]:
        frames = windows(samples, self._spec.window, self._spec.context)
        scores: list[float] = []
        timings: list[TensorTimings] = []
        for i, frame in enumerate(frames):
            feeds = {self._input.name: frame[np.newaxis], **self._rate}
            answer = infer(feeds, stream=stream, is_last=i == len(frames) - 1)
            score = answer.outputs[self._output.name].ravel()
            if score.size != 1 or not np.isfinite(score[0]):
                raise BackendStepError(reason=f"{self._output.name} is {score[:8].tolist()}, not one score")
            scores.append(float(score[0]))
            timings.append(answer.timings)
        return scores, timings


def windows(samples: NDArray[np.float32], window: int, context: int) -> NDArray[np.float32]:
    """Cut samples into [n, context + window]: windows side by side, each behind what came before it; zeros around."""
    n_windows = -(-len(samples) // window)
    padded = np.pad(samples, (context, n_windows * window - len(samples)))
    frames: NDArray[np.float32] = np.lib.stride_tricks.sliding_window_view(padded, context + window)[::window]
    return np.ascontiguousarray(frames)


def find_spans(
    scores: Sequence[float], spec: FindSpeech, *, n_samples: int, threshold: float, below: float
) -> tuple[Span, ...]:
    """Find the spans of speech in the windows' scores.

    Speech begins with a score of threshold; it ends where scores have been under threshold - below for min_silence_s.
    """
    min_silence, min_speech = spec.min_silence_s * spec.rate_hz, spec.min_speech_s * spec.rate_hz
    found: list[tuple[int, int]] = []
    start = end = -1  # of the speech under way; end: of what may be its last sound
    for i, score in enumerate(scores):
        at = i * spec.window
        if score >= threshold:
            start, end = (at if start < 0 else start), -1
        elif start >= 0 and (score < threshold - below or end >= 0):
            if end < 0:
                end = at
            if score < threshold - below and at - end >= min_silence:
                found.append((start, end))
                start = end = -1
    if start >= 0:
        found.append((start, n_samples))
    return _padded([span for span in found if span[1] - span[0] > min_speech], spec, n_samples)


def _padded(spans: list[tuple[int, int]], spec: FindSpeech, n_samples: int) -> tuple[Span, ...]:
    """Widen spans on both sides; two that are too near for that meet in the middle."""
    pad = spec.pad_s * spec.rate_hz
    edges: list[list[float]] = [[start, end] for start, end in spans]
    if edges:
        edges[0][0] = max(0, edges[0][0] - pad)
        edges[-1][1] = min(n_samples, edges[-1][1] + pad)
    for before, after in pairwise(edges):
        grow = min(pad, (after[0] - before[1]) / 2)
        before[1] += grow
        after[0] -= grow
    return tuple(Span(start_s=start / spec.rate_hz, end_s=end / spec.rate_hz, label="speech") for start, end in edges)
