"""Train the classifier with an early exit, and answer held-out crops for the calibration of when it may stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from tools.calibrate_cascade import Answers, choose_threshold, confidence, highest_loss, outcome, temperature
from tools.pcb.boards import Board
from tools.pcb.exit_graph import FEATURES, LOGITS, crops_of, first_graph, named, part_of, rest_graph, whole_graph
from tools.pcb.net import Layer, Weights
from tools.pcb.samples import INVERTED
from tools.pcb.train import Recipe, Report


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {name: Layer(conv, is_normalised="head" not in name) for name, conv in named().items()}
        self.layers = nn.ModuleDict({name.replace(".", "_"): layer for name, layer in layers.items()})

    def forward(self, pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """pairs: [n, 2, 48, 48] as 0..1; gives the exit's and the last logits [n, classes]."""
        features = self._through("first", pairs)
        return self._answer("first", features), self._answer("rest", self._through("rest", features))

    def _through(self, part: str, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            if name.startswith(f"{part}_") and not name.endswith("head"):
                x = layer(x)
        return x

    def _answer(self, part: str, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers[f"{part}_head"](features.mean(dim=(2, 3), keepdim=True)).flatten(1)
        return logits

    def weights(self) -> Weights:
        return {name.replace("_", "."): layer.folded() for name, layer in self.layers.items()}


def make_early_exit(
    boards: Sequence[Board], test: Sequence[Board], recipe: Recipe, max_loss: float, folder: Path, report: Report
) -> dict[str, object]:
    """Train on three quarters of boards, calibrate on the fourth, write the files and tell what they do on test."""
    n_known = len(boards) * 3 // 4
    weights = _trained(boards[:n_known], recipe, report)
    models = {"first": first_graph(part_of(weights, "first")), "rest": rest_graph(part_of(weights, "rest"))}
    for part, model in models.items():
        onnx.save(model, folder / f"pcb-kind-{part}.fp32.onnx")
    held_out, tested = (_answers(models, some, recipe.seed) for some in (boards[n_known:], test))
    by = temperature(held_out.first, held_out.label)
    threshold = choose_threshold(confidence(held_out.first, by), highest_loss(held_out), max_loss)
    onnx.save(whole_graph(weights, by, threshold), folder / "pcb-kind.fp32.onnx")
    told: dict[str, object] = {"temperature": by, "threshold": threshold, "max_loss": max_loss}
    for name, answers in (("held_out", held_out), ("test", tested)):
        told[name] = asdict(outcome(answers, confidence(answers.first, by) >= threshold))
    return told


def _trained(boards: Sequence[Board], recipe: Recipe, report: Report) -> Weights:
    """Train both exits together. recipe.side is not used: crops have the classifier's size."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model = Classifier().to(memory_format=torch.channels_last)
    cut = [crops_of(boards, recipe.seed + i, max_shift=6.0) for i in range(4)]  # the same marks, lying differently
    crops, labels = (np.concatenate(parts) for parts in zip(*cut, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.max_rate, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.max_rate, total_steps=recipe.n_steps, pct_start=0.1
    )
    rng = np.random.default_rng(recipe.seed)
    model.train()
    lately = 0.0
    for step in range(1, recipe.n_steps + 1):
        pairs, label = _turned(crops, labels, recipe.batch, rng)
        first, last = model(pairs)
        loss = functional.cross_entropy(last, label) + 0.5 * functional.cross_entropy(first, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        lately += (loss.item() - lately) * max(1 / step, 0.02)
        if step % max(1, recipe.n_steps // 5) == 0:
            report(f"early exit, step {step}/{recipe.n_steps}: loss {lately:.3f}")
    model.eval()
    weights: Weights = model.weights()
    return weights


def _answers(models: Mapping[str, onnx.ModelProto], boards: Sequence[Board], seed: int) -> Answers:
    """Give both exits' logits for the crops of boards, from the files as they are written."""
    crops, label = crops_of(boards, seed)
    first, rest = (
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for model in (models["first"], models["rest"])
    )
    early, features = first.run([LOGITS, FEATURES], {"image": crops[:, :1], "golden": crops[:, 1:]})
    (last,) = rest.run([LOGITS], {FEATURES: features})
    return Answers(first=early.astype(np.float64), last=last.astype(np.float64), label=label)


def _turned(
    crops: NDArray[np.uint8], labels: NDArray[np.int64], n: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw n crops and turn, mirror and sometimes invert all of them alike: the next step's differ."""
    chosen = rng.integers(len(crops), size=n)
    pairs, label = crops[chosen], labels[chosen]
    if rng.random() < 0.4:
        pairs, label = 255 - pairs, np.array([*INVERTED, len(INVERTED)])[label]
    pairs = np.rot90(pairs if rng.random() < 0.5 else pairs[..., ::-1], int(rng.integers(4)), axes=(2, 3))
    scaled = torch.from_numpy(np.ascontiguousarray(pairs)).float().div(255)
    return scaled.to(memory_format=torch.channels_last), torch.from_numpy(np.ascontiguousarray(label))
