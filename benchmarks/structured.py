"""What it costs to hold answers to a JSON Schema, on the native engine, in turns with answers that are free.

    python benchmarks/structured.py [--quick] [--check] [--json FILE]

Masks: a step of 8 streams, or of 1, whose tokens are sampled under a mask of a schema, against the same step without,
for schemas of eight kinds. Both ways are timed on the logits of each step, and each schema's median and worst token are
told. Nothing is forced, so each token pays for its mask: at least 0.91 of the
rate, which is masks of 10 % of decode. With the model's vocabulary of 49,152 tokens, and with a made one of 152,064,
which is as large as Qwen's: the model's own and pairs of them. There the model's logits are repeated, and the step is
the small model's: a real one would take longer.

Answers: 8 streams, or 1, of a schema, against as many tokens without: at least 0.9 of the tokens per second. Tokens
that the schema leaves no choice about are computed together here, as in use; and the same answers against themselves
with a step for each token.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import default_model
import harness
import numpy as np

import edge_rt
from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.devices import cpu
from edge_rt.engine import grammar_text
from edge_rt.engine.grammar import Constraint, Grammars
from edge_rt.engine.sampling import Sampler
from edge_rt.types import CHAT_SAMPLING, GenerateRequest, Message, ResponseFormat

_N_LARGE = 152_064
_SCHEMA: Any = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 60},
        "severity": {"enum": ["low", "medium", "high"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 12},
        "is_safety_relevant": {"type": "boolean"},
        "measures": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "minLength": 20, "maxLength": 60},
                    "minutes": {"type": "integer", "minimum": 1, "maximum": 240},
                },
                "required": ["what", "minutes"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "severity", "line", "is_safety_relevant", "measures"],
    "additionalProperties": False,
}
_FORM = ResponseFormat(kind="json_schema", text=json.dumps(_SCHEMA))


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# Kinds of schemas, with an instance as answers are written.
_TEXT = "The pressure rose and then fell again, so the valve behind the pump shall be checked before the next shift. "
_TREE = {"name": "root", "children": [{"name": "left", "children": []}, {"name": "right", "children": []}]}
_KINDS: dict[str, tuple[Any, Any]] = {
    "flat": (_object(name={"type": "string"}, born={"type": "integer"}), {"name": "Ada Lovelace", "born": 1815}),
    "long text": (_object(text={"type": "string", "maxLength": 2000}), {"text": _TEXT * 4}),
    "numbers": (
        {"type": "array", "items": {"type": "number", "minimum": -1000, "maximum": 1000}},
        [round(7.37 * i - 90.25, 2) for i in range(30)],
    ),
    "enum of 500": (
        {"type": "array", "items": {"enum": [f"part {i:03} of {i * 7 % 91}" for i in range(500)]}},
        [f"part {i:03} of {i * 7 % 91}" for i in range(0, 500, 40)],
    ),
    "formats": (
        _object(
            at={"type": "string", "format": "date-time"},
            mail={"type": "string", "format": "email"},
            id={"type": "string", "format": "uuid"},
            part={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}(/[a-z]+)?$"},
        ),
        {
            "at": "2026-11-30T20:45:00Z",
            "mail": "ada@example.org",
            "id": "8c1e7b0a-52ab-4c0e-9d55-0a7b6f3c2d11",
            "part": "KV-2041/left",
        },
    ),
    "recursive": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": _object(name={"type": "string"}, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
            },
        },
        {"name": "whole", "children": [_TREE, _TREE]},
    ),
    "any JSON": (
        {"type": "object"},
        {"a": [1, 2.5, None, True, {"b": "text of any kind"}], "c": {"d": [], "e": _TEXT}},
    ),
}
_ANSWER = json.dumps(
    {
        "title": "Pressure in line 3 rose, then fell",
        "severity": "medium",
        "line": 3,
        "is_safety_relevant": True,
        "measures": [
            {"what": "Check the valve behind the pump", "minutes": 25},
            {"what": "Replace the seal of the tank", "minutes": 120},
        ],
    }
)
_REPORT = "The pressure in line {} rose at 14:05, then fell. Report it as JSON, with what shall be done."


class LargeVocabulary:
    """As much of a session as a grammar asks for: the model's tokens, and pairs of them that stand for one more."""

    def __init__(self, session: TokenSession) -> None:
        n_own = session.caps.n_vocab
        rng = np.random.default_rng(3)
        own = [session.piece(i) for i in range(n_own)]
        starts = [text for text in own if text.startswith(b" ") and len(text) > 1]
        ends = [text for text in own if text and not text.startswith(b" ")]
        pairs: dict[bytes, None] = {}
        known = set(own)
        while len(pairs) < _N_LARGE - n_own:
            text = starts[rng.integers(len(starts))] + ends[rng.integers(len(ends))]
            if text not in known:
                pairs[text] = None
        self._pieces = [*own, *pairs]
        self._session = session
        self.caps = replace(session.caps, n_vocab=_N_LARGE)
        self.vocab = replace(session.vocab, n_vocab=_N_LARGE)

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        if special and token_id < self._session.caps.n_vocab:
            return self._session.piece(token_id, special=True)
        return self._pieces[token_id]

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        return self._session.tokenize(text, special=special, add_bos=add_bos)


