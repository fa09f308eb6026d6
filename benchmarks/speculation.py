"""What guessing tokens brings: decode with engine.max_draft against 0, in turns.

    python benchmarks/speculation.py [--quick] [--check] [--json FILE] [--only words|drafts|head] [--head FILE]

words: guesses from the text's own words, on the native engine. Three tasks repeat their prompt: a text written out
again, records turned into JSON, code with an edit. Two do not: they are drawn from the model with a seed, as chat
answers are. Bars: copying and JSON at least 1.3 ×, code 1.0 ×, free text at least 0.97 ×.

drafts: a draft model that guesses too, on free text, for one stream and for several. The catalog has no smaller model
of the same vocabulary, so these are what a user should not do, and must lose nothing by: the model's own Q4_0, which is
nearly always right and as dear as it is, and its first 3 of 30 layers, cheap and nearly always wrong. Bar: 0.97 ×. And
one that pays: the native engine drafting for llama.cpp, which takes several times as long for the same model; no bar.

head: a draft head on the native engine, in chat and in free text, greedy and drawn, for 1, 2 and 4 streams: the one
that the model's manifest names, or FILE. Bar: 0.97 ×. With neither it is not measured.

All in the median of at least seven pairs. The native engine gives the same tokens with and without, which is checked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import default_model
import harness

import edge_rt
from edge_rt import config
from edge_rt.catalog.gguf import read_header
from edge_rt.types import CHAT_SAMPLING, Chunk, GenerateRequest, Sampling
from tools.gguf_copy import copy_gguf

_ROOT = Path(__file__).resolve().parent.parent
_PROSE = (_ROOT / "tests" / "golden" / "prose.txt").read_text(encoding="utf-8").split("\n\n")
_CODE = """\
def read_sensor(bus, address, n_samples=8):
    total = 0.0
    for _ in range(n_samples):
        raw = bus.read_word(address, 0x00)
        total += (raw >> 4) * 0.0625
    return total / n_samples


def read_pressure(bus, address, n_samples=8):
    total = 0.0
    for _ in range(n_samples):
        raw = bus.read_word(address, 0x02)
        total += (raw >> 4) * 0.25
    return total / n_samples


def log_readings(bus, path):
    temperature = read_sensor(bus, 0x48)
    pressure = read_pressure(bus, 0x60)
    with open(path, "a") as file:
        file.write(f"{temperature:.2f},{pressure:.1f}\\n")
