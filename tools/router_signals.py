"""How sure the local model is of an answer that is given: its token signals on question and answer, in one pass.

Nothing is decoded: the text is laid before the model, and for each token the softmax that it would have been drawn from
is looked at. So a model's confidence can be measured on answers of public data sets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.library_models import find_model
from edge_rt.router import confidence
from edge_rt.types import TokenSignal

_N_CTX = 1024
_N_ROWS = 128  # of one step: their logits take 25 MB

Features = dict[str, list[float]]


def key_of(question: str, answer: str) -> str:
    return hashlib.sha256(f"{question}\0{answer}".encode()).hexdigest()[:16]


def read_signals(path: Path) -> Features:
    """Read what write_signals wrote; nothing where there is no file. Raises ValueError for other features' file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["features"] != list(confidence.NAMES):
        raise ValueError(f"{path}: other features; delete it to measure again")
    rows: Features = found["rows"]
    return rows


def write_signals(path: Path, rows: Features, note: str) -> None:
    lines = ",\n".join(f'"{key}": {json.dumps(values)}' for key, values in sorted(rows.items()))
    head = f'{{"note": {json.dumps(note)},\n"features": {json.dumps(confidence.NAMES)},\n"rows": {{\n'
    path.write_text(f"{head}{lines}\n}}}}\n", encoding="utf-8")


def measure_signals(
    pairs: Iterable[tuple[str, str]],
    known: Features,
    *,
    model: str = "smollm2-135m-instruct",
    n_threads: int = 1,
    save: Callable[[Features], None],
) -> Features:
    """Give the confidence features of each (question, answer) that is not known yet; saves now and then."""
    missing = [pair for pair in pairs if key_of(*pair) not in known]
    if not missing:
        return known
    session = _load(model, n_threads)
    try:
        rows = dict(known)
        for number, (question, answer) in enumerate(missing):
            found = confidence.summary(answer_signals(session, question, answer), answer, is_whole=True)
            rows[key_of(question, answer)] = [round(value, 4) for value in found]
            if number % 50 == 49:
                save(rows)
    finally:
        session.close()
    save(rows)
    return rows


def answer_signals(session: TokenSession, question: str, answer: str) -> list[TokenSignal]:
    """Give a signal for each token of the answer, which is cut where the context ends."""
    head = session.tokenize(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", special=True)
    ids = (head + session.tokenize(answer.strip(), special=False))[:_N_CTX]
    session.seq_trim(0, 0)
    signals = []
    for start in range(0, len(ids), _N_ROWS):
        part = ids[start : start + _N_ROWS]
        logits = session.decode([SeqRows(0, start, part, False, want_all=True)])[0]
        for row, following in zip(logits, range(start + 1, start + 1 + len(part)), strict=True):
            if len(head) <= following < len(ids):
                signals.append(_signal(row, ids[following]))
    return signals


def _signal(logits: NDArray[np.float32], token_id: int) -> TokenSignal:
    peak = float(logits.max())
    exps = np.exp(logits - peak)
    total = float(exps.sum(dtype=np.float64))
    entropy = float(np.log(total)) - float(exps @ (logits - peak)) / total
    second, first = np.partition(exps, -2)[-2:]
    logprob = float(logits[token_id]) - peak - float(np.log(total))
    return TokenSignal(logprob=logprob, margin=float(first - second) / total, entropy=max(entropy, 0.0))


def _load(model: str, n_threads: int) -> TokenSession:
    placement = find_model(model, config.load().config, pull=False, progress=lambda _: None)
    if placement.path is None:
        raise SystemExit(f"{model} is not in the store")
    file = ModelFile(model=model, variant=placement.variant, path=Path(placement.path), quant=placement.quant)
    options = LoadOptions(n_ctx=_N_CTX, n_seq_max=1, n_batch=_N_ROWS, n_ubatch=_N_ROWS, n_threads=n_threads)
    name = "native" if placement.backend == "auto" else placement.backend
    return registry.get(name).load(file, options)
