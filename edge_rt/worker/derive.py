"""Make one quantisation of a model from another with llama.cpp's quantiser, in a process of its own.

`python -m edge_rt.worker.derive SRC DST QUANT` is that process: the quantiser aborts on what it does not like, and
it takes the whole file into memory. The child's stdout holds an error of ours as one JSON line; what llama.cpp
says goes to stderr, of which the last lines are quoted when it fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from edge_rt.catalog.ggml_types import GGML_TYPES
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.part import Derivation
from edge_rt.errors import BackendLoadError, BackendUnavailableError
from edge_rt.same_package import end_with_parent
from edge_rt.worker.child import answer_parent, run_child
from edge_rt.worker.recipe import apply

_EMBEDDING = "token_embd.weight"


def derive(src: Path, dst: Path, how: Derivation) -> None:
    """Make dst of src as told. Raises what quantise and worker/recipe.py's apply raise; dst may then be a part."""
    if how.recipe:
        apply(how.recipe, src, dst, *how.beside)
    else:
        quantise(src, dst, how.quant)


def quantise(src: Path, dst: Path, quant: str) -> None:
    """Write the GGUF file src in another quantisation to dst; the embedding keeps the type it has in src.

    Raises ModelFormatError for a src that is no sound model, BackendUnavailableError without llama.cpp, and
    BackendLoadError with the quantiser's last words. dst may then hold a part of the file.
    """
    run_child("edge_rt.worker.derive", str(src), str(dst), quant, model=src.name, what="the quantiser")


def _quantise(src: Path, dst: Path, quant: str) -> int:
    header = read_header(src)
    try:
        import llama_cpp
    except ImportError as exc:
        raise BackendUnavailableError(backend="llama_cpu", reason=str(exc), extra="llama") from exc
    file_type = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quant}", None)
    if file_type is None:
        raise BackendLoadError(model=src.name, reason=f"llama.cpp has no quantisation {quant}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
    params.nthread = len(os.sched_getaffinity(0))
    params.allow_requantize = True
    if (kept := next((t.type for t in header.tensors if t.name == _EMBEDDING), None)) is not None:
        params.token_embedding_type = next(number for number, kind in GGML_TYPES.items() if kind.name == kept)
    llama_cpp.llama_backend_init()
    return int(llama_cpp.llama_model_quantize(os.fsencode(src), os.fsencode(dst), params))


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run as the child."""
    src, dst, quant = argv
    return answer_parent(lambda: _quantise(Path(src), Path(dst), quant))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