class Stepper:
    """Decodes a token of each stream a step, and samples each both ways."""

    def __init__(
        self, session: TokenSession, vocabulary: Any, n_streams: int, form: ResponseFormat, answer: str
    ) -> None:
        self._session = session
        self._grammars = Grammars(vocabulary)
        self._n_vocab = vocabulary.caps.n_vocab
        self._n_streams = n_streams
        self._text = grammar_text.of_format(form)
        self._path = session.tokenize(answer, special=False)
        self.token_s: list[float] = []  # what the mask of each token took
        self._constraint()  # compiled now

    def _constraint(self) -> Constraint:
        return self._grammars.compile(self._text, "benchmark")

    def _samplers(self) -> list[Sampler]:
        sampling = [replace(CHAT_SAMPLING, seed=i) for i in range(self._n_streams)]
        return [Sampler(each, self._n_vocab, [1], entropy=lambda: 0) for each in sampling]

    def rates(self) -> tuple[float, float]:
        """Give the steps a second of one answer, formed and free.

        A step is the decode, by the clock, and the loop's own work on its tokens, by its thread's CPU time. Neighbours
        slow the decode most, which would hide the masks: so the step that is compared is the fastest tenth's.
        """
        session, n = self._session, self._n_streams
        for i in range(n):
            session.seq_trim(i, 0)
        forms, formed, free = [self._constraint() for _ in range(n)], self._samplers(), self._samplers()
        decode_s, formed_s, free_s = [], [], []
        for position, token_id in enumerate(self._path):
            rows = [SeqRows(i, position, [token_id], want_logits=True) for i in range(n)]
            begun_s = time.perf_counter()
            rows_of = session.decode(rows)
            decode_s.append(time.perf_counter() - begun_s)
            wide = [row if self._n_vocab == len(row) else np.resize(row, self._n_vocab) for row in rows_of]
            for seconds in (free_s, formed_s) if position % 2 else (formed_s, free_s):
                begun_s = time.thread_time()
                for i, logits in enumerate(wide):
                    if seconds is formed_s:
                        formed[i].sample(logits, forms[i])
                        forms[i].take(token_id, forces=False)
                    else:
                        free[i].sample(logits)
                seconds.append(time.thread_time() - begun_s)
        self.token_s += [(formed - float(np.median(free_s))) / n for formed in formed_s]
        step_s = float(np.quantile(decode_s, 0.1))
        return 1 / (step_s + float(np.mean(formed_s))), 1 / (step_s + float(np.mean(free_s)))


