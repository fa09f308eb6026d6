"""Which forms of a model run fast on a CPU, told from its manifest: what to pull, before there is a file to ask.

The worker dispatches by the file's header. Where the two differ the model runs all the same, not as fast as it could.
"""

from __future__ import annotations

from collections.abc import Mapping

_Needs = tuple[frozenset[str], ...]  # CPU features as `edge_rt devices` lists them; one of the sets suffices

# What the native engine runs, and the features it has kernels for. It runs all 4-bit forms alike.
NATIVE_ARCHITECTURES = frozenset({"llama", "mistral3", "deci", "qwen2", "qwen3", "smollm3"})
NATIVE_FORMS = frozenset({"Q4_0", "Q4_1", "Q4_K", "Q4_K_S", "Q4_K_M"})
NATIVE_KERNELS: _Needs = (frozenset({"avx2", "fma", "f16c"}), frozenset({"neon"}))

# CPU features for which llama.cpp interleaves the rows of a format as it loads it (ggml-org/llama.cpp,
# ggml/src/ggml-cpu/repack.cpp, ggml_repack_get_optimal_repack_type); such formats run two to three times as fast
# as others of their size.
_REPACKED: Mapping[str, _Needs] = {
    "Q4_0": (frozenset({"avx2"}), frozenset({"neon", "dotprod"}), frozenset({"neon", "i8mm"})),
    "IQ4_NL": (frozenset({"avx2"}), frozenset({"neon", "dotprod"})),
}


def is_fast(arch: str, quant: str, features: frozenset[str], backend: str) -> bool:
    """Say whether a form runs as fast as its size allows on this CPU.

    backend  the configured one: unless it is llama_cpu the native engine runs what it can
    """
    is_native = backend != "llama_cpu" and arch in NATIVE_ARCHITECTURES and quant in NATIVE_FORMS
    if is_native and any(need <= features for need in NATIVE_KERNELS):
        return True
    return any(need <= features for need in _REPACKED.get(quant, ()))
