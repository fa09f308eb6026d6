"""Train the router's shipped weights on labelled requests: python -m tools.train_router --data DIR [--out FILE].

Takes some minutes, and prints what budget.SHIPPED_PRIOR must then be. docs/router.md says what the data are and how
good the result is; benchmarks/router.py measures.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

from edge_rt.bench.samples import quantile
from edge_rt.router import fitting
from edge_rt.router.scorer import SHIPPED, Scorer
from edge_rt.text_vectors import TextVectors
from tools.router_data import SOURCES, read_examples, read_rows

_MAX_SHIPPED_BYTES = 1_000_000
_PRIOR_FILES = {  # and the column of the request: what traffic may be like
    "llmrouter_mix": "question", "routellm_mmlu": "prompt", "zeroeval_gsm": "question", "clinc150": "text",
    "banking77": "text",
}  # fmt: skip
_N_OF_EACH = 150
_N_QUANTILES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGE_RT_DATA"), metavar="DIR", required=False)
    parser.add_argument("--out", type=Path, default=SHIPPED, metavar="FILE")
    parser.add_argument("--source", action="append", choices=list(SOURCES), help="may be repeated; all by default")
    given = parser.parse_args()
    if given.data is None:
        parser.error("say where the data are: --data DIR or EDGE_RT_DATA")
    names = given.source or list(SOURCES)
    examples = [example for name in names for example in read_examples(given.data, name)]
    print(f"{len(examples)} requests of {', '.join(names)}")
    rows = fitting.prepare(examples, TextVectors.load())
    weights = fitting.fit(rows, note=f"{', '.join(names)}: {len(examples)} requests")
    weights.save(given.out)
    given.out.chmod(0o644)  # a file of the package, not of one user
    n_bytes = given.out.stat().st_size
    print(f"{given.out}: {n_bytes} bytes; shares of dense, terms, topics {weights.blend.tolist()}")
    if n_bytes > _MAX_SHIPPED_BYTES:
        raise SystemExit(f"larger than {_MAX_SHIPPED_BYTES} bytes: too large to ship")
    print("SHIPPED_PRIOR =", prior(given.out, given.data))


def prior(weights: Path, data: Path) -> tuple[float, ...]:
    """Give quantiles of the gains that requests of five kinds get, as many of each kind."""
    scorer, draw = Scorer.load(weights), random.Random(0)
    texts = [
        text
        for name, column in _PRIOR_FILES.items()
        for text in draw.sample([row[column] for row in read_rows(data, name)], _N_OF_EACH)
    ]
    gains = [scorer.score(text).gain for text in texts]
    return tuple(round(quantile(gains, i / (_N_QUANTILES - 1)), 3) for i in range(_N_QUANTILES))


if __name__ == "__main__":
    main()
