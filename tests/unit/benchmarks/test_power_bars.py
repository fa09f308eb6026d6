"""What benchmarks/power.py says of a bar: whether it holds, is missed, or cannot be reached."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import power  # type: ignore[import-not-found]

from tests.plants import board_model, traces


def _bar(ours: float, oracle: float, free: float) -> power.Bar:
    return power.Bar(
        other="schedutil", of="soc_j_token", at_most=0.75, ours=(0, ours), oracle=(0, oracle), free=(0, free)
    )


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((0.74, 0.73, 0.72), "holds"),
        ((0.76, 0.74, 0.73), "missed"),
        ((0.77, 0.76, 0.74), "beyond the oracle's -24.0 %"),
        ((0.80, 0.79, 0.78), "ceiling -22.0 %, beyond any choice of clocks on this profile"),
    ],
)
def test_a_verdict_is_by_the_unfavourable_end(ends: tuple[float, float, float], verdict: str) -> None:
    assert _bar(*ends).verdict == verdict


def test_nobody_is_below_the_ceiling_nor_the_oracle_above_edge_rt() -> None:
    board = board_model.load("orin_nano_class")
    cell = power.play(
        board,
        "0.08/s",
        lambda seed: traces.poisson(seed, rate_hz=0.08, span_s=150.0),
        2,
        ambient_c=25.0,
        with_oracles=True,
    )
    for bar in power.bars(cell, 0.08):
        assert bar.free[1] <= bar.oracle[1] <= bar.ours[1] or bar.of == "board_j_token"
        assert bar.free[1] <= bar.ours[1]
    assert power.FREE in power.table([cell])
