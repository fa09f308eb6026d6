from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.gguf_reader import ArrayValue
from edge_rt.errors import ModelFormatError
from tests.gguf_files import GgufFile, Tensor, string, tiny_llama, value


def write(path: Path, file: GgufFile | bytes) -> Path:
    path.write_bytes(file if isinstance(file, bytes) else file.encode())
    return path


def test_facts_of_a_sound_file(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", tiny_llama()))
    assert (header.version, header.arch, header.quant) == (3, "llama", "Q4_0")
    assert (header.n_layers, header.embedding_length, header.n_ctx_train, header.n_vocab) == (2, 64, 128, 64)
    assert (header.n_heads, header.n_kv_heads, header.key_dim, header.value_dim) == ((4, 4), (2, 2), 16, 16)
    assert header.kv_elements_per_token == 2 * 2 * (16 + 16)
    assert header.chat_template == "{{ messages }}"
    # embedding and final norm, then by layer: two norms, q and output, k and v, gate, up and down
    assert header.n_params == 64 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert header.data_offset % 32 == 0
    last = header.tensors[-1]
    assert header.data_offset + last.offset + last.size_bytes == header.file_bytes


def test_version_2_is_read(tmp_path: Path) -> None:
    file = tiny_llama()
    file.version = 2
    assert read_header(write(tmp_path / "m.gguf", file)).version == 2


def test_long_arrays_are_counted_and_not_kept(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", tiny_llama(n_vocab=5000)))
    assert header.n_vocab == 5000
    assert header.metadata["tokenizer.ggml.tokens"] == ArrayValue("string", 5000, None)
    assert header.metadata["tokenizer.ggml.scores"] == ArrayValue("f32", 5000, None)


@pytest.mark.parametrize("n_vocab", [64, 300_000])
def test_a_vocabulary_with_the_same_token_twice_is_refused(tmp_path: Path, n_vocab: int) -> None:
    file = tiny_llama(n_vocab=n_vocab)
    tokens = ["", "", *(f"t{i}" for i in range(n_vocab - 2))]
    file.set("tokenizer.ggml.tokens", "[string]", tokens)
    assert read_header(write(tmp_path / "m.gguf", file)).n_vocab == n_vocab
    file.set("tokenizer.ggml.tokens", "[string]", [*tokens[:-1], "t0\0more"])
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.tokens: two of its strings are the same"):
        read_header(write(tmp_path / "m.gguf", file))


@pytest.mark.parametrize(
    ("key", "number", "problem"),
    [
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "nan is not a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, r"-1\.0 is below 0"),
        ("llama.rope.freq_base", float("inf"), "inf is not a finite number"),
    ],
)
def test_numbers_that_ggml_would_abort_on_are_refused(tmp_path: Path, key: str, number: float, problem: str) -> None:
    file = tiny_llama()
    file.set(key, "f32", number)
    with pytest.raises(ModelFormatError, match=f"{key}: {problem}"):
        read_header(write(tmp_path / "m.gguf", file))


def test_layers_of_different_width(tmp_path: Path) -> None:
    file = tiny_llama()
    file.set("llama.attention.head_count", "[u32]", [4, 0])
    file.set("llama.attention.head_count_kv", "[u32]", [1, 0])
    file.set("llama.attention.key_length", "u32", 24)
    header = read_header(write(tmp_path / "m.gguf", file))
    assert header.n_kv_heads == (1, 0)
    assert header.kv_elements_per_token == 24 + 16


def test_a_model_without_attention(tmp_path: Path) -> None:
    file = tiny_llama()
    del file.keys["llama.attention.head_count"], file.keys["llama.attention.head_count_kv"]
    assert read_header(write(tmp_path / "m.gguf", file)).kv_elements_per_token == 0


def test_a_gap_between_tensors_and_bytes_after_the_last_are_allowed(tmp_path: Path) -> None:
    file = tiny_llama()
    file.tensors[-1].offset = file.data_bytes()
    file.tail = bytes(1 << 16)
    assert len(read_header(write(tmp_path / "m.gguf", file)).tensors) == 20


@pytest.mark.model
def test_the_real_model(model_store: Path) -> None:
    header = read_header(model_store)
    assert (header.arch, header.n_layers, header.n_vocab, header.n_params) == ("llama", 30, 49152, 134_515_008)
    assert header.kv_elements_per_token == 30 * 2 * 3 * 64
    assert header.chat_template is not None


def _set(key: str, kind: str, content: object) -> Callable[[GgufFile], None]:
    return lambda file: file.set(key, kind, content)


def _raw(key: str | bytes, raw: bytes) -> Callable[[GgufFile], None]:
    def change(file: GgufFile) -> None:
        file.keys[key] = raw

    return change


def _delete(key: str) -> Callable[[GgufFile], None]:
    def change(file: GgufFile) -> None:
        del file.keys[key]

    return change


def _field(**values: object) -> Callable[[GgufFile], None]:
    def change(file: GgufFile) -> None:
        for name, content in values.items():
            setattr(file, name, content)

    return change


def _tensor(**values: object) -> Callable[[GgufFile], None]:
    """Change the embedding, the first tensor."""

    def change(file: GgufFile) -> None:
        for name, content in values.items():
            setattr(file.tensors[0], name, content)

    return change


def _add(tensor: Tensor) -> Callable[[GgufFile], None]:
    return lambda file: file.tensors.append(tensor)


EMBEDDING = "tensor token_embd.weight"
HEADS = "llama.attention.head_count"
TOKENS = "tokenizer.ggml.tokens"
# name -> (what is wrong, field of the error, part of its problem)
CASES: dict[str, tuple[Callable[[GgufFile], None], str, str]] = {
    "not GGUF": (_field(magic=b"PK\x03\x04"), "magic", "not a GGUF file"),
    "version 1": (_field(version=1), "version", "1 is not supported"),
    "version 4": (_field(version=4), "version", "4 is not supported"),
    "big-endian": (_field(version=3 << 24), "version", "big-endian"),
    "no tensors": (_field(tensors=[]), "tensor count", "no tensors"),
    "huge tensor count": (_field(n_tensors=2**64 - 1), "tensor count", "the limit is"),
    "more tensors than bytes": (_field(n_tensors=16_000), "tensor count", "do not fit"),
    "huge key count": (_field(n_keys=2**63), "key count", "the limit is"),
    "more keys than bytes": (_field(n_keys=4000, tensors=[Tensor("x", (32,))]), "key count", "do not fit"),
    "too few keys counted": (_field(n_keys=3), "tensor llama.context_length", "overflows"),
    "empty key": (_raw("", value("u32", 1)), "key 16", "printable ASCII"),
    "key with an escape sequence": (_raw("a\x1b[2Jb", value("u32", 1)), "key 16", "printable ASCII"),
    "key that is not UTF-8": (_raw(b"\xff\xfe", value("u32", 1)), "key 16", "not UTF-8"),
    "key too long": (_raw("k" * 300, value("u32", 1)), "key 16", "the limit is 256"),
    "doubled key": (_field(doubled_keys=["general.name"]), "general.name", "twice"),
    "unknown value type": (_raw("x", struct.pack("<I", 13)), "x", "unknown value type 13"),
    "bool of 2": (_raw("x", struct.pack("<IB", 7, 2)), "x", "bool of 2"),
    "string of 2**63 bytes": (_raw("x", struct.pack("<IQ", 8, 2**63)), "x", "the limit is"),
    "string past the end": (_raw("x", struct.pack("<IQ", 8, 2**20)), "x", "do not fit"),
    "string that is not UTF-8": (_raw("x", struct.pack("<I", 8) + string(b"\xc3\x28")), "x", "not UTF-8"),
    "nested array": (_raw("x", struct.pack("<IIQ", 9, 9, 1)), "x", "nested"),
    "array of unknown type": (_raw("x", struct.pack("<IIQ", 9, 77, 1)), "x", "unknown value type 77"),
    "array of 2**62 numbers": (_raw("x", struct.pack("<IIQ", 9, 10, 2**62)), "x", "the limit is"),
    "array past the end": (_raw("x", struct.pack("<IIQ", 9, 10, 20_000)), "x", "do not fit"),
    "array of 2**40 strings": (_raw("x", struct.pack("<IIQ", 9, 8, 2**40)), "x", "the limit is"),
    "array item past the end": (_raw("x", struct.pack("<IIQQ", 9, 8, 3000, 2**19)), "x", "truncated"),
    "values over the budget": (
        _field(keys={f"x{i}": value("string", "é" * 500_000) for i in range(5)}),
        "x4",
        "take more than",
    ),
    "alignment 0": (_set("general.alignment", "u32", 0), "general.alignment", "not in"),
    "alignment 48": (_set("general.alignment", "u32", 48), "general.alignment", "power of two"),
    "alignment 2**31": (_set("general.alignment", "u32", 2**31), "general.alignment", "not in"),
    "alignment as text": (_set("general.alignment", "string", "32"), "general.alignment", "whole number"),
    "tensor name empty": (_tensor(name=""), "tensor 0", "printable ASCII"),
    "tensor name too long": (_tensor(name="n" * 64), "tensor 0", "the limit is 63"),
    "doubled tensor": (_add(Tensor("token_embd.weight", (32,))), EMBEDDING, "twice"),
    "no dimensions": (_field(n_dims=0), EMBEDDING, "0 dimensions"),
    "five dimensions": (_field(n_dims=5), EMBEDDING, "5 dimensions"),
    "dimension of 0": (_tensor(shape=(64, 0)), EMBEDDING, "dimension of 0"),
    "elements overflow": (_add(Tensor("x", (2**32, 2**32, 2), has_data=False)), "tensor x", "overflows"),
    "elements wrap to a small number": (_add(Tensor("x", (2**33, 2**31 + 1), has_data=False)), "tensor x", "overflows"),
    "bytes overflow 64 bits": (_add(Tensor("x", (2**62, 1), has_data=False)), "tensor x", "truncated"),
    "unknown tensor type": (_tensor(type_number=43), EMBEDDING, "unknown tensor type 43"),
    "removed tensor type": (_tensor(type_number=31), EMBEDDING, "unknown tensor type 31"),
    "row not of whole blocks": (_tensor(shape=(48, 64), type="Q4_0"), EMBEDDING, "not a multiple"),
    "row below a k-quant's block": (_tensor(shape=(64, 64), type="IQ3_S"), EMBEDDING, "block of 256"),
    "offset not aligned": (_tensor(offset=8), EMBEDDING, "alignment"),
    "offset past the end": (_tensor(offset=2**40), EMBEDDING, "truncated"),
    "offset wraps": (_add(Tensor("x", (32,), offset=2**64 - 32)), "tensor x", "truncated"),
    "tensors overlap": (lambda f: setattr(f.tensor("output_norm.weight"), "offset", 0), "tensor ", "overlap"),
    "architecture missing": (_delete("general.architecture"), "general.architecture", "missing"),
    "architecture a number": (_set("general.architecture", "u32", 5), "general.architecture", "text is expected"),
    "architecture a path": (_set("general.architecture", "string", "../x"), "general.architecture", "not an arch"),
    "part of a split model": (_set("split.count", "u16", 4), "split.count", "4 parts"),
    "layers missing": (_delete("llama.block_count"), "llama.block_count", "missing"),
    "layers 0": (_set("llama.block_count", "u32", 0), "llama.block_count", "not in"),
    "layers 2**32 - 1": (_set("llama.block_count", "u32", 2**32 - 1), "llama.block_count", "not in"),
    "layers a bool": (_set("llama.block_count", "bool", 1), "llama.block_count", "whole number"),
    "context missing": (_delete("llama.context_length"), "llama.context_length", "missing"),
    "context negative": (_set("llama.context_length", "i32", -1), "llama.context_length", "not in"),
    "width missing": (_delete("llama.embedding_length"), "llama.embedding_length", "missing"),
    "width a float": (_set("llama.embedding_length", "f32", 64.0), "llama.embedding_length", "whole number"),
    "too many head counts": (_set(HEADS, "[u32]", [4, 4, 4]), HEADS, "3 items for 2 layers"),
    "head counts of text": (_set(HEADS, "[string]", ["4", "4"]), HEADS, "whole number"),
    "heads not in groups": (_set("llama.attention.head_count_kv", "u32", 3), "llama.attention.head_count_kv", "divide"),
    "key length huge": (_set("llama.attention.key_length", "u32", 2**31), "llama.attention.key_length", "not in"),
    "too many widths": (
        _set("llama.feed_forward_length", "[u32]", [1] * 5000),
        "llama.feed_forward_length",
        "5000 items for 2 layers",
    ),
    "no vocabulary": (_delete(TOKENS), TOKENS, "no vocabulary"),
    "empty vocabulary": (_set(TOKENS, "[string]", []), TOKENS, "no vocabulary"),
    "vocabulary of numbers": (_set(TOKENS, "[u32]", [1] * 64), TOKENS, "list of string is expected"),
    "vocabulary not as long as the embedding": (
        _set(TOKENS, "[string]", [f"a{i}" for i in range(63)]),
        "tokenizer.ggml.scores",
        "64",
    ),
    "fewer scores than tokens": (_set("tokenizer.ggml.scores", "[f32]", [0.0]), "tokenizer.ggml.scores", "1 items"),
    "scores as bytes": (_set("tokenizer.ggml.scores", "[u8]", [0] * 64), "tokenizer.ggml.scores", "f32"),
    "types as text": (_set("tokenizer.ggml.token_type", "string", "x"), "tokenizer.ggml.token_type", "i32"),
    "merges as numbers": (_set("tokenizer.ggml.merges", "[u32]", [1]), "tokenizer.ggml.merges", "string"),
    "embedding of another vocabulary": (_tensor(shape=(64, 32)), EMBEDDING, "vocabulary"),
}


@pytest.mark.parametrize("name", CASES)
def test_crafted_file_is_refused_by_its_field(name: str, tmp_path: Path) -> None:
    change, field, problem = CASES[name]
    file = tiny_llama()
    change(file)
    with pytest.raises(ModelFormatError) as caught:
        read_header(write(tmp_path / "m.gguf", file))
    assert caught.value.field.startswith(field)
    assert problem in caught.value.problem
    assert len(str(caught.value)) < 700


SOUND = tiny_llama().encode()
HEADER_BYTES = len(tiny_llama().header())


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for size in (*range(0, HEADER_BYTES, 7), HEADER_BYTES, len(SOUND) - 1):
        with pytest.raises(ModelFormatError):
            read_header(write(path, SOUND[:size]))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ModelFormatError, match="cannot be read"):
            read_header(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=8),
    end=st.integers(HEADER_BYTES // 2, len(SOUND)),
)
@example(flips=[(8, 255), (15, 255)], end=len(SOUND))
def test_a_damaged_file_is_refused_or_read_and_nothing_else(
    flips: list[tuple[int, int]], end: int, tmp_path: Path
) -> None:
    raw = bytearray(SOUND)
    for at, byte in flips:
        raw[at] = byte
    try:
        header = read_header(write(tmp_path / "m.gguf", bytes(raw[:end])))
    except ModelFormatError:
        return
    assert all(header.data_offset + t.offset + t.size_bytes <= end for t in header.tensors)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=400))
def test_noise_after_a_true_beginning_is_refused(noise: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError):
        read_header(write(tmp_path / "m.gguf", b"GGUF\x03\x00\x00\x00" + noise))
