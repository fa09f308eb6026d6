"""Which kept prefixes leave when memory is short: by use alone, as edge_rt does, or by hits too; on seeded traces.

    python benchmarks/prefix_eviction.py

Nothing is computed and nothing is timed: prompts are numbers, and a state is its size. The figure is the share of
prompt tokens that would be computed, with a part of the memory that the whole trace would fill. A ratio above 1 is more
computed by GDSF than by LRU.

tenants  12 tenants in turn, each with a system prompt of 700 tokens and a talk of 20 turns
popular  24 tenants, some asked far more often than others, talks of 8 turns
scans    the same, and three of ten prompts are long and never seen again
agents   two agents with 2,500 and 3,000 tokens of instructions, short chats, and long documents between them
shift    the popular ones change in the middle
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import numpy as np

from edge_rt.engine.prefix_eviction import least_used
from edge_rt.engine.prefix_nodes import InMemory
from edge_rt.engine.prefix_tree import PrefixTree

TOKEN_BYTES = 64  # of a state, less than a model's: only ratios count
_N_BLOCK = 32
_MAX_COUNTED_HITS = 16  # what was asked for more often than that is not kept longer once nobody asks any more
_STATE = np.zeros(_N_BLOCK * TOKEN_BYTES, np.uint8)
Turn = tuple[list[int], list[int]]  # a prompt, and all that is computed once it is answered


@dataclass(slots=True)
class Text:
    """Tokens that nobody has had before."""

    rnd: random.Random
    next: int = 1

    def __call__(self, low: int, high: int = 0) -> list[int]:
        n = self.rnd.randrange(low, high) if high else low
        self.next += n
        return list(range(self.next - n, self.next))


def tenants(_: random.Random, text: Text) -> Iterator[Turn]:
    talks = [text(700) for _ in range(12)]
    for _ in range(20):
        for talk in talks:
            talk.extend(text(20))
            prompt = list(talk)
            talk.extend(text(24))
            yield prompt, list(talk)


def popular(rnd: random.Random, text: Text, *, n_tenants: int = 24, n: int = 600, scans: float = 0.0) -> Iterator[Turn]:
    systems = [text(200, 1500) for _ in range(n_tenants)]
    talks: list[list[int]] = [[] for _ in systems]
    turns = [0] * n_tenants
    weights = [1 / (rank + 1) ** 0.9 for rank in range(n_tenants)]
    for _ in range(n):
        if rnd.random() < scans:
            prompt = text(500, 3000)
            yield prompt, prompt + text(100)
            continue
        (tenant,) = rnd.choices(range(n_tenants), weights)
        if not talks[tenant] or turns[tenant] >= 8:
            talks[tenant], turns[tenant] = list(systems[tenant]), 0
        talks[tenant] += text(10, 120)
        turns[tenant] += 1
        prompt = list(talks[tenant])
        talks[tenant] += text(20, 200)
        yield prompt, list(talks[tenant])


def scans(rnd: random.Random, text: Text) -> Iterator[Turn]:
    yield from popular(rnd, text, scans=0.3)


def agents(rnd: random.Random, text: Text) -> Iterator[Turn]:
    instructions, chat = [text(3000), text(2500)], text(400)
    runs = [list(each) for each in instructions]
    for _ in range(500):
        kind = rnd.random()
        if kind < 0.6:
            which = rnd.randrange(2)
            if len(runs[which]) > 7000 or rnd.random() < 0.1:
                runs[which] = list(instructions[which])
            runs[which] += text(100, 800)
            prompt = list(runs[which])
            runs[which] += text(80)
            yield prompt, list(runs[which])
        else:
            prompt = chat + text(60) if kind < 0.8 else text(300, 4000)
            yield prompt, prompt + text(100)


def shift(rnd: random.Random, text: Text) -> Iterator[Turn]:
    for _ in range(2):
        yield from popular(rnd, text, n_tenants=12, n=400, scans=0.15)


def most_asked(floor: int, _tick: int, n_hits: int) -> int:
    """Let blocks stay longer that many prompts have gone through: GDSF (greedy dual size with frequency).

    floor   the worth of what left last, so that what is not used any more sinks as others come and go
    n_hits  how many prompts have gone through it

    What a block costs to compute for each of its bytes is the same for all blocks of a model, so that hits alone are
    left to weigh.
    """
    return floor + 1 + min(n_hits, _MAX_COUNTED_HITS)


def computed(trace: list[Turn], max_bytes: int, choice: Callable[[int, int, int], int]) -> tuple[float, int]:
    """Give the share of prompt tokens that are computed, and how many bytes are kept in the end."""
    tree = PrefixTree(lambda _: max_bytes, n_block=_N_BLOCK, keeps_ranges=True, worth=choice)
    n_computed = n_prompt = 0
    for prompt, whole in trace:
        match = tree.find("", prompt)
        tree.touch(match)
        n_prompt += len(prompt)
        n_computed += len(prompt) - min(match.n_tokens, len(prompt) - 1)

        def save(start: int, end: int | None, n: int = len(whole)) -> InMemory:
            return InMemory(_STATE[: ((n if end is None else end) - start) * TOKEN_BYTES])

        tree.put("", whole, save)
    return n_computed / n_prompt, tree.n_bytes


def main() -> None:
    arguments = harness.parse(__doc__)
    figures = []
    makers: tuple[Callable[[random.Random, Text], Iterator[Turn]], ...] = (tenants, popular, scans, agents, shift)
    for make in makers:
        name, seeds = make.__name__, range(1 if arguments.quick else 3)
        traces = [list(make(rnd, Text(rnd))) for rnd in map(random.Random, seeds)]
        whole = [computed(trace, 2**60, least_used) for trace in traces]
        for part in (0.05, 0.1, 0.25, 0.5):
            pairs = [
                [computed(trace, int(part * n_bytes), choice)[0] for choice in (most_asked, least_used)]
                for trace, (_, n_bytes) in zip(traces, whole, strict=True)
            ]
            if max(lru for _, lru in pairs) == min(share for share, _ in whole):
                continue  # nothing has to leave
            label = f"{name}, {part:.0%} of memory: LRU computes {sum(lru for _, lru in pairs) / len(pairs):.1%}"
            ratios = tuple(own / lru for own, lru in pairs)
            figures.append(harness.Figure(name=label, unit="x LRU", samples=ratios, at_most=float("inf")))
    harness.finish(arguments, [], {}, figures)


if __name__ == "__main__":
    main()
