from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.scheduler.agreement import MAX_ELEMENTS, difference
from edge_rt.tensor_types import Box, Label, MediaAnswer, Span, Tensor, TensorAnswer, TensorTimings

TIMINGS = TensorTimings(queue_s=0.0, compute_s=0.0, batch_size=1)
CODES = {"FP64": "d", "FP32": "f", "FP16": "e", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H"}


def answer(*values: float, datatype: str = "FP32", name: str = "y") -> TensorAnswer:
    data = struct.pack(f"<{len(values)}{CODES[datatype]}", *values)
    tensor = Tensor(name=name, datatype=datatype, shape=(len(values),), data=data)  # type: ignore[arg-type]
    return TensorAnswer(outputs=(tensor,), timings=TIMINGS)


@pytest.mark.parametrize("datatype", CODES)
def test_small_differences_agree_and_large_ones_do_not(datatype: str) -> None:
    reference = answer(100, 50, 0, datatype=datatype)
    assert difference(reference, reference, 0.0) == ""
    assert difference(answer(101, 50, 1, datatype=datatype), reference, 0.02) == ""
    assert difference(answer(100, 47, 0, datatype=datatype), reference, 0.02).startswith("y: 47 instead of 50")


def test_what_is_no_number_agrees_only_with_itself() -> None:
    nan, inf = float("nan"), float("inf")
    assert difference(answer(nan, inf, 1.0), answer(nan, inf, 1.0), 0.0) == ""
    assert difference(answer(nan, 1.0), answer(0.0, 1.0), 0.5) != ""
    assert difference(answer(0.0, 1.0), answer(nan, 1.0), 0.5) != ""
    assert difference(answer(inf, 1.0), answer(1.0, 1.0), 0.5) != ""
    assert difference(answer(1.0), answer(inf), 0.5) != ""
    assert difference(answer(0.001), answer(0.0), 0.5) != "", "nothing is allowed where all are 0"


def test_indices_flags_and_texts_are_equal_or_wrong() -> None:
    def of(datatype: str, data: bytes) -> TensorAnswer:
        tensor = Tensor(name="i", datatype=datatype, shape=(1,), data=data)  # type: ignore[arg-type]
        return TensorAnswer(outputs=(tensor,), timings=TIMINGS)

    for datatype, data, other in (
        ("INT64", (1000).to_bytes(8, "little"), (1001).to_bytes(8, "little")),
        ("BOOL", b"\0", b"\1"),
        ("BYTES", b"\1\0\0\0a", b"\1\0\0\0b"),
    ):
        assert difference(of(datatype, data), of(datatype, data), 0.5) == ""
        assert difference(of(datatype, data), of(datatype, other), 0.5) == f"i: other {datatype} values"


def test_other_names_shapes_types_and_kinds_do_not_agree() -> None:
    one = answer(1.0)
    assert "outputs ['z'] instead of ['y']" in difference(answer(1.0, name="z"), one, 1.0)
    assert difference(answer(1.0, 1.0), one, 1.0) != ""
    assert difference(answer(1.0, datatype="FP64"), one, 1.0) != ""
    assert difference(one, MediaAnswer(task="classify"), 1.0) != ""


def test_of_a_large_tensor_a_part_is_looked_at() -> None:
    n = MAX_ELEMENTS * 4
    reference, shifted = [1.0] * n, [1.5] * n
    assert difference(answer(*shifted), answer(*reference), 0.02) != ""
    one_off = list(reference)
    one_off[0] = 9.0
    assert f"of {MAX_ELEMENTS} compared" in difference(answer(*one_off), answer(*reference), 0.02)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50), st.floats(0.001, 0.5), st.integers(0, 2**32))
def test_noise_under_the_tolerance_agrees_and_twice_it_does_not(
    values: list[float], tolerance: float, seed: int
) -> None:
    rng, largest = random.Random(seed), max(map(abs, values))
    noisy = [value + rng.uniform(-0.9, 0.9) * tolerance * largest for value in values]
    assert difference(answer(*noisy, datatype="FP64"), answer(*values, datatype="FP64"), tolerance) == ""
    at = rng.randrange(len(values))
    noisy[at] = values[at] + 2 * tolerance * largest
    if noisy[at] != values[at]:
        assert difference(answer(*noisy, datatype="FP64"), answer(*values, datatype="FP64"), tolerance) != ""


def media(**fields: object) -> MediaAnswer:
    return MediaAnswer(**{"task": "detect"} | fields)  # type: ignore[arg-type]


def box(x: float, score: float, label: str = "open") -> Box:
    return Box(x=x, y=10.0, width=20.0, height=20.0, label=label, score=score)


def test_boxes_agree_where_the_sure_ones_do() -> None:
    reference = media(boxes=(box(10, 0.9), box(100, 0.52), box(200, 0.3)))
    assert difference(media(boxes=(box(11, 0.87), box(100, 0.51))), reference, 0.02) == ""
    assert "in one answer only" in difference(media(boxes=(box(10, 0.9),)), reference, 0.02)
    assert "in one answer only" in difference(media(boxes=(*reference.boxes, box(300, 0.8))), reference, 0.02)
    assert difference(media(boxes=(box(10, 0.9, "short"), box(100, 0.52))), reference, 0.02) != ""
    assert difference(media(boxes=(box(20, 0.9), box(100, 0.52))), reference, 0.02) != ""


def labels(*scores: tuple[int, float]) -> MediaAnswer:
    return MediaAnswer(task="classify", labels=tuple(Label(index=i, label=f"l{i}", score=s) for i, s in scores))


def test_labels_agree_by_their_scores_not_by_their_order() -> None:
    reference = labels((3, 0.41), (7, 0.40), (9, 0.02))
    assert difference(labels((7, 0.41), (3, 0.40), (8, 0.021)), reference, 0.02) == ""
    assert "label l3" in difference(labels((7, 0.81), (3, 0.10), (9, 0.02)), reference, 0.02)


def test_spans_texts_and_embeddings() -> None:
    span = media(task="vad", spans=(Span(start_s=0.5, end_s=1.5),))
    assert difference(media(task="vad", spans=(Span(start_s=0.53, end_s=1.5),)), span, 0.02) == ""
    assert difference(media(task="vad", spans=(Span(start_s=0.8, end_s=1.5),)), span, 0.02) != ""
    assert difference(media(task="vad"), span, 0.02) != ""
    text = media(task="read", texts=(Label(index=0, label="U3", score=0.9),))
    assert difference(media(task="read", texts=(Label(index=0, label="U8", score=0.6),)), text, 0.02) != ""
    assert difference(media(task="read"), text, 0.02) != ""
    vector = media(task="embed", embedding=(0.1, -0.9))
    assert difference(media(task="embed", embedding=(0.11, -0.9)), vector, 0.02) == ""
    assert difference(media(task="embed", embedding=(0.2, -0.9)), vector, 0.02) != ""
    assert difference(media(task="embed", embedding=(0.1,)), vector, 0.02) != ""
    assert difference(media(task="vad"), media(task="embed"), 0.02) != ""
