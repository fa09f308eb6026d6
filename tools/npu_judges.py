"""Say how far apart the answers of forms of a model are, by what the model is there for.

A judge gives the inputs, and figures of the answers to them. `float` is the float parent, which counts as right where
nothing else does; `cpu` the quantised file on onnxruntime's CPU; `npu` the same file as a vendor compiled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.pipelines import DetectText
from edge_rt.engine.text_boxes import text_rectangles
from tools.npu_inputs import (
    Feed,
    Texts,
    board_feed,
    halves,
    judge_boards,
    map_feed,
    paragraphs,
    picture_feed,
    plates,
    text_feed,
)
from tools.pcb.average_precision import iou, mean_average_precision
from tools.pcb.boards import Board, read_boards, unpacked
from tools.pcb.detect import boxes_of
from tools.picture_set import MAX_PICTURES, labelled_pictures, pictures
from tools.sentence_pairs import PAIRS

Outputs = Mapping[str, NDArray[Any]]
Answers = Mapping[str, Sequence[Outputs]]  # by who gave them: float, cpu, npu
_MIN_IOU = 0.5  # of two boxes of text that are one


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number: what of whose answers, on how many items of which data."""

    measure: str
    of: str
    value: float
    n: int
    data: str


class Judge(Protocol):
    feeds: Sequence[Feed]

    def figures(self, answers: Answers) -> list[Figure]: ...


def judge_for(manifest: Manifest, *, n: int, data: Path | None, tokenizer: Path | None) -> Judge:
    """Give the judge of a model's answers. Raises ValueError for a model that has none, SamplesAbsentError.

    n     inputs at most
    data  DeepPCB, for pcb-defect; None draws boards
    """
    if manifest.id == "efficientnet-lite0":
        return Pictures(manifest, n)
    if manifest.id == "pcb-defect":
        if data is None:
            return Boards(judge_boards(n), "drawn boards")
        with unpacked(data) as folder:
            return Boards(read_boards(folder, "test")[:n], "DeepPCB's test pairs")
    if manifest.id == "minilm-l6":
        return Sentences(Texts(tokenizer), n)
    if manifest.id == "pp-ocrv4-det":
        return Plates(manifest, n)
    raise ValueError(f"nothing is known of how to judge {manifest.id}")


def cosines(answers: Answers) -> list[tuple[str, NDArray[np.float64]]]:
    """Give the cosine of all outputs of each input together, of the NPU and the CPU to the float, and to each other."""
    flat = {
        who: [np.concatenate([np.asarray(o[name], np.float64).ravel() for name in sorted(o)]) for o in given]
        for who, given in answers.items()
    }
    pairs = [(a, b) for a, b in (("npu", "cpu"), ("npu", "float"), ("cpu", "float")) if a in flat and b in flat]
    return [(f"{a} to {b}", np.array([_cosine(x, y) for x, y in zip(flat[a], flat[b], strict=True)])) for a, b in pairs]


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))


def cosine_figures(answers: Answers, data: str) -> list[Figure]:
    found = []
    for pair, values in cosines(answers):
        for measure, value in (("cosine, mean", values.mean()), ("cosine, least", values.min())):
            found.append(Figure(measure=measure, of=pair, value=float(value), n=len(values), data=data))
    return found


class Pictures:
    """Classes put first for n photographs, and for n views of labelled ones."""

    def __init__(self, manifest: Manifest, n: int):
        labelled = list(labelled_pictures(min(n, MAX_PICTURES)))
        self._labels = np.array([label for _, label in labelled])
        self._n = min(n, MAX_PICTURES)
        self.feeds: Sequence[Feed] = [picture_feed(manifest, picture) for picture in pictures(self._n)]
        self.feeds += [picture_feed(manifest, picture) for picture, _ in labelled]

    def figures(self, answers: Answers) -> list[Figure]:
        first = {who: np.array([o["logits"][0].argmax() for o in given]) for who, given in answers.items()}
        n, data = self._n, "photographs of picture_set.py"
        found = cosine_figures({who: given[:n] for who, given in answers.items()}, data)
        for a, b in (("npu", "cpu"), ("npu", "float"), ("cpu", "float")):
            if a in first and b in first:
                same = float((first[a][:n] == first[b][:n]).mean())
                found.append(Figure(measure="same class first", of=f"{a} to {b}", value=same, n=n, data=data))
        for who, classes in first.items():
            right = float((classes[n:] == self._labels).mean())
            found.append(Figure(measure="top-1", of=who, value=right, n=n, data="labelled views of 20 pictures"))
        return found


class Boards:
    """Flaws found on boards with marks."""

    def __init__(self, boards: Sequence[Board], data: str):
        self._marks, self._data = [board.marks for board in boards], data
        self.feeds: Sequence[Feed] = [board_feed(board) for board in boards]

    def figures(self, answers: Answers) -> list[Figure]:
        found = cosine_figures(answers, self._data)
        for who, given in answers.items():
            boxes = [boxes_of(o["heat"], o["offset"], o["size"]) for o in given]
            mean = mean_average_precision(boxes, self._marks).mean
            found.append(Figure(measure="mAP@0.33", of=who, value=mean, n=len(boxes), data=self._data))
        return found


