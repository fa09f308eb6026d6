"""What drafts by an early exit could bring: the first layers and the output matrix guess, the whole model checks.

    python benchmarks/early_exit.py [--quick] [--json FILE]

For each number of layers it measures how often the token guessed behind them is the model's own, in answers that the
model has written itself: as the states are (lens), and through a matrix of n_embd x n_embd that was fitted to turn them
into the last layer's (fitted), on other text. Nothing is approximated: the layers are computed in float32 from the
file's weights (llama_math). Step times by rows are measured on the native engine.

The gain is derived from these, in the draft's favour: a draft step costs its share of the weights' bytes and nothing
else, the KV is shared, and each further guess is as good as the first. Beside it stands the gain if further rows of a
step cost nothing at all. Where even that is below 1, no implementation pays. There is no bar: this is why
engine.max_draft guesses from n-grams and not by an early exit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import default_model
import harness
import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.backends.fpga_llama import read_exact, read_llama
from edge_rt.backends.llama_math import OUTPUT, KvCache, LlamaMath
from edge_rt.backends.native import NativeBackend

_ROOT = Path(__file__).resolve().parent.parent
_FITTED = ("tests/golden/prose.txt", "tests/golden/technical.txt", "docs/npu.md", "docs/power.md", "docs/router.md")
_PROMPTS = (
    "What is gravity?",
    "Write a short story about a lighthouse keeper.",
    "How do I boil an egg?",
    "List five facts about the ocean.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that reverses a list.",
    "Why is the sky blue?",
    "Describe a busy market in the morning.",
)
_RIDGE = 1e-3
_MAX_GUESSES = 6


@dataclass(frozen=True, slots=True)
class Exit:
    """agreement is a share of tokens; cost a share of a step; the gains are the best over the number of guesses."""

    n_layers: int
    kind: str
    agreement: float
    cost: float
    gain: float
    gain_if_rows_are_free: float


def written(session: TokenSession, n_tokens: int) -> list[tuple[list[int], int]]:
    """Let the model answer the prompts greedily: token ids, and how many of them are the prompt's."""
    answers = []
    for prompt in _PROMPTS:
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = session.tokenize(text, special=True, add_bos=True)
        n_prompt, n_done = len(ids), 0
        while len(ids) < n_prompt + n_tokens and (n_done == 0 or ids[-1] not in session.vocab.eog_ids):
            [logits] = session.decode([SeqRows(0, n_done, ids[n_done:], want_logits=True)])
            n_done = len(ids)
            ids.append(int(logits.argmax()))
        session.seq_trim(0, 0)
        answers.append((ids, n_prompt))
    return answers


def step_times_s(session: TokenSession, prompt: Sequence[int]) -> list[float]:
    """Measure steps of 1, 2, … rows behind a prompt, all of whose logits are wanted, each the median of 15."""
    n = len(prompt)
    session.decode([SeqRows(0, 0, prompt, want_logits=True)])
    times: list[list[float]] = [[] for _ in range(_MAX_GUESSES + 1)]
    for _ in range(15):
        for i, seconds in enumerate(times):
            begun_s = time.perf_counter()
            session.decode([SeqRows(0, n, [prompt[-1]] * (i + 1), want_logits=True, want_all=True)])
            seconds.append(time.perf_counter() - begun_s)
            session.seq_trim(0, n)
    session.seq_trim(0, 0)
    return [float(np.median(seconds)) for seconds in times]


def states_of(model: LlamaMath, ids: Sequence[int], kv: KvCache) -> list[NDArray[np.float32]]:
    """Give a text's states behind each layer, [n_layers + 1][n, n_embd]."""
    kv.n_past = 0
    return list(model.states(ids, kv))


def gain(agreement: float, cost: float, times_s: Sequence[float]) -> float:
    """Give the most tokens in the time of a plain step, over the number of guesses."""

    def of(n: int) -> float:
        return sum(agreement**i for i in range(n + 1)) / (n * cost + times_s[n] / times_s[0])

    return max(of(n) for n in range(1, len(times_s)))


def main() -> None:
    arguments = harness.parse(__doc__)
    path = default_model.path_of()
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    session = NativeBackend().load(file, LoadOptions(n_ctx=1024, n_seq_max=1))
    answers = written(session, 64 if arguments.quick else 160)
    times_s = step_times_s(session, answers[0][0])
    text = "\n".join((_ROOT / name).read_text(encoding="utf-8") for name in _FITTED)
    ids = session.tokenize(text, special=False)[: 1024 if arguments.quick else 6144]
    session.close()

    packed, exact = read_llama(file), read_exact(file)
    model = packed.with_linear(lambda name, x: x @ exact[name].T)
    n_layers = file.header.n_layers
    kv = KvCache.of(packed.config, 1024)
    chunks = [states_of(model, ids[i : i + 512], kv) for i in range(0, len(ids), 512)]
    fit = [np.concatenate([chunk[i] for chunk in chunks]) for i in range(n_layers + 1)]
    found = [(states_of(model, own, kv), n_prompt) for own, n_prompt in answers]
    judged = [np.concatenate([states[i][n - 1 : -1] for states, n in found]) for i in range(n_layers + 1)]
    own_ids = model.logits(judged[-1]).argmax(axis=1)
    layer_bytes = sum(t.size_bytes for t in file.header.tensors if t.name.startswith("blk.")) / n_layers
    output_bytes = (
        exact[OUTPUT].size
        * layer_bytes
        * n_layers
        / sum(matrix.size for name, matrix in exact.items() if name != OUTPUT)
    )
    exits: list[Exit] = []
    for n in range(3, n_layers, 3):
        cost = (n * layer_bytes + output_bytes) / (n_layers * layer_bytes + output_bytes)
        x = fit[n].astype(np.float64)
        square = x.T @ x
        square += _RIDGE * np.trace(square) / len(square) * np.eye(len(square))
        turned = np.linalg.solve(square, x.T @ fit[-1].astype(np.float64)).astype(np.float32)
        for kind, states in (("lens", judged[n]), ("fitted", judged[n] @ turned)):
            agreement = float((model.logits(states).argmax(axis=1) == own_ids).mean())
            gains = (gain(agreement, cost, times_s), gain(agreement, cost, [1.0] * len(times_s)))
            exits.append(Exit(n, kind, agreement, cost, *gains))
    rows = ", ".join(f"{i}: {seconds / times_s[0]:.2f}" for i, seconds in enumerate(times_s, 1))
    print(f"{path.name}: {len(own_ids)} tokens judged, {len(ids)} fitted to")
    print(f"a step by rows, of one row's time: {rows}\n")
    print("| layers | exit | right | cost of a guess | gain at most | if rows were free |")
    print("|---|---|---|---|---|---|")
    for e in exits:
        gains = f"{e.gain:.2f} | {e.gain_if_rows_are_free:.2f}"
        print(f"| {e.n_layers} of {n_layers} | {e.kind} | {e.agreement:.1%} | {e.cost:.2f} | {gains} |")
    print()
    harness.finish(arguments, [], {"exits": [asdict(e) for e in exits]})


if __name__ == "__main__":
    main()
