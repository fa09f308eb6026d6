from __future__ import annotations

from edge_rt.backends.llama_library import blocks

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
