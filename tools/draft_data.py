"""Let a model answer questions by itself, and keep its tokens and states, to train a draft head on.

    python -m tools.draft_data DIR [--questions FILE --questions-from NAME…] [--parts N] [--first N]

Questions are subjects of models/imagenet-1k-labels.txt and everyday ones in sentences of our own; those of FILE,
whose lines are JSON strings, are a bit more than half, and the head says which data sets they are from. Most are
asked in the model's chat form, some are beginnings to go on with. Half of the answers are greedy, half drawn as chat
answers are. A twentieth of the questions is held out.

DIR gets files of 256 answers, `part-NNNN.npz`: ids, of each answer with the token before it; lens, drawn and held of
each; and states [n, n_embd] float16, the model's own behind its last layer at each of these tokens but an answer's
last. Files that are there are kept, so it can be stopped and begun again. `parent.npz` and `parent.json` hold what else
training needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.fpga_llama import read_exact, read_llama
from edge_rt.backends.llama_math import DOWN, GATE_UP, OUTPUT
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.catalog.draft_head import model_sha256
from edge_rt.catalog.store import Store

_ROOT = Path(__file__).resolve().parent.parent
_N_STREAMS, _MAX_PROMPT, _MAX_ANSWER = 32, 160, 224
_PART_ANSWERS = 256
_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
_EVERYDAY = (
    "gravity; the ocean; a healthy breakfast; learning to swim; the Roman Empire; photosynthesis; a job interview; "
    "inflation; saving money; a rainy Sunday; the water cycle; a bicycle; climate change; a computer virus; the moon; "
    "democracy; good sleep; a broken friendship; the history of printing; electric cars; a train journey; bread; "
    "a small garden; the human heart; vaccines; a lighthouse keeper; the stock market; a lost dog; volcanoes; "
    "the solar system; a job in a hospital; noise at work; recursion; a sorted list; prime numbers; a database; "
    "an operating system; sound; light; evolution; the French Revolution; jazz; chess; a marathon; public libraries; "
    "recycling; the internet; a power plant; rain forests; deserts; a birthday party; a new school; patience; honesty; "
    "anger; teamwork; a difficult customer; an old house; a winter storm; the invention of paper; steam engines; "
    "renewable energy; magnets; bees; a city market; a spaceship; an honest thief; two sisters; a teacher; a river; "
    "mathematics"
)
_SENTENCES = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Why does {} matter?",
    "Write a poem about {}.",
    "Give me some advice about {}.",
    "What are the advantages and disadvantages of {}?",
    "Describe {} in one paragraph.",
    "Write an e-mail to a colleague about {}.",
    "How would you draw {}?",
    "Compare {} with something else.",
    "What should a beginner know about {}?",
    "Write a Python function that has to do with {}.",
    "Summarise what is known about {}.",
    "Write a dialogue between two friends about {}.",
    "Make a plan for a day with {}.",
    "What questions could I ask an expert on {}?",
)
_BEGINNINGS = (
    "The history of {} begins",
    "Once upon a time there was {}. One day",
    "When people think of {}, they",
    "# {}\n\n",
    "In this chapter we look at {}. ",
)
_ASKED_SHARE, _BEGINNING_SHARE, _SYSTEM_SHARE = 0.55, 0.15, 0.6


@dataclass(slots=True)
class Answer:
    """Token ids of a prompt and, behind n_prompt of them, of the answer.

    states  of the prompt's last token and all of the answer's but the last
    """

    ids: list[int]
    n_prompt: int
    drawn: bool
    held: bool
    states: list[NDArray[np.float16]] = field(default_factory=list)


def open_model(model_id: str, variant: str, *, n_batch: int) -> tuple[Path, NativeSession]:
    """Open a model of the store on the native engine, with room for all answers under way."""
    store = Store.open(config.load().config.catalog, os.environ)
    manifest = store.get(model_id)
    path = store.path(manifest, next(v for v in manifest.variants if v.id == variant))
    if path is None:
        raise SystemExit(f"{model_id}:{variant} is not in the store: run `edge_rt models pull` first")
    n_ctx = _N_STREAMS * (-(-(_MAX_PROMPT + _MAX_ANSWER) // 32) * 32)
    options = LoadOptions(n_ctx=n_ctx, n_seq_max=_N_STREAMS, n_batch=n_batch)
    return path, NativeBackend().load(ModelFile(model=model_id, variant=variant, path=path, quant=""), options)


def subjects() -> list[str]:
    """List what is asked about; the everyday ones are as likely as half of the others together."""
    labels = (_ROOT / "models" / "imagenet-1k-labels.txt").read_text(encoding="utf-8").splitlines()
    names = [label.split(",")[0].strip() for label in labels if label.strip()]
    things = [("an " if name[0].lower() in "aeiou" else "a ") + name for name in names]
    return [*_EVERYDAY.split("; ") * 6, *things]


def prompts(asked: list[str], seed: int) -> Iterator[tuple[str, bool]]:
    """Give prompts in the model's form without end, and whether each is held out."""
    rng, about = random.Random(seed), subjects()
    while True:
        given = rng.choice(asked) if asked and rng.random() < _ASKED_SHARE else ""
        form = rng.random()
        is_beginning = form > 1 - _BEGINNING_SHARE
        question = given or rng.choice(_BEGINNINGS if is_beginning else _SENTENCES).format(rng.choice(about))
        held = sum(question.encode()) % 20 == 0
        system = _SYSTEM if form < _SYSTEM_SHARE else ""
        chat = f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        yield question if is_beginning else chat, held


