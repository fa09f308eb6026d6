"""A classifier of flaws with an early exit, as two ONNX files: the first answers, and hands the second its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from PIL import Image

from tools.pcb.boards import KINDS, Board, Picture
from tools.pcb.graph import INPUTS, GraphWriter, Weights
from tools.pcb.shape import Conv

CLASSES = (*KINDS, "none")
CROP = 48  # pixels a side
FEATURES = "features"
LOGITS = "logits"

FIRST = (
    Conv(n_in=2, n_out=16, stride=2),
    Conv(n_in=16, n_out=24, stride=2),
    Conv(n_in=24, n_out=24, is_residual=True),
)
REST = (Conv(n_in=24, n_out=48), Conv(n_in=48, n_out=48, stride=2), Conv(n_in=48, n_out=64))
_CELLS = CROP // 4

_ROOM = 1.25  # of a mark, around its middle
_NONE_PER_MARK = 0.5


def crops_of(
    boards: Sequence[Board], seed: int, *, max_shift: float = 0.0
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Cut all marks out, and half as many places without one: [n, 2, 48, 48], and the indices in CLASSES [n].

    max_shift  pixels that a mark may be off the crop's middle, as a detector's boxes are
    """
    rng = np.random.default_rng(seed)
    cut: list[NDArray[np.uint8]] = []
    label: list[int] = []
    for board in boards:
        for x1, y1, x2, y2, kind in board.marks:
            middle = np.array([(x1 + x2) / 2, (y1 + y2) / 2]) + rng.uniform(-max_shift, max_shift, 2)
            cut.append(crop(board, middle, max(CROP, _ROOM * max(x2 - x1, y2 - y1))))
            label.append(int(kind))
        for _ in range(round(_NONE_PER_MARK * len(board.marks))):
            cut.append(crop(board, _empty_place(board, rng), CROP))
            label.append(len(KINDS))
    return np.stack(cut), np.array(label, np.int64)


def crop(board: Board, middle: NDArray[np.float64], side: float) -> NDArray[np.uint8]:
    """Cut a square out of both pictures and fit it into 48 × 48."""
    left, top = middle - side / 2
    box = (float(left), float(top), float(left + side), float(top + side))
    return np.stack([_fitted(picture, box) for picture in (board.picture, board.golden)])


def first_graph(weights: Weights) -> onnx.ModelProto:
    """image and golden, uint8 [n, 1, 48, 48], to logits [n, classes] and features [n, 24, 12, 12]."""
    graph = GraphWriter(_named("first", FIRST), weights)
    last = graph.convs("first", FIRST, graph.pixels())
    graph.add("Identity", (last,), FEATURES)
    _answer(graph, "first", last, FIRST[-1].n_out, weights)
    pictures = [_value(name, onnx.TensorProto.UINT8, (1, CROP, CROP)) for name in INPUTS]
    return graph.model("pcb-kind-first", pictures, [_logits(), _features()])


def rest_graph(weights: Weights) -> onnx.ModelProto:
    """features [n, 24, 12, 12] to logits [n, classes]."""
    graph = GraphWriter(_named("rest", REST), weights)
    last = graph.convs("rest", REST, FEATURES)
    _answer(graph, "rest", last, REST[-1].n_out, weights)
    return graph.model("pcb-kind-rest", [_features()], [_logits()])


