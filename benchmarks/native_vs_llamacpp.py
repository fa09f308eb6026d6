"""Compare edge_rt's own engine with llama.cpp: same file, same threads, run in turns; A/B over 1 means ours is faster.

    python benchmarks/native_vs_llamacpp.py [--quick] [--check] [--json FILE]

The bars are those of the roadmap for CPUs with AVX-512 VNNI; on others they are not reached, and say how far it is.
Each side is its bare loop over token ids in a process of its own, that sleeps while the other is measured.
"""

from __future__ import annotations

import os
from pathlib import Path

import harness
from subjects import Process, fresh_prompt

from edge_rt import config
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


def measure(arguments: harness.Arguments, path: Path, form: str, n_threads: int) -> list[harness.Claim]:
    n_pairs = arguments.pairs(7, quick=3)
    n_prefill, n_decode, n_stream = (128, 32, 8) if arguments.quick else (512, 128, 48)
    prefill_bar, decode_bar, streams_bar = _BARS[form, n_threads]
    where = f"{form}, {n_threads} thread{'s' if n_threads > 1 else ''}"
    with Process("native", path, n_threads) as ours, Process("bare", path, n_threads) as theirs:
        prefill = harness.paired(
            "native",
            lambda: ours.prefill_tps(fresh_prompt(n_prefill)),
            "llama.cpp",
            lambda: theirs.prefill_tps(fresh_prompt(n_prefill)),
            n_pairs=n_pairs,
        )
        decode = harness.paired(
            "native",
            lambda: ours.decode_tps(fresh_prompt(64), n_decode),
            "llama.cpp",
            lambda: theirs.decode_tps(fresh_prompt(64), n_decode),
            n_pairs=n_pairs,
        )
    with Process("native-streams", path, n_threads) as ours, Process("bare-streams", path, n_threads) as theirs:
        streams = harness.paired(
            "native",
            lambda: ours.streams_tps(fresh_prompt(16), n_stream),
            "llama.cpp",
            lambda: theirs.streams_tps(fresh_prompt(16), n_stream),
            n_pairs=n_pairs,
        )
    return [
        harness.Claim(name=f"prefill {n_prefill}, {where}", pair=prefill, at_least=prefill_bar),
        harness.Claim(name=f"decode {n_decode}, {where}", pair=decode, at_least=decode_bar),
        harness.Claim(name=f"16 streams, {where}", pair=streams, at_least=streams_bar),
    ]


def main() -> None:
    arguments = harness.parse(__doc__)
    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    claims: list[harness.Claim] = []
    for variant in manifest.variants:
        path = store.path(manifest, variant)
        if variant.id in _FORMS and path is not None:
            for n_threads in range(1, min(2, len(cpu.usable().cpus)) + 1):
                claims += measure(arguments, path, variant.id, n_threads)
    harness.finish(arguments, claims)


if __name__ == "__main__":
    main()
