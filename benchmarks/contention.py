"""Decode with busy neighbours: the engine that chooses its threads against every fixed thread count.

Bar: with one and with three busy neighbour processes, at least 0.9 × the best fixed count. All counts are tried in the
same minutes, so the bar holds if it holds against each of them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import default_model
import harness
from subjects import Process, fresh_prompt

from edge_rt.devices import cpu

AT_LEAST = 0.9


def main() -> None:
    arguments = harness.parse(__doc__)
    n_gen = 48 if arguments.quick else 128
    n_pairs = arguments.pairs(7, quick=2)
    path = default_model.path_of(backend="llama_cpu")
    claims: list[harness.Claim] = []
    with ExitStack() as stack:
        chosen = stack.enter_context(Process("engine", path, 0))
        fixed = {n: stack.enter_context(Process("engine", path, n)) for n in range(1, len(cpu.usable_cores()) + 1)}
        for n_neighbours in (1, 3):
            for n_threads, rival in fixed.items():
                with harness.busy_neighbours(n_neighbours):
                    time.sleep(1.0)  # until the scheduler has spread them
                    pair = harness.paired(
                        "threads chosen",
                        lambda: chosen.decode_tps(fresh_prompt(16), n_gen),
                        f"fixed at {n_threads}",
                        lambda rival=rival: rival.decode_tps(fresh_prompt(16), n_gen),
                        n_pairs=n_pairs,
                    )
                claims.append(harness.Claim(name=f"{n_neighbours} busy, decode {n_gen}", pair=pair, at_least=AT_LEAST))
    harness.finish(arguments, claims, {"file": path.name})


if __name__ == "__main__":
    main()
