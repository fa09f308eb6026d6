"""The default model as the INT4 engine has it, against the native engine's logits. The engine is simulated."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.divergence import Divergence
from edge_rt.backends import registry
from edge_rt.backends.base import LoadOptions, ModelFile, SeqRows
from edge_rt.backends.fpga_layout import Layout
from edge_rt.backends.fpga_llama import read_exact, read_llama
from edge_rt.backends.fpga_products import FpgaProducts, place
from edge_rt.backends.llama_math import KvCache
from hw.fpga.sim.build import CONFIGS
from hw.fpga.sim.port import GoldenPort

pytestmark = pytest.mark.model

N_TOKENS = 8


@pytest.fixture(scope="module")
def file(model_store):
    return ModelFile(model="m", variant="", path=model_store, quant="")


@pytest.fixture(scope="module")
def llama(file):
    return read_llama(file)


@pytest.fixture(scope="module")
def native(file):
    """Token ids of a text and the native engine's logits after each."""
    session = registry.get("native").load(file, LoadOptions(n_ctx=64, n_seq_max=1, n_batch=64, n_ubatch=64))
    text = (Path(__file__).resolve().parents[2] / "tests/golden/prose.txt").read_text(encoding="utf-8")
    ids = session.tokenize(text, special=False)[:N_TOKENS]
    logits = session.decode([SeqRows(0, 0, ids, False, want_all=True)])[0].copy()
    session.close()
    return ids, logits


def divergence(native, logits):
    found = Divergence()
    found.add(native[0], native[1], logits)
    return found.mean_kl


def test_the_mathematics_is_the_native_engines(file, llama, native):
    exact = read_exact(file)
    model = llama.with_linear(lambda name, x: x @ exact[name].T)
    logits = model.forward(native[0], KvCache.of(llama.config, 64), want_all=True)
    assert divergence(native, logits) <= 0.01


def test_the_model_through_a_ring_on_the_golden_model_is_near(llama, native):
    """The format costs some thousandths of a nat on this text; a wrong row costs whole ones."""
    config = CONFIGS["kv260-gemm"]
    placement = place(llama.matrices, Layout(config.beat_bits), config.n_vectors)
    port = GoldenPort(config, np.zeros(placement.memory_bytes, np.uint8))
    model = llama.with_linear(FpgaProducts(port, placement, llama.matrices).multiply)
    logits = model.forward(native[0], KvCache.of(llama.config, 64), want_all=True)
    assert divergence(native, logits) <= 0.02
