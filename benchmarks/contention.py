"""Decode with busy neighbours: the engine that chooses its threads against every fixed thread count.

Bar: with one and with three busy neighbour processes, at least 0.9 × the best fixed count, found by trying all of them
in the same minutes; a claim per count says the same and shows where the others stand.
"""

from __future__ import annotations

import time

import harness
from overhead import Engine, fresh_prompt, model_path

import edge_rt
from edge_rt import config
from edge_rt.devices import cpu

AT_LEAST = 0.9


def main() -> None:
    arguments = harness.parse(__doc__)
    n_gen = 64 if arguments.quick else 256
    n_pairs = arguments.pairs(7, quick=2)
    settings = config.load()
    path = model_path(settings.config)
    claims: list[harness.Claim] = []
    counts = range(1, len(cpu.usable_cores()) + 1)
    with edge_rt.load(path) as free:
        chosen = Engine(free)
        for n_threads in counts:
            with edge_rt.load(path, settings=config.load(flags={"engine.n_threads": n_threads})) as model:
                fixed = Engine(model)
                for n_neighbours in (1, 3):
                    with harness.busy_neighbours(n_neighbours):
                        time.sleep(1.0)  # until the scheduler has spread them
                        pair = harness.paired(
                            "threads chosen",
                            lambda: chosen.decode_tps(fresh_prompt(16), n_gen),
                            f"fixed at {n_threads}",
                            lambda fixed=fixed: fixed.decode_tps(fresh_prompt(16), n_gen),
                            n_pairs=n_pairs,
                        )
                    claims.append(
                        harness.Claim(name=f"{n_neighbours} busy, decode {n_gen}", pair=pair, at_least=AT_LEAST)
                    )
    harness.finish(arguments, sorted(claims, key=lambda claim: claim.name), {"file": path.name})


if __name__ == "__main__":
    main()
