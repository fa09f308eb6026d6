"""Train the detectors and write all their forms: NAME.fp32.onnx, NAME.int8.onnx and NAME.int4.onnx for each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import torch
from google.protobuf.message import DecodeError

from tools.pcb.boards import Board, BoardDataError
from tools.pcb.graph import detector_graph, weights_of
from tools.pcb.net import Detector
from tools.pcb.quantise import INT4_LEVELS, N_CALIBRATION, to_int4, to_int8
from tools.pcb.shape import SHAPES
from tools.pcb.train import Recipe, Report, train

_KEEP_INT8 = ("fine.0",)  # sees the pixels; 1 % of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """n_tuning_steps: with the weights held to 4 bits, at a fifth of the rate, taught by the float model."""

    shape: str
    recipe: Recipe
    n_tuning_steps: int


def make(
    name: str, plan: Plan, boards: Sequence[Board], folder: Path, report: Report, *, teacher: Path | None = None
) -> None:
    """Train one detector and write its three forms into folder. The same plan and boards write the same files.

    teacher  a large detector's float file, whose answers are learnt beside the marks
    """
    torch.set_num_threads(1)
    torch.manual_seed(plan.recipe.seed)
    model = Detector(SHAPES[plan.shape])
    report(f"{name}: {model.shape.n_params} parameters")
    train(model, boards, plan.recipe, report, teacher=_teacher(teacher) if teacher else None)
    fp32, int8, int4 = (folder / f"{name}.{form}.onnx" for form in ("fp32", "int8", "int4"))
    onnx.save(detector_graph(model.shape, model.weights()), fp32)
    to_int8(fp32, int8, boards[:N_CALIBRATION])

    tuned = copy.deepcopy(model)
    recipe = replace(
        plan.recipe, n_steps=plan.n_tuning_steps, max_rate=plan.recipe.max_rate / 5, seed=plan.recipe.seed + 1
    )
    held = {layer: INT4_LEVELS for layer in model.shape.named() if layer not in (*_KEEP_INT8, "head.0")}
    train(tuned, boards, recipe, report, teacher=model, n_levels=held)
    on_grid, on_grid_int8 = (folder / f".{name}.grid.{form}.onnx" for form in ("fp32", "int8"))
    try:
        onnx.save(detector_graph(tuned.shape, tuned.weights()), on_grid)
        to_int8(on_grid, on_grid_int8, boards[:N_CALIBRATION])
        to_int4(on_grid_int8, on_grid, int4, keep_int8=_KEEP_INT8)
    finally:
        on_grid.unlink(missing_ok=True)
        on_grid_int8.unlink(missing_ok=True)


def _teacher(file: Path) -> Detector:
    """Read a teacher. Raises BoardDataError for a file that is no large detector in floats."""
    model = Detector(SHAPES["large"])
    try:
        model.take(weights_of(onnx.load(file), model.shape))
    except (KeyError, ValueError, RuntimeError, DecodeError) as exc:
        raise BoardDataError(f"{file} is no pcb-defect.fp32.onnx, the only teacher that is read: {exc}") from exc
    model.to(memory_format=torch.channels_last)
    return model