def drawn(logits: NDArray[np.float32], rng: np.random.Generator) -> int:
    """Draw much as chat answers are drawn: temperature 0.8, of 40 that have a twentieth of the likeliest's chance."""
    ids = np.flatnonzero(logits >= logits.max() + np.log(0.05))
    ids = ids[np.argsort(-logits[ids], kind="stable")][:40]
    weights = np.exp((logits[ids] - logits[ids[0]]).astype(np.float64) / 0.8)
    n = int(np.searchsorted(weights.cumsum(), 0.95 * weights.sum())) + 1
    weights = weights[:n]
    return int(ids[rng.choice(n, p=weights / weights.sum())])


def answers(session: NativeSession, asked: list[str], seed: int, n: int) -> list[Answer]:
    """Write n answers; all that are begun are finished, so short ones are not preferred."""
    source, rng = prompts(asked, seed), np.random.default_rng(seed)
    eog_ids: frozenset[int] = session.vocab.eog_ids
    running: dict[int, Answer] = {}
    done: list[Answer] = []
    while len(done) < n:
        for seq in range(_N_STREAMS):
            while seq not in running and len(done) + len(running) < n:
                text, held = next(source)
                ids = session.tokenize(text, special=True)
                if 0 < len(ids) <= _MAX_PROMPT:
                    running[seq] = Answer(ids, len(ids), bool(rng.random() < 0.5), held)
        batch = []
        for seq, answer in running.items():
            n_held = session.seq_length(seq)
            batch.append(SeqRows(seq, n_held, answer.ids[n_held:], want_logits=True))
        for rows, logits in zip(batch, session.decode(batch), strict=True):
            answer = running[rows.seq_id]
            answer.states.append(session.state(rows.seq_id, len(answer.ids) - 1).astype(np.float16))
            token = drawn(logits, rng) if answer.drawn else int(logits.argmax())
            answer.ids.append(token)
            if token in eog_ids or len(answer.ids) - answer.n_prompt >= _MAX_ANSWER:
                session.seq_trim(rows.seq_id, 0)
                done.append(running.pop(rows.seq_id))
    return done


def _describe(path: Path, model: str, variant: str, directory: Path, sources: list[str]) -> None:
    """Write what training needs of the model: embedding, output norm and the last layer's feed-forward part."""
    file = ModelFile(model=model, variant=variant, path=path, quant="")
    packed, exact = read_llama(file), read_exact(file)
    last = file.header.n_layers - 1
    gate_up = exact[f"blk.{last}.{GATE_UP}"]
    np.savez(
        directory / "parent.npz",
        embedding=exact[OUTPUT].astype(np.float16),
        output_norm=packed.vectors["output_norm.weight"],
        ffn_norm=packed.vectors[f"blk.{last}.ffn_norm.weight"],
        ffn_gate=gate_up[: len(gate_up) // 2],
        ffn_up=gate_up[len(gate_up) // 2 :],
        ffn_down=exact[f"blk.{last}.{DOWN}"],
    )
    facts = {"model": model, "sha256": model_sha256(path, file.header), "data": ["its own answers", *sources]}
    (directory / "parent.json").write_text(json.dumps(facts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--questions-from", nargs="*", default=[], help="names of the data sets, with their licences")
    parser.add_argument("--parts", type=int, default=16, help="files of 256 answers")
    parser.add_argument("--first", type=int, default=0, help="number of the first, which is its seed too")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--variant", default="q4_1")
    arguments = parser.parse_args()
    asked = []
    if (arguments.questions is None) != (not arguments.questions_from):
        parser.error("--questions and --questions-from go together: a head must say what it was trained on")
    if arguments.questions is not None:
        asked = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    arguments.directory.mkdir(parents=True, exist_ok=True)
    path, session = open_model(arguments.model, arguments.variant, n_batch=_N_STREAMS * _MAX_PROMPT)
    _describe(path, arguments.model, arguments.variant, arguments.directory, arguments.questions_from)
    session.keep_states(1)
    for part in range(arguments.first, arguments.first + arguments.parts):
        target = arguments.directory / f"part-{part:04d}.npz"
        if target.exists():
            continue
        begun_s = time.monotonic()
        group = answers(session, asked, part, _PART_ANSWERS)
        temporary = target.with_suffix(".tmp.npz")
        np.savez(
            temporary,
            ids=np.concatenate([np.array(a.ids[a.n_prompt - 1 :], np.uint16) for a in group]),
            states=np.concatenate([np.stack(a.states) for a in group]),
            lens=np.array([len(a.states) + 1 for a in group]),
            drawn=np.array([a.drawn for a in group]),
            held=np.array([a.held for a in group]),
        )
        temporary.replace(target)
        n_tokens = sum(len(a.states) for a in group)
        print(target.name, n_tokens, f"tokens, {time.monotonic() - begun_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
