"""python -m tools.pcb draw | train | evaluate | cascade | early-exit | register."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from PIL import Image

from edge_rt import config
from edge_rt.errors import EdgeRtError
from tools.pcb.average_precision import MIN_IOU, mean_average_precision
from tools.pcb.boards import KINDS, Board, BoardDataError, read_boards, unpacked
from tools.pcb.cascade import Side, cross_calibrated
from tools.pcb.detect import detect
from tools.pcb.drawn import draw_boards
from tools.pcb.register import CASCADE, RESULTS, Origin, Result, cascade_text, register, register_cascade
from tools.pcb.shape import SHAPES

DETECTORS = {"pcb-defect": "large", "pcb-defect-small": "small"}  # their shapes
N_STEPS = {"pcb-defect": 3000, "pcb-defect-small": 4000}
DRAWN_TEST_SEED = 1_000_003  # a board that is trained on is never one of these
_DRAWN = Origin(license_id="Apache-2.0", note="Trained on drawn boards alone, by tools.pcb of edge_rt")
_DEEPPCB = Origin(
    license_id="LicenseRef-DeepPCB-research",
    note="Trained on DeepPCB, whose readme allows research only; not to be given away",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (BoardDataError, EdgeRtError, FileNotFoundError) as exc:
        print(f"pcb: {exc}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        print("pcb: training needs PyTorch, which is not installed here; docs/pcb.md says how", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.pcb", description=__doc__)
    commands = parser.add_subparsers(required=True)

    draw = commands.add_parser("draw", help="draw boards: board-N.png, and board-N.golden.png beside each")
    draw.add_argument("--seed", type=int, default=0)
    draw.add_argument("n", type=int)
    draw.add_argument("folder", type=Path, metavar="DIR")
    draw.set_defaults(run=_draw)

    train = commands.add_parser("train", help="train the detector and its small one, write all their forms")
    train.add_argument("--data", type=Path, help="DeepPCB pairs: a folder with trainval.lst, or an archive of one")
    train.add_argument("--drawn", type=int, default=0, metavar="N", help="boards to draw and train on, beside data")
    train.add_argument("--out", type=Path, required=True, metavar="DIR")
    train.add_argument("--steps", type=int, help=f"without it {' and '.join(map(str, N_STEPS.values()))}")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--only", choices=tuple(DETECTORS), help="train this one; both can be trained at once")
    train.add_argument("--teacher", type=Path, metavar="FILE", help="a trained pcb-defect.fp32.onnx to learn from")
    train.add_argument("--shape", choices=tuple(SHAPES), help="instead of the detector's own; tiny tests the chain")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="measure mAP of exported files, through onnxruntime")
    evaluate.add_argument("--data", type=Path, help="as for train, with test.lst; without it boards are drawn")
    evaluate.add_argument("--drawn", type=int, default=50, metavar="N", help="boards to draw where there is no data")
    evaluate.add_argument("folder", type=Path, metavar="DIR")
    evaluate.set_defaults(run=_evaluate)

    cascade = commands.add_parser("cascade", help="calibrate pcb-defect-small first, pcb-defect for unsure boards")
    cascade.add_argument("--data", type=Path, help="as for evaluate")
    cascade.add_argument("--drawn", type=int, default=50, metavar="N", help="as for evaluate")
    cascade.add_argument("--form", choices=("fp32", "int8", "int4"), default="fp32")
    cascade.add_argument("--max-loss", type=float, default=0.005, help="mAP that may be lost; 0.005 is half a point")
    cascade.add_argument("folder", type=Path, metavar="DIR")
    cascade.set_defaults(run=_cascade)

    early = commands.add_parser("early-exit", help="train and calibrate a classifier of flaws with an early exit")
    early.add_argument("--data", type=Path, help="as for train; without it boards are drawn")
    early.add_argument("--out", type=Path, required=True, metavar="DIR")
    early.add_argument("--drawn", type=int, default=200, metavar="N", help="boards to draw where there is no data")
    early.add_argument("--steps", type=int, default=1200)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--max-loss", type=float, default=0.01, help="accuracy that may be lost; 0.01 is a point")
    early.set_defaults(run=_early_exit)

    into = commands.add_parser("register", help="take the files into edge_rt's store")
    into.add_argument("--drawn-only", action="store_true", help="they were trained on drawn boards alone")
    into.add_argument("folder", type=Path, metavar="DIR")
    into.set_defaults(run=_register)
    return parser


def _draw(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, board in enumerate(draw_boards(options.n, options.seed), 1):
        for suffix, picture in (("", board.picture), (".golden", board.golden)):
            Image.fromarray(picture).save(options.folder / f"board-{number}{suffix}.png")


def _train(options: argparse.Namespace) -> None:
    import torch

    from tools.pcb.make import Plan, make
    from tools.pcb.train import Recipe

    if not options.data and options.drawn < 1:
        raise BoardDataError("nothing to train on: give --data, --drawn or both")
    boards: list[Board] = []
    if options.data:
        with unpacked(options.data) as folder:
            boards += read_boards(folder, "trainval")
    boards += draw_boards(options.drawn, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / RESULTS).unlink(missing_ok=True)
    for name in [options.only] if options.only else DETECTORS:
        shape = options.shape or DETECTORS[name]
        recipe = Recipe(n_steps=options.steps or N_STEPS[name], seed=options.seed)
        plan = Plan(shape=shape, recipe=recipe, n_tuning_steps=max(1, recipe.n_steps // 8))
        make(name, plan, boards, options.out, _say, teacher=options.teacher)
        told = {"n_boards": len(boards), "n_drawn": options.drawn, "torch": torch.__version__, "plan": asdict(plan)}
        (options.out / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _test_boards(data: Path | None, n_drawn: int) -> tuple[list[Board], str]:
    if data is None:
        return draw_boards(n_drawn, DRAWN_TEST_SEED), "drawn boards"
    with unpacked(data) as folder:
        return read_boards(folder, "test"), "DeepPCB test subset"


def _evaluate(options: argparse.Namespace) -> None:
    paths = sorted(options.folder.glob("pcb-defect*.onnx"))
    if not paths:
        raise FileNotFoundError(f"{options.folder} has no pcb-defect*.onnx: train writes them")
    boards, data = _test_boards(options.data, options.drawn)
    results = [measure(path, boards, data) for path in paths]
    (options.folder / RESULTS).write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    print(f"mAP@{MIN_IOU} on {len(boards)} {data}, {sum(len(b.marks) for b in boards)} flaws; kB; CPU ms a board")
    for result in results:
        kinds = " ".join(f"{kind} {value:.3f}" for kind, value in result.by_kind.items())
        print(f"{result.file:28} {result.mean:.4f} {result.size_bytes / 1e3:7.1f} {result.cpu_s * 1e3:6.2f}  {kinds}")


def measure(path: Path, boards: Sequence[Board], data: str) -> Result:
    detections = detect(path, boards)
    precision = mean_average_precision(detections.found, [board.marks for board in boards])
    return Result(
        file=path.name,
        mean=precision.mean,
        by_kind={kind: v for kind, v in zip(KINDS, precision.by_kind, strict=True) if v == v},  # NaN is not there
        n_boards=precision.n_boards,
        n_marks=precision.n_marks,
        data=data,
        size_bytes=path.stat().st_size,
        cpu_s=sorted(detections.cpu_s)[len(detections.cpu_s) // 2],
    )


def _cascade(options: argparse.Namespace) -> None:
    boards, data = _test_boards(options.data, options.drawn)
    large_name, small_name = DETECTORS
    small, large = (detect(options.folder / f"{n}.{options.form}.onnx", boards) for n in (small_name, large_name))
    side = Side(small=small.found, large=large.found, marks=[board.marks for board in boards])
    result = cross_calibrated(side, options.max_loss, seed=0)
    small_s, large_s = (sorted(d.cpu_s)[len(boards) // 2] for d in (small, large))
    told = asdict(result) | {"data": data, "max_loss": options.max_loss, "small_cpu_s": small_s, "large_cpu_s": large_s}
    print(json.dumps(told | {"cascade_cpu_s": small_s + (1 - result.stopped.value) * large_s}, indent=1))
    path = options.folder / CASCADE
    path.unlink(missing_ok=True)
    if max(result.thresholds) <= 1:
        path.write_text(cascade_text(small_name, large_name, result, data), encoding="utf-8")


def _early_exit(options: argparse.Namespace) -> None:
    from tools.pcb.early_exit import make_early_exit
    from tools.pcb.train import Recipe

    if options.data:
        with unpacked(options.data) as folder:
            boards = read_boards(folder, "trainval")
    else:
        boards = draw_boards(options.drawn, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(n_steps=options.steps, batch=64, max_rate=6e-3, seed=options.seed)
    test, _ = _test_boards(options.data, max(1, options.drawn // 2))
    told = make_early_exit(boards, test, recipe, options.max_loss, options.out, _say)
    text = json.dumps(told, indent=1)
    (options.out / "pcb-kind.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def _register(options: argparse.Namespace) -> None:
    names = [name for name in DETECTORS if (options.folder / f"{name}.fp32.onnx").exists()]
    if not names:
        raise FileNotFoundError(f"{options.folder} has no pcb-defect.fp32.onnx: train writes it")
    catalog = config.load().config.catalog
    for name in names:
        for path in register(options.folder, name, _DRAWN if options.drawn_only else _DEEPPCB, catalog):
            print(path)
    if chain := register_cascade(options.folder, catalog):
        print(chain)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
