"""A manifest's [pipeline]: what happens to a file before a tensor model sees it, what its outputs mean; and [[state]].

Names of inputs and outputs may be left out where the model has only one. labels is the id of an asset with one label a
line, or the labels themselves.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=500)]
_Score = Annotated[float, Meta(ge=0, le=1)]
_Channels = Annotated[tuple[float, ...], Meta(min_length=1, max_length=4)]
_Name = Annotated[str, Meta(max_length=200)]
_Labels = (
    Annotated[str, Meta(min_length=1, max_length=200)]
    | Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(min_length=1, max_length=1000)]
)
_Side = Annotated[int, Meta(ge=1, le=8192)]
_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a picture becomes a tensor: (pixel - mean) / std for pixels 0..255.

    resize  stretch: to width × height · letterbox: whole and unstretched, the rest filled with pad · crop: the middle,
            of which the shorter side is crop_fraction
    """

    width: _Side
    height: _Side
    input: _Name = ""
    resize: Literal["stretch", "letterbox", "crop"] = "stretch"
    crop_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    filter: Literal["nearest", "bilinear", "bicubic"] = "bilinear"
    color: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"
    mean: _Channels = (0.0,)
    std: _Channels = (1.0,)
    pad: Annotated[int, Meta(ge=0, le=255)] = 114
    datatype: Literal["FP32", "UINT8"] = "FP32"


class Classify(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="classify"):
    """One label for a picture.

    softmax      the output holds logits
    reference    as in Detect
    exit_output  a BOOL of a model that may stop early: whether it did; the answer's stage is "early" or "full" then
    """

    image: ImageInput
    labels: _Labels
    output: _Name = ""
    softmax: bool = True
    reference: Literal["", "channels", "input"] = ""
    reference_input: _Name = ""
    exit_output: _Name = ""
    top_k: Annotated[int, Meta(ge=1, le=1000)] = 5


class Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="rows"):
    """Detections as [1, n, 4 + classes], 5 + classes with objectness; transposed: the last two swapped, as YOLOv8.

    boxes  center: cx cy w h · corners: x1 y1 x2 y2; in the input's pixels, is_relative: 0..1
    """

    output: _Name = ""
    boxes: Literal["center", "corners"] = "center"
    is_relative: bool = False
    objectness: bool = False
    transposed: bool = False
    sigmoid: bool = False


class Centers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="centers"):
    """Detections as peaks, highest in their 3 × 3 cells: heatmap [1, classes, h, w] a cell for some pixels.

    sizes    [1, 2, h, w]: width and height at each cell, in cells; log_sizes: their natural logarithms
    offsets  [1, 2, h, w]: x and y of the centre from the cell's corner, in cells; without it the cell's middle
    sigmoid  the heatmap holds logits
    """

    heatmap: _Name
    sizes: _Name
    offsets: _Name = ""
    sigmoid: bool = False
    log_sizes: bool = False


class Detect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="detect"):
    """Labelled boxes in a picture.

    reference  what becomes of a second picture that must come with each: "" there is none · channels: behind the
               picture's own in one input · input: an input of its own, reference_input
    max_iou    of two boxes with one label that overlap more only the better stays
    """

    image: ImageInput
    labels: _Labels
    decode: Rows | Centers
    reference: Literal["", "channels", "input"] = ""
    reference_input: _Name = ""
    min_score: _Score = 0.25
    max_iou: _Score = 0.45
    max_boxes: Annotated[int, Meta(ge=1, le=10_000)] = 300


class DetectText(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="detect-text"
):
    """Boxes around lines of text, from a map of how likely each pixel is text ("differentiable binarisation").

    The picture is fitted into max_side × max_side and its sides rounded to multiples of side_step, which bounds the
    number of shapes.

    threshold  of the map; min_score is of a box's mean
    unclip     how far a box grows: area × unclip / perimeter
    min_side   of a box, in the map's pixels
    """

    input: _Name = ""
    output: _Name = ""
    max_side: Annotated[int, Meta(ge=32, le=4096)] = 960
    side_step: Annotated[int, Meta(ge=1, le=512)] = 32
    color: Literal["rgb", "bgr", "gray"] = "bgr"
    mean: _Channels = (123.675, 116.28, 103.53)
    std: _Channels = (58.395, 57.12, 57.375)
    threshold: _Score = 0.3
    min_score: _Score = 0.6
    unclip: Annotated[float, Meta(ge=0, le=10)] = 1.6
    min_side: Annotated[float, Meta(ge=1, le=1000)] = 3.0
    max_boxes: Annotated[int, Meta(ge=1, le=1000)] = 1000


