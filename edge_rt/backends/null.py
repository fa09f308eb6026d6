"""A model without weights: deterministic, no dependency beyond numpy, any latency you ask for.

Text is UTF-8 bytes, one token each. A chat is answered with the last user message, word for word. A plain prompt is
continued with letters drawn from a hash of the whole context, so that a row at the wrong place changes the answer.
The variant string sets latency, for example "step_s=0.005,row_s=0.00002". Rows at a position that does not follow
the sequence, or more rows than cells, are refused as the real back ends refuse them. Tensors: see null_tensor.py.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import (
    Device,
    LoadOptions,
    MemoryNeed,
    ModelFile,
    NoCellsError,
    SeqRows,
    TensorOptions,
    Vocab,
)
from edge_rt.backends.null_tensor import NullTensorSession, read_script
from edge_rt.errors import BackendLoadError, BackendStepError, InvalidRequestError
from edge_rt.types import Adapter, Capabilities, ModelInfo

USER, ASSISTANT, EOS = 256, 257, 258
FAIL, ABORT, HANG = 259, 260, 261  # faults on purpose: what a broken driver does to a worker
_SPECIAL = {
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
    "<|end|>": EOS,
    "<|fail|>": FAIL,
    "<|abort|>": ABORT,
    "<|hang|>": HANG,
}
_N_VOCAB = 264
_STATE_MAGIC = (0x6E756C6C, 2)
_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "


class NullBackend:
    """Loads nothing and answers predictably."""

    name: ClassVar[str] = "null"

    def probe(self) -> tuple[Device, ...]:
        return (Device(id="null", kind="null", detail="no weights, deterministic answers: for tests", evidence="stub"),)

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def estimate(self, file: ModelFile, options: LoadOptions) -> MemoryNeed:  # noqa: ARG002 - the protocol's
        return MemoryNeed(weights_bytes=0, kv_bytes=options.n_ctx * 8, scratch_bytes=_N_VOCAB * 4 * options.n_seq_max)

    def load(self, file: ModelFile, options: LoadOptions) -> NullSession:
        return NullSession(file, options)

    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:  # noqa: ARG002 - the protocol's
        return None

    def estimate_tensor(self, file: ModelFile, options: TensorOptions) -> MemoryNeed:  # noqa: ARG002 - the protocol's
        return MemoryNeed(weights_bytes=read_script(file).memory_bytes, kv_bytes=0, scratch_bytes=0)

    def load_tensor(self, file: ModelFile, options: TensorOptions) -> NullTensorSession:
        return NullTensorSession(file, options)


def _latency(file: ModelFile) -> dict[str, float]:
    latency = {"step_s": 0.0, "row_s": 0.0}
    for part in filter(None, file.variant.split(",")):
        name, _, value = part.partition("=")
        if name not in latency:
            raise BackendLoadError(model=file.model, reason=f"variant {part!r}: the null model knows step_s and row_s")
        try:
            latency[name] = float(value)
        except ValueError as exc:
            raise BackendLoadError(model=file.model, reason=f"variant {part!r}: {value!r} is not a number") from exc
    return latency


class NullSession:
    """Keeps each sequence's tokens as its KV."""

    def __init__(self, file: ModelFile, options: LoadOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._latency = _latency(file)
        self._sleep = sleep
        self._kv: dict[int, list[int]] = {}
        self._closed = False
        self._adapted = 0  # added to the ids of rows: those computed with adapters are others
        self.n_threads = options.n_threads or 1
        self.caps = Capabilities(
            n_ctx=options.n_ctx,
            n_seq_max=options.n_seq_max,
            n_vocab=_N_VOCAB,
            n_batch=options.n_batch,
            can_trim=True,
            can_copy=True,
            can_save=True,
            can_save_ranges=True,
            is_batch_invariant=True,
            adapters=tuple(adapter.name for adapter in options.adapters),
        )
        self.vocab = Vocab(
            n_vocab=_N_VOCAB,
            bos_id=-1,
            eos_id=EOS,
            eog_ids=frozenset({EOS}),
            add_bos=False,
            chat_template=_TEMPLATE,
            eos_text="<|end|>",
            control_texts=frozenset(_SPECIAL),
        )
        self.info = ModelInfo(
            model=file.model,
            variant=file.variant,
            backend=NullBackend.name,
            device="null",
            arch="null",
            quant="none",
            n_params=0,
            size_bytes=0,
            n_ctx_train=options.n_ctx,
            caps=self.caps,
            n_threads=self.n_threads,
            has_chat_template=True,
            build=str(_STATE_MAGIC),
        )

    def tokenize(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:  # noqa: ARG002 - no BOS here
        self._check_open()
        ids: list[int] = []
        while special and text:
            found = [(at, name) for name in _SPECIAL if (at := text.find(name)) >= 0]
            if not found:
                break
            at, name = min(found)
            ids += text[:at].encode("utf-8")
            ids.append(_SPECIAL[name])
            text = text[at + len(name) :]
        ids += text.encode("utf-8")
        return ids

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        self._check_open()
        if 0 <= token_id < 256:
            return bytes((token_id,))
        if not 0 <= token_id < _N_VOCAB:
            raise InvalidRequestError(param="token", problem=f"id {token_id} is outside the vocabulary of {_N_VOCAB}")
        names = [name.encode() for name, number in _SPECIAL.items() if number == token_id]
        return names[0] if special and names else b""

    def decode(self, batch: Sequence[SeqRows]) -> list[NDArray[np.float32]]:
        self._check_open()
        n_rows = sum(len(rows.token_ids) for rows in batch)
        if n_rows > self.caps.n_batch:
            raise BackendStepError(reason=f"{n_rows} rows in one batch, the limit is {self.caps.n_batch}")
        if self.cells_used() + n_rows > self.caps.n_ctx:
            raise NoCellsError
        self._sleep(self._latency["step_s"] + n_rows * self._latency["row_s"])
        outputs: list[NDArray[np.float32]] = []
        for rows in batch:
            kv = self._kv.setdefault(rows.seq_id, [])
            if not 0 <= rows.seq_id < self.caps.n_seq_max or rows.start != len(kv):
                raise BackendStepError(
                    reason=f"sequence {rows.seq_id} has {len(kv)} positions, the rows start at {rows.start}"
                )
            each = []
            for token_id in rows.token_ids:
                _fault(token_id)
                kv.append(token_id + self._adapted)
                each.append(_logits(kv) if rows.want_all else None)
            if rows.want_all:
                outputs.append(np.stack([row for row in each if row is not None]))
            elif rows.want_logits:
                outputs.append(_logits(kv))
        return outputs

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Answer otherwise with each set of adapters; their files are not read."""
        named = ",".join(f"{adapter.name}:{adapter.scale!r}" for adapter in adapters)
        self._adapted = 1024 * (1 + zlib.crc32(named.encode()) % 2**20) if adapters else 0

    def cells_used(self) -> int:
        return sum(len(kv) for kv in self._kv.values())

    def seq_copy(self, src: int, dst: int, n_tokens: int) -> None:
        if self._kv.get(dst):
            raise BackendStepError(reason=f"sequence {dst} is not empty")
        self._kv[dst] = self._kv.get(src, [])[:n_tokens]

    def seq_trim(self, seq_id: int, n_tokens: int) -> None:
        self._kv[seq_id] = self._kv.get(seq_id, [])[:n_tokens]

    def seq_length(self, seq_id: int) -> int:
        return len(self._kv.get(seq_id, []))

    def seq_bytes(self, seq_id: int) -> int:
        return 4 * (len(_STATE_MAGIC) + 1 + len(self._kv.get(seq_id, [])))

    def seq_save(self, seq_id: int, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
        kv = self._kv.get(seq_id, [])
        if not 0 <= start <= (len(kv) if end is None else end) <= len(kv):
            raise BackendStepError(reason=f"positions {start} to {end} are not in a sequence of {len(kv)}")
        return np.array([*_STATE_MAGIC, start, *kv[start:end]], dtype=np.int32).view(np.uint8)

    def seq_load(self, seq_id: int, state: NDArray[np.uint8]) -> None:
        words = state.view(np.int32).tolist() if state.nbytes % 4 == 0 else []
        if tuple(words[: len(_STATE_MAGIC)]) != _STATE_MAGIC or len(words) == len(_STATE_MAGIC):
            raise BackendStepError(reason="the saved sequence belongs to another model or is damaged")
        start, token_ids = words[len(_STATE_MAGIC)], words[len(_STATE_MAGIC) + 1 :]
        if start != self.seq_length(seq_id):
            raise BackendStepError(reason=f"a part from position {start} on does not follow {self.seq_length(seq_id)}")
        if self.cells_used() + len(token_ids) > self.caps.n_ctx:
            raise BackendStepError(reason="there are not enough cells for the saved sequence")
        self._kv.setdefault(seq_id, []).extend(token_ids)

    def set_threads(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def _check_open(self) -> None:
        if self._closed:
            raise BackendStepError(reason="the session is closed")

    def close(self) -> None:
        self._closed = True
        self._kv.clear()


def _fault(token_id: int) -> None:
    if token_id == FAIL:
        raise BackendStepError(reason="the prompt asked the null model to fail")
    if token_id == ABORT:
        os.abort()
    if token_id == HANG:
        threading.Event().wait()


def _logits(context: Sequence[int]) -> NDArray[np.float32]:
    logits = np.zeros(_N_VOCAB, dtype=np.float32)
    logits[_next(context)] = 16.0
    return logits


def _next(context: Sequence[int]) -> int:
    """Give the token after context: the last user message replayed, or a hash of everything."""
    if ASSISTANT in context:
        answer_at = len(context) - 1 - list(reversed(context)).index(ASSISTANT)
        before = context[:answer_at]
        user_at = len(before) - 1 - list(reversed(before)).index(USER) if USER in before else -1
        echo = before[user_at + 1 :]
        n_done = len(context) - answer_at - 1
        return echo[n_done] if n_done < len(echo) else EOS
    digest = hashlib.blake2b(np.asarray(context, dtype=np.int32).tobytes(), digest_size=2).digest()
    return EOS if digest[1] == 0 else _LETTERS[digest[0] % len(_LETTERS)]