class Sentences:
    """Which of 32 sentences is nearest to one: that which means the same. Which half of a paragraph is to the other."""

    def __init__(self, texts: Texts, n: int):
        sentences = [sentence for pair in PAIRS for sentence in pair][:n]
        found = halves(paragraphs()[1])
        n_halves = min(max(n - len(sentences), 0) // 2, len(found))
        # Spread over all pages: those of one are all of one matter.
        pairs = [found[at * len(found) // n_halves] for at in range(n_halves)]
        ids = [texts.ids(text) for text in (*sentences, *(half for pair in pairs for half in pair))]
        self._n_sentences = len(sentences)
        self._lengths = [len(tokens) for tokens in ids]
        self.feeds: Sequence[Feed] = [text_feed(tokens) for tokens in ids]

    def figures(self, answers: Answers) -> list[Figure]:
        vectors = {who: self._vectors(given) for who, given in answers.items()}
        sentences, paragraphs_ = "sentences, two of which mean the same", "halves of paragraphs"
        found = cosine_figures({who: [{"vector": v} for v in rows] for who, rows in vectors.items()}, "both")
        nearest: dict[str, dict[str, NDArray[np.intp]]] = {sentences: {}, paragraphs_: {}}
        n = self._n_sentences
        for who, rows in vectors.items():
            alike = rows[:n] @ rows[:n].T - 2 * np.eye(n)
            nearest[sentences][who] = alike.argmax(axis=1)
            right = float((nearest[sentences][who] == np.arange(n) ^ 1).mean())
            found.append(Figure(measure="nearest means the same", of=who, value=right, n=n, data=sentences))
            if len(rows) > n:
                own = (rows[n::2] @ rows[n + 1 :: 2].T).argmax(axis=1)
                nearest[paragraphs_][who] = own
                right = float((own == np.arange(len(own))).mean())
                found.append(Figure(measure="nearest is its own", of=who, value=right, n=len(own), data=paragraphs_))
        for data, by_who in nearest.items():
            for a, b in (("npu", "cpu"), ("npu", "float"), ("cpu", "float")):
                if a in by_who and b in by_who:
                    same = float((by_who[a] == by_who[b]).mean())
                    found.append(
                        Figure(measure="same nearest", of=f"{a} to {b}", value=same, n=len(by_who[a]), data=data)
                    )
        return found

    def _vectors(self, given: Sequence[Outputs]) -> NDArray[np.float64]:
        rows = [
            np.asarray(outputs["last_hidden_state"], np.float64)[0, :length].mean(axis=0)
            for outputs, length in zip(given, self._lengths, strict=True)
        ]
        return np.array([row / np.linalg.norm(row) for row in rows])


class Plates:
    """Lines of text found in rendered pictures."""

    def __init__(self, manifest: Manifest, n: int):
        assert isinstance(manifest.pipeline, DetectText)
        self._spec = manifest.pipeline
        rendered = list(plates(n))
        self._truth = [np.array(boxes, np.float32).reshape(-1, 4) for _, boxes in rendered]
        self.feeds: Sequence[Feed] = [map_feed(manifest, picture) for picture, _ in rendered]

    def figures(self, answers: Answers) -> list[Figure]:
        data = "rendered lines of text"
        found = cosine_figures(answers, data)
        n_lines = sum(map(len, self._truth))
        for who, given in answers.items():
            boxes = [self._boxes(outputs) for outputs in given]
            hits = sum(_matched(truth, mine) for truth, mine in zip(self._truth, boxes, strict=True))
            n_boxes = max(sum(map(len, boxes)), 1)
            found.append(Figure(measure="lines found", of=who, value=hits / n_lines, n=n_lines, data=data))
            found.append(Figure(measure="boxes that are lines", of=who, value=hits / n_boxes, n=n_boxes, data=data))
        return found

    def _boxes(self, outputs: Outputs) -> NDArray[np.float32]:
        (likely,) = outputs.values()
        found, _ = text_rectangles(np.asarray(likely, np.float32)[0, 0], self._spec)
        x, y, width, height = found[:, :4].T
        return np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)


def _matched(truth: NDArray[np.float32], boxes: NDArray[np.float32]) -> int:
    """Count the lines that a box of its own covers."""
    if not len(truth) or not len(boxes):
        return 0
    overlaps = iou(truth, boxes)
    hits = 0
    while overlaps.size and overlaps.max() >= _MIN_IOU:
        row, column = np.unravel_index(int(overlaps.argmax()), overlaps.shape)
        overlaps[row, :] = overlaps[:, column] = 0
        hits += 1
    return hits