class Answers:
    """Runs streams at the same time and gives the tokens a second of all."""

    def __init__(self, model: edge_rt.Model, n_streams: int) -> None:
        self._model = model
        self._n_streams = n_streams
        self._n_run = 0
        self._n_tokens = [64] * n_streams
        self.n_whole = self.n_tokens = 0

    def rate(self, *, is_formed: bool, forces: bool = True) -> float:
        """Give tokens a second; without forces each token is a step of its own, as where its log probability is asked
        for, which takes a hundredth of a step more.
        """
        self._n_run += 1
        counts = [0] * self._n_streams
        gate = threading.Barrier(self._n_streams + 1)

        def one(i: int) -> None:
            request = GenerateRequest(
                id=f"r{self._n_run}-{i}",
                model=self._model.info.model,
                messages=(Message(role="user", content=_REPORT.format(i + 1)),),
                max_tokens=256 if is_formed else self._n_tokens[i],
                sampling=replace(CHAT_SAMPLING, seed=i),
                ignore_eos=not is_formed,
                max_draft=0,
                response_format=_FORM if is_formed else None,
                top_logprobs=None if forces else 0,
            )
            gate.wait()
            chunks = list(self._model.stream(request))
            last = chunks[-1]
            assert last.usage is not None
            counts[i] = last.usage.completion_tokens
            if is_formed:
                self._n_tokens[i] = counts[i]
                json.loads("".join(chunk.text for chunk in chunks))  # or there is nothing to measure
                self.n_whole += last.finish_reason == "stop"

        threads = [threading.Thread(target=one, args=(i,)) for i in range(self._n_streams)]
        for thread in threads:
            thread.start()
        gate.wait()
        begun_s = time.perf_counter()
        for thread in threads:
            thread.join()
        self.n_tokens = sum(counts)
        return sum(counts) / (time.perf_counter() - begun_s)


def main() -> None:
    arguments = harness.parse(__doc__)
    path = default_model.path_of()
    claims: list[harness.Claim] = []

    def compare(name: str, rate: Callable[..., float], at_least: float, n_pairs: int) -> None:
        pair = harness.paired(
            "formed", lambda: rate(is_formed=True), "free", lambda: rate(is_formed=False), n_pairs=n_pairs, n_warmup=2
        )
        claims.append(harness.Claim(name=name, pair=pair, at_least=at_least))

    options = LoadOptions(n_ctx=4096, n_seq_max=8, n_threads=len(cpu.usable_cores()))
    session = registry.get("native").load(ModelFile(model="m", variant="", path=path, quant=""), options)
    extra: dict[str, Any] = {"file": path.name}
    began_s = time.perf_counter()
    Grammars(session).compile(grammar_text.of_format(_FORM), "benchmark")
    extra["first_compile_s"] = time.perf_counter() - began_s
    vocabularies: list[Any] = [session, LargeVocabulary(session)]
    kinds = {"nested": (_SCHEMA, _ANSWER)} | {kind: (s, json.dumps(value)) for kind, (s, value) in _KINDS.items()}
    masks: list[str] = []
    for vocabulary in vocabularies:
        for kind, (schema, answer) in kinds.items():
            form = ResponseFormat(kind="json_schema", text=json.dumps(schema))
            for n_streams in (8, 1):
                stepper = Stepper(session, vocabulary, n_streams, form, answer)
                stepper.rates()
                both = [stepper.rates() for _ in range(arguments.pairs(4, quick=2))]
                pair = harness.Pair(
                    name_a="formed", name_b="free", a=tuple(a for a, _ in both), b=tuple(b for _, b in both)
                )
                name = f"masks, {kind}, {vocabulary.caps.n_vocab} tokens, {n_streams} streams"
                claims.append(harness.Claim(name=name, pair=pair, at_least=0.91))
                median_us, worst_us = np.median(stepper.token_s) * 1e6, max(stepper.token_s) * 1e6
                masks.append(f"{name}: {median_us:.0f} us a token, {worst_us:.0f} at worst")
    extra["masks"] = masks
    session.close()
    settings = config.load(flags={"engine.backend": "native", "engine.n_ctx": 4096, "engine.n_parallel": 8})
    with edge_rt.load(path, settings=settings) as model:
        for n_streams in (8, 1):
            answers = Answers(model, n_streams)
            compare(f"answers, {n_streams} streams", answers.rate, 0.9, arguments.pairs(11, quick=3))
            extra[f"tokens_of_{n_streams}"] = answers.n_tokens
            pair = harness.paired(
                "forced",
                partial(answers.rate, is_formed=True),
                "one by one",
                partial(answers.rate, is_formed=True, forces=False),
                n_pairs=arguments.pairs(7, quick=3),
                n_warmup=1,
            )
            claims.append(harness.Claim(name=f"forced tokens, {n_streams} streams", pair=pair, at_least=1.0))
    print(f"the first form of a session took {extra['first_compile_s']:.2f} s to prepare\n")
    print(*masks, "", sep="\n")
    harness.finish(arguments, claims, extra)


if __name__ == "__main__":
    main()
