"""Requests a second of 16 clients: edge_rt joining them against onnxruntime called by one thread per client.

Both in a process of their own, called by 16 threads with one row each. The rival has the setting it is fastest with:
threads of its own choice or one, spinning or not. What joining can bring at most is in the model, not in who joins: the
ceiling is what onnxruntime itself makes of batches over what the same onnxruntime makes of 16 threads, and is measured
beside each model, with the best size of a batch up to the model's own.

wide        weights (101 MB) that no cache holds are read once a batch instead of once a request: at least 1.2 ×
dense       the same layers in 8 MB that the cache holds; what joining saves, Python takes from requests of 0.2 ms
classifier  convolutions take the same for each row: the ceiling is about 1, so there is nothing for joining to win
inspection  the same in 0.3 ms

Bars: 1.2 × the rival's on wide; on each of the others at least 0.95 × edge_rt that does not join, because what does
not pay must be found out and left alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import tensor_models
from tensor_subjects import Process

AT_LEAST = 1.2
NO_WORSE = 0.95
N_CLIENTS = 16
NAMES = ("wide", "dense", "classifier", "inspection")
GAINS = {"wide"}  # whose weights no cache holds
RIVALS: dict[str, dict[str, Any]] = {
    "default": {},
    "1 thread": {"n_threads": 1},
    "default, no spinning": {"spin": False},
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", metavar="NAMES", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of edge_rt's")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time a request instead: for a busy machine")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    names = (arguments.own.models or ",".join(NAMES)).split(",")
    if unknown := {*names} - {*NAMES}:
        sys.exit(f"no such models: {', '.join(unknown)}")
    own = dict(setting.split("=", 1) for setting in arguments.own.set)
    cpu_s: dict[str, list[float]] = {}
    claims: list[harness.Claim] = []
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        flags = tensor_models.catalog(Path(folder), *names) | own
        for name in names:
            claims += _compare(name, Path(folder) / f"{name}.onnx", flags, arguments, cpu_s)
    harness.finish(arguments, claims, {"cpu_s_per_request": cpu_s})


def _compare(
    name: str, path: Path, flags: dict[str, Any], arguments: harness.Arguments, cpu_s: dict[str, list[float]]
) -> list[harness.Claim]:
    seconds = 0.5 if arguments.quick else 4.0
    n_pairs = arguments.pairs(11, quick=3)

    def noted(who: str, rate: float, of_request_s: float) -> float:
        cpu_s.setdefault(f"{name}: {who}", []).append(of_request_s)
        return 1 / of_request_s if arguments.own.cpu else rate

    def rate(who: str, process: Process) -> float:
        return noted(who, *process.clients(N_CLIENTS, seconds))

    def batched(process: Process, n_rows: int) -> float:
        return noted(f"onnxruntime, {n_rows} rows", *process.rows(n_rows, seconds))

    with ExitStack() as stack:
        rivals = {
            label: stack.enter_context(Process("onnxruntime", name, path, **settings))
            for label, settings in RIVALS.items()
        }
        ours = stack.enter_context(Process("edge_rt", name, path, **flags))
        rates = {label: max(rate(label, rival) for _ in range(2)) for label, rival in rivals.items()}
        best = max(rates, key=lambda label: rates[label])

        def rival() -> float:
            return rate(best, rivals[best])

        pair = harness.paired("edge_rt", lambda: rate("edge_rt", ours), f"onnxruntime, {best}", rival, n_pairs=n_pairs)
        claims = [
            harness.Claim(name=f"{name}, 16 clients", pair=pair, at_least=AT_LEAST if name in GAINS else None),
        ]
        of_batches = {
            (label, n_rows): batched(process, n_rows)
            for label, process in rivals.items()
            for n_rows in _sizes(tensor_models.MODELS[name].max_batch)
        }
        label, n_rows = max(of_batches, key=lambda key: of_batches[key])
        pair = harness.paired(
            f"onnxruntime, {label}, {n_rows} rows at a time",
            lambda: batched(rivals[label], n_rows),
            f"onnxruntime, {best}",
            rival,
            n_pairs=min(n_pairs, 5),
        )
        claims.append(harness.Claim(name=f"{name}, ceiling", pair=pair))
        if name not in GAINS:
            alone = stack.enter_context(Process("edge_rt", name, path, **flags, **{"tensor.max_batch": 1}))
            pair = harness.paired(
                "edge_rt",
                lambda: rate("edge_rt", ours),
                "edge_rt, not joining",
                lambda: rate("edge_rt, not joining", alone),
                n_pairs=n_pairs,
            )
            claims.append(harness.Claim(name=f"{name}, does no harm", pair=pair, at_least=NO_WORSE))
    return claims


def _sizes(max_batch: int) -> list[int]:
    return [1 << i for i in range(max_batch.bit_length()) if 1 << i <= max_batch]


if __name__ == "__main__":
    main()
