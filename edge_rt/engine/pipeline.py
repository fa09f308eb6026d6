"""Pipelines: from a client's file to what a tensor model's outputs mean.

    pipeline = make_pipeline(load.tensor, session.inputs, session.outputs)
    answer = pipeline.run(request, infer)

A pipeline is checked against its model when it is made, so that a manifest which does not fit fails the load and not
each request. What a client's file is wrong in is an InvalidRequestError for "data" ("reference" for the second file).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edge_rt.catalog import pipelines
from edge_rt.engine.facts import ModelFacts
from edge_rt.engine.infer import Infer
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorSpec


class Pipeline(Protocol):
    """One model's pipeline. Any thread may run it, several at a time."""

    task: str

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        """Answer one file; blocks while infer computes. Raises InvalidRequestError, and what infer raises."""
        ...


class PipelineLoad(Protocol):
    """What a pipeline is made from; edge_rt.worker.channel.TensorLoad is one."""

    @property
    def pipeline(self) -> pipelines.Pipeline | None: ...

    @property
    def assets(self) -> Mapping[str, str]: ...

    @property
    def max_batch(self) -> int: ...

    @property
    def max_pixels(self) -> int: ...

    @property
    def max_audio_s(self) -> float: ...


def make_pipeline(
    load: PipelineLoad,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> Pipeline | None:
    """Make the pipeline that a manifest declares; None if it declares none.

    inputs, outputs  of the model, without the state's tensors, which the engine keeps

    Raises ModelFormatError where manifest, model and assets do not fit, and BackendUnavailableError where a package
    is missing.
    """
    spec = load.pipeline
    if spec is None:
        return None
    model = ModelFacts(tuple(inputs), tuple(outputs))
    assets = {name: Path(path) for name, path in load.assets.items()}
    # Each brings packages of its own, and a worker needs only one of them.
    if isinstance(spec, pipelines.Classify):
        from edge_rt.engine.classify import ClassifyPipeline

        return ClassifyPipeline(spec, model, assets, max_pixels=load.max_pixels)
    if isinstance(spec, pipelines.Detect):
        from edge_rt.engine.detect import DetectPipeline

        return DetectPipeline(spec, model, assets, max_pixels=load.max_pixels)
    if isinstance(spec, pipelines.FindSpeech):
        from edge_rt.engine.vad import SpeechPipeline

        return SpeechPipeline(spec, model, max_audio_s=load.max_audio_s)
    if isinstance(spec, pipelines.DetectText):
        from edge_rt.engine.text_boxes import DetectTextPipeline

        return DetectTextPipeline(spec, model, max_pixels=load.max_pixels)
    if isinstance(spec, pipelines.ReadText):
        from edge_rt.engine.read_text import ReadTextPipeline

        return ReadTextPipeline(spec, model, assets, max_pixels=load.max_pixels)
    from edge_rt.engine.embed import EmbedPipeline

    return EmbedPipeline(spec, model, assets)
