"""Measure pcb-defect: accuracy of every form, what the smaller ones lose, sizes, and CPU time of a board.

    python benchmarks/pcb.py DIR [--data DeepPCB] [--quick] [--check]

DIR has what `python -m tools.pcb train` wrote. Bars are set for DeepPCB's 100 test pairs: mAP@0.33 of at least 0.90 in
fp32, INT8 within half a point, 4-bit weights within one; the small detector with at most 60 % of the parameters, 1.6
times the speed and at least 95 % of the accuracy; edge_rt's own pipeline within 0.1 point of the evaluator. Without
--data boards are drawn. CPU time is the calling thread's, for the model alone, on one thread.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import harness
import numpy as np
from PIL import Image

from edge_rt import config, library
from edge_rt.tensor_library import TensorModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tools/ is not installed

from tools.pcb.__main__ import DETECTORS, DRAWN_TEST_SEED, measure
from tools.pcb.average_precision import FoundBoxes, mean_average_precision
from tools.pcb.boards import KINDS, Board, read_boards, unpacked
from tools.pcb.detect import MAX_BOXES, MIN_SCORE, run, session
from tools.pcb.drawn import draw_boards
from tools.pcb.register import Origin, Result, register
from tools.pcb.shape import SHAPES

_LARGE, _SMALL = DETECTORS
_FORMS = ("fp32", "int8", "int4")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--data", type=Path, help="DeepPCB pairs: a folder with test.lst, or an archive of one")


def boards_per_cpu_s(path: Path, boards: Sequence[Board]) -> Callable[[], float]:
    opened = session(path)

    def rate() -> float:
        before_s = time.thread_time()
        for board in boards:
            run(opened, board.picture, board.golden)
        return len(boards) / (time.thread_time() - before_s)

    return rate


def through_edge_rt(folder: Path, boards: Sequence[Board]) -> float:
    """Give mAP of what edge_rt answers for the boards as PNG files, from a store of its own."""
    with tempfile.TemporaryDirectory() as store:
        settings = config.load(flags={"catalog.store_dir": store})
        register(folder, _LARGE, Origin(license_id="LicenseRef-unknown", note="benchmark"), settings.config.catalog)
        with library.load_tensors(f"{_LARGE}:fp32", settings=settings) as model:
            found = [_boxes(model, board) for board in boards]
    return mean_average_precision(found, [board.marks for board in boards]).mean


def _boxes(model: TensorModel, board: Board) -> FoundBoxes:
    answer = model.look(_png(board.picture), reference=_png(board.golden), min_score=MIN_SCORE, top_k=MAX_BOXES)
    rows = [(b.x, b.y, b.x + b.width, b.y + b.height, b.score, KINDS.index(b.label)) for b in answer.boxes]
    return np.array(rows, np.float32).reshape(-1, 6)


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=1)
    return file.getvalue()


def figures(results: dict[str, Result], through: float) -> list[harness.Figure]:
    """What less of is better: points short of a bar, points lost, shares kept."""

    def figure(name: str, unit: str, value: float, at_most: float) -> harness.Figure:
        return harness.Figure(name=name, unit=unit, samples=(value,), at_most=at_most)

    def points(name: str, form: str) -> float:
        return 100 * results[f"{name}.{form}.onnx"].mean

    large, small = points(_LARGE, "fp32"), points(_SMALL, "fp32")
    params = [SHAPES[DETECTORS[name]].n_params for name in (_LARGE, _SMALL)]
    return [
        figure("fp32: mAP missing to 100", "points", 100 - large, 10.0),
        figure("INT8: mAP lost", "points", large - points(_LARGE, "int8"), 0.5),
        figure("INT4 weights: mAP lost", "points", large - points(_LARGE, "int4"), 1.0),
        figure("edge_rt's pipeline: mAP lost", "points", large - 100 * through, 0.1),
        figure("small: parameters kept", "%", 100 * params[1] / params[0], 60.0),
        figure("small: mAP lost", "% of it", 100 * (1 - small / large), 5.0),
    ]


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    folder: Path = arguments.own.folder
    if arguments.own.data:
        with unpacked(arguments.own.data) as data:
            boards, told = read_boards(data, "test"), "DeepPCB test subset"
    else:
        boards, told = draw_boards(10 if arguments.quick else 50, DRAWN_TEST_SEED), "drawn boards"
    results = {}
    for name in DETECTORS:
        for form in _FORMS:
            path = folder / f"{name}.{form}.onnx"
            results[path.name] = result = measure(path, boards, told)
            kinds = " ".join(f"{kind} {value:.3f}" for kind, value in result.by_kind.items())
            print(f"{path.name:28} mAP {result.mean:.4f}  {result.size_bytes:7} B  {kinds}", flush=True)
    few = boards[:10]
    rates = {key: boards_per_cpu_s(folder / key, few) for key in results}
    large = f"{_LARGE}.fp32.onnx"
    claims = []
    for key, at_least in ((f"{_SMALL}.fp32.onnx", 1.6), (f"{_LARGE}.int8.onnx", None), (f"{_LARGE}.int4.onnx", None)):
        pair = harness.paired(key, rates[key], large, rates[large], n_pairs=arguments.pairs(15, quick=3))
        claims.append(harness.Claim(name="boards per CPU-s", pair=pair, at_least=at_least))
    bars = figures(results, through_edge_rt(folder, boards))
    print(f"{len(boards)} {told}, {sum(len(board.marks) for board in boards)} flaws\n")
    harness.finish(arguments, claims, {"results": [r.mean for r in results.values()]}, figures=bars)


if __name__ == "__main__":
    main()
