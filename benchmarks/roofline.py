"""Say how near the native engine comes to what the machine can do, for models that no cache holds.

    python benchmarks/roofline.py [--models 135m,1.1b,3b] [--forms q4_0,q4_1] [--keep] [--quick] [--check] [--json FILE]

Decode is bounded by reading every weight once a token: its GB/s against a plain read of memory. Prefill is bounded by
integer products: GOP/s of its linear layers (a product and its sum are two) against the dot instruction on registers
alone. Both limits are measured between the engine's runs, on as many threads. 135m is the default model from the store;
the others have random weights; they are written to --cache and removed at the end unless --keep is given.

Bars, on 1 and on 2 threads: decode at least 0.9 × the read, prefill at least 0.45 × the peak. The model must be larger
than the last level of cache for the first; where it is not, the row carries no bar.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import harness
import numpy as np
import synthetic
from subjects import Process, fresh_prompt

from edge_rt import config
from edge_rt.backends.llama_library import system_info
from edge_rt.backends.native_library import isa_names, load_native
from edge_rt.bench.samples import quantile
from edge_rt.catalog.gguf import GgufHeader, read_header
from edge_rt.catalog.store import Store
from edge_rt.devices import cpu

_DECODE_BAR = 0.9
_PREFILL_BAR = 0.45
_PEAK_S = 0.05
_N_LIMIT_RUNS = 5
_READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model asks of the machine: operations of a prompt's token and of its end, bytes of a decoded token."""

    ops_per_token: int
    ops_of_logits: int
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, header: GgufHeader) -> Work:
        has_output = any(t.name == "output.weight" for t in header.tensors)
        head = "output.weight" if has_output else "token_embd.weight"
        n_weights = {t.name: int(np.prod(t.shape)) for t in header.tensors if len(t.shape) == 2}
        looked_up = sum(t.size_bytes for t in header.tensors if t.name == "token_embd.weight") if has_output else 0
        return cls(
            ops_per_token=2 * sum(n for name, n in n_weights.items() if name.startswith("blk.")),
            ops_of_logits=2 * n_weights[head],
            weight_bytes=sum(t.size_bytes for t in header.tensors) - looked_up,
            kv_bytes_per_token=2 * header.kv_elements_per_token,
        )

    def prefill_gops(self, tps: float, n_tokens: int) -> float:
        return (self.ops_per_token + self.ops_of_logits / n_tokens) * tps / 1e9

    def decode_gbps(self, tps: float, n_past: float) -> float:
        return (self.weight_bytes + self.kv_bytes_per_token * n_past) * tps / 1e9


@dataclass(slots=True)
class Row:
    """Samples of one model, form and thread count, one of each list a round."""

    model: str
    form: str
    n_threads: int
    prefill_tps: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    prefill_gops: list[float] = field(default_factory=list)
    decode_gbps: list[float] = field(default_factory=list)
    peak_gops: list[float] = field(default_factory=list)
    read_gbps: list[float] = field(default_factory=list)
    rival_prefill_tps: list[float] = field(default_factory=list)
    rival_decode_tps: list[float] = field(default_factory=list)

    def claims(self, *, is_beyond_cache: bool) -> list[harness.Claim]:
        where = f"{self.model} {self.form}, {self.n_threads} thread{'s' if self.n_threads > 1 else ''}"

        def claim(what: str, a: list[float], rival: str, b: list[float], bar: float | None) -> harness.Claim:
            pair = harness.Pair(name_a="native", name_b=rival, a=tuple(a), b=tuple(b))
            return harness.Claim(name=f"{what}, {where}", pair=pair, at_least=bar)

        found = []
        if min(self.peak_gops) > 0:
            found.append(claim("prefill GOP/s", self.prefill_gops, "peak", self.peak_gops, _PREFILL_BAR))
        bar = _DECODE_BAR if is_beyond_cache else None
        found.append(claim("decode GB/s", self.decode_gbps, "memory read", self.read_gbps, bar))
        found.append(claim("prefill t/s", self.prefill_tps, "llama.cpp", self.rival_prefill_tps, None))
        found.append(claim("decode t/s", self.decode_tps, "llama.cpp", self.rival_decode_tps, None))
        return found

    def cells(self) -> list[str]:
        def median(samples: list[float]) -> float:
            return quantile(samples, 0.5)

        def share(a: list[float], b: list[float]) -> str:
            ratios = [x / y for x, y in zip(a, b, strict=True) if y > 0]
            return f"{100 * median(ratios):.0f}" if ratios else "unknown"

        rival = [median(self.rival_prefill_tps), median(self.rival_decode_tps)]
        return [
            f"{self.model} {self.form}",
            str(self.n_threads),
            f"{median(self.prefill_tps):.1f}",
            f"{median(self.prefill_gops):.0f}",
            share(self.prefill_gops, self.peak_gops),
            f"{median(self.decode_tps):.1f}",
            f"{median(self.decode_gbps):.1f}",
            share(self.decode_gbps, self.read_gbps),
            f"{rival[0]:.1f}",
            f"{median(self.prefill_tps) / rival[0]:.2f}",
            f"{rival[1]:.1f}",
            f"{median(self.decode_tps) / rival[1]:.2f}",
        ]


