"""Let a model answer questions by itself, and keep its tokens and states, to train a draft head on.

    python -m tools.draft_data DIR [--model ID --variant ID] [--questions FILE --questions-from NAME…] [--parts N]

Needs gguf, which edge_rt does not (`pip install gguf`). The model is one of the catalog that runs on `native`.

Questions are subjects of models/imagenet-1k-labels.txt and everyday ones in sentences of our own; those of FILE,
whose lines are JSON strings, are a bit more than half, and the head says which data sets they are from. Most are
asked in the model's chat form, with or without a system prompt, some are beginnings to go on with. Half of the answers
are greedy, half drawn as chat answers are. A twentieth of the questions is held out.

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
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.native import NativeBackend, NativeSession
from edge_rt.backends.native_config import read_config
from edge_rt.catalog.draft_head import model_sha256
from edge_rt.catalog.store import Store
from edge_rt.engine.prompt import PromptReader
from edge_rt.engine.sampling import Sampler
from edge_rt.errors import EdgeRtError
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Message, Sampling

_ROOT = Path(__file__).resolve().parent.parent
_N_STREAMS, _MAX_PROMPT, _MAX_ANSWER = 32, 160, 224
_PART_ANSWERS = 256
_SYSTEM = Message(role="system", content="You are a helpful assistant.")
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
_ASKED_SHARE, _BEGINNING_SHARE, _SYSTEM_SHARE = 0.55, 0.15, 0.25


@dataclass(slots=True)
class Answer:
    """Token ids of a prompt and, behind n_prompt of them, of the answer.

    sampler  chooses its tokens
    states   of the prompt's last token and all of the answer's but the last
    """

    ids: list[int]
    n_prompt: int
    drawn: bool
    held: bool
    sampler: Sampler
    states: list[NDArray[np.float16]] = field(default_factory=list)


def find_model(model_id: str, variant_id: str) -> ModelFile:
    """Find a model of the store."""
    store = Store.open(config.load().config.catalog, os.environ)
    manifest = store.get(model_id)
    variant = next((v for v in manifest.variants if v.id == variant_id), None)
    if variant is None:
        sys.exit(f"{model_id} has no variant {variant_id}: it has {', '.join(v.id for v in manifest.variants)}")
    if (path := store.path(manifest, variant)) is None:
        sys.exit(f"{model_id}:{variant_id} is not in the store: run `edge_rt models pull` first")
    return ModelFile(model=model_id, variant=variant_id, path=path, quant="")


def open_model(file: ModelFile) -> NativeSession:
    """Open a model on the native engine, with room for all answers under way."""
    n_ctx = _N_STREAMS * (-(-(_MAX_PROMPT + _MAX_ANSWER) // 32) * 32)
    return NativeBackend().load(file, LoadOptions(n_ctx=n_ctx, n_seq_max=_N_STREAMS, n_batch=_N_STREAMS * _MAX_PROMPT))


def subjects() -> list[str]:
    """List what is asked about; the everyday ones are as likely as half of the others together."""
    labels = (_ROOT / "models" / "imagenet-1k-labels.txt").read_text(encoding="utf-8").splitlines()
    names = [label.split(",")[0].strip() for label in labels if label.strip()]
    things = [("an " if name[0].lower() in "aeiou" else "a ") + name for name in names]
    return [*_EVERYDAY.split("; ") * 6, *things]


def prompts(asked: list[str], seed: int) -> Iterator[tuple[GenerateRequest, bool]]:
    """Give chats and beginnings without end, and whether each is held out."""
    rng, about = random.Random(seed), subjects()
    while True:
        given = rng.choice(asked) if asked and rng.random() < _ASKED_SHARE else ""
        form = rng.random()
        is_beginning = form > 1 - _BEGINNING_SHARE
        question = given or rng.choice(_BEGINNINGS if is_beginning else _SENTENCES).format(rng.choice(about))
        held = sum(question.encode()) % 20 == 0
        if is_beginning:
            yield GenerateRequest(id="", model="", prompt=question), held
        else:
            system = (_SYSTEM,) if form < _SYSTEM_SHARE else ()
            yield GenerateRequest(id="", model="", messages=(*system, Message(role="user", content=question))), held


def answers(session: NativeSession, asked: list[str], seed: int, n: int) -> list[Answer]:
    """Write n answers; all that are begun are finished, so short ones are not preferred."""
    source, rng, reader = prompts(asked, seed), random.Random(seed), PromptReader(session)
    eog_ids: frozenset[int] = session.vocab.eog_ids
    running: dict[int, Answer] = {}
    done: list[Answer] = []
    while len(done) < n:
        for seq in range(_N_STREAMS):
            while seq not in running and len(done) + len(running) < n:
                request, held = next(source)
                ids, is_drawn = reader.token_ids(request), rng.random() < 0.5
                if 0 < len(ids) <= _MAX_PROMPT:
                    sampling = replace(CHAT_SAMPLING, seed=rng.getrandbits(63)) if is_drawn else Sampling()
                    sampler = Sampler(sampling, session.caps.n_vocab, ids)
                    running[seq] = Answer(ids, len(ids), is_drawn, held, sampler)
        batch = []
        for seq, answer in running.items():
            n_held = session.seq_length(seq)
            batch.append(SeqRows(seq, n_held, answer.ids[n_held:], want_logits=True))
        for rows, logits in zip(batch, session.decode(batch), strict=True):
            answer = running[rows.seq_id]
            answer.states.append(session.state(rows.seq_id, len(answer.ids) - 1).astype(np.float16))
            token = answer.sampler.sample(logits)
            answer.sampler.accept(token)
            answer.ids.append(token)
            if token in eog_ids or len(answer.ids) - answer.n_prompt >= _MAX_ANSWER:
                session.seq_trim(rows.seq_id, 0)
                done.append(running.pop(rows.seq_id))
    return done


def describe(file: ModelFile, directory: Path, sources: list[str]) -> None:
    """Write what training needs of the model: embedding, output, norms and the last layer's feed-forward part.

    Ends the program where the model has not all of them, or the directory holds another model's answers.
    """
    about, sha256 = directory / "parent.json", model_sha256(file.path, file.header)
    if about.exists() and json.loads(about.read_text(encoding="utf-8"))["sha256"] != sha256:
        sys.exit(f"{directory} holds what another model answered: name another directory")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    last = file.header.n_layers - 1
    named = {
        "embedding": "token_embd.weight",
        "output_norm": "output_norm.weight",
        **{part: f"blk.{last}.{part}.weight" for part in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")},
    }
    if absent := [name for name in named.values() if name not in tensors]:
        sys.exit(f"{file.model} has no {absent[0]}, which a head begins with")
    if "output.bias" in tensors:
        sys.exit(f"{file.model} has an output.bias, which no head adds")
    if "output.weight" in tensors:
        named["output"] = "output.weight"
    arrays: dict[str, Any] = {"eps": read_config(file.model, str(file.path), file.header).norm_eps}
    for key, name in named.items():
        array = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        arrays[key] = array.astype(np.float16) if key in ("embedding", "output") else array
    np.savez(directory / "parent.npz", **arrays)
    facts = {"model": file.model, "sha256": sha256, "data": ["its own answers", *sources]}
    about.write_text(json.dumps(facts), encoding="utf-8")


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
    try:
        file = find_model(arguments.model, arguments.variant)
        session = open_model(file)
        PromptReader(session).token_ids(next(r for r, _ in prompts(asked, 0) if r.messages))  # has it a chat form?
        describe(file, arguments.directory, arguments.questions_from)
    except EdgeRtError as exc:
        sys.exit(f"draft_data: {exc}")
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
            ids=np.concatenate([np.array(a.ids[a.n_prompt - 1 :], np.uint32) for a in group]),
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
