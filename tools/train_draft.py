"""Train a draft head on what tools/draft_data.py recorded, judge it, and write it for the native engine.

    python -m tools.train_draft DIR [--minutes M] [--steps N] [--from FILE] [--save FILE] [--write FILE]

Needs PyTorch and gguf, which edge_rt does not (`pip install torch gguf`). A core with bfloat16 learns from some 5,900
places a second, one guess each; minutes count its own time.

The head goes on from the model's last state h behind a token and from the next token's embedding e:

    x = S norm(h) + T norm(e);  x = x + D (silu(G norm(x)) * U norm(x));  logits = W norm(x)

W is the model's own output matrix, of which only the rows of those tokens count that its answers use most. The
feed-forward part begins as the model's last layer's. --steps guesses are learned together, each from the head's own x
before: the cross entropy with the model's own chances of these tokens, and a smooth L1 distance from its state there.

Judged are questions that were held out: how often the first guess, the first two, … are what the model wrote.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edge_rt.catalog.draft_head import ARCH, KEY_N_FF, KEY_SHA256, VOCABULARY

_N_JUDGED, _MAX_JUDGED = 4, 6_000
_STEP_WEIGHTS = (1.0, 0.7, 0.5)
_STATE_WEIGHT = 0.5
_BATCH, _WARM_UP = 512, 50
_JUDGE_EVERY_S = 150.0


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Head(nn.Module):  # type: ignore[misc]
    """The head; forward gives x from states and embeddings, both [m, n_embd]."""

    def __init__(self, parent: dict[str, NDArray[np.float32]], n_ff: int) -> None:
        super().__init__()
        self.eps = float(parent["eps"])
        n_embd = len(parent["output_norm"])
        self.state_norm = nn.Parameter(torch.tensor(parent["output_norm"]))
        self.token_norm = nn.Parameter(torch.ones(n_embd))
        self.ffn_norm = nn.Parameter(torch.tensor(parent["ffn_norm"]))
        self.output_norm = nn.Parameter(torch.tensor(parent["output_norm"]))
        self.state = nn.Parameter(torch.randn(n_embd, n_embd) * 0.02)
        self.token = nn.Parameter(torch.randn(n_embd, n_embd) * 0.02)
        self.ffn_gate = nn.Parameter(torch.tensor(parent["ffn_gate"][:n_ff]))
        self.ffn_up = nn.Parameter(torch.tensor(parent["ffn_up"][:n_ff]))
        self.ffn_down = nn.Parameter(torch.tensor(parent["ffn_down"][:, :n_ff]))

    def forward(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        x = norm(h, self.state_norm, self.eps) @ self.state.T + norm(e, self.token_norm, self.eps) @ self.token.T
        y = norm(x, self.ffn_norm, self.eps)
        return x + (functional.silu(y @ self.ffn_gate.T) * (y @ self.ffn_up.T)) @ self.ffn_down.T


@dataclass(slots=True)
class Places:
    """Positions that a head goes on from: the rows of their states, of their tokens, and how many tokens follow."""

    states: NDArray[np.int64]
    tokens: NDArray[np.int64]
    n_after: NDArray[np.int64]

    def __getitem__(self, which: NDArray[Any]) -> Places:
        return Places(self.states[which], self.tokens[which], self.n_after[which])

    def __len__(self) -> int:
        return len(self.states)


class Recorded:
    """All files of a directory.

    n_vocab     tokens of the model
    vocabulary  given, or the n_tokens that are used most outside what is held out; rising
    """

    def __init__(self, directory: Path, n_vocab: int, n_tokens: int, vocabulary: NDArray[np.int64] | None) -> None:
        parts = [np.load(path) for path in sorted(directory.glob("part-????.npz"))]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
        self.ids = joined["ids"].astype(np.int64)
        self.states = joined["states"]
        lens, held = joined["lens"], joined["held"]
        first_id = np.concatenate([[0], lens.cumsum()[:-1]])
        first_state = np.concatenate([[0], (lens - 1).cumsum()[:-1]])
        found: dict[tuple[bool, bool], list[tuple[NDArray[np.int64], ...]]] = {}
        used = np.zeros(n_vocab)
        for i in range(len(lens)):
            at = np.arange(lens[i] - 2)  # the state there, the token behind it, and one more to guess
            place = (first_state[i] + at, first_id[i] + at, lens[i] - 2 - at)
            found.setdefault((bool(held[i]), bool(joined["drawn"][i])), []).append(place)
            if not held[i]:
                np.add.at(used, self.ids[first_id[i] + 1 : first_id[i] + lens[i]], 1)
        by_kind = {kind: Places(*(np.concatenate(c) for c in zip(*p, strict=True))) for kind, p in found.items()}
        learned = [by_kind[False, False], by_kind[False, True]]
        self.learned = Places(*(np.concatenate([getattr(p, n) for p in learned]) for n in Places.__slots__))
        self.held = {"greedy": by_kind[True, False], "drawn": by_kind[True, True]}
        if vocabulary is None:  # of those never used the first, which are the most common in other text too
            vocabulary = np.sort(np.argsort(-used, kind="stable")[:n_tokens])
        self.vocabulary = vocabulary
        self.coverage = used[vocabulary].sum() / used.sum()
        self.known = np.full(n_vocab, -1, np.int64)  # a token's place in the vocabulary
        self.known[self.vocabulary] = np.arange(len(self.vocabulary))

    def state(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(self.states[rows].astype(np.float32))


class Trainer:
    def __init__(self, data: Recorded, parent: dict[str, NDArray[np.float32]], head: Head, n_steps: int) -> None:
        self.data, self.head, self.n_steps = data, head, n_steps
        self.embedding = torch.tensor(parent["embedding"].astype(np.float32))
        output = parent.get("output", parent["embedding"])
        self.output = torch.tensor(output[data.vocabulary].astype(np.float32)).bfloat16()
        self.target_norm = torch.tensor(parent["output_norm"])

    def step(self, h: torch.Tensor, places: Places, ahead: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Give x and logits for the token that many places behind each one's next."""
        e = self.embedding[torch.from_numpy(self.data.ids[places.tokens + ahead])]
        x = self.head(h, e)
        return x, (norm(x, self.head.output_norm, self.head.eps).bfloat16() @ self.output.T).float()

    def loss(self, places: Places) -> torch.Tensor:
        h, total = self.data.state(places.states), torch.zeros(())
        for i, weight in enumerate(_STEP_WEIGHTS[: self.n_steps], 1):
            ahead = np.minimum(i, places.n_after)
            is_there = torch.from_numpy((places.n_after >= i).astype(np.float32))
            h, logits = self.step(h, places, ahead)
            target = norm(self.data.state(places.states + ahead), self.target_norm, self.head.eps)
            with torch.no_grad():
                chances = (target.bfloat16() @ self.output.T).float().softmax(-1)
            apart = functional.cross_entropy(logits, chances, reduction="none")
            said = norm(h, self.head.output_norm, self.head.eps)
            moved = functional.smooth_l1_loss(said, target, reduction="none").mean(1)
            total = total + weight * ((apart + _STATE_WEIGHT * moved) * is_there).sum() / is_there.sum()
        return total

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def judge(self) -> dict[str, list[float]]:
        """Give for each kind of answer how often the first 1, 2, … guesses are all right."""
        found = {}
        for kind, places in self.data.held.items():
            kept = places[np.arange(len(places))[:_MAX_JUDGED]]
            right = [[0, 0] for _ in range(_N_JUDGED)]
            for start in range(0, len(kept), 2000):
                part = kept[np.arange(start, min(start + 2000, len(kept)))]
                h, so_far = self.data.state(part.states), np.ones(len(part), bool)
                for i in range(_N_JUDGED):
                    h, logits = self.step(h, part, np.minimum(i + 1, part.n_after))
                    there = part.n_after > i
                    said = self.data.known[self.data.ids[part.tokens + np.minimum(i + 2, part.n_after + 1)]]
                    so_far &= logits.argmax(1).numpy() == said
                    right[i][0] += int((so_far & there).sum())
                    right[i][1] += int(there.sum())
            found[kind] = [round(n / max(of, 1), 3) for n, of in right]
        return found

    def save(self, path: Path) -> None:
        torch.save({"head": self.head.state_dict(), "vocabulary": torch.from_numpy(self.data.vocabulary)}, path)

    def train(self, minutes: float, top_rate: float, save: Path) -> None:
        """Train for so long, judging and saving now and then; what counts is the time of the thread that steps."""
        optimiser = torch.optim.AdamW(self.head.parameters(), lr=top_rate, betas=(0.9, 0.95), weight_decay=0.01)
        rng, n_places = np.random.default_rng(0), len(self.data.learned)
        spent_s, judged_s, n_steps = 0.0, 0.0, 0
        order: NDArray[np.int64] = np.empty(0, np.int64)
        while spent_s < 60 * minutes:
            if len(order) < _BATCH:
                order = rng.permutation(n_places)
            chosen, order = order[:_BATCH], order[_BATCH:]
            begun_s = time.thread_time()
            rate = top_rate * min(1.0, (n_steps + 1) / _WARM_UP) * (1 - 0.95 * spent_s / (60 * minutes))
            for group in optimiser.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.loss(self.data.learned[chosen])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            optimiser.step()
            n_steps += 1
            spent_s += min(time.thread_time() - begun_s, 60.0)
            if n_steps % 100 == 0:
                seen = n_steps * _BATCH
                print(f"{spent_s:.0f} s, {seen / n_places:.2f} rounds, loss {loss.item():.3f}", flush=True)
            if spent_s - judged_s > _JUDGE_EVERY_S:
                judged_s = spent_s
                print(json.dumps(self.judge()), flush=True)
                self.save(save)
        self.save(save)


