"""Requests a second of 16 clients: edge_rt joining them against onnxruntime called by one thread per client.

Both in a process of their own, called by 16 threads with one row each. The rival has the setting it is fastest with:
threads of its own choice or one, spinning or not. Bar: at least 1.2 × its requests a second, on every model; what
convolutions take is the same for each row of a batch, so only the layers behind them and the calls themselves gain.
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
N_CLIENTS = 16
NAMES = ("classifier", "inspection", "dense")
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
    with tempfile.TemporaryDirectory(prefix="ert-") as folder:
        flags = tensor_models.catalog(Path(folder), *names) | own
        claims = [_compare(name, Path(folder) / f"{name}.onnx", flags, arguments, cpu_s) for name in names]
    harness.finish(arguments, claims, {"cpu_s_per_request": cpu_s})


def _compare(
    name: str, path: Path, flags: dict[str, Any], arguments: harness.Arguments, cpu_s: dict[str, list[float]]
) -> harness.Claim:
    seconds = 1.0 if arguments.quick else 4.0

    def rate(who: str, process: Process) -> float:
        found, of_request_s = process.clients(N_CLIENTS, seconds)
        cpu_s.setdefault(f"{name}: {who}", []).append(of_request_s)
        return 1 / of_request_s if arguments.own.cpu else found

    with ExitStack() as stack:
        rivals = {
            label: stack.enter_context(Process("onnxruntime", name, path, **settings))
            for label, settings in RIVALS.items()
        }
        ours = stack.enter_context(Process("edge_rt", name, path, **flags))
        rates = {label: max(rate(label, rival) for _ in range(2)) for label, rival in rivals.items()}
        best = max(rates, key=lambda label: rates[label])
        pair = harness.paired(
            "edge_rt",
            lambda: rate("edge_rt", ours),
            f"onnxruntime, {best}",
            lambda: rate(best, rivals[best]),
            n_pairs=arguments.pairs(11, quick=3),
        )
    return harness.Claim(name=f"{name}, {N_CLIENTS} clients", pair=pair, at_least=AT_LEAST)


if __name__ == "__main__":
    main()
