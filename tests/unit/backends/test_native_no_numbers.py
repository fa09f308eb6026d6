"""Weights that are no numbers: every instruction set makes NaN of them, which the sampler refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import ModelFile
from edge_rt.backends.native import _tensors
from edge_rt.backends.native_config import engine_config, read_config
from edge_rt.backends.native_library import KV_TYPES, Rows, load_native
from edge_rt.engine.sampling import Sampler
from edge_rt.errors import BackendStepError, BackendUnavailableError
from edge_rt.types import Sampling
from tests.gguf_files import tiny_llama

try:
    LIB: Any = load_native()
except BackendUnavailableError as exc:
    pytest.skip(f"the native engine is not here: {exc.reason}", allow_module_level=True)

ISAS = [i for i in range(LIB.en_isa_count()) if LIB.en_isa_usable(i)]
NAMES = [LIB.en_isa_name(i).decode() for i in ISAS]
N_VOCAB, IDS = 24, (3, 1, 4, 1, 5, 9, 2, 6)
FILE = tiny_llama(n_layers=1, n_vocab=N_VOCAB, linear="Q4_0", embedding="Q4_0")
HIDDEN = [t.name for t in FILE.tensors if t.name.startswith("blk.")]
BLOCK_BYTES = 18


def written(path: Path, broken: str, value: float) -> ModelFile:
    """Write the model with random weights; one number of a tensor, or the scale of one of its blocks, is the value."""
    rng = np.random.default_rng(1)
    data = bytearray()
    for tensor in FILE.tensors:
        if tensor.type == "F32":
            values = 1 + 0.3 * rng.standard_normal(tensor.size_bytes // 4).astype(np.float32)
            if tensor.name == broken:
                values[len(values) // 2] = value
            data += values.tobytes()
        else:
            blocks = rng.integers(0, 256, (tensor.size_bytes // BLOCK_BYTES, BLOCK_BYTES), dtype=np.uint8)
            scales = np.full(len(blocks), 0.05, np.float16)
            if tensor.name == broken:
                scales[len(blocks) // 2] = value
            blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
            data += blocks.tobytes()
        data += bytes(-len(data) % FILE.alignment)
    raw = FILE.encode()
    path.write_bytes(raw[: len(raw) - len(data)] + data)
    return ModelFile(model="tiny", variant="", path=path, quant="")


def logits(file: ModelFile, isa: int, kv_type: str) -> NDArray[np.float32]:
    """Compute the logits after IDS."""
    raw = np.frombuffer(file.path.read_bytes(), dtype=np.uint8)
    config = engine_config(read_config(file.model, str(file.path), file.header), None)
    tensors = _tensors(file.header, raw.ctypes.data + file.header.data_offset)
    error = ctypes.create_string_buffer(256)
    model = LIB.en_model_new(ctypes.byref(config), tensors, len(tensors), isa, None, 0, error, len(error))
    assert model, error.value
    context = LIB.en_context_new(model, 64, 1, 8, 1, KV_TYPES[kv_type], error, len(error))
    assert context, error.value
    ids = (ctypes.c_int32 * len(IDS))(*IDS)
    out = np.empty(N_VOCAB, np.float32)
    assert LIB.en_decode(context, (Rows * 1)(Rows(0, 0, len(IDS), 1, ctypes.addressof(ids))), 1, out.ctypes.data) == 0
    LIB.en_context_free(context)
    LIB.en_model_free(model)
    return out


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("broken", HIDDEN)
@pytest.mark.parametrize("isa", ISAS, ids=NAMES)
def test_a_layers_weight_that_is_no_number_is_an_error(
    tmp_path: Path, isa: int, broken: str, value: float, kv_type: str
) -> None:
    out = logits(written(tmp_path / "m.gguf", broken, value), isa, kv_type)
    assert np.isnan(out).all()
    for temperature in (0.0, 1.0):
        with pytest.raises(BackendStepError):
            Sampler(Sampling(temperature=temperature), N_VOCAB, IDS).sample(out)


@pytest.mark.parametrize("isa", ISAS, ids=NAMES)
def test_a_sound_model_gives_numbers(tmp_path: Path, isa: int) -> None:
    assert np.isfinite(logits(written(tmp_path / "m.gguf", "", 0.0), isa, "q8_0")).all()
