"""What the benchmarks measure, each in a process of its own: the bare rival and edge_rt's engine.

One process for both would measure neither: libgomp stops spinning at barriers once a process has more OpenMP threads
than there are cores, and two thread pools are more.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from llama_cpp import llama_cpp as lib

import edge_rt
from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.types import GenerateRequest, Sampling

N_STREAMS = 16
_GREEDY = Sampling()
_ids = np.random.default_rng()


def fresh_prompt(n_tokens: int) -> list[int]:
    """Draw a prompt that no prefix kept from before can shorten."""
    return [int(i) for i in _ids.integers(1000, 40_000, n_tokens)]


class Subject(Protocol):
    def prefill_tps(self, token_ids: list[int]) -> float: ...

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float: ...


class Process:
    """A subject in a process of its own, asked over pipes; it sleeps while it is not measured."""

    def __init__(self, kind: str, path: Path, n_threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(path), str(n_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def prefill_tps(self, token_ids: list[int]) -> float:
        return self._ask(token_ids, 0)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        return self._ask(token_ids, n_tokens)

    def streams_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time N_STREAMS sequences that each decode n_tokens; kinds that end in "-streams" only."""
        return self._ask(token_ids, n_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, token_ids: list[int], n_tokens: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([token_ids, n_tokens]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


class BareLlama:
    """One context of 2,048 tokens with llama.cpp's defaults (flash attention auto, repacked kernels, OpenMP).

    Several sequences share them out: llama.cpp is faster so than with one pool of cells for all.
    """

    def __init__(self, path: Path, n_threads: int, n_seqs: int = 1) -> None:
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.no_perf = 2048, 512, 512, True
        params.n_threads = params.n_threads_batch = n_threads
        params.n_seq_max = n_seqs
        self._ctx: Any = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._ctx)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(512, 0, 1)

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
        return int(np.ctypeslib.as_array(pointer, (self.n_vocab,)).argmax())


class BareNative:
    """edge_rt's own engine without what is around it, as BareLlama is: a session, greedy."""

    def __init__(self, path: Path, n_threads: int, n_seqs: int = 1) -> None:
        file = ModelFile(model=path.stem, variant="", path=path, quant="")
        options = LoadOptions(n_ctx=2048, n_seq_max=n_seqs, n_threads=n_threads)
        self._session = registry.get("native").load(file, options)

    def prefill_tps(self, token_ids: list[int]) -> float:
        """Time a prompt up to the choice of the first token."""
        self._session.seq_trim(0, 0)
        begun_s = time.perf_counter()
        self._greedy([SeqRows(0, 0, token_ids, True)])
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time greedy decoding after the first token."""
        self._session.seq_trim(0, 0)
        next_ids = self._greedy([SeqRows(0, 0, token_ids, True)])
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

    def _greedy(self, batch: list[SeqRows]) -> list[int]:
        return [int(logits.argmax()) for logits in self._session.decode(batch)]


class Engine:
    """edge_rt as a library over llama.cpp, to be compared with a bare loop of it; n_threads 0 lets it choose.

    Nothing is guessed: each token is a step, as the rival's.
    """

    def __init__(self, path: Path, n_threads: int) -> None:
        flags = {"engine.backend": "llama_cpu", "engine.n_threads": n_threads, "engine.max_draft": 0}
        self._model = edge_rt.load(path, settings=config.load(flags=flags))
        self._n = 0

    def prefill_tps(self, token_ids: list[int]) -> float:
        begun_s = time.perf_counter()
        for _ in self._model.stream(self._request(token_ids, 1)):
            pass
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        chunks = self._model.stream(self._request(token_ids, n_tokens + 1))
        next(chunks)
        begun_s = time.perf_counter()
        for _ in chunks:
            pass
        return n_tokens / (time.perf_counter() - begun_s)

    def _request(self, token_ids: list[int], n_tokens: int) -> GenerateRequest:
        self._n += 1
        return GenerateRequest(
            id=f"bench-{self._n}",
            model=self._model.info.model,
            prompt_token_ids=tuple(token_ids),
            max_tokens=n_tokens,
            ignore_eos=True,
            sampling=_GREEDY,
        )


def main() -> None:
    kind, path, n_threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    name, _, streams = kind.partition("-")
    bare = {"bare": BareLlama, "native": BareNative}
    subject: Subject
    if streams:
        many = bare[name](path, n_threads, N_STREAMS)
        for line in sys.stdin:
            print(many.streams_tps(*json.loads(line)), flush=True)
        return
    subject = Engine(path, n_threads) if name == "engine" else bare[name](path, n_threads)
    for line in sys.stdin:
        token_ids, n_tokens = json.loads(line)
        rate = subject.decode_tps(token_ids, n_tokens) if n_tokens else subject.prefill_tps(token_ids)
        print(rate, flush=True)


if __name__ == "__main__":
    main()