class ReadText(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="read-text"
):
    """The text of a line: [n, steps, 1 + characters] by CTC, whose blank is the first.

    characters   the asset with one character a line
    width_step   lines are padded to multiples of it; longer ones than max_width are squeezed
    space        the last class is a space that the list does not have
    """

    input: _Name = ""
    output: _Name = ""
    characters: Annotated[str, Meta(min_length=1, max_length=200)]
    height: Annotated[int, Meta(ge=8, le=512)] = 48
    width_step: Annotated[int, Meta(ge=8, le=4096)] = 320
    max_width: Annotated[int, Meta(ge=8, le=16_384)] = 1920
    color: Literal["rgb", "bgr", "gray"] = "bgr"
    mean: _Channels = (127.5,)
    std: _Channels = (127.5,)
    space: bool = True
    softmax: bool = False
    min_score: _Score = 0.5
    max_rows: Annotated[int, Meta(ge=1, le=256)] = 8


class FindSpeech(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="vad"):
    """Spans of speech in a recording. The model sees window samples behind the context samples before them.

    threshold      from which on speech begins; it ends below threshold_off
    min_speech_s   shorter speech is none; shorter silence than min_silence_s does not part two spans
    pad_s          added to both ends of a span
    rate_input     where the model wants the sample rate, as INT64
    """

    input: _Name = ""
    output: _Name = ""
    rate_input: _Name = ""
    rate_hz: Annotated[int, Meta(ge=4000, le=192_000)] = 16_000
    window: Annotated[int, Meta(ge=1, le=2**20)] = 512
    context: Annotated[int, Meta(ge=0, le=2**20)] = 64
    threshold: _Score = 0.5
    threshold_off: _Score = 0.35
    min_speech_s: _Seconds = 0.25
    min_silence_s: _Seconds = 0.1
    pad_s: _Seconds = 0.03


class Embed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="task", tag="embed"):
    """A text's embedding, from the states [n, tokens, size] of its tokens.

    tokenizer   the asset, a tokenizer.json; special_tokens: its own, such as a beginning, are added
    max_tokens  of a text with its special tokens; longer ones are refused
    token_step  texts are padded to multiples of it, which bounds the number of shapes
    matryoshka  sizes whose first numbers are an embedding by themselves, as the model was trained to give them
    """

    tokenizer: Annotated[str, Meta(min_length=1, max_length=200)]
    special_tokens: bool = True
    ids_input: _Name = "input_ids"
    mask_input: _Name = "attention_mask"
    types_input: _Name = "token_type_ids"
    output: _Name = ""
    max_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 256
    token_step: Annotated[int, Meta(ge=1, le=4096)] = 16
    pooling: Literal["mean", "first"] = "mean"
    normalize: bool = True
    matryoshka: Annotated[tuple[Annotated[int, Meta(ge=1, le=65_536)], ...], Meta(max_length=32)] = ()


class StateTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state that a stream carries: the output is the next call's input; the first call's is zeros of shape."""

    input: Line
    output: Line
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**20)], ...], Meta(max_length=8)]


Pipeline = Classify | Detect | DetectText | ReadText | FindSpeech | Embed


def task(pipeline: Pipeline) -> str:
    """Give a pipeline's task as manifests and answers name it."""
    return str(type(pipeline).__struct_config__.tag)


def assets(pipeline: Pipeline) -> tuple[str, ...]:
    """Give the ids of the assets that a pipeline reads."""
    if isinstance(pipeline, Classify | Detect):
        return (pipeline.labels,) if isinstance(pipeline.labels, str) else ()
    if isinstance(pipeline, ReadText):
        return (pipeline.characters,)
    return (pipeline.tokenizer,) if isinstance(pipeline, Embed) else ()
