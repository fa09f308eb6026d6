"""What the catalog's embedding models are worth: a question's other wording among others' questions, by cosine.

    python benchmarks/retrieval.py [--data DIR] [--n N]

Of N clusters of Quora's question pairs (benchmarks/README.md says where the data is from) one member asks, and one
member of each stands among 3 N: the rest are questions without a duplicate. Told are the share whose own other wording
comes first, and the mean reciprocal rank, by model and number of dimensions.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import qqp
from numpy.typing import NDArray

import edge_rt

_MODELS = {"minilm-l6": (None,), "wordllama-256": (None, 128, 64)}


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _embed(model: str, texts: list[str]) -> NDArray[np.float32]:
    with edge_rt.load(model) as loaded:
        return np.array([loaded.look(text.encode()).embedding for text in texts], np.float32)


def main(data: Path | None, n: int) -> None:
    questions = qqp.Questions(qqp.rows(qqp.data_dir(data), "qqp_pairs"))
    members: dict[str, list[str]] = defaultdict(list)
    for question, cluster in questions.cluster.items():
        members[cluster].append(question)
    draw = random.Random(0)
    several = sorted(group for group in members.values() if len(group) > 1)
    single = sorted(group[0] for group in members.values() if len(group) == 1)
    pairs = [draw.sample(group, 2) for group in draw.sample(several, n)]
    asked, found = (list(side) for side in zip(*pairs, strict=True))
    others = [*found, *draw.sample(single, 2 * n)]
    print(f"{len(asked)} questions, {len(others)} candidates")
    for model, sizes in _MODELS.items():
        queries, candidates = _embed(model, asked), _embed(model, others)
        for size in sizes:
            scores = _unit(queries[:, :size]) @ _unit(candidates[:, :size]).T
            own = scores[np.arange(n), np.arange(n)]
            ranks = (scores > own[:, None]).sum(axis=1) + 1
            first, reciprocal = float((ranks == 1).mean()), float((1 / ranks).mean())
            print(f"{model} {size or queries.shape[1]}: first {first:.3f}, mean reciprocal rank {reciprocal:.3f}")


if __name__ == "__main__":
    given = sys.argv[1:]
    options = dict(zip(given[::2], given[1::2], strict=True))
    main(Path(options["--data"]) if "--data" in options else None, int(options.get("--n", "1000")))
