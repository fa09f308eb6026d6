"""Train the semantic cache's judge of pairs: python -m tools.train_cache_judge --data DIR --teacher DIR [--out FILE].

Needs PyTorch, which edge_rt does not (`pip install torch`), and half an hour of one core. Pairs are each question and
its nearest others among Quora's questions, less all duplicate clusters of the streams that benchmarks/cache_semantic.py
measures and fits on. Two things are learnt at once: whether a pair is labelled a duplicate, and how near a sentence
embedder places it (minilm-l6, from DIR with its INT8 file and tokenizer), which knows more of the language than these
pairs do. The embedder itself has seen Quora's pairs; it is asked about questions of training only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from edge_rt.cache import judge, similarity
from edge_rt.cache.lexical import differs
from edge_rt.cache.refusal import refusal
from edge_rt.cache.semantic import MIN_SIMILARITY
from edge_rt.text_vectors import TextVectors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # not installed
import qqp  # type: ignore[import-not-found]

_N_NEAR = 6
_BATCH = 256
_RATE = 2e-3
_DECAY = 0.01
_DROPOUT = 0.3
_TEACHING = 20.0  # weight of the teacher's squared errors beside the labels' log loss
_MAX_DEVIATIONS = 5.0
_DIFFERENCES = (  # what the guard names: told in training, where such pairs count too; it lets none of them pass later
    "number", "unit or date", "pronoun", "kind of answer", "name", "tense", "negation", "opposite", "one word", "order",
)  # fmt: skip
_N_TOLD = judge.N_MEASURES + len(_DIFFERENCES)
_OF_OTHERS = ("lead", "crowd")  # measures that depend on what else is stored


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Questions' token ids [n, MAX_TOKENS] and how many; pairs by question, measures, labels, teacher's cosines."""

    ids: torch.Tensor
    n_tokens: torch.Tensor
    one: NDArray[np.int64]
    other: NDArray[np.int64]
    measures: NDArray[np.float32]
    is_same: NDArray[np.float32]
    taught: NDArray[np.float32]


