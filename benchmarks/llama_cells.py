"""What cells of their own bring to llama.cpp's sequences: a step's time with them, against one pool for all, in turns.

    python benchmarks/llama_cells.py [--quick] [--check] [--json FILE]

1, 4, 8 and 16 sequences of about 256 tokens, one row of each in a step, on llama.cpp with two threads and 16 sequences
at most. Bars: nowhere slower than 0.97 ×, at least 1.1 × at 8 and 1.25 × at 16 sequences.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import default_model
import harness

from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.llama_cpu import LlamaCpuSession, open_session
from edge_rt.devices.base import known

_N_TOKENS = 240
_N_STEPS = 16  # up to the 256 tokens that llama.cpp rounds to
_AT_LEAST = {1: 0.97, 4: 0.97, 8: 1.1, 16: 1.25}


def steps_per_s(session: LlamaCpuSession, n_sequences: int) -> float:
    """Decode a row of each sequence behind _N_TOKENS, over and over: steps a second."""
    seconds = 0.0
    for position in range(_N_TOKENS, _N_TOKENS + _N_STEPS):
        batch = [SeqRows(seq_id, position, [5], want_logits=True) for seq_id in range(n_sequences)]
        begun_s = time.perf_counter()
        session.decode(batch)
        seconds += time.perf_counter() - begun_s
    for seq_id in range(n_sequences):
        session.seq_trim(seq_id, _N_TOKENS)
    return _N_STEPS / seconds


def main() -> None:
    arguments = harness.parse(__doc__)
    file = ModelFile(model="default", variant="", path=default_model.path_of(backend="llama_cpu"), quant="")
    options = LoadOptions(n_ctx=8192, n_seq_max=16, n_threads=2)
    claims: list[harness.Claim] = []
    with ExitStack() as stack:
        # Without the memory to hold cells twice there is the pool alone.
        parts, pool = (
            stack.enter_context(
                closing(
                    open_session(file, options, is_interrupted=lambda: False, available=lambda b=b: known(b, "given"))  # type: ignore[misc]
                )
            )
            for b in (2**40, 0)
        )
        if not parts.is_in_parts or pool.is_in_parts:
            raise RuntimeError("the cells do not lie as they should")
        for n in _AT_LEAST:
            for session in (parts, pool):
                for seq_id in range(n):
                    session.seq_trim(seq_id, 0)
                    ids = [100 + (7 * seq_id + i) % 400 for i in range(_N_TOKENS)]
                    session.decode([SeqRows(seq_id, 0, ids, want_logits=False)])
            pair = harness.paired(
                "in parts",
                lambda n=n: steps_per_s(parts, n),  # type: ignore[misc]
                "one pool",
                lambda n=n: steps_per_s(pool, n),  # type: ignore[misc]
                n_pairs=arguments.pairs(11, quick=3),
            )
            claims.append(harness.Claim(name=f"{n} sequences, steps/s", pair=pair, at_least=_AT_LEAST[n]))
    harness.finish(arguments, claims)


if __name__ == "__main__":
    main()
