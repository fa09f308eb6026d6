"""What guessing repeated tokens brings: decode with engine.max_draft against 0, on the native engine, in turns.

    python benchmarks/speculation.py [--quick] [--check] [--json FILE]

Three tasks repeat their prompt: a text written out again, records turned into JSON, code with an edit. Two do not: they
are drawn from the model with a seed, as chat answers are. Both sides give the same tokens, which is checked. Bars:
copying and JSON at least 1.3 ×, code 1.0 ×, free text at least 0.97 ×, in the median of at least seven pairs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import harness

import edge_rt
from edge_rt import config
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Sampling

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

    def run(self, task: Task, max_draft: int | None) -> float:
        """Give the rate of the tokens after the first."""
        self.n_run += 1
        request = GenerateRequest(
            id=f"r{self.n_run}",
            model=self.model.info.model,
            prompt=task.prompt,
            max_tokens=self.n_tokens,
            sampling=task.sampling,
            ignore_eos=True,
            max_draft=max_draft,
        )
        chunks = self.model.stream(request)
        first = last = next(chunks)
        token_ids = list(first.token_ids)
        begun_s = time.perf_counter()
        for last in chunks:
            token_ids += last.token_ids
        seconds = time.perf_counter() - begun_s
        self.token_ids.setdefault(task.name, set()).add(tuple(token_ids))
        if max_draft is None and last.timings is not None:
            self.guesses[task.name] = (last.timings.drafted_tokens, last.timings.accepted_tokens)
        return (self.n_tokens - len(first.token_ids)) / seconds


def _model_path() -> Path:
    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    path = store.path(manifest, pick_variant(manifest, cpu.features()))
    if path is None:
        sys.exit(f"{manifest.id} is not in the store: run `edge_rt models pull` first")
    return path


def main() -> None:
    arguments = harness.parse(__doc__)
    path = _model_path()
    settings = config.load(flags={"engine.backend": "native", "engine.n_ctx": 2048})
    claims: list[harness.Claim] = []
    with edge_rt.load(path, settings=settings) as model:
        answers = Answers(model, 96 if arguments.quick else 192)

        def runs(task: Task, max_draft: int | None) -> Callable[[], float]:
            return lambda: answers.run(task, max_draft)

        for task in tasks():
            pair = harness.paired(
                "guessed", runs(task, None), "plain", runs(task, 0), n_pairs=arguments.pairs(11, quick=3), n_warmup=2
            )
            if len(answers.token_ids[task.name]) != 1:
                sys.exit(f"{task.name}: guesses changed the answer")
            claims.append(harness.Claim(name=task.name, pair=pair, at_least=task.at_least))
    n_rest = answers.n_tokens - 1
    for name, (drafted, accepted) in answers.guesses.items():
        print(f"{name}: {accepted} of {drafted} guesses were right, of {n_rest} tokens")
    print()
    guesses = {name: {"drafted": d, "accepted": a, "tokens": n_rest} for name, (d, a) in answers.guesses.items()}
    harness.finish(arguments, claims, {"file": path.name, "guesses": guesses})


if __name__ == "__main__":
    main()
