"""The rival: llama.cpp driven by a bare loop, nothing of edge_rt in between."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

_quiet = lib.llama_log_callback(lambda *_: None)


class BareLlama:
    """One context of 2,048 tokens with llama.cpp's defaults (flash attention auto, repacked kernels, OpenMP)."""

    def __init__(self, path: Path, n_threads: int) -> None:
        lib.llama_log_set(_quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.no_perf = 2048, 512, 512, True
        params.n_threads = params.n_threads_batch = n_threads
        self._ctx: Any = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._ctx)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(512, 0, 1)

    def set_threads(self, n_threads: int) -> None:
        lib.llama_set_n_threads(self._ctx, n_threads, n_threads)

    def prefill_tps(self, token_ids: list[int]) -> float:
        """Time a prompt up to the choice of the first token."""
        lib.llama_memory_clear(self._memory, True)
        begun_s = time.perf_counter()
        self._decode(token_ids, 0)
        self._argmax(len(token_ids) - 1)
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding after the first token."""
        lib.llama_memory_clear(self._memory, True)
        self._decode(token_ids, 0)
        token_id = self._argmax(len(token_ids) - 1)
        begun_s = time.perf_counter()
        for i in range(n_tokens):
            self._decode([token_id], len(token_ids) + i)
            token_id = self._argmax(0)
        return n_tokens / (time.perf_counter() - begun_s)

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._ctx)
        lib.llama_model_free(self._model)

    def _decode(self, token_ids: list[int], start: int) -> None:
        batch = self._batch
        for i, token_id in enumerate(token_ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token_id, start + i, 1, 0
            batch.seq_id[i][0] = 0
        batch.logits[len(token_ids) - 1] = 1
        batch.n_tokens = len(token_ids)
        if lib.llama_decode(self._ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _argmax(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        return int(np.ctypeslib.as_array(pointer, (self.n_vocab,)).argmax())
