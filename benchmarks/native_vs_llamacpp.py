"""Compare edge_rt's own engine with llama.cpp: same file, same threads, run in turns; A/B over 1 means ours is faster.

    python benchmarks/native_vs_llamacpp.py [--quick] [--check] [--json FILE]

The bars are those of the roadmap for CPUs with AVX-512 VNNI; on others they are not reached, and say how far it is.
Each side is its bare loop over token ids in a process of its own, that sleeps while the other is measured. llama.cpp
runs with the settings that were its fastest for the phase a minute before, which B names; with --quick, with the first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import harness
from bare import N_STREAMS
from subjects import Process, fresh_prompt

from edge_rt import config
from edge_rt.backends.llama_library import system_info
from edge_rt.backends.native_library import isa_names, load_native
from edge_rt.catalog.store import Store
from edge_rt.devices import cpu

_FORMS = ("q4_1", "q4_0")
# (form, threads) -> least ratio of prefill, decode, streams; None is only reported
_BARS: dict[tuple[str, int], tuple[float | None, float | None, float | None]] = {
    ("q4_1", 1): (5.5, 1.9, None),
    ("q4_1", 2): (6.0, 1.75, 4.0),
    ("q4_0", 1): (2.2, 1.0, None),
    ("q4_0", 2): (2.0, 1.2, 2.0),
}
_BUSY_BAR = 2.0
_MEMORY_BAR = 1.0
_N_CTX_MEMORY = 4096
_RIVALS: Mapping[str, dict[str, Any]] = {
    "flash": {"flash": 1},
    "no flash": {"flash": 0},
    "flash, ubatch 128": {"flash": 1, "n_ubatch": 128},
}
_STREAM_RIVALS: Mapping[str, dict[str, Any]] = {"flash": {"flash": 1}, "no flash": {"flash": 0}}
_BUSY_RIVALS: Mapping[str, dict[str, Any]] = {
    "flash": {"flash": 1},
    "flash, OMP passive": {"flash": 1, "wait_policy": "passive"},
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much to run: tokens of each phase and of the prompt before it, pairs, and the rival's settings to try."""

    n_prefill: int
    n_prompt: int
    n_decode: int
    n_stream: int
    n_memory: int
    n_pairs: int
    n_rivals: int


_FULL = Size(n_prefill=512, n_prompt=64, n_decode=128, n_stream=48, n_memory=_N_CTX_MEMORY - 64, n_pairs=7, n_rivals=3)
_QUICK = Size(n_prefill=96, n_prompt=8, n_decode=16, n_stream=4, n_memory=64, n_pairs=3, n_rivals=1)
_N_CHOOSING = 3


def fastest(rivals: Mapping[str, Process], run: Callable[[Process], float]) -> str:
    """Choose the settings of the rival that are fastest at what run does, tried in turns."""
    best = dict.fromkeys(rivals, 0.0)
    for _ in range(_N_CHOOSING if len(rivals) > 1 else 0):
        for name, rival in rivals.items():
            best[name] = max(best[name], run(rival))
    return max(best, key=lambda name: best[name])


def claim(
    name: str,
    bar: float | None,
    run: Callable[[Process], float],
    ours: Process,
    rivals: Mapping[str, Process],
    size: Size,
) -> harness.Claim:
    chosen = fastest(rivals, run)
    theirs = rivals[chosen]
    pair = harness.paired(
        "native", lambda: run(ours), f"llama.cpp, {chosen}", lambda: run(theirs), n_pairs=size.n_pairs
    )
    return harness.Claim(name=name, pair=pair, at_least=bar)


