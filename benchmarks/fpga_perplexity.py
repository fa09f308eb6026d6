"""Compare perplexity in the INT4 engine's number format with llama.cpp's on the same files. Emulated in float, no RTL.

    python benchmarks/fpga_perplexity.py --text FILE [--forms q4_1,q4_0] [--tokens N] [--parts] [--quick] [--check]

--text is a text file, or .xz of one; of WikiText-2's test set 4,608 tokens are the default. Windows of 512 tokens, each
with a context of its own. Every matrix, the output's too, is in the engine's numbers: its weights and the
activations are what those numbers stand for, multiplied in float32, which the fabric does exactly. Bar: perplexity at
most 0.5 % above llama.cpp's, which rounds activations to eight bits too. --parts says what weights and activations do
alone, each against no rounding at all.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
from divergence import Divergence
from numpy.typing import NDArray
from quality import load, stored

from edge_rt.backends.base import ModelFile, SeqRows
from edge_rt.backends.fpga_llama import FpgaLlama, read_exact, read_llama
from edge_rt.backends.fpga_numbers import encode_activations
from edge_rt.backends.llama_math import Floats, KvCache, Linear

_N_WINDOW = 512
_BAR = 0.5  # per cent


def in_format(x: Floats) -> Floats:
    return encode_activations(x).to_float().astype(np.float32)


def products(weights: dict[str, Floats], round_x: Callable[[Floats], Floats]) -> Linear:
    return lambda name, x: round_x(x) @ weights[name].T


def logits(llama: FpgaLlama, linear: Linear, window: list[int]) -> NDArray[np.float32]:
    return llama.with_linear(linear).forward(window, KvCache.of(llama.config, _N_WINDOW), want_all=True)


def measure(path: Path, text: str, n_tokens: int, *, has_parts: bool) -> dict[str, Divergence]:
    """Give each way of computing, against the one it is compared with."""
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    llama = read_llama(file)
    rounded = {name: matrix.to_float().astype(np.float32) for name, matrix in llama.matrices.items()}
    exact = read_exact(file) if has_parts else {}
    ways = {"weights in the format, float activations": products(rounded, lambda x: x)}
    ways["weights as they are, activations in the format"] = products(exact, in_format)
    session = load("llama_cpu", path, _N_WINDOW)
    ids = session.tokenize(text, special=False)[:n_tokens]
    if len(ids) < n_tokens:
        sys.exit(f"the text has {len(ids)} tokens, not {n_tokens}")
    found: dict[str, Divergence] = {}
    for start in range(0, n_tokens, _N_WINDOW):
        window = ids[start : start + _N_WINDOW]
        session.seq_trim(0, 0)
        reference = session.decode([SeqRows(0, 0, window, False, want_all=True)])[0]
        ours = logits(llama, products(rounded, in_format), window)
        found.setdefault("engine's format from llama.cpp", Divergence()).add(window, reference, ours)
        if has_parts:
            plain = logits(llama, products(exact, lambda x: x), window)
            found.setdefault("llama.cpp from no rounding", Divergence()).add(window, plain, reference)
            found.setdefault("engine's format from no rounding", Divergence()).add(window, plain, ours)
            for name, linear in ways.items():
                found.setdefault(f"{name}, from no rounding", Divergence()).add(
                    window, plain, logits(llama, linear, window)
                )
        d = found["engine's format from llama.cpp"]
        so_far = f"perplexity {d.perplexity:.3f}, llama.cpp's {d.reference_perplexity:.3f}, KL {d.mean_kl:.4f}"
        print(f"{path.stem}: {start + len(window)}/{n_tokens} tokens, {so_far}", file=sys.stderr, flush=True)
    session.close()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="what is predicted")
    parser.add_argument("--forms", default="q4_1,q4_0", metavar="FORMS", help="of the default model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=9 * _N_WINDOW, metavar="N", help="of the text (%(default)s)")
    parser.add_argument("--parts", action="store_true", help="say what each rounding does alone")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    own = arguments.own
    opened = lzma.open if own.text.suffix == ".xz" else open
    with opened(own.text, "rt", encoding="utf-8") as file:
        text = file.read(8 * own.tokens)
    figures = []
    rows = [["form", "compared", "tokens", "perplexity", "of the other", "change %", "mean KL", "same choice %"]]
    for form, path in stored(own.forms.split(",")).items():
        for name, d in measure(path, text, 512 if arguments.quick else own.tokens, has_parts=own.parts).items():
            change = 100 * (d.perplexity / d.reference_perplexity - 1)
            rows.append(
                [
                    form,
                    name,
                    f"{d.n_scored}",
                    f"{d.perplexity:.3f}",
                    f"{d.reference_perplexity:.3f}",
                    f"{change:+.2f}",
                    f"{d.mean_kl:.4f}",
                    f"{100 * d.same_choice:.1f}",
                ]
            )
            if name.endswith("from llama.cpp"):
                figures.append(
                    harness.Figure(
                        name=f"perplexity above llama.cpp's, {form}", unit="%", samples=(change,), at_most=_BAR
                    )
                )
    print(harness.draw(rows, n_names=2), end="\n\n")
    harness.finish(arguments, figures=figures)


if __name__ == "__main__":
    main()
