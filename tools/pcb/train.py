"""The training loop: one thread, so that a seed gives the same weights again on the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tools.pcb.boards import Board
from tools.pcb.net import Detector, detector_loss
from tools.pcb.samples import STRIDE, draw_sample, targets

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """side, batch: pixels and number of a step's crops; max_rate: of learning, reached after a tenth of the steps."""

    n_steps: int
    batch: int = 8
    side: int = 320
    max_rate: float = 4e-3
    decay: float = 1e-4
    seed: int = 0


def train(
    model: Detector,
    boards: Sequence[Board],
    recipe: Recipe,
    report: Report,
    *,
    teacher: Detector | None = None,
    n_levels: Mapping[str, int] | None = None,
) -> None:
    """Train model in place. n_levels: steps either side of zero that the named layers' weights are held to."""
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model.hold_to_grid(n_levels or {})
    model.to(memory_format=torch.channels_last)  # a quarter less time
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.max_rate, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.max_rate, total_steps=recipe.n_steps, pct_start=0.1, final_div_factor=100
    )
    model.train()
    started_s, lately = time.process_time(), 0.0
    for step, (pair, heat, box, is_near) in enumerate(_batches(boards, recipe), 1):
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(pair)
        loss = detector_loss(model(pair), heat, box, is_near, taught)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        lately += (loss.item() - lately) * max(1 / step, 0.02)
        if step % max(1, recipe.n_steps // 20) == 0 or step == recipe.n_steps:
            report(f"step {step}/{recipe.n_steps}: loss {lately:.3f}, {time.process_time() - started_s:.0f} CPU-s")
    model.eval()


def _batches(boards: Sequence[Board], recipe: Recipe) -> Iterator[tuple[torch.Tensor, ...]]:
    rng = np.random.default_rng(recipe.seed)
    n_cells = recipe.side // STRIDE
    for _ in range(recipe.n_steps):
        samples = [draw_sample(boards, recipe.side, rng) for _ in range(recipe.batch)]
        pairs = np.stack([np.stack([s.picture, s.golden]) for s in samples])
        wanted = [targets(s.marks, n_cells, n_cells) for s in samples]
        yield (
            torch.from_numpy(pairs).float().div(255).to(memory_format=torch.channels_last),
            *(torch.from_numpy(np.stack([getattr(w, name) for w in wanted])) for name in ("heat", "box", "is_near")),
        )
