"""Whether a device's answer is the CPU's within a tolerance, told without numpy, which the front process has not. Pure.

The first few answers of a device are compared, so what counts is that it needs neither another message to a worker nor
another process. Of a large tensor MAX_ELEMENTS are looked at, spread evenly: some milliseconds of plain Python. Broken
arithmetic shows anywhere; a single wrong element of a large tensor may stay unseen.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from edge_rt.tensor_types import Box, Label, MediaAnswer, Tensor, TensorAnswer

MAX_ELEMENTS = 32 * 1024

_FORMATS = {"FP64": "d", "FP32": "f", "INT16": "h", "UINT16": "H", "INT8": "b", "UINT8": "B"}
_SURE = 0.5  # boxes and labels with a lower score may come and go with the rounding
_MIN_IOU = 0.75
_SPAN_S = 0.1


def difference(answer: TensorAnswer | MediaAnswer, reference: TensorAnswer | MediaAnswer, tolerance: float) -> str:
    """Say where an answer differs from the reference by more than tolerance, "" if nowhere.

    tolerance  of an output's largest value in the reference; scores are compared as they are, being 0..1
    """
    if isinstance(answer, TensorAnswer) and isinstance(reference, TensorAnswer):
        theirs = {tensor.name: tensor for tensor in reference.outputs}
        if {tensor.name for tensor in answer.outputs} != set(theirs):
            return f"outputs {sorted(tensor.name for tensor in answer.outputs)} instead of {sorted(theirs)}"
        return next(filter(None, (_tensor(own, theirs[own.name], tolerance) for own in answer.outputs)), "")
    if isinstance(answer, MediaAnswer) and isinstance(reference, MediaAnswer):
        return _media(answer, reference, tolerance)
    return "an answer of another kind"


def _tensor(own: Tensor, reference: Tensor, tolerance: float) -> str:
    if (own.datatype, own.shape) != (reference.datatype, reference.shape) or len(own.data) != len(reference.data):
        return f"{own.name}: {own.datatype} {own.shape} instead of {reference.datatype} {reference.shape}"
    if own.data == reference.data:
        return ""
    if own.datatype != "FP16" and own.datatype not in _FORMATS:
        return f"{own.name}: other {own.datatype} values"  # indices, flags and texts are equal or wrong
    return _numbers(own.name, _elements(own), _elements(reference), tolerance)


def _elements(tensor: Tensor) -> Sequence[float]:
    code = _FORMATS.get(tensor.datatype, "H")
    raw: Any = memoryview(tensor.data)
    view = raw.cast(code)
    some = view[:: max(1, len(view) // MAX_ELEMENTS)]
    if tensor.datatype == "FP16":  # which memoryview does not know
        return struct.unpack(f"<{len(some)}e", some.tobytes())
    elements: list[float] = some.tolist()
    return elements


def _numbers(name: str, own: Sequence[float], reference: Sequence[float], tolerance: float) -> str:
    finite = [abs(value) for value in reference if math.isfinite(value)]
    allowed = tolerance * max(finite, default=0.0)
    for at, (a, b) in enumerate(zip(own, reference, strict=True)):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        if not abs(a - b) <= allowed:  # a NaN on one side is not
            return f"{name}: {a:.6g} instead of {b:.6g} (element {at} of {len(own)} compared, allowed ±{allowed:.3g})"
    return ""


def _media(own: MediaAnswer, reference: MediaAnswer, tolerance: float) -> str:
    if own.task != reference.task:
        return f"task {own.task} instead of {reference.task}"
    if len(own.embedding) != len(reference.embedding):
        return f"an embedding of {len(own.embedding)} values instead of {len(reference.embedding)}"
    if len(own.spans) != len(reference.spans) or any(
        abs(a.start_s - b.start_s) > _SPAN_S or abs(a.end_s - b.end_s) > _SPAN_S
        for a, b in zip(own.spans, reference.spans, strict=True)
    ):
        return f"spans {own.spans} instead of {reference.spans}"
    return (
        _numbers("embedding", own.embedding, reference.embedding, tolerance)
        or _labels(own.labels, reference.labels, tolerance)
        or _boxes(own.boxes, reference.boxes)
        or _boxes(reference.boxes, own.boxes)
        or _texts(own.texts, reference.texts)
    )


def _labels(own: Sequence[Label], reference: Sequence[Label], tolerance: float) -> str:
    scores = {label.index: label.score for label in own}
    for label in reference:
        score = scores.get(label.index)
        # One that left the list may have been just under its last.
        near = score if score is not None else min(scores.values(), default=0.0)
        if abs(near - label.score) > tolerance:
            return f"label {label.label or label.index}: {score} instead of {label.score:.3f}"
    return ""


def _boxes(some: Sequence[Box], others: Sequence[Box]) -> str:
    for box in some:
        if box.score >= _SURE and not any(o.label == box.label and _iou(o, box) >= _MIN_IOU for o in others):
            return f"a box {box.label} at {box.x:.0f}, {box.y:.0f} with score {box.score:.3f} is in one answer only"
    return ""


def _texts(own: Sequence[Label], reference: Sequence[Label]) -> str:
    for a, b in zip(own, reference, strict=False):
        if a.label != b.label and max(a.score, b.score) >= _SURE:
            return f"text {a.label!r} instead of {b.label!r}"
    return "" if len(own) == len(reference) else f"{len(own)} texts instead of {len(reference)}"


def _iou(a: Box, b: Box) -> float:
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    shared = max(width, 0.0) * max(height, 0.0)
    union = a.width * a.height + b.width * b.height - shared
    return shared / union if union > 0 else float(a == b)