def speed(path: Path, form: str, n_threads: int, size: Size) -> list[harness.Claim]:
    prefill_bar, decode_bar, streams_bar = _BARS[form, n_threads]
    where = f"{form}, {n_threads} thread{'s' if n_threads > 1 else ''}"

    def prefill(subject: Process) -> float:
        return subject.prefill_tps(fresh_prompt(size.n_prefill))

    def decode(subject: Process) -> float:
        return subject.decode_tps(fresh_prompt(size.n_prompt), size.n_decode)

    def streams(subject: Process) -> float:
        return subject.streams_tps(fresh_prompt(size.n_prompt // 4), size.n_stream)

    claims: list[harness.Claim] = []
    with ExitStack() as stack:
        ours, rivals = start(stack, path, n_threads, _RIVALS, size)
        claims.append(claim(f"prefill {size.n_prefill}, {where}", prefill_bar, prefill, ours, rivals, size))
        claims.append(claim(f"decode {size.n_decode}, {where}", decode_bar, decode, ours, rivals, size))
    if streams_bar is None:
        return claims
    with ExitStack() as stack:
        ours, rivals = start(stack, path, n_threads, _STREAM_RIVALS, size, n_seqs=N_STREAMS)
        claims.append(claim(f"{N_STREAMS} streams, {where}", streams_bar, streams, ours, rivals, size))
    return claims


def contention(path: Path, form: str, size: Size) -> list[harness.Claim]:
    """Decode on two threads while another process keeps the first of the cores busy."""

    def decode(subject: Process) -> float:
        return subject.decode_tps(fresh_prompt(size.n_prompt), size.n_decode)

    claims: list[harness.Claim] = []
    with ExitStack() as stack:
        ours, rivals = start(stack, path, 2, _BUSY_RIVALS, size)
        alone = {"1 thread": stack.enter_context(Process("bare", path, 1, flash=1))}
        stack.enter_context(harness.busy_neighbours(1, cpu.usable().cpus[:1]))
        time.sleep(1.0)  # until the scheduler has taken notice of it
        name = f"decode {size.n_decode} beside a busy process, {form}"
        claims.append(claim(f"{name}, 2 threads", _BUSY_BAR, decode, ours, rivals, size))
        claims.append(claim(f"{name}, 2 threads against 1", None, decode, ours, alone, size))
    return claims


def start(
    stack: ExitStack,
    path: Path,
    n_threads: int,
    settings: Mapping[str, dict[str, Any]],
    size: Size,
    *,
    n_seqs: int = 1,
) -> tuple[Process, dict[str, Process]]:
    ours = stack.enter_context(Process("native", path, n_threads, n_seqs=n_seqs))
    rivals = {
        name: stack.enter_context(Process("bare", path, n_threads, n_seqs=n_seqs, **values))
        for name, values in islice(settings.items(), size.n_rivals)
    }
    return ours, rivals


def memory(path: Path, form: str, size: Size) -> harness.Figure:
    """Compare what is resident after the same prompt; in a full run it fills the context."""
    prompt = fresh_prompt(size.n_memory)
    resident_mib = []
    for kind in ("native", "bare"):
        with Process(kind, path, 2, n_ctx=_N_CTX_MEMORY) as subject:
            subject.decode_tps(prompt, 8)
            resident_mib.append(subject.resident_mib())
    ours, theirs = resident_mib
    return harness.Figure(
        name=f"resident at n_ctx {_N_CTX_MEMORY} after {len(prompt)} tokens, {form} ({ours:.0f} to {theirs:.0f} MiB)",
        unit="× llama.cpp",
        samples=(ours / theirs,),
        at_most=_MEMORY_BAR,
    )


def engines() -> dict[str, str]:
    """Say which kernels each side computes with."""
    return {"native": isa_names(load_native())[-1], "llama.cpp": system_info().strip(" |")}


def main() -> None:
    arguments = harness.parse(__doc__)
    size = _QUICK if arguments.quick else _FULL
    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    n_cpus = len(cpu.usable().cpus)
    claims: list[harness.Claim] = []
    figures: list[harness.Figure] = []
    for variant in manifest.variants:
        path = store.path(manifest, variant)
        if variant.id not in _FORMS or path is None:
            continue
        for n_threads in range(1, min(2, n_cpus) + 1):
            claims += speed(path, variant.id, n_threads, size)
        if n_cpus > 1:
            claims += contention(path, variant.id, size)
        figures.append(memory(path, variant.id, size))
    kernels = engines()
    print("\n".join(f"{name}: {what}" for name, what in kernels.items()))
    harness.finish(arguments, claims, {"engines": kernels}, figures)


if __name__ == "__main__":
    main()
