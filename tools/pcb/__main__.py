"""python -m tools.pcb train | evaluate | register."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from edge_rt import config
from edge_rt.errors import EdgeRtError
from tools.pcb.average_precision import MIN_IOU, mean_average_precision
from tools.pcb.boards import KINDS, Board, BoardDataError, read_boards, unpacked
from tools.pcb.detect import detect
from tools.pcb.drawn import draw_boards
from tools.pcb.register import RESULTS, Origin, Result, register

DETECTORS = {"pcb-defect": "teacher", "pcb-defect-small": "student"}
_DRAWN_TEST_SEED = 1_000_003  # a board that is trained on is never one of these
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

    train = commands.add_parser("train", help="train the detector and its small one, write all their forms")
    train.add_argument("--data", type=Path, help="DeepPCB pairs: a folder with trainval.lst, or an archive of one")
    train.add_argument("--drawn", type=int, default=0, metavar="N", help="boards to draw and train on, beside data")
    train.add_argument("--out", type=Path, required=True, metavar="DIR")
    train.add_argument("--steps", type=int, default=4000)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--shape", default="", help="train this shape only, as a test of the chain: tiny")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="measure mAP of exported files, through onnxruntime")
    evaluate.add_argument("--data", type=Path, help="as for train, with test.lst; without it boards are drawn")
    evaluate.add_argument("folder", type=Path, metavar="DIR")
    evaluate.set_defaults(run=_evaluate)

    into = commands.add_parser("register", help="take the files into edge_rt's store")
    into.add_argument("--drawn-only", action="store_true", help="they were trained on drawn boards alone")
    into.add_argument("folder", type=Path, metavar="DIR")
    into.set_defaults(run=_register)
    return parser


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
    teacher = None
    recipe = Recipe(n_steps=options.steps, seed=options.seed)
    for name, shape in [("pcb-defect", options.shape)] if options.shape else DETECTORS.items():
        plan = Plan(shape=shape, recipe=recipe, n_tuning_steps=max(1, options.steps // 8))
        teacher = make(name, plan, boards, options.out, _say, teacher=teacher)
    told = {"n_boards": len(boards), "n_drawn": options.drawn, "torch": torch.__version__, "recipe": asdict(recipe)}
    (options.out / "training.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _evaluate(options: argparse.Namespace) -> None:
    if options.data:
        with unpacked(options.data) as folder:
            boards, data = read_boards(folder, "test"), "DeepPCB test subset"
    else:
        boards, data = draw_boards(50, _DRAWN_TEST_SEED), "drawn boards"
    paths = sorted(options.folder.glob("pcb-defect*.onnx"))
    if not paths:
        raise FileNotFoundError(f"{options.folder} has no pcb-defect*.onnx: train writes them")
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


def _register(options: argparse.Namespace) -> None:
    names = [name for name in DETECTORS if (options.folder / f"{name}.fp32.onnx").exists()]
    if not names:
        raise FileNotFoundError(f"{options.folder} has no pcb-defect.fp32.onnx: train writes it")
    catalog = config.load().config.catalog
    for name in names:
        for path in register(options.folder, name, _DRAWN if options.drawn_only else _DEEPPCB, catalog):
            print(path)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
