"""Running chains: which model is asked next, and what the whole answer is. No inference, no tensors, no numpy here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Protocol

from edge_rt.catalog import pipelines
from edge_rt.catalog.chains import Cascade, Chain, Ocr
from edge_rt.catalog.manifest import Manifest
from edge_rt.errors import UnsupportedFeatureError
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorTimings
from edge_rt.types import Energy

Look = Callable[[MediaRequest], Awaitable[MediaAnswer]]


class ChainEvents(Protocol):
    """Where a chain's figures go."""

    def chain_answered(self, chain: str, stage: str) -> None: ...


def task_of(model: str, manifests: Mapping[str, Manifest | None], chains: Mapping[str, Chain]) -> str:
    """Give the task of a model or a chain; "" for one without a pipeline, and for a chain whose models are not here."""
    if (chain := chains.get(model)) is not None:
        tasks = [task_of(part, manifests, {}) for part in chain.parts]
        if isinstance(chain, Ocr):
            return "ocr" if tasks == ["detect-text", "read-text"] else ""
        return tasks[0] if tasks[0] == tasks[1] and tasks[0] in {"classify", "detect"} else ""
    manifest = manifests.get(model)
    return pipelines.task(manifest.pipeline) if manifest is not None and manifest.pipeline is not None else ""


async def run_chain(chain: Chain, request: MediaRequest, look: Look, events: ChainEvents) -> MediaAnswer:
    """Answer a request. Raises what look raises, and UnsupportedFeatureError for what the chain cannot do."""
    if isinstance(chain, Cascade):
        answer = await _cascade(chain, request, look)
    else:
        answer = await _ocr(chain, request, look)
    events.chain_answered(chain.id, answer.stage)
    return answer


async def _cascade(chain: Cascade, request: MediaRequest, look: Look) -> MediaAnswer:
    if request.regions:
        raise UnsupportedFeatureError(feature=f"regions for the cascade {chain.id}", remedy="ask its models directly")
    begun_s = asyncio.get_running_loop().time()
    # Its own top_k and min_score: what the caller does not want to see may be what makes the model unsure.
    first = await look(replace(request, model=chain.first, top_k=None, min_score=None))
    if confidence(first, chain.confidence) >= chain.min_score:
        return replace(_cut(first, request), stage=chain.first)
    then = await look(replace(request, model=chain.then, deadline_s=_left_s(request, begun_s)))
    return replace(then, stage=chain.then, timings=_sum(first.timings, then.timings), energy=_energy(first, then))


def confidence(answer: MediaAnswer, rule: str) -> float:
    """Say how sure a model is of its answer, as Cascade.confidence tells."""
    scores = [found.score for found in answer.labels or answer.boxes]
    if rule == "least" and not answer.labels:
        return min(scores, default=1.0)
    return max(scores, default=0.0)


def _cut(answer: MediaAnswer, request: MediaRequest) -> MediaAnswer:
    """Leave out what the request does not want."""
    floor = request.min_score or 0.0
    labels = tuple(label for label in answer.labels if label.score >= floor)[: request.top_k]
    boxes = tuple(box for box in answer.boxes if box.score >= floor)[: request.top_k]
    return replace(answer, labels=labels, boxes=boxes)


async def _ocr(chain: Ocr, request: MediaRequest, look: Look) -> MediaAnswer:
    """Read all lines of a picture, or those in its regions. The request's min_score is of the reading."""
    begun_s = asyncio.get_running_loop().time()
    found = await look(replace(request, model=chain.detect, min_score=None))
    if not found.boxes:
        return replace(found, task="ocr")
    deadline_s = _left_s(request, begun_s)
    read = await look(replace(request, model=chain.read, regions=found.boxes, top_k=None, deadline_s=deadline_s))
    boxes = tuple(
        replace(box, text=text.label, score=text.score)
        for box, text in zip(found.boxes, read.texts, strict=True)
        if text.label
    )
    return replace(
        read, task="ocr", boxes=boxes, texts=(), timings=_sum(found.timings, read.timings), energy=_energy(found, read)
    )


def _left_s(request: MediaRequest, begun_s: float) -> float | None:
    """Give what is left of a request's deadline."""
    if request.deadline_s is None:
        return None
    return max(0.001, request.deadline_s - (asyncio.get_running_loop().time() - begun_s))


def _sum(a: TensorTimings | None, b: TensorTimings | None) -> TensorTimings | None:
    if a is None or b is None:
        return a or b
    return TensorTimings(
        queue_s=a.queue_s + b.queue_s,
        compute_s=a.compute_s + b.compute_s,
        batch_size=max(a.batch_size, b.batch_size),
        engine_s=a.engine_s + b.engine_s,
    )


def _energy(a: MediaAnswer, b: MediaAnswer) -> Energy | None:
    """Add up what both took; where one of them was not measured the whole is not."""
    return None if a.energy is None or b.energy is None else a.energy.plus(b.energy)