def whole_graph(weights: Weights, temperature: float, threshold: float) -> onnx.ModelProto:
    """image and golden to logits, and whether the first part's were sure enough: only else the rest is computed.

    `stopped` is true where every row's likeliest class has at least threshold of the softmax of logits / temperature;
    rows that are to stop one by one are run one by one.
    """
    graph = GraphWriter(named(), weights)
    last = graph.convs("first", FIRST, graph.pixels())
    graph.add("Identity", (last,), FEATURES)
    _answer(graph, "first", last, FIRST[-1].n_out, weights, "logits.first")
    graph.constant("temperature", np.array(temperature, np.float32))
    graph.constant("threshold", np.array(threshold, np.float32))
    graph.add("Div", ("logits.first", "temperature"), "logits.tempered")
    graph.add("Softmax", ("logits.tempered",), "likely", axis=1)
    graph.add("ReduceMax", ("likely",), "likeliest", axes=[1], keepdims=0)
    graph.add("ReduceMin", ("likeliest",), "least.sure", keepdims=0)
    graph.add("GreaterOrEqual", ("least.sure", "threshold"), "stopped")
    stop, go_on = (GraphWriter(_named("rest", REST), part_of(weights, "rest")) for _ in range(2))
    stop.add("Identity", ("logits.first",), "logits.stop")
    _answer(go_on, "rest", go_on.convs("rest", REST, FEATURES), REST[-1].n_out, weights, "logits.rest")
    branches = {
        "then_branch": helper.make_graph(stop.nodes, "stop", [], [_logits("logits.stop")]),
        "else_branch": helper.make_graph(go_on.nodes, "rest", [], [_logits("logits.rest")], go_on.constants),
    }
    graph.add("If", ("stopped",), LOGITS, **branches)
    pictures = [_value(name, onnx.TensorProto.UINT8, (1, CROP, CROP)) for name in INPUTS]
    stopped = helper.make_tensor_value_info("stopped", onnx.TensorProto.BOOL, ())
    return graph.model("pcb-kind", pictures, [_logits(), stopped])


def named() -> dict[str, Conv]:
    """All convolutions by name."""
    return _named("first", FIRST) | _named("rest", REST)


def _named(part: str, convs: Sequence[Conv]) -> dict[str, Conv]:
    head = Conv(n_in=convs[-1].n_out, n_out=len(CLASSES), kernel=1, has_relu=False)
    return {f"{part}.{i}": conv for i, conv in enumerate(convs)} | {f"{part}.head": head}


def _answer(graph: GraphWriter, part: str, x: str, n_channels: int, weights: Weights, output: str = LOGITS) -> None:
    """The mean over all places through a 1 × 1 convolution."""
    graph.add("GlobalAveragePool", (x,), f"{part}.mean")
    head = Conv(n_in=n_channels, n_out=len(CLASSES), kernel=1, has_relu=False)
    graph.conv(f"{part}.head", head, f"{part}.mean", *weights[f"{part}.head"], f"{part}.place")
    graph.add("Flatten", (f"{part}.place",), output, axis=1)


def _value(name: str, kind: int, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ("n", *shape))


def _logits(name: str = LOGITS) -> onnx.ValueInfoProto:
    return _value(name, onnx.TensorProto.FLOAT, (len(CLASSES),))


def _features() -> onnx.ValueInfoProto:
    return _value(FEATURES, onnx.TensorProto.FLOAT, (FIRST[-1].n_out, _CELLS, _CELLS))


def _empty_place(board: Board, rng: np.random.Generator) -> NDArray[np.float64]:
    """A place whose crop shows no mark, on an edge of copper where one is found."""
    height, width = board.picture.shape
    place = rng.uniform(0, 1, 2) * (width, height)
    for _ in range(50):
        place = rng.uniform(0, 1, 2) * (width, height)
        middles = (board.marks[:, 0:2] + board.marks[:, 2:4]) / 2
        if len(middles) and np.abs(middles - place).max(axis=1).min() < CROP:
            continue
        x, y = place.astype(int)
        around = board.golden[max(0, y - 12) : y + 12, max(0, x - 12) : x + 12]
        if around.min() < 128 <= around.max():
            break
    return place


def _fitted(picture: Picture, box: tuple[float, float, float, float]) -> Picture:
    image = Image.fromarray(picture)
    transform = Image.Transform.EXTENT
    if box[2] - box[0] > CROP:  # shrinks well, which the transformation does not
        whole = (round(box[0]), round(box[1]), round(box[2]), round(box[3]))
        return np.asarray(image.crop(whole).resize((CROP, CROP), Image.Resampling.BILINEAR))
    return np.asarray(image.transform((CROP, CROP), transform, box, Image.Resampling.NEAREST))


def part_of(weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]], part: str) -> Weights:
    """Give one part's weights."""
    return {name: w for name, w in weights.items() if name.startswith(f"{part}.")}
