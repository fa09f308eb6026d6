"""A declared mixed workload, replayed against recorded answers of a device's and a cloud's model.

60 % of requests are simple (ARC, CommonsenseQA, OpenBookQA), 40 % complex (MATH, GPQA, MBPP, HumanEval, LogicGrid);
15 % of all repeat an earlier one word for word and are answered from the exact cache. The router was fitted on other
rows; its threshold is the budget controller's, which begins with the gains that the shipped weights usually give.
A request costs its prompt and its answer in the cloud: characters / 4 tokens, and 64 tokens of a simple or 256 of a
complex answer at four times the prompt's price.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_rt.router.budget import SHIPPED_PRIOR, Budget
from edge_rt.router.fitting import F64, Rows

SIMPLE = frozenset({"arc_challenge", "commonsense_qa", "openbook_qa"})
COMPLEX = frozenset({"math", "gpqa", "mbpp", "human_eval", "agentverse-logicgrid"})

_N_PER_SPLIT = 400
_SIMPLE_SHARE = 0.6
_REPEATS = 0.15
_CLOUD_SHARE = 0.4
_ANSWER_TOKENS = {True: 64, False: 256}  # by is_simple
_ANSWER_PRICE = 4.0  # of a token, where one of the prompt costs 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replay came to. recovered: share of the gap between all local and all cloud, in recorded scores."""

    n: int
    local_share: float
    cached_share: float
    simple_local_share: float
    complex_local_share: float
    cost_saved: float
    flat_cost_saved: float
    recovered: float
    local_score: float
    score: float
    cloud_score: float

    def __str__(self) -> str:
        return (
            f"workload of {self.n} requests: {self.local_share:.1%} stay ({self.cached_share:.1%} from the exact "
            f"cache; of simple ones {self.simple_local_share:.1%}, of complex ones {self.complex_local_share:.1%}); "
            f"{self.cost_saved:.1%} of the cost saved ({self.flat_cost_saved:.1%} if all answers were equally long); "
            f"score {self.score:.3f} between {self.local_score:.3f} and {self.cloud_score:.3f}, "
            f"{self.recovered:.2f} of the gap"
        )


@dataclass(slots=True)
class _Sums:
    n: int = 0
    cached: int = 0
    score: float = 0.0
    weak: float = 0.0
    strong: float = 0.0
    paid: float = 0.0
    price: float = 0.0
    flat_paid: int = 0


def replay(splits: Sequence[tuple[Rows, F64]], *, seed: int = 1, cloud_share: float = _CLOUD_SHARE) -> Load:
    """Send a stream of each split's rows, as a router that never saw them judges it, through budget and cache."""
    sums = {True: _Sums(), False: _Sums()}
    for number, (test, p) in enumerate(splits):
        _stream(test, p, random.Random(seed + number), cloud_share, sums)
    a, b = sums[True], sums[False]
    n, weak, strong = a.n + b.n, a.weak + b.weak, a.strong + b.strong
    return Load(
        n=n,
        local_share=1 - (a.flat_paid + b.flat_paid) / n,
        cached_share=(a.cached + b.cached) / n,
        simple_local_share=1 - a.flat_paid / a.n,
        complex_local_share=1 - b.flat_paid / b.n,
        cost_saved=1 - (a.paid + b.paid) / (a.price + b.price),
        flat_cost_saved=1 - (a.flat_paid + b.flat_paid) / n,
        recovered=(a.score + b.score - weak) / (strong - weak),
        local_score=weak / n,
        score=(a.score + b.score) / n,
        cloud_score=strong / n,
    )


def _stream(test: Rows, p: F64, rng: random.Random, cloud_share: float, sums: dict[bool, _Sums]) -> None:
    kinds = [topic.removeprefix("task: ") for topic in test.topics]
    pools = {
        True: [i for i, kind in enumerate(kinds) if kind in SIMPLE],
        False: [i for i, kind in enumerate(kinds) if kind in COMPLEX],
    }
    for pool in pools.values():
        rng.shuffle(pool)
    n_prompt = np.expm1(test.surface[:, 0]) / 4
    budget = Budget(share=cloud_share, prior=SHIPPED_PRIOR)
    answered: list[int] = []
    came_from: dict[int, float] = {}
    for number in range(_N_PER_SPLIT):
        if answered and rng.random() < _REPEATS:
            row = rng.choice(answered)
        else:
            pool = pools[rng.random() < _SIMPLE_SHARE]
            if not pool:
                break  # each recorded request is new once
            row = pool.pop()
        is_simple = kinds[row] in SIMPLE
        found = sums[is_simple]
        weak, strong = test.outcomes[row].tolist()
        price = float(n_prompt[row]) + _ANSWER_TOKENS[is_simple] * _ANSWER_PRICE
        found.n += 1
        found.weak += weak
        found.strong += strong
        found.price += price
        if row in came_from:
            found.cached += 1
            found.score += came_from[row]
            continue
        gain = float(p[row, 1] - p[row, 0])
        goes = gain > budget.allowance("", now_s=number, wall_s=number).threshold
        budget.observe("", gain, went=goes)
        found.score += strong if goes else weak
        found.paid += price * goes
        found.flat_paid += int(goes)
        came_from[row] = strong if goes else weak
        answered.append(row)
