"""What edge_rt costs over llama.cpp: prefill and decode through the engine and through the daemon against a bare loop.

Bars: each at least 0.97 × the bare loop on the same file, in the median of at least seven pairs. The bare loop gets the
thread count it is fastest with; edge_rt chooses its own. The daemon's rates are those its client sees: from sending the
request to the first event for prefill, from the first event to the last for decode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import numpy as np
from bare_llama import BareLlama

import edge_rt
from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu
from edge_rt.types import GenerateRequest, Sampling

AT_LEAST = 0.97
N_PROMPT = 512
_GREEDY = Sampling()
_ids = np.random.default_rng(1)


def fresh_prompt(n_tokens: int) -> list[int]:
    """Draw a prompt that no prefix kept from before can shorten."""
    return [int(i) for i in _ids.integers(1000, 40_000, n_tokens)]


def model_path(settings: config.Config) -> Path:
    store = Store.open(settings.catalog, os.environ)
    manifest = store.get(settings.catalog.default_model)
    path = store.path(manifest, pick_variant(manifest, cpu.features()))
    if path is None:
        sys.exit(f"{manifest.id} is not in the store: run `edge_rt models pull` first")
    return path


@contextmanager
def running_daemon() -> Iterator[Client]:
    """Start a daemon on a socket of its own with the default model in memory."""
    model = config.load().config.catalog.default_model
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        socket = Path(folder) / "api.sock"
        daemon = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "edge_rt",
                "serve",
                "--socket",
                str(socket),
                "--model",
                model,
                "--log-level",
                "error",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(socket) as client:
                for _ in range(600):
                    if socket.exists() and client.is_ready():
                        break
                    time.sleep(0.1)
                yield client
        finally:
            daemon.terminate()
            daemon.wait()


class Engine:
    def __init__(self, model: edge_rt.Model) -> None:
        self._model = model
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


class Daemon:
    def __init__(self, client: Client) -> None:
        self._client = client

    def prefill_tps(self, token_ids: list[int]) -> float:
        begun_s = time.perf_counter()
        for _ in self._client.complete(token_ids, max_tokens=1, temperature=0, ignore_eos=True):
            pass
        return len(token_ids) / (time.perf_counter() - begun_s)

    def decode_tps(self, token_ids: list[int], n_tokens: int) -> float:
        pieces = self._client.complete(token_ids, max_tokens=n_tokens + 1, temperature=0, ignore_eos=True)
        next(pieces)
        begun_s = time.perf_counter()
        for _ in pieces:
            pass
        return n_tokens / (time.perf_counter() - begun_s)


def best_threads(bare: BareLlama, measure: Callable[[], float]) -> int:
    """Find the count the bare loop is fastest with."""
    rates: dict[int, float] = {}
    for n_threads in range(1, len(cpu.usable_cores()) + 1):
        bare.set_threads(n_threads)
        rates[n_threads] = max(measure() for _ in range(3))
    return max(rates, key=lambda n: rates[n])


def main() -> None:
    arguments = harness.parse(__doc__)
    n_gen = 48 if arguments.quick else 128
    n_pairs = arguments.pairs(9, quick=3)
    path = model_path(config.load().config)
    bare = BareLlama(path, len(cpu.usable_cores()))
    rivals = {
        "prefill": best_threads(bare, lambda: bare.prefill_tps(fresh_prompt(N_PROMPT))),
        "decode": best_threads(bare, lambda: bare.decode_tps(fresh_prompt(16), n_gen // 2)),
    }
    claims: list[harness.Claim] = []

    def measure(name: str, subject: Engine | Daemon) -> None:
        for phase, n_threads in rivals.items():
            bare.set_threads(n_threads)
            n_tokens = N_PROMPT if phase == "prefill" else n_gen

            def run(who: Engine | Daemon | BareLlama, phase: str = phase) -> float:
                return (
                    who.prefill_tps(fresh_prompt(N_PROMPT))
                    if phase == "prefill"
                    else who.decode_tps(fresh_prompt(16), n_gen)
                )

            pair = harness.paired(
                name, lambda: run(subject), f"bare llama.cpp, {n_threads} threads", lambda: run(bare), n_pairs=n_pairs
            )
            claims.append(harness.Claim(name=f"{phase} {n_tokens}", pair=pair, at_least=AT_LEAST))

    with edge_rt.load(path) as model:
        measure("engine", Engine(model))
    with running_daemon() as client:
        measure("daemon", Daemon(client))
    bare.close()
    harness.finish(arguments, claims, {"file": path.name})


if __name__ == "__main__":
    main()
