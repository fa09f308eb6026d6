from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import FindSpeech
from edge_rt.engine.pipeline import make_pipeline
from edge_rt.engine.vad import find_spans, windows
from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.tensor_types import Box, MediaRequest, Span, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer
from tests.unit.engine.test_audio import wav

# One window is a tenth of a second.
SPEC = FindSpeech(input="x", window=1600, context=160, min_speech_s=0.25, min_silence_s=0.3, pad_s=0.0, rate_input="sr")
INPUTS = (
    TensorSpec(name="x", datatype="FP32", shape=(-1, -1)),
    TensorSpec(name="sr", datatype="INT64", shape=()),
)
OUTPUTS = (TensorSpec(name="y", datatype="FP32", shape=(-1, 1)),)


def spans(text: str, spec: FindSpeech = SPEC, n_samples: int = 0) -> list[tuple[float, float]]:
    """Give the spans of a picture of the scores: # speech, - between the thresholds, . silence."""
    scores = [{"#": 0.9, "-": 0.4, ".": 0.1}[mark] for mark in text]
    found = find_spans(scores, spec, n_samples=n_samples or 1600 * len(text), threshold=0.5, below=0.15)
    return [(round(span.start_s, 6), round(span.end_s, 6)) for span in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("......", []),
        ("..####....", [(0.2, 0.6)]),
        ("..##......", []),  # too short
        ("..####..####....", [(0.2, 1.2)]),  # the silence is too short to part them
        ("..####....####....", [(0.2, 0.6), (1.0, 1.4)]),
        ("..####----......", [(0.2, 1.0)]),  # goes on between the thresholds
        ("..----....", []),  # does not begin there
        ("..####", [(0.2, 0.6)]),  # ends with the recording
        ("..####..", [(0.2, 0.8)]),  # as silero-vad: no end was found before the recording's
        ("..####.-.-....", [(0.2, 0.6)]),  # what is between does not take back an end
    ],
)
def test_hysteresis(text: str, expected: list[tuple[float, float]]) -> None:
    assert spans(text) == expected


def test_spans_are_widened_but_never_overlap() -> None:
    spec = FindSpeech(window=1600, context=160, min_silence_s=0.3, pad_s=0.25)
    assert spans("#####....#####....", spec) == [(0.0, 0.7), (0.7, 1.65)]


def test_last_span_ends_with_the_last_sample() -> None:
    assert spans("..####", n_samples=9000) == [(0.2, 0.5625)]


def test_windows_overlap_by_their_context() -> None:
    frames = windows(np.arange(1, 8, dtype=np.float32), 3, 2)
    assert frames.tolist() == [[0, 0, 1, 2, 3], [2, 3, 4, 5, 6], [5, 6, 7, 0, 0]]


def test_recording_goes_to_the_model_as_one_stream() -> None:
    samples = np.zeros(16_000, "<i2")
    samples[4800:9600] = 12_000

    def loud(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        return {"y": np.array([[np.abs(feeds["x"][:, 160:]).mean() > 0.1]], np.float32)}

    infer = FakeInfer(loud)
    pipeline = make_pipeline(TensorLoad(pipeline=SPEC), INPUTS, OUTPUTS)
    assert pipeline is not None
    answer = pipeline.run(MediaRequest(id="7", model="m", data=wav(samples.tobytes())), infer)
    assert answer.spans == (Span(start_s=0.3, end_s=0.6, label="speech"),)
    assert answer.duration_s == 1.0
    assert [call[0]["x"].shape for call in infer.calls] == [(1, 1760)] * 10
    assert infer.calls[0][0]["sr"].shape == ()
    assert int(infer.calls[0][0]["sr"]) == 16_000
    assert {call[1] for call in infer.calls} == {"look:7"}
    assert [call[2] for call in infer.calls] == [False] * 9 + [True]


def test_regions_of_a_recording_are_refused() -> None:
    pipeline = make_pipeline(TensorLoad(pipeline=SPEC), INPUTS, OUTPUTS)
    assert pipeline is not None
    request = MediaRequest(id="7", model="m", data=wav(b"\0\0"), regions=(Box(x=0, y=0, width=1, height=1),))
    with pytest.raises(InvalidRequestError, match="regions"):
        pipeline.run(request, FakeInfer(lambda _: {}))


def test_window_that_the_model_does_not_take_fails_the_load() -> None:
    with pytest.raises(ModelFormatError, match=r"makes FP32 \? x 1760, the model's x is FP32 1 x 576"):
        make_pipeline(
            TensorLoad(pipeline=SPEC), (TensorSpec(name="x", datatype="FP32", shape=(1, 576)), INPUTS[1]), OUTPUTS
        )
