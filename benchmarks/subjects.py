"""What the benchmarks measure, each in a process of its own: the bare loops and edge_rt's engine.

One process for both would measure neither: libgomp stops spinning at barriers once a process has more OpenMP threads
than there are cores, and two thread pools are more.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from bare import BareLlama, BareNative
from subject_process import SubjectProcess

import edge_rt
from edge_rt import config
from edge_rt.types import GenerateRequest, Sampling

_GREEDY = Sampling()
_ids = np.random.default_rng()


def fresh_prompt(n_tokens: int, n_vocab: int = 40_000) -> list[int]:
    """Draw a prompt that no prefix kept from before can shorten."""
    return [int(i) for i in _ids.integers(1000, n_vocab, n_tokens)]


class Subject(Protocol):
    def prefill_tps(self, token_ids: list[int]) -> float: ...

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float: ...


class Process(SubjectProcess):
    """A subject in a process of its own.

    kind is "bare" for llama.cpp, "native", or "engine" for edge_rt as a library, which takes none of the settings of a
    context. wait_policy is OMP_WAIT_POLICY, which tells libgomp whether to spin at llama.cpp's barriers.
    """

    def __init__(
        self,
        kind: str,
        path: Path,
        n_threads: int,
        *,
        n_ctx: int = 2048,
        n_seqs: int = 1,
        n_ubatch: int = 512,
        flash: int = -1,
        wait_policy: str = "",
    ) -> None:
        context = {} if kind == "engine" else {"n_ctx": n_ctx, "n_seqs": n_seqs, "n_ubatch": n_ubatch, "flash": flash}
        environ = {"OMP_WAIT_POLICY": wait_policy} if wait_policy else {}
        super().__init__(__file__, kind, str(path), str(n_threads), json.dumps(context), environ=environ)

    def prefill_tps(self, token_ids: list[int]) -> float:
        return float(self._ask("prefill_tps", token_ids))

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        return float(self._ask("decode_tps", token_ids, n_tokens))

    def streams_tps(self, token_ids: list[int], n_tokens: int) -> float:
        """Time N_STREAMS sequences that each decode n_tokens; for bare loops with so many sequences."""
        return float(self._ask("streams_tps", token_ids, n_tokens))


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
    kinds = {"bare": BareLlama, "native": BareNative, "engine": Engine}
    kind, path, n_threads, context = sys.argv[1:]
    subject: Any = kinds[kind](Path(path), int(n_threads), **json.loads(context))
    for line in sys.stdin:
        what, *values = json.loads(line)
        print(json.dumps(getattr(subject, what)(*values)), flush=True)


if __name__ == "__main__":
    main()
