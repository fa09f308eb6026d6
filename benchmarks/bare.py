"""The bare loops: llama.cpp and the native engine over token ids, without anything of edge_rt's around them."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows

N_STREAMS = 16
N_BATCH = 512


class BareLlama:
    """A llama.cpp context with repacked kernels and OpenMP; flash is its flash attention: -1 auto, 0 off, 1 on.

    Several sequences share its cells out: llama.cpp is faster so than with one pool of cells for all.
    """

    def __init__(self, path: Path, n_threads: int, *, n_ctx: int, n_seqs: int, n_ubatch: int, flash: int) -> None:
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.no_perf = n_ctx, N_BATCH, n_ubatch, True
        params.n_threads = params.n_threads_batch = n_threads
        params.n_seq_max, params.flash_attn_type = n_seqs, flash
        self._ctx: Any = lib.llama_init_from_model(self._model, params)
        if not self._ctx:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        self._memory = lib.llama_get_memory(self._ctx)
        self._n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(N_BATCH, 0, 1)

    def prefill_tps(self, token_ids: list[int]) -> float:
        """Time a prompt up to the choice of the first token."""
        lib.llama_memory_clear(self._memory, True)
        begun_s = time.perf_counter()
        self._prompt(token_ids)
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding after the first token."""
        lib.llama_memory_clear(self._memory, True)
        token_id = self._prompt(token_ids)
        begun_s = time.perf_counter()
        for i in range(n_tokens):
            self._decode([token_id], len(token_ids) + i)
            token_id = self._argmax(0)
        return n_tokens / (time.perf_counter() - begun_s)

    def streams_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding of N_STREAMS sequences together, after a prompt each."""
        lib.llama_memory_clear(self._memory, True)
        next_ids = []
        for seq_id in range(N_STREAMS):
            self._decode(token_ids, 0, seq_id)
            next_ids.append(self._argmax(len(token_ids) - 1))
        begun_s = time.perf_counter()
        for i in range(n_tokens):
            batch = self._batch
            for row, token_id in enumerate(next_ids):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token_id, len(token_ids) + i, 1
                batch.seq_id[row][0], batch.logits[row] = row, 1
            batch.n_tokens = N_STREAMS
            if lib.llama_decode(self._ctx, batch) != 0:
                raise RuntimeError("llama_decode failed")
            next_ids = [self._argmax(row) for row in range(N_STREAMS)]
        return N_STREAMS * n_tokens / (time.perf_counter() - begun_s)

    def _prompt(self, token_ids: list[int]) -> int:
        for start in range(0, len(token_ids), N_BATCH):
            part = token_ids[start : start + N_BATCH]
            self._decode(part, start)
        return self._argmax(len(part) - 1)

    def _decode(self, token_ids: list[int], start: int, seq_id: int = 0) -> None:
        batch = self._batch
        for i, token_id in enumerate(token_ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token_id, start + i, 1, 0
            batch.seq_id[i][0] = seq_id
        batch.logits[len(token_ids) - 1] = 1
        batch.n_tokens = len(token_ids)
        if lib.llama_decode(self._ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _argmax(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        return int(np.ctypeslib.as_array(pointer, (self._n_vocab,)).argmax())


class BareNative:
    """A session of edge_rt's own engine, greedy; it has no choice of attention, so flash is not its own."""

    def __init__(self, path: Path, n_threads: int, *, n_ctx: int, n_seqs: int, n_ubatch: int, flash: int) -> None:
        del flash
        file = ModelFile(model=path.stem, variant="", path=path, quant="")
        options = LoadOptions(n_ctx=n_ctx, n_seq_max=n_seqs, n_batch=N_BATCH, n_ubatch=n_ubatch, n_threads=n_threads)
        self._session = registry.get("native").load(file, options)

    def prefill_tps(self, token_ids: list[int]) -> float:
        """Time a prompt up to the choice of the first token."""
        self._session.seq_trim(0, 0)
        begun_s = time.perf_counter()
        self._prompt(token_ids)
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding after the first token."""
        self._session.seq_trim(0, 0)
        next_ids = self._prompt(token_ids)
        begun_s = time.perf_counter()
        for i in range(n_tokens):
            next_ids = self._greedy([SeqRows(0, len(token_ids) + i, next_ids, True)])
        return n_tokens / (time.perf_counter() - begun_s)

    def streams_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding of N_STREAMS sequences together, after a prompt each."""
        next_ids = []
        for seq_id in range(N_STREAMS):
            self._session.seq_trim(seq_id, 0)
            next_ids += self._greedy([SeqRows(seq_id, 0, token_ids, True)])
        begun_s = time.perf_counter()
        for i in range(n_tokens):
            start = len(token_ids) + i
            next_ids = self._greedy([SeqRows(n, start, [token_id], True) for n, token_id in enumerate(next_ids)])
        return N_STREAMS * n_tokens / (time.perf_counter() - begun_s)

    def _prompt(self, token_ids: list[int]) -> list[int]:
        for start in range(0, len(token_ids), N_BATCH):
            part = token_ids[start : start + N_BATCH]
            next_ids = self._greedy([SeqRows(0, start, part, True)])
        return next_ids

    def _greedy(self, batch: list[SeqRows]) -> list[int]:
        return [int(logits.argmax()) for logits in self._session.decode(batch)]
