from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.llama_cpu import LlamaCpuBackend
from edge_rt.backends.llama_library import blocks
from edge_rt.errors import BackendLoadError
from tests.gguf_files import tiny_llama

CONTROL = frozenset({"<|a|>", "<|a|>b", "<|end|>"})


def test_long_texts_are_cut_behind_control_tokens() -> None:
    text = "<|a|>b" * 5000 + "some words <|end|> " * 3000
    parts = list(blocks(text, CONTROL))
    assert "".join(parts) == text
    assert len(parts) == 8000 // 256 + 1
    assert all(part.endswith(("<|a|>b", "<|end|>")) for part in parts[:-1])
    assert max(part.count("<|") for part in parts) == 256


def test_texts_that_are_short_or_plain_stay_whole() -> None:
    for text in ("", "<|a|>" * 2000, "word " * 20_000):
        assert list(blocks(text, CONTROL)) == [text]
    assert list(blocks("<|a|>" * 20_000, frozenset())) == ["<|a|>" * 20_000]


def test_a_context_that_has_no_token_for_each_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_llama().encode())
    file = ModelFile(model="m", variant="", path=path, quant="")
    with pytest.raises(BackendLoadError, match="context of 3 tokens is too small for 4 sequences"):
        LlamaCpuBackend().load(file, LoadOptions(n_ctx=3, n_seq_max=4))
