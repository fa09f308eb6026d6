"""The shared library of edge_rt's own engine, as native/include/edge_native.h declares it."""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from edge_rt.errors import BackendUnavailableError

ABI = 5
NO_CELLS = 1
MAX_THREADS = 256
KV_BLOCK = 32
ERRORS = {
    2: "rows that do not follow their sequence, or a token outside the vocabulary",
    3: "no such sequence, or one that must be empty is not",
    4: "no memory, or no more threads can be had",
    5: "the kernel allows none of the CPUs that were chosen",
}
LINEAR_FAILED = 6
# Order of the tensors given to en_model_new: FIXED, then LAYER for each layer.
FIXED = ("token_embd.weight", "output_norm.weight", "output.weight", "output.bias")
LAYER = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "attn_q.bias",
    "attn_k.bias",
    "attn_v.bias",
    "attn_output.bias",
    "ffn_gate.bias",
    "ffn_up.bias",
    "ffn_down.bias",
)
KV_TYPES = {"f16": 1, "q8_0": 8}
TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
}


class Tensor(ctypes.Structure):
    """en_tensor: data may be None where the file has no such tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n_bytes", ctypes.c_uint64),
        ("n_cols", ctypes.c_int64),
        ("n_rows", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    """en_layer_config."""

    _fields_ = tuple((n, ctypes.c_int32) for n in ("n_heads", "n_kv_heads", "n_ff", "window", "uses_rope"))


class Config(ctypes.Structure):
    """en_config; the arrays that layers and frequencies point to must be kept until the model is loaded."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("n_layers", "n_embd", "head_dim", "n_vocab", "n_rot")),
        *((n, ctypes.c_int32) for n in ("pairs_halves", "temperature_length")),
        *((n, ctypes.c_float) for n in ("temperature_scale", "norm_eps", "attention_factor")),
        ("layers", ctypes.POINTER(Layer)),
        ("frequencies", ctypes.POINTER(ctypes.c_double)),
    )


class Rows(ctypes.Structure):
    """en_rows; want is 0 for no logits, 1 for those after the last row, 2 for all."""

    _fields_ = (
        ("seq_id", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("want", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
    )


class Asked(ctypes.Structure):
    """en_asked."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("seq_id", "token_id", "n_max")),
        ("min_chance", ctypes.c_float),
    )


# en_linear_fn: user, matrix, x, m, k, y, n
LINEAR = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
)

_INT, _POINTER, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "en_isa_count": (_INT, ()),
    "en_isa_name": (ctypes.c_char_p, (_INT,)),
    "en_isa_usable": (_INT, (_INT,)),
    "en_layout": (ctypes.c_char_p, ()),
    "en_pack_model": (ctypes.c_int64, (_POINTER, _POINTER, _INT, _INT, _POINTER, ctypes.c_char_p, _SIZE)),
    "en_model_new": (_POINTER, (_POINTER, _POINTER, _INT, _INT, _POINTER, ctypes.c_uint64, ctypes.c_char_p, _SIZE)),
    "en_model_free": (None, (_POINTER,)),
    "en_model_bytes": (ctypes.c_uint64, (_POINTER,)),
    "en_model_isa": (ctypes.c_char_p, (_POINTER,)),
    "en_context_new": (_POINTER, (_POINTER, _INT, _INT, _INT, _INT, _INT, ctypes.c_char_p, _SIZE)),
    "en_context_free": (None, (_POINTER,)),
    "en_set_threads": (_INT, (_POINTER, _INT)),
    "en_set_cpus": (_INT, (_POINTER, _POINTER, _INT)),
    "en_decode": (_INT, (_POINTER, _POINTER, _INT, _POINTER)),
    "en_seq_length": (_INT, (_POINTER, _INT)),
    "en_seq_copy": (_INT, (_POINTER, _INT, _INT, _INT)),
    "en_seq_trim": (_INT, (_POINTER, _INT, _INT)),
    "en_seq_bytes": (ctypes.c_uint64, (_POINTER, _INT)),
    "en_seq_save": (_INT, (_POINTER, _INT, _POINTER)),
    "en_seq_load": (_INT, (_POINTER, _INT, _INT, _POINTER, ctypes.c_uint64)),
    "en_free_blocks": (_INT, (_POINTER,)),
    "en_matmul": (_INT, (_INT, _POINTER, _POINTER, _INT, _POINTER, _INT)),
    "en_quantize": (_INT, (_INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER)),
    "en_dequantize": (_INT, (_POINTER, ctypes.c_int64, _POINTER)),
    "en_dequantize_packed": (_INT, (_POINTER, ctypes.c_int64, _POINTER)),
    "en_keep_and_spread": (_INT, (_INT, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "en_softmax_attention": (_INT, (_INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER)),
    "en_peak_dots": (ctypes.c_uint64, (_INT, ctypes.c_uint64)),
    "en_peak_read": (ctypes.c_uint64, (_POINTER, ctypes.c_uint64)),
    "en_model_external": (_POINTER, (_POINTER, _POINTER, _INT, _INT, ctypes.c_char_p, _SIZE)),
    "en_set_linear": (None, (_POINTER, LINEAR, _POINTER)),
    "en_seq_save_blocks": (_INT, (_POINTER, _INT, _INT, _INT, _POINTER)),
    "en_seq_append": (_INT, (_POINTER, _INT, _INT, _POINTER, ctypes.c_uint64)),
    "en_keep_states": (_INT, (_POINTER, _INT)),
    "en_seq_state": (_INT, (_POINTER, _INT, _INT, _POINTER)),
    "en_draft_load": (_INT, (_POINTER, _POINTER, _INT, _POINTER, _INT, ctypes.c_char_p, _SIZE)),
    "en_draft_bytes": (ctypes.c_uint64, (_POINTER,)),
    "en_can_draft": (_INT, (_POINTER, _INT)),
    "en_draft": (_INT, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER)),
}


def load_native(path: Path | None = None) -> Any:
    """Load the library built with the package, or the one at path. Raises BackendUnavailableError."""
    return _load(path or _path())


def _path() -> Path:
    return Path(__file__).parent / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


@cache
def _load(path: Path) -> Any:
    if not path.is_file():
        raise BackendUnavailableError(
            backend="native", reason="the package was installed without a C compiler; install one, then edge_rt again"
        )
    try:
        lib = ctypes.CDLL(str(path))
        if (found := lib.en_abi()) != ABI:  # an int, as is what has not been declared
            reason = f"the engine's library has version {found}, {ABI} is needed; install edge_rt again"
            raise BackendUnavailableError(backend="native", reason=reason)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as exc:
        raise BackendUnavailableError(backend="native", reason=f"the engine's library does not load: {exc}") from exc
    return lib


@cache
def build() -> str:
    """Tell one build of the library from another."""
    from edge_rt.catalog.part import hash_file  # this module is imported beside pynq too, where there is no msgspec

    return hash_file(_path())[:16]


def isa_names(lib: Any) -> tuple[str, ...]:
    """List the instruction sets compiled in that this CPU has, best last."""
    return tuple(lib.en_isa_name(i).decode() for i in range(lib.en_isa_count()) if lib.en_isa_usable(i))
