"""Run an exported detector with onnxruntime and read its boxes as edge_rt's pipeline does for `centers`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tools.pcb.average_precision import FoundBoxes, iou
from tools.pcb.boards import Board, Picture
from tools.pcb.graph import INPUTS, OUTPUTS
from tools.pcb.samples import STRIDE

MAX_BOXES = 100
MAX_IOU = 0.45  # two boxes of one kind that overlap more are one flaw
MIN_SHOWN = 0.4  # in the manifests: what a user is shown
MIN_SCORE = 0.01  # low: average precision ranks all boxes; whoever only wants sure ones asks for more


@dataclass(frozen=True, slots=True, kw_only=True)
class Detections:
    """cpu_s: what each run took of this thread's CPU time, decoding left out."""

    found: list[FoundBoxes]
    cpu_s: list[float]


def session(model: Path) -> Any:
    """One thread, so that CPU time is comparable and a run's sums are in one order."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    opened = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    opened.disable_fallback()
    return opened


def run(opened: Any, picture: Picture, golden: Picture) -> list[NDArray[np.float32]]:
    feeds = {name: p[None, None] for name, p in zip(INPUTS, (picture, golden), strict=True)}
    outputs: list[NDArray[np.float32]] = opened.run(list(OUTPUTS), feeds)
    return outputs


def detect(model: Path, boards: Sequence[Board]) -> Detections:
    opened = session(model)
    found, cpu_s = [], []
    for board in boards:
        before_s = time.thread_time()
        outputs = run(opened, board.picture, board.golden)
        cpu_s.append(time.thread_time() - before_s)
        found.append(boxes_of(*outputs))
    return Detections(found=found, cpu_s=cpu_s)


def boxes_of(heat: NDArray[np.float32], offset: NDArray[np.float32], size: NDArray[np.float32]) -> FoundBoxes:
    """Decode one picture's outputs: the peaks, highest in their 3 × 3 cells, best first, without doubles."""
    logits = heat[0]
    kinds, n_rows, n_columns = logits.shape
    around = np.pad(logits, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    near = [around[:, dy : dy + n_rows, dx : dx + n_columns] for dy in range(3) for dx in range(3)]
    score = np.where(logits >= np.maximum.reduce(near), 1 / (1 + np.exp(-logits)), 0).reshape(-1)
    best = np.argsort(-score, kind="stable")[:MAX_BOXES]
    best = best[score[best] >= MIN_SCORE]
    kind, row, column = np.unravel_index(best, (kinds, n_rows, n_columns))
    middle = np.stack([column, row], axis=1) + offset[0][:, row, column].T
    half = np.exp(size[0][:, row, column].T) / 2
    corners = np.concatenate([middle - half, middle + half], axis=1) * STRIDE
    found = np.concatenate([corners, score[best, None], kind[:, None]], axis=1).astype(np.float32)
    return found[_kept(found)]


def _kept(found: FoundBoxes) -> list[int]:
    doubled = (iou(found, found) > MAX_IOU) & (found[:, None, 5] == found[None, :, 5])
    kept: list[int] = []
    for i in range(len(found)):
        if not doubled[i, kept].any():
            kept.append(i)
    return kept
