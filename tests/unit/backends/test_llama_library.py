from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.backends.base import LoadOptions, ModelFile
from edge_rt.backends.llama_cpu import LlamaCpuBackend
from edge_rt.backends.llama_library import blocks
from edge_rt.errors import BackendLoadError, InvalidRequestError
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


@pytest.mark.parametrize("has_bytes", [False, True])
def test_a_vocabulary_without_bytes_refuses_what_would_end_the_process(tmp_path: Path, has_bytes: bool) -> None:
    written_bytes = [f"<0x{b:02X}>" for b in range(256)] if has_bytes else []
    texts = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", *written_bytes]
    kinds = [2, 3, 1, 1, 1, 1, *(6 for _ in written_bytes)]
    made = tiny_llama(n_vocab=len(texts))
    made.set("tokenizer.ggml.tokens", "[string]", texts)
    made.set("tokenizer.ggml.token_type", "[i32]", kinds)
    path = tmp_path / "m.gguf"
    path.write_bytes(made.encode())
    file = ModelFile(model="m", variant="", path=path, quant="")
    session = LlamaCpuBackend().load(file, LoadOptions(n_ctx=64, n_seq_max=1, n_threads=1))
    try:
        assert session.tokenize("ab a", special=False) == [5, 4, 5]
        assert session.tokenize("<s>ab", special=True)[0] == 1
        if has_bytes:
            assert session.tokenize("é", special=False)[1:] == [6 + 0xC3, 6 + 0xA9]
        else:
            with pytest.raises(InvalidRequestError, match="has no token for 'é', nor for its bytes"):
                session.tokenize("aé", special=False)
    finally:
        session.close()