def write(path: Path, head: Head, ids: NDArray[np.int64], model: str, sha256: str, quant: str, data: list[str]) -> None:
    """Write the head as edge_rt/catalog/draft_head.py reads it."""
    kind = gguf.GGMLQuantizationType[quant]
    writer = gguf.GGUFWriter(path, ARCH)
    writer.add_name(f"Draft head of {model}")
    writer.add_license("apache-2.0")
    writer.add_array(f"{ARCH}.trained_on", data)
    writer.add_string(f"{ARCH}.model", model)
    writer.add_string(KEY_SHA256, sha256)
    writer.add_uint32(KEY_N_FF, len(head.ffn_gate))
    for name, tensor in head.state_dict().items():
        array = tensor.float().numpy()
        if array.ndim == 1:
            writer.add_tensor(f"{name}.weight", array)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.add_tensor(VOCABULARY, ids.astype(np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--steps", type=int, default=3, help="guesses that are learned together")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--n-ff", type=int, default=1536)
    parser.add_argument("--from", dest="start", type=Path, help="weights to begin with")
    parser.add_argument("--save", type=Path, help="where weights go; DIR/head.pt")
    parser.add_argument("--threads", type=int, default=1, help="more lose where others use the cores too")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--quant", default="Q8_0")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    with np.load(arguments.directory / "parent.npz") as file:
        parent = {name: file[name] for name in file.files}
    head = Head(parent, arguments.n_ff)
    begun = torch.load(arguments.start) if arguments.start is not None else None
    if begun is not None:
        head.load_state_dict(begun["head"])
    vocabulary = None if begun is None else begun["vocabulary"].numpy()
    data = Recorded(arguments.directory, len(parent["embedding"]), arguments.tokens, vocabulary)
    trainer = Trainer(data, parent, head, arguments.steps)
    n_held = {kind: len(places) for kind, places in data.held.items()}
    print(f"{len(data.learned)} places, held out {n_held}, {data.coverage:.2%} of the tokens known", flush=True)
    if arguments.minutes > 0:
        trainer.train(arguments.minutes, arguments.rate, arguments.save or arguments.directory / "head.pt")
    print(json.dumps(trainer.judge()), flush=True)
    if arguments.write is not None:
        facts = json.loads((arguments.directory / "parent.json").read_text(encoding="utf-8"))
        write(arguments.write, head, data.vocabulary, facts["model"], facts["sha256"], arguments.quant, facts["data"])


if __name__ == "__main__":
    main()
