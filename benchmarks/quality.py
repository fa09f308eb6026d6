"""Compare the native engine's logits with llama.cpp's on the same file, and with float arithmetic on the same weights.

    python benchmarks/quality.py [--forms q4_1,q4_0 | --file GGUF ...] [--text FILE ...] [--truth] [--quick] [--check]

Bars for all texts of a form together: mean KL divergence of at most 0.005, perplexity within 0.5 %. Both engines round
activations to eight bits and go apart by that; --truth says how far each is from the same weights in F32 without any
rounding (it writes such a file for the time of the run: half a gigabyte for the default model). Texts: prose and a
technical text from the tests, the licence, the engine's own source, and any other file named with --text.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import harness
from divergence import Divergence
from llama_cpp import llama_cpp as lib

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.backends.native_library import isa_names, load_native
from edge_rt.catalog.store import Store

_ROOT = Path(__file__).resolve().parent.parent
_TEXTS = ("tests/golden/prose.txt", "tests/golden/technical.txt", "LICENSE", "native/src/pool.c")
_N_WINDOW = 256
_KL_BAR = 5.0  # thousandths of a nat
_PERPLEXITY_BAR = 0.5  # per cent


def load(backend: str, path: Path, n_window: int = _N_WINDOW) -> TokenSession:
    file = ModelFile(model=path.stem, variant="", path=path, quant="")
    options = LoadOptions(n_ctx=n_window, n_seq_max=1, n_batch=n_window, n_ubatch=n_window)
    return registry.get(backend).load(file, options)


def compare(reference: TokenSession, session: TokenSession, ids: list[int]) -> Divergence:
    """Compare on windows of a text, each with a context of its own."""
    found = Divergence()
    for start in range(0, len(ids), _N_WINDOW):
        window = ids[start : start + _N_WINDOW]
        logits = []
        for each in (reference, session):
            each.seq_trim(0, 0)
            logits.append(each.decode([SeqRows(0, 0, window, False, want_all=True)])[0])
        found.add(window, *logits)
    return found


def write_f32(source: Path, target: Path) -> None:
    """Spread a model's weights out to floats, with llama.cpp's quantiser."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = 0, True
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        raise RuntimeError(f"llama.cpp does not write {source.name} as F32")


def measure(
    path: Path, texts: Mapping[str, str], n_tokens: int, *, has_truth: bool
) -> list[tuple[str, str, Divergence]]:
    """Give the pair compared, the text and the result of each comparison."""
    found = []
    native, llama = load("native", path), load("llama_cpu", path)
    ids = {name: native.tokenize(text, special=False)[:n_tokens] for name, text in texts.items()}
    for name in texts:
        found.append(("native from llama.cpp", name, compare(llama, native, ids[name])))
        say(f"{path.name}, {name}: {found[-1][2].mean_kl:.5f}")
    if has_truth:
        with tempfile.TemporaryDirectory() as folder:
            write_f32(path, Path(folder) / "f32.gguf")
            truth = load("llama_cpu", Path(folder) / "f32.gguf")
            for kind, session in (("native from F32", native), ("llama.cpp from F32", llama)):
                for name in texts:
                    found.append((kind, name, compare(truth, session, ids[name])))
                    say(f"{path.name}, {name}, {kind}: {found[-1][2].mean_kl:.5f}")
            truth.close()
    native.close()
    llama.close()
    return found


def stored(forms: list[str]) -> dict[str, Path]:
    """Find the default model's files of these forms."""
    settings = config.load().config.catalog
    store = Store.open(settings, os.environ)
    manifest = store.get(settings.default_model)
    files = {v.id: path for v in manifest.variants if v.id in forms and (path := store.path(manifest, v)) is not None}
    if missing := sorted(set(forms) - set(files)):
        sys.exit(f"{manifest.id} has no form {missing[0]} in the store: `edge_rt models pull` fetches it")
    return files


def total(found: list[tuple[str, str, Divergence]], kind: str) -> Divergence:
    result = Divergence()
    for each, _, divergence in found:
        if each == kind:
            result += divergence
    return result


def row(form: str, kind: str, text: str, d: Divergence) -> list[str]:
    return [
        form,
        kind,
        text,
        str(len(d.kl)),
        f"{d.mean_kl:.5f}",
        f"{100 * d.same_choice:.1f}",
        f"{d.perplexity:.3f}",
        f"{d.reference_perplexity:.3f}",
        f"{100 * d.perplexity_change:.2f}",
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", default="q4_1,q4_0", metavar="FORMS", help="of the default model (%(default)s)")
    parser.add_argument("--file", type=Path, action="append", default=[], metavar="GGUF", help="these models instead")
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE", help="one more text")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="at most so many of a text (%(default)s)")
    parser.add_argument("--truth", action="store_true", help="compare both with the same weights in F32 too")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=add_options)
    own = arguments.own
    paths = [*(_ROOT / name for name in _TEXTS), *own.text]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    files = {path.stem: path for path in own.file} or stored(own.forms.split(","))
    figures: list[harness.Figure] = []
    rows = [
        ["form", "compared", "text", "tokens", "mean KL", "same choice %", "perplexity", "of the other", "change %"]
    ]
    for form, path in files.items():
        found = measure(path, texts, 256 if arguments.quick else own.tokens, has_truth=own.truth)
        for kind in dict.fromkeys(kind for kind, _, _ in found):
            rows += [row(form, kind, text, d) for each, text, d in found if each == kind]
            rows.append(row(form, kind, "all", total(found, kind)))
        d = total(found, "native from llama.cpp")
        kl, change = (1000 * d.mean_kl,), (100 * d.perplexity_change,)
        figures.append(harness.Figure(name=f"mean KL, {form}", unit="nats / 1000", samples=kl, at_most=_KL_BAR))
        figures.append(
            harness.Figure(name=f"change of perplexity, {form}", unit="%", samples=change, at_most=_PERPLEXITY_BAR)
        )
    print(harness.draw(rows, n_names=3), end="\n\n")
    print(f"native: {isa_names(load_native())[-1]}", end="\n\n")
    harness.finish(arguments, figures=figures)


if __name__ == "__main__":
    main()