"""
_PEOPLE = (
    ("Anna Berg", "Oslo", 34, "engineer"),
    ("Tom Reed", "Leeds", 51, "plumber"),
    ("Mia Sato", "Kyoto", 28, "nurse"),
    ("Jon Falk", "Bergen", 45, "teacher"),
    ("Eva Lind", "Malmö", 39, "pilot"),
    ("Raj Patel", "Pune", 30, "chemist"),
)
_GREEDY = Sampling()
_DRAWN = replace(CHAT_SAMPLING, seed=5)


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    prompt: str
    sampling: Sampling
    at_least: float


def _sentence(name: str, city: str, age: int, job: str) -> str:
    return f"{name} lives in {city}, is {age} years old and works as a {job}."


def _record(name: str, city: str, age: int, job: str) -> str:
    return f'{{"name": "{name}", "city": "{city}", "age": {age}, "job": "{job}"}}'


def tasks() -> list[Task]:
    """Show the model first what is wanted, where it must copy: a model of this size does not follow an instruction."""
    again = "\n\nThe same text again:\n"
    copy = f"Text:\n{_PROSE[1]}{again}{_PROSE[1]}\n\nText:\n{_PROSE[2]}{again}"
    examples = "".join(f"Text: {_sentence(*one)}\nJSON: [{_record(*one)}]\n\n" for one in _PEOPLE[:2])
    extract = f"{examples}Text: {' '.join(_sentence(*one) for one in _PEOPLE)}\nJSON: ["
    edit = f"Original file:\n```python\n{_CODE}```\n\nThe file with one comment added:\n```python\n"
    return [
        Task("copy a text", copy, _GREEDY, 1.3),
        Task("JSON from sentences", extract, _GREEDY, 1.3),
        Task("edit code", edit, _GREEDY, 1.0),
        Task("free: a story", "Once upon a time, in a small village by the sea, there was", _DRAWN, 0.97),
        Task("free: an essay", "The history of the steam engine begins", _DRAWN, 0.97),
    ]


@dataclass(slots=True)
class Answers:
    """Runs a task with a limit of guesses and keeps what came out."""

    model: edge_rt.Model
    n_tokens: int
    n_run: int = 0
    token_ids: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    guesses: dict[str, tuple[int, int]] = field(default_factory=dict)

    def run(self, task: Task, max_draft: int | None, n_streams: int = 1) -> float:
        """Give the rate of the tokens after the first; all streams have the same task, and seeds of their own."""
        streams = [self._ask(task, max_draft, number) for number in range(n_streams)]
        answers: list[list[int]] = [[] for _ in streams]
        drafted = accepted = n_first = 0
        begun_s = 0.0
        # The engine computes all of them together, whoever is read first.
        for number, chunks in enumerate(streams):
            for chunk in chunks:
                answers[number] += chunk.token_ids
                if not begun_s:
                    begun_s, n_first = time.perf_counter(), len(chunk.token_ids)
                if chunk.timings is not None:
                    drafted += chunk.timings.drafted_tokens
                    accepted += chunk.timings.accepted_tokens
        seconds = time.perf_counter() - begun_s
        self.token_ids.setdefault(task.name, set()).add(tuple(i for answer in answers for i in answer))
        if max_draft != 0:
            self.guesses[task.name] = (drafted, accepted)
        return (n_streams * self.n_tokens - n_first) / seconds

    def _ask(self, task: Task, max_draft: int | None, number: int) -> Iterator[Chunk]:
        self.n_run += 1
        sampling = task.sampling
        request = GenerateRequest(
            id=f"r{self.n_run}",
            model=self.model.info.model,
            prompt=task.prompt,
            max_tokens=self.n_tokens,
            sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number),
            ignore_eos=True,
            max_draft=max_draft,
        )
        return self.model.stream(request)

    def claims(self, found: list[Task], arguments: harness.Arguments, *, n_streams: int = 1) -> list[harness.Claim]:
        """Measure tasks in pairs, with all guesses that there are and with none."""

        def runs(task: Task, max_draft: int) -> Callable[[], float]:
            return lambda: self.run(task, max_draft, n_streams)

        n_pairs = arguments.pairs(7, quick=3)
        claims = []
        for task in found:
            pair = harness.paired("guessed", runs(task, 15), "plain", runs(task, 0), n_pairs=n_pairs, n_warmup=2)
            if len(self.token_ids[task.name]) != 1 and self.model.info.caps.is_batch_invariant:
                sys.exit(f"{task.name}: guesses changed the answer")
            claims.append(harness.Claim(name=task.name, pair=pair, at_least=task.at_least))
        return claims


_FREE = (
    ("story, drawn", "Once upon a time, in a small village by the sea, there was", _DRAWN),
    ("essay, greedy", "The history of the steam engine begins", _GREEDY),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and its draft, as the configuration names them."""

    name: str
    flags: dict[str, object]
    at_least: float | None
    streams: tuple[int, ...]


def keep_layers(source: Path, target: Path, n_layers: int) -> None:
    """Write a model's child that has its first layers only: cheap to compute, and hardly ever right."""

    def keeps(name: str) -> bool:
        parts = name.split(".")
        return parts[0] != "blk" or int(parts[1]) < n_layers

    copy_gguf(source, target, keys={f"{read_header(source).arch}.block_count": n_layers}, keeps=keeps)


