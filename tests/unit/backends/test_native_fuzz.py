"""Broken and odd model files against the native engine: refused with a typed error, or computed; never a crash."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.native import NativeBackend, _tensors
from edge_rt.backends.native_config import engine_config, read_config
from edge_rt.backends.native_library import Rows, load_native
from edge_rt.backends.native_weights import NativeWeights
from edge_rt.errors import BackendUnavailableError, ModelFormatError
from tests.gguf_files import tiny_llama

try:
    load_native()
except BackendUnavailableError as exc:
    pytest.skip(f"the native engine is not here: {exc.reason}", allow_module_level=True)

SOUND = tiny_llama(n_vocab=24).encode()
N_HEADER = SOUND.index(b"blk.1.ffn_down.weight") + 64
OPTIONS = LoadOptions(n_ctx=64, n_seq_max=2, n_batch=32, n_ubatch=8, n_threads=1)
KEYS = [at for at in range(N_HEADER) if SOUND.startswith((b"llama.", b"blk.", b"general.", b"token"), at)]

# A byte anywhere in the header, or a number right behind a name, where types, counts, shapes and values stand.
CHANGES = st.one_of(
    st.tuples(st.integers(0, N_HEADER - 1), st.binary(min_size=1, max_size=1)),
    st.tuples(
        st.tuples(st.sampled_from(KEYS), st.integers(0, 40)).map(sum),
        st.one_of(
            st.integers(0, 2**32 - 1).map(lambda n: struct.pack("<I", n)),
            st.sampled_from([0, 1, 2, 3, 7, 8, 12, 16, 31, 32, 64, 96, 2**31, 2**63]).map(
                lambda n: struct.pack("<Q", n)
            ),
            st.floats(width=32).map(lambda f: struct.pack("<f", f)),
        ),
    ),
)


def compute(file: ModelFile) -> None:
    """Load the weights and run a step, without the tokenizer, which is llama.cpp's."""
    lib, raw = load_native(), np.frombuffer(file.path.read_bytes(), dtype=np.uint8)
    config = read_config(file.model, str(file.path), file.header)
    if config.rope.factors_tensor(OPTIONS.n_ctx):
        return  # read by the session
    tensors = _tensors(file.header, raw.ctypes.data + file.header.data_offset)
    weights = NativeWeights(lib, file.model, file.path, engine_config(config, None), tensors, packed_copy=False)
    error = ctypes.create_string_buffer(256)
    context = lib.en_context_new(weights.pointer, 64, 2, 8, 1, 1, error, len(error))
    assert context, error.value
    ids = (ctypes.c_int32 * 9)(*(i % file.header.n_vocab for i in range(9)))
    rows = (Rows * 1)(Rows(0, 0, 9, 1, ctypes.addressof(ids)))
    logits = np.empty((1, file.header.n_vocab), dtype=np.float32)
    assert lib.en_decode(context, rows, 1, logits.ctypes.data) == 0
    lib.en_context_free(context)
    weights.close()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(CHANGES, min_size=0, max_size=3))
def test_a_changed_header_is_refused_or_computed(tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    raw = bytearray(SOUND)
    for at, what in changes:
        raw[at : at + len(what)] = what
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    file = ModelFile(model="tiny", variant="", path=path, quant="")
    try:
        reason = NativeBackend().supports(file, OPTIONS)
    except ModelFormatError:
        return
    if reason is None:
        compute(file)
    else:
        assert "native engine" in reason
    assert reason is None or changes
