"""Average precision as Pascal VOC measures it since 2010: the area under the precision that is left at each recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.pcb.boards import KINDS, Marks

FoundBoxes = NDArray[np.float32]  # [n, 6]: x1, y1, x2, y2, score, index in KINDS

MIN_IOU = 0.33  # what DeepPCB's own evaluation asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """by_kind has NaN for a kind that the truth does not have; mean is over the others."""

    by_kind: tuple[float, ...]
    n_boards: int
    n_marks: int

    @property
    def mean(self) -> float:
        return float(np.nanmean(self.by_kind))


def iou(boxes: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Intersection over union of each of boxes [n, 4+] with each of others [m, 4+]: [n, m]."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:4], others[None, :, 2:4])
    shared = np.prod(np.clip(high - low, 0, None), axis=2)
    areas = [np.prod(np.clip(b[:, 2:4] - b[:, :2], 0, None), axis=1) for b in (boxes, others)]
    union = areas[0][:, None] + areas[1][None, :] - shared
    result: NDArray[np.float32] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return result


def mean_average_precision(
    found: Sequence[FoundBoxes], truth: Sequence[Marks], *, min_iou: float = MIN_IOU, n_kinds: int = len(KINDS)
) -> Precision:
    """Compare what was found on each board with what is there.

    A box is right if, of the marks of its kind on its board, the one that it overlaps most does so by min_iou and no
    box with a higher score has taken it.
    """
    if len(found) != len(truth):
        raise ValueError(f"boxes of {len(found)} boards, marks of {len(truth)}")
    by_kind = tuple(_of_kind(found, truth, kind, min_iou) for kind in range(n_kinds))
    return Precision(by_kind=by_kind, n_boards=len(truth), n_marks=sum(map(len, truth)))


def _of_kind(found: Sequence[FoundBoxes], truth: Sequence[Marks], kind: int, min_iou: float) -> float:
    scores: list[float] = []
    hits: list[bool] = []
    n_marks = 0
    for boxes, marks in zip(found, truth, strict=True):
        here = marks[marks[:, 4] == kind]
        mine = boxes[boxes[:, 5] == kind]
        mine = mine[np.argsort(-mine[:, 4], kind="stable")]
        n_marks += len(here)
        scores += mine[:, 4].tolist()
        hits += _hits(mine, here, min_iou)
    if not n_marks:
        return float("nan")
    order = np.argsort(-np.array(scores), kind="stable")
    return area_under_precision(np.array(hits, bool)[order], n_marks)


def _hits(boxes: FoundBoxes, marks: Marks, min_iou: float) -> list[bool]:
    if not len(marks):
        return [False] * len(boxes)
    overlaps = iou(boxes, marks)
    taken: set[int] = set()
    hits = []
    for row in overlaps:
        best = int(np.argmax(row))
        hits.append(bool(row[best] >= min_iou) and best not in taken)
        if hits[-1]:
            taken.add(best)
    return hits


def area_under_precision(hits: NDArray[np.bool_], n_marks: int) -> float:
    """hits: whether each box was right, best score first."""
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    left = np.maximum.accumulate(precision[::-1])[::-1]  # the best that is still reached at this recall or a higher one
    return float(left[hits].sum() / n_marks)