class Limits:
    """Measures what the machine reaches, on threads of this process."""

    def __init__(self, n_threads: int) -> None:
        self._lib = load_native()
        self._isa = max(i for i in range(self._lib.en_isa_count()) if self._lib.en_isa_usable(i))
        self._memory = [np.ones(_READ_BYTES // 8, dtype=np.uint64) for _ in range(n_threads)]
        begun_s = time.perf_counter()
        self._lib.en_peak_dots(self._isa, 1_000_000)
        self._n_rounds = int(1_000_000 * _PEAK_S / (time.perf_counter() - begun_s)) + 1

    def peak_gops(self, n_threads: int) -> float:
        """Run the dot instruction alone; 0 where the instruction set in use has none."""
        return self._rate(n_threads, lambda _: int(self._lib.en_peak_dots(self._isa, self._n_rounds)))

    def read_gbps(self, n_threads: int) -> float:
        def read(number: int) -> int:
            memory = self._memory[number]
            self._lib.en_peak_read(memory.ctypes.data, memory.size)
            return memory.nbytes

        return self._rate(n_threads, read)

    @staticmethod
    def _rate(n_threads: int, run: Callable[[int], int]) -> float:
        """Give the best of some runs on each thread, begun together; the library's calls let go of the interpreter."""
        return max(Limits._once(n_threads, run) for _ in range(_N_LIMIT_RUNS))

    @staticmethod
    def _once(n_threads: int, run: Callable[[int], int]) -> float:
        done = [0] * n_threads
        ready = threading.Barrier(n_threads + 1)

        def work(number: int) -> None:
            ready.wait()
            done[number] = run(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
        for thread in threads:
            thread.start()
        ready.wait()
        begun_s = time.perf_counter()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begun_s) / 1e9


def measure(arguments: harness.Arguments, model: str, form: str, path: Path, n_threads: int, limits: Limits) -> Row:
    n_rounds = arguments.pairs(5, quick=2)
    n_prefill, n_decode, n_past = (64, 8, 8) if arguments.quick else (256, 32, 16)
    header = read_header(path)
    work = Work.of(header)
    row = Row(model, form, n_threads)
    with ExitStack() as stack:
        ours = stack.enter_context(Process("native", path, n_threads))
        theirs = stack.enter_context(Process("bare", path, n_threads, flash=1))
        for subject in (ours, theirs):
            subject.prefill_tps(fresh_prompt(32, header.n_vocab))
        for number in range(n_rounds):
            for subject in (ours, theirs) if number % 2 == 0 else (theirs, ours):
                prefill_tps = subject.prefill_tps(fresh_prompt(n_prefill, header.n_vocab))
                if subject is ours:
                    row.peak_gops.append(limits.peak_gops(n_threads))
                decode_tps = subject.decode_tps(fresh_prompt(n_past, header.n_vocab), n_decode)
                if subject is ours:
                    row.read_gbps.append(limits.read_gbps(n_threads))
                    row.prefill_tps.append(prefill_tps)
                    row.decode_tps.append(decode_tps)
                    row.prefill_gops.append(work.prefill_gops(prefill_tps, n_prefill))
                    row.decode_gbps.append(work.decode_gbps(decode_tps, n_past + n_decode / 2))
                else:
                    row.rival_prefill_tps.append(prefill_tps)
                    row.rival_decode_tps.append(decode_tps)
            say(
                f"{model} {form}, {n_threads} threads, {number + 1}/{n_rounds}: "
                f"prefill {row.prefill_tps[-1]:.1f} t/s, {row.prefill_gops[-1]:.0f} of {row.peak_gops[-1]:.0f} GOP/s; "
                f"decode {row.decode_tps[-1]:.1f} t/s, {row.decode_gbps[-1]:.1f} of {row.read_gbps[-1]:.1f} GB/s"
            )
    return row


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def model_path(model: str, form: str, kept: Path, folder: Path) -> Path | None:
    """Find a model's file, or write it to folder; None if the default model is not in the store in this form."""
    if model == "135m":
        settings = config.load().config.catalog
        store = Store.open(settings, os.environ)
        manifest = store.get(settings.default_model)
        return next((store.path(manifest, v) for v in manifest.variants if v.id == form), None)
    name = f"{model}-{form}.gguf"
    if (kept / name).is_file():
        return kept / name
    tenths: set[int] = set()

    def progress(done: float) -> None:
        if int(done * 10) not in tenths:
            tenths.add(int(done * 10))
            say(f"writing {name}: {100 * done:.0f} %")

    synthetic.write(folder / name, synthetic.SHAPES[model], form, progress=progress)
    return folder / name


def cache_bytes() -> int:
    """Give the size of the last level of cache, as sysfs has it; 0 if it does not say."""
    sizes = [p.read_text(encoding="ascii").strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size and size[-1] in units), default=0)


def add_options(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge_rt" / "roofline"
    parser.add_argument("--models", metavar="NAMES", help=f"of 135m, {', '.join(synthetic.SHAPES)}; all by default")
    parser.add_argument("--forms", metavar="FORMS", help="of q4_0, q4_1; both by default")
    parser.add_argument(
        "--cache", type=Path, default=default, metavar="DIR", help="where models are written (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the models written there for the next run")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    own = arguments.own
    names, forms = (own.models or ("1.1b" if arguments.quick else "135m,1.1b,3b")), own.forms or "q4_0,q4_1"
    if unknown := {*names.split(",")} - {"135m", *synthetic.SHAPES} | {*forms.split(",")} - {"q4_0", "q4_1"}:
        sys.exit(f"unknown model or form: {', '.join(sorted(unknown))}")
    most = min(2, len(cpu.usable().cpus))
    limits = Limits(most)
    rows: list[Row] = []
    claims: list[harness.Claim] = []
    own.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=own.cache) as scratch:
        for model in names.split(","):
            for form in forms.split(","):
                folder = own.cache if own.keep else Path(scratch)
                if (path := model_path(model, form, own.cache, folder)) is None:
                    say(f"{model} {form} is not in the store; `edge_rt models pull` fetches it")
                    continue
                is_beyond_cache = path.stat().st_size > 2 * cache_bytes()
                for n_threads in range(1, most + 1):
                    rows.append(measure(arguments, model, form, path, n_threads, limits))
                    claims += rows[-1].claims(is_beyond_cache=is_beyond_cache)
                for used in Path(scratch).iterdir():  # what native keeps beside the model too
                    used.unlink()
    head = ["model", "threads", "prefill t/s", "GOP/s", "% of peak", "decode t/s", "GB/s", "% of read"]
    head += ["llama.cpp prefill", "ratio", "llama.cpp decode", "ratio"]
    print(harness.draw([head, *(row.cells() for row in rows)], n_names=1), end="\n\n")
    kernels = {"native": isa_names(load_native())[-1], "llama.cpp": system_info().strip(" |")}
    print("\n".join(f"{name}: {what}" for name, what in kernels.items()), end="\n\n")
    harness.finish(arguments, claims, {"engines": kernels})


if __name__ == "__main__":
    main()
