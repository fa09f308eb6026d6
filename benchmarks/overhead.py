"""What edge_rt costs over llama.cpp: prefill and decode through the engine and through the daemon against a bare loop.

Bars: each at least 0.97 × the bare loop on the same file, in the median of at least seven pairs. The bare loop gets the
thread count it is fastest with; edge_rt chooses its own. The daemon's rates are those its client sees: from sending the
request to the first event for prefill, from the first event to the last for decode.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import default_model
import harness
from footprint import daemon as running_daemon
from subjects import Process, Subject, fresh_prompt

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.devices import cpu

AT_LEAST = 0.97
N_PROMPT = 512
_FIELDS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculative.n_max": 0}


class Daemon:
    def __init__(self, client: Client) -> None:
        self._client = client

    def prefill_tps(self, token_ids: list[int]) -> float:
        begun_s = time.perf_counter()
        for _ in self._client.complete(token_ids, max_tokens=1, **_FIELDS):
            pass
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        pieces = self._client.complete(token_ids, max_tokens=n_tokens + 1, **_FIELDS)
        next(pieces)
        begun_s = time.perf_counter()
        for _ in pieces:
            pass
        return n_tokens / (time.perf_counter() - begun_s)


def main() -> None:
    arguments = harness.parse(__doc__)
    n_gen = 64 if arguments.quick else 128
    n_pairs = arguments.pairs(21, quick=3)
    path = default_model.path_of(backend="llama_cpu")
    claims: list[harness.Claim] = []

    def run(who: Subject, phase: str) -> float:
        if phase == "prefill":
            return who.prefill_tps(fresh_prompt(N_PROMPT))
        return who.decode_tps(fresh_prompt(16), n_gen)

    def compare(name: str, subject: Subject, rival: str, bare: Subject, phase: str) -> None:
        pair = harness.paired(
            name, lambda: run(subject, phase), rival, lambda: run(bare, phase), n_pairs=n_pairs, n_warmup=3
        )
        n_tokens = N_PROMPT if phase == "prefill" else n_gen
        claims.append(harness.Claim(name=f"{phase} {n_tokens}", pair=pair, at_least=AT_LEAST))

    with ExitStack() as stack:
        bare = {n: stack.enter_context(Process("bare", path, n)) for n in range(1, len(cpu.usable_cores()) + 1)}
        engine = stack.enter_context(Process("engine", path, 0))
        model = config.load().config.catalog.default_model
        _, socket, _ = stack.enter_context(running_daemon("--model", model, EDGE_RT__ENGINE__BACKEND="llama_cpu"))
        daemon = Daemon(stack.enter_context(Client(socket)))
        subjects: dict[str, Subject] = {"engine": engine, "daemon": daemon}
        for phase in ("prefill", "decode"):
            rates = {n: max(run(rival, phase) for _ in range(3)) for n, rival in bare.items()}
            n_threads = max(rates, key=lambda n: rates[n])
            for name, subject in subjects.items():
                compare(name, subject, f"bare llama.cpp, {n_threads} threads", bare[n_threads], phase)
    harness.finish(arguments, claims, {"file": path.name})


if __name__ == "__main__":
    main()