def setups(folder: Path) -> list[Setup]:
    """Write the child that the second one takes."""
    child = folder / "child.gguf"
    keep_layers(default_model.path_of("q4_0"), child, 3)
    own = f"models.{_model()}"
    return [
        Setup("Q4_0 for Q4_1", {f"{own}.draft": f"{_model()}:q4_0", f"{own}.variant": "q4_1"}, 0.97, (1, 4)),
        Setup("3 layers of 30", {f"{own}.draft": str(child), f"{own}.variant": "q4_1"}, 0.97, (1, 4)),
        Setup(
            "native for llama_cpu",
            {
                f"{own}.draft": str(default_model.path_of("q4_0")),
                f"{own}.variant": "q4_0",
                f"{own}.backend": "llama_cpu",
            },
            None,
            (1,),
        ),
    ]


def _model() -> str:
    return config.load().config.catalog.default_model


def _words(arguments: harness.Arguments, n_tokens: int) -> tuple[list[harness.Claim], dict[str, tuple[int, int]]]:
    settings = config.load(flags={"engine.backend": "native", "engine.n_ctx": 2048})
    with edge_rt.load_text(default_model.path_of("q4_1"), settings=settings) as model:
        answers = Answers(model, n_tokens)
        return answers.claims(tasks(), arguments), answers.guesses


def _drafts(arguments: harness.Arguments, n_tokens: int) -> tuple[list[harness.Claim], dict[str, tuple[int, int]]]:
    claims: list[harness.Claim] = []
    guesses: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in setups(Path(folder)):
            settings = config.load(flags={"engine.backend": "native", "engine.n_ctx": 4096, **setup.flags})
            for n_streams in setup.streams:
                with edge_rt.load_text(_model(), settings=settings) as model:
                    answers = Answers(model, n_tokens)
                    found = [
                        Task(f"{setup.name}, {n_streams}: {name}", text, sampling, setup.at_least or 0.0)
                        for name, text, sampling in _FREE
                    ]
                    claims += answers.claims(found, arguments, n_streams=n_streams)
                    guesses |= answers.guesses
    return claims, guesses


def _head(arguments: harness.Arguments, n_tokens: int) -> tuple[list[harness.Claim], dict[str, tuple[int, int]]]:
    given = arguments.own.head
    flags: dict[str, object] = {"engine.backend": "native", "engine.n_ctx": 4096, f"models.{_model()}.variant": "q4_1"}
    if given is not None:
        flags[f"models.{_model()}.draft"] = str(given.resolve())
    claims: list[harness.Claim] = []
    guesses: dict[str, tuple[int, int]] = {}
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asked = (("chat", chat.format("How does a heat pump warm a house?")), ("story", _FREE[0][1]))
    for n_streams in (1, 2, 4):
        with edge_rt.load_text(_model(), settings=config.load(flags=flags)) as model:
            answers = Answers(model, n_tokens)
            found = [
                Task(f"head, {n_streams}: {name}, {kind}", text, sampling, 0.97)
                for name, text in asked
                for kind, sampling in (("greedy", _GREEDY), ("drawn", _DRAWN))
            ]
            claims += answers.claims(found, arguments, n_streams=n_streams)
            guesses |= answers.guesses
    return claims, guesses


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("words", "drafts", "head"), help="leave out the other parts")
    parser.add_argument("--head", type=Path, help="a draft head's file")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=_options)
    n_tokens = 96 if arguments.quick else 192
    claims: list[harness.Claim] = []
    guesses: dict[str, tuple[int, int]] = {}
    has_head = arguments.own.head is not None or bool(default_model.manifest().draft)
    if arguments.own.only == "head" and not has_head:
        sys.exit("head: nothing to measure: the model's manifest names none; name a file with --head")
    for name, part in (("words", _words), ("drafts", _drafts), ("head", _head)):
        if arguments.own.only in (None, name) and (name != "head" or has_head):
            found, counted = part(arguments, n_tokens)
            claims += found
            guesses |= counted
    for name, (drafted, accepted) in guesses.items():
        print(f"{name}: {accepted} of {drafted} guesses were right")
    if arguments.own.only is None and not has_head:
        print("head: not measured: the model's manifest names none, and no --head was given")
    print()
    told = {name: {"drafted": d, "accepted": a, "tokens": n_tokens - 1} for name, (d, a) in guesses.items()}
    harness.finish(arguments, claims, {"model": _model(), "guesses": told})


if __name__ == "__main__":
    main()
