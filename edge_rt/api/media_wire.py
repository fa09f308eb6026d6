"""How what a pipeline found looks on the wire."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from edge_rt import tensor_types
from edge_rt.api.schemas import WireEnergy, wire_energy
from edge_rt.tensor_types import MediaAnswer


class Region(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a picture to work on, in pixels from its top left corner; turned clockwise about its middle."""

    x: float
    y: float
    width: float
    height: float
    turn_deg: float = 0.0


class Timings(msgspec.Struct):
    """queue_s: before its batch was computed; compute_s: of the batch, with batch_size rows in all."""

    queue_s: float
    compute_s: float
    batch_size: int


class Label(msgspec.Struct):
    index: int
    label: str
    score: float


class Box(msgspec.Struct, omit_defaults=True):
    """text is what is read in it; score is the text's then."""

    x: float
    y: float
    width: float
    height: float
    score: float
    label: str = ""
    text: str | UnsetType = UNSET
    turn_deg: float | UnsetType = UNSET


class Line(msgspec.Struct):
    """What is written in one region, in their order."""

    index: int
    text: str
    score: float


class Span(msgspec.Struct):
    start_s: float
    end_s: float


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """place: the back end and device; variant: the form that ran; stage: which model of a cascade answered."""

    model: str
    place: str = ""
    variant: str = ""
    stage: str = ""
    timings: Timings | UnsetType = UNSET
    energy: WireEnergy | UnsetType = UNSET


class Classification(_Answer, kw_only=True, tag_field="object", tag="vision.classification"):
    """labels: best first. boxes: the regions that were asked for, with their best label each."""

    labels: list[Label]
    boxes: list[Box] | UnsetType = UNSET
    width: int
    height: int


class Detection(_Answer, kw_only=True, tag_field="object", tag="vision.detection"):
    boxes: list[Box]
    width: int
    height: int


class Reading(_Answer, kw_only=True, tag_field="object", tag="vision.reading"):
    """boxes: in reading order, with their text where the model reads; lines: of a model that reads given regions."""

    boxes: list[Box] | UnsetType = UNSET
    lines: list[Line] | UnsetType = UNSET
    width: int
    height: int


class Speech(_Answer, kw_only=True, tag_field="object", tag="audio.vad"):
    spans: list[Span]
    duration_s: float


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's; token ids are those of the model's own tokenizer. truncate is edge_rt's: cut what is too long."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate: bool = False
    deadline_s: float | None = None


EMBEDDINGS_DECODER: Final = msgspec.json.Decoder(EmbeddingsRequest)


class Embedding(msgspec.Struct, kw_only=True, tag_field="object", tag="embedding"):
    """base64: the little-endian float32 numbers."""

    index: int
    embedding: tuple[float, ...] | str


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class Document(msgspec.Struct):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Jina's and Cohere's, which llama-server takes too."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False
    user: str | None = None
    deadline_s: float | None = None


RERANK_DECODER: Final = msgspec.json.Decoder(RerankRequest)


class Ranked(msgspec.Struct, kw_only=True):
    """One document: index is its place in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Reranked(msgspec.Struct, kw_only=True, tag_field="object", tag="list"):
    """results: best first. method: how they were judged."""

    model: str
    method: Literal["embedding-cosine"] = "embedding-cosine"
    results: list[Ranked]
    usage: EmbeddingsUsage


def _box(box: tensor_types.Box, *, is_read: bool = False) -> Box:
    return Box(
        x=round(box.x, 2),
        y=round(box.y, 2),
        width=round(box.width, 2),
        height=round(box.height, 2),
        score=round(box.score, 6),
        label=box.label,
        text=box.text if is_read else UNSET,
        turn_deg=round(box.turn_deg, 2) if box.turn_deg else UNSET,
    )


def _computed(answer: MediaAnswer) -> dict[str, Any]:
    """Give what every answer says of how it was computed: the fields of _Answer but for model."""
    taken = answer.timings
    return {
        "place": answer.place,
        "variant": answer.variant,
        "stage": answer.stage,
        "timings": Timings(taken.queue_s, taken.compute_s, taken.batch_size) if taken is not None else UNSET,
        "energy": wire_energy(answer.energy),
    }


def classification(model: str, answer: MediaAnswer) -> Classification:
    return Classification(
        model=model,
        labels=[Label(label.index, label.label, round(label.score, 6)) for label in answer.labels],
        boxes=[_box(box) for box in answer.boxes] or UNSET,
        width=answer.width,
        height=answer.height,
        **_computed(answer),
    )


def detection(model: str, answer: MediaAnswer) -> Detection:
    return Detection(
        model=model,
        boxes=[_box(box) for box in answer.boxes],
        width=answer.width,
        height=answer.height,
        **_computed(answer),
    )


def reading(model: str, answer: MediaAnswer) -> Reading:
    is_read = answer.task == "ocr"
    return Reading(
        model=model,
        boxes=[_box(box, is_read=is_read) for box in answer.boxes] if answer.task != "read-text" else UNSET,
        lines=[Line(text.index, text.label, round(text.score, 6)) for text in answer.texts]
        if answer.task == "read-text"
        else UNSET,
        width=answer.width,
        height=answer.height,
        **_computed(answer),
    )


def speech(model: str, answer: MediaAnswer) -> Speech:
    return Speech(
        model=model,
        spans=[Span(round(span.start_s, 3), round(span.end_s, 3)) for span in answer.spans],
        duration_s=round(answer.duration_s, 3),
        **_computed(answer),
    )
