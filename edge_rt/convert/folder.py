"""A folder of ONNX Runtime GenAI and a GGUF file of the same model, made into one GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import gguf
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from edge_rt.backends.native_config import ARCHITECTURES, NativeConfig, read_config
from edge_rt.catalog.gguf import GgufHeader, read_header
from edge_rt.convert.decoder import Decoder, DecoderWalk
from edge_rt.convert.graph import FLOATS, Graph, read_bounded
from edge_rt.errors import ModelFormatError

CONFIG_NAME = "genai_config.json"
_MAX_CONFIG_BYTES = 2**20
_ROPE_FREQS = "rope_freqs.weight"
# GenAI's model types by what GGUF calls the architecture.
_TYPES = {"llama": ("llama", "mistral", "smollm"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
# Keys that say how the vocabulary's own file was made.
_NOT_COPIED = ("GGUF.", "split.", "quantize.", "general.architecture", "general.alignment", "general.file_type")
_NOT_COPIED_EITHER = ("general.quantization_version", "general.quantized_by")
_HALF = np.dtype("<f2")  # of the embedding: F32 would make it most of a small model's file
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3}

_Count = Annotated[int, Meta(ge=1, le=2**24)]


class _DecoderConfig(msgspec.Struct):
    filename: Annotated[str, Meta(min_length=1, max_length=255)]
    hidden_size: _Count
    head_size: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    num_hidden_layers: _Count


class _Model(msgspec.Struct):
    type: str
    vocab_size: _Count
    decoder: _DecoderConfig


class _GenaiConfig(msgspec.Struct):
    model: _Model


def convert_folder(folder: Path, vocab: Path, dst: Path) -> None:
    """Write dst. Raises ModelFormatError naming what is not known or does not agree, and BackendLoadError."""
    genai = _read_genai(folder)
    header = read_header(vocab)
    reader = gguf.GGUFReader(vocab)
    config = _config(header, vocab)
    _check_agreement(genai, header, config, folder)
    factors = next((t.data for t in reader.tensors if t.name == _ROPE_FREQS), None)
    graph = Graph(folder, genai.decoder.filename)
    decoder = DecoderWalk(
        graph,
        config,
        permutes_heads=not config.rope.pairs_halves,
        has_qk_norm=ARCHITECTURES[header.arch].has_qk_norm,
        frequencies=config.rope.frequencies(None if factors is None else [float(f) for f in factors]),
    ).run()
    try:
        _write(dst, header.arch, reader, graph, decoder, factors)
    except UnicodeDecodeError as exc:
        raise ModelFormatError(path=str(vocab), field="text", problem=f"is not UTF-8: {exc.reason}") from exc


def _read_genai(folder: Path) -> _Model:
    raw = read_bounded(folder, CONFIG_NAME, _MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(raw, type=_GenaiConfig).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelFormatError(path=str(folder / CONFIG_NAME), field="JSON", problem=str(exc)) from exc


def _config(header: GgufHeader, vocab: Path) -> NativeConfig:
    """Read the hyperparameters as the native engine does; the weights' types are the ONNX model's business."""
    if header.arch not in _TYPES:
        raise ModelFormatError(
            path=str(vocab),
            field="general.architecture",
            problem=f"ONNX models of {header.arch} are not known here, only {', '.join(_TYPES)}",
        )
    tensors = tuple(t if t.name == _ROPE_FREQS else replace(t, type="F32") for t in header.tensors)
    config = read_config(vocab.name, str(vocab), replace(header, tensors=tensors))
    if config.rope.is_longrope or config.rope.n_rot != config.head_dim:
        raise ModelFormatError(
            path=str(vocab), field="rope", problem="RoPE of two lengths or of parts of a head is not known here"
        )
    if any(not (layer.n_kv_heads and layer.n_ff and layer.uses_rope) for layer in config.layers):
        raise ModelFormatError(path=str(vocab), field="layers", problem="layers without a part are not known here")
    return config


def _check_agreement(genai: _Model, header: GgufHeader, config: NativeConfig, folder: Path) -> None:
    decoder, first = genai.decoder, config.layers[0]
    facts: tuple[tuple[str, object, object], ...] = (
        ("model.vocab_size", genai.vocab_size, header.n_vocab),
        ("model.decoder.hidden_size", decoder.hidden_size, config.n_embd),
        ("model.decoder.head_size", decoder.head_size, config.head_dim),
        ("model.decoder.num_hidden_layers", decoder.num_hidden_layers, len(config.layers)),
        ("model.decoder.num_attention_heads", decoder.num_attention_heads, first.n_heads),
        ("model.decoder.num_key_value_heads", decoder.num_key_value_heads, first.n_kv_heads),
    )
    for name, here, there in facts:
        if here != there:
            raise ModelFormatError(
                path=str(folder / CONFIG_NAME), field=name, problem=f"{here}, the file given as --vocab has {there}"
            )
    if genai.type not in _TYPES[header.arch]:
        raise ModelFormatError(
            path=str(folder / CONFIG_NAME),
            field="model.type",
            problem=f"{genai.type!r} is not {header.arch}, which the file given as --vocab is",
        )


def _write(
    dst: Path,
    arch: str,
    reader: gguf.GGUFReader,
    graph: Graph,
    decoder: Decoder,
    factors: NDArray[np.float32] | None,
) -> None:
    with closing(gguf.GGUFWriter(dst, arch)) as writer:
        _copy_keys(reader, writer)
        _write_tensors(writer, graph, decoder, factors)


def _write_tensors(
    writer: gguf.GGUFWriter, graph: Graph, decoder: Decoder, factors: NDArray[np.float32] | None
) -> None:
    kinds = [matrix.quant for matrix in decoder.matrices.values()]
    most = max(("Q4_0", "Q4_1"), key=kinds.count)
    writer.add_file_type(_FILE_TYPES[most])
    writer.add_quantization_version(2)
    vectors = decoder.vectors if factors is None else decoder.vectors | {_ROPE_FREQS: np.asarray(factors, np.float32)}
    table, is_turned = decoder.embedding
    rows = graph.shape(table, "the embedding")
    n_bytes = rows[0] * rows[1] * _HALF.itemsize
    writer.add_tensor_info("token_embd.weight", rows[::-1] if is_turned else rows, _HALF, n_bytes)
    for name, matrix in decoder.matrices.items():
        quant = gguf.GGMLQuantizationType[matrix.quant]
        size, n_bytes = gguf.GGML_QUANT_SIZES[quant]
        total = matrix.shape[0] * matrix.shape[1] // size * n_bytes
        writer.add_tensor_info(name, matrix.shape, np.dtype(np.float32), total, raw_dtype=quant)
    for name, values in vectors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in _arrays(graph, decoder, vectors):
        writer.write_tensor_data(array)


def _arrays(graph: Graph, decoder: Decoder, vectors: dict[str, NDArray[np.float32]]) -> Iterator[NDArray[Any]]:
    """Read one tensor after the other, so that only one is in memory."""
    table, is_turned = decoder.embedding
    with np.errstate(over="ignore"):
        embedding = graph.array(table, "the embedding", FLOATS).astype(_HALF)
    if not np.isfinite(embedding).all():
        graph.fail(table, "it has values that do not fit F16")
    yield np.ascontiguousarray(embedding.T if is_turned else embedding)
    for matrix in decoder.matrices.values():
        yield matrix.read()
    yield from vectors.values()


def _copy_keys(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, found in reader.fields.items():
        if name.startswith(_NOT_COPIED) or name in _NOT_COPIED_EITHER:
            continue
        value = found.contents()
        if found.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, value, found.types[0])
        elif value:  # the writer knows no empty list
            writer.add_key_value(name, value, found.types[0], sub_type=found.types[-1])
