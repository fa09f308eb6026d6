"""Models with random weights must be whole files, of the size and shape asked for, that engines load and agree on."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from benchmarks import synthetic
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile, SeqRows
from edge_rt.catalog.gguf import read_header

_SHAPE = synthetic.Shape(name="tiny", n_layers=2, n_embd=256, n_heads=8, n_kv_heads=2, n_ff=512, n_vocab=1000)


@pytest.mark.parametrize("form", ["q4_0", "q4_1", "f16"])
def test_both_engines_read_the_same_model(form: str, tmp_path: Path) -> None:
    shares: list[float] = []
    path = tmp_path / "tiny.gguf"
    synthetic.write(path, _SHAPE, form, progress=shares.append)
    assert shares[-1] == 1.0
    header = read_header(path)
    assert (header.quant, header.n_vocab, header.n_ff) == (form.upper(), 1000, (512, 512))
    logits = []
    for name in ("native", "llama_cpu"):
        backend = registry.get(name)
        if isinstance(found := backend.probe(), Absent):
            pytest.skip(f"{name}: {found.reason}")
        file = ModelFile(model="tiny", variant="", path=path, quant="")
        session = backend.load(file, LoadOptions(n_ctx=64, n_seq_max=1, n_threads=1))
        logits.append(session.decode([SeqRows(0, 0, list(range(300, 340)), False, want_all=True)])[0].copy())
        session.close()
    assert 0.5 < logits[0].std() < 2.0
    assert np.abs(logits[0] - logits[1]).max() < 0.1


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1 << 20))
    with pytest.raises(OSError, match="1 MiB are free"):
        synthetic.write(tmp_path / "tiny.gguf", _SHAPE, "q4_0", progress=lambda _: None)
    assert list(tmp_path.iterdir()) == []