class Net(nn.Module):
    """What judge.PairJudge computes, by batches; its second output follows the teacher."""

    def __init__(self, rows: torch.Tensor, dropout: float) -> None:
        super().__init__()
        wide = judge.N_WIDE
        self.rows, self.dropout = rows, dropout
        self.project = nn.Linear(rows.shape[1], wide)
        self.around = nn.Conv1d(wide, wide, 3, padding=1)
        self.sharpness = nn.Parameter(torch.tensor([1.0, 4.0]))
        self.compare = nn.Linear(4 * wide + 3, wide)
        self.join = nn.Linear(4 * wide + _N_TOLD, wide)
        self.decide = nn.Linear(wide, 2)

    def forward(self, a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], m: Any) -> Any:
        one, other = self._align(*a), self._align(*b)
        (sum_a, most_a), (sum_b, most_b) = self._side(one, other), self._side(other, one)
        joined = torch.cat(
            [sum_a + sum_b, (sum_a - sum_b).abs(), torch.maximum(most_a, most_b), torch.minimum(most_a, most_b), m], -1
        )
        return self.decide(self._drop(functional.relu(self.join(joined))))

    def _drop(self, x: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        return functional.dropout(x, self.dropout * share, self.training)

    def _align(self, ids: torch.Tensor, n_tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = self.rows[ids].float()
        lengths = vectors.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        units = vectors / lengths
        mask = (torch.arange(ids.shape[1])[None, :] < n_tokens[:, None]).float()[..., None]
        x = self.project(self._drop(units * judge.SCALE, 0.5)) * mask
        return units, lengths, x + functional.relu(self.around(x.transpose(1, 2)).transpose(1, 2)) * mask, mask

    def _side(self, one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (units_a, lengths_a, a, mask_a), (units_b, _, b, mask_b) = one, other
        is_padding = mask_b.transpose(1, 2) < 0.5
        raw = units_a @ units_b.transpose(1, 2)
        pull = (a @ b.transpose(1, 2)) * self.sharpness[0] / judge.N_WIDE**0.5 + raw * self.sharpness[1]
        blend = torch.softmax(pull.masked_fill(is_padding, -1e4), -1) @ b
        best = raw.masked_fill(is_padding, -1).max(-1, keepdim=True).values
        sides = torch.cat([a, blend, (a - blend).abs(), a * blend, best, lengths_a, (1 - best) * lengths_a], -1)
        found = self._drop(functional.relu(self.compare(sides)) * mask_a)
        return found.sum(1) / 4, found.max(1).values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGE_RT_DATA"), metavar="DIR")
    parser.add_argument("--teacher", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=judge.SHIPPED, metavar="FILE")
    parser.add_argument("--epochs", type=float, default=8.0)
    given = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    pairs = read_pairs(qqp.data_dir(given.data), given.teacher)
    print(f"{len(pairs.one)} pairs, {pairs.is_same.mean():.1%} the same", flush=True)
    judge.write_weights(given.out, train(pairs, given.epochs))
    print(f"{given.out}: {given.out.stat().st_size} bytes")


def read_pairs(data: Path, teacher: Path) -> Pairs:
    """Pair up the questions of all clusters that are neither measured nor fitted on."""
    vectors = TextVectors.load()
    questions = qqp.Questions(qqp.rows(data, "qqp_pairs"))
    taken = {questions.cluster[q] for seed in range(3) for q in questions.stream(seed)}
    taken |= {questions.cluster[q] for q in questions.stream(qqp.FIT_SEED, without=frozenset(taken))}
    texts = [q for q, cluster in questions.cluster.items() if cluster not in taken]
    subjects = [similarity.subject(text, vectors) for text in texts]
    met, measures = [], []
    for (one, other), cosine, near in _nearest(texts, vectors):
        a, b = subjects[one], subjects[other]
        difference = differs(a.reading, b.reading)
        met.append((one, other))
        measured = similarity.measures(a, b, vectors, cosine=cosine, rivals=near)
        measures.append((*measured, *(float(difference == known) for known in _DIFFERENCES)))
    one, other = np.array(met, np.int64).T
    clusters = np.array([questions.cluster[text] for text in texts])
    ids = torch.zeros(len(texts), judge.MAX_TOKENS, dtype=torch.int64)
    n_tokens = torch.ones(len(texts), dtype=torch.int64)
    for row, subject in enumerate(subjects):
        own = list(subject.ids[: judge.MAX_TOKENS]) or [0]
        ids[row, : len(own)], n_tokens[row] = torch.tensor(own), len(own)
    placed = _taught(texts, teacher)
    taught = np.einsum("ij,ij->i", placed[one], placed[other])
    is_same = (clusters[one] == clusters[other]).astype(np.float32)
    return Pairs(ids, n_tokens, one, other, np.array(measures, np.float32), is_same, taught)


def _nearest(texts: list[str], vectors: TextVectors) -> list[tuple[tuple[int, int], float, list[float]]]:
    """Give each pair of near questions once, with its cosine and those of the nearest others."""
    rows = vectors.embed(texts)
    answerable = np.array([not refusal(text) for text in texts])
    found: dict[tuple[int, int], tuple[float, list[float]]] = {}
    for begin in range(0, len(rows), 512):
        products = rows[begin : begin + 512] @ rows.T
        products[:, ~answerable] = -1
        for at, line in enumerate(products, begin):
            line[at] = -1
            top = [int(i) for i in _highest(line) if line[i] >= MIN_SIMILARITY]
            for other in top if answerable[at] else ():
                rivals = [float(line[i]) for i in top[:3] if i != other]
                found.setdefault((min(at, other), max(at, other)), (float(line[other]), rivals))
    return [(pair, cosine, rivals) for pair, (cosine, rivals) in found.items()]


def _highest(line: NDArray[np.float32]) -> NDArray[np.int64]:
    top = np.argpartition(-line, _N_NEAR)[:_N_NEAR]
    return top[np.argsort(-line[top])]


def _taught(texts: list[str], folder: Path) -> NDArray[np.float32]:
    """Embed all texts by minilm-l6: unit vectors."""
    tokenizer = Tokenizer.from_file(str(folder / "minilm-l6.tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.no_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "minilm-l6.int8.onnx"), options)
    tokens = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
    order = sorted(range(len(texts)), key=lambda row: len(tokens[row]))
    vectors: NDArray[np.float32] | None = None
    for begin in range(0, len(order), 32):
        rows = order[begin : begin + 32]
        ids = np.zeros((len(rows), max(len(tokens[row]) for row in rows)), np.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(tokens[row])] = tokens[row]
        mask = (ids > 0).astype(np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        states = session.run(None, feeds)[0]
        means = (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        vectors = np.zeros((len(texts), means.shape[1]), np.float32) if vectors is None else vectors
        vectors[rows] = means / np.linalg.norm(means, axis=1, keepdims=True)
    assert vectors is not None
    return vectors


def train(pairs: Pairs, n_epochs: float) -> dict[str, NDArray[np.float32]]:
    """Give the weights as judge.write_weights takes them."""
    mean, deviation = pairs.measures.mean(axis=0), np.maximum(pairs.measures.std(axis=0), 1e-3)
    is_own = np.array([name not in _OF_OTHERS for name in (*similarity.NAMES, *_DIFFERENCES)], np.float32)
    standard = np.clip((pairs.measures - mean) / deviation, -_MAX_DEVIATIONS, _MAX_DEVIATIONS) * is_own
    measures, is_same, taught = (torch.tensor(part) for part in (standard, pairs.is_same, pairs.taught))
    net = Net(_embedding(), _DROPOUT)
    steps = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=_DECAY)
    n_steps = max(int(n_epochs * len(pairs.one) / _BATCH), 1)
    rate = torch.optim.lr_scheduler.OneCycleLR(steps, _RATE, total_steps=n_steps + 1, pct_start=0.1)
    rng = np.random.default_rng(1)
    lengths = np.maximum(pairs.n_tokens.numpy()[pairs.one], pairs.n_tokens.numpy()[pairs.other])
    batches = _batches(lengths, rng)
    for step in range(n_steps):
        batch = next(batches)
        one, other = pairs.one[batch], pairs.other[batch]
        width = int(lengths[batch].max())
        a, b = ((pairs.ids[rows, :width], pairs.n_tokens[rows]) for rows in (one, other))
        found = net(a, b, measures[batch])
        loss = functional.binary_cross_entropy_with_logits(found[:, 0], is_same[batch])
        loss = loss + _TEACHING * torch.square(found[:, 1] - taught[batch]).mean()
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        steps.step()
        rate.step()
        if step % 200 == 0:
            print(f"step {step} of {n_steps}: loss {loss.item():.3f}", flush=True)
    return _exported(net, mean, deviation, is_own)


def _batches(lengths: NDArray[np.int64], rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Give pairs of about the same length together, each pair once before any comes again."""
    while True:
        order = rng.permutation(len(lengths))
        for begin in range(0, len(order), 32 * _BATCH):
            part = order[begin : begin + 32 * _BATCH]
            part = part[np.argsort(lengths[part], kind="stable")]
            pieces = [part[at : at + _BATCH] for at in range(0, len(part), _BATCH)]
            for piece in rng.permutation(len(pieces)):
                yield pieces[piece]


def _embedding() -> torch.Tensor:
    vectors = TextVectors.load()
    return torch.tensor(vectors.token_vectors(range(vectors.n_tokens)))


def _exported(
    net: Net, mean: NDArray[np.float32], deviation: NDArray[np.float32], is_own: NDArray[np.float32]
) -> dict[str, NDArray[np.float32]]:
    own = {name: weight.detach().numpy() for name, weight in net.named_parameters()}
    join = own["join.weight"].T.copy()
    join[4 * judge.N_WIDE :] *= is_own[:, None]
    n = judge.N_MEASURES
    no_difference = np.clip(-mean[n:] / deviation[n:], -_MAX_DEVIATIONS, _MAX_DEVIATIONS)
    return {
        "mean": mean[:n],
        "deviation": deviation[:n],
        "project": own["project.weight"].T,
        "project_bias": own["project.bias"],
        "around": np.concatenate([own["around.weight"][:, :, place].T for place in range(3)]),
        "around_bias": own["around.bias"],
        "sharpness": own["sharpness"],
        "compare": own["compare.weight"].T,
        "compare_bias": own["compare.bias"],
        "join": join[: 4 * judge.N_WIDE + n],
        "join_bias": own["join.bias"] + no_difference @ join[4 * judge.N_WIDE + n :],
        "decide": own["decide.weight"][:1].T,
        "decide_bias": own["decide.bias"][:1],
    }


if __name__ == "__main__":
    main()
