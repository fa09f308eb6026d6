"""Embeddings: edge_rt's daemon against llama-server, the same model (all-MiniLM-L6-v2) in 8 bit, in turns.

    python benchmarks/embeddings.py [--quick] [--json FILE]

edge_rt runs the catalog's `minilm-l6` (INT8, onnxruntime), llama-server a GGUF that is written here from the same float
weights (Q8_0). Both get the same texts over a Unix socket, 32 a request; that they embed alike is checked first.
One claim a length of text, in texts a second. No bar was promised; the ratio is told.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import harness
import httpx2
import numpy as np
from footprint import daemon
from llama_rival import rival
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.catalog.store import Store
from edge_rt.convert.safetensors_file import read_safetensors

_ROOT = Path(__file__).resolve().parent.parent
_N_TEXTS = 32
_N_WORDS = (8, 40, 120)
_ARCH = "bert"
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_WHOLE = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}


def write_gguf(weights: Path, tokenizer: Path, path: Path) -> None:
    """Write the encoder as llama.cpp's own converter lays it out: matrices in Q8_0, the rest in float."""
    state = read_safetensors(weights)
    words = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = [word for word, _ in sorted(words.items(), key=lambda item: item[1])]
    n_layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layer."))
    writer = gguf.GGUFWriter(path, _ARCH)
    writer.add_block_count(n_layers)
    writer.add_context_length(state["embeddings.position_embeddings.weight"].shape[0])
    writer.add_embedding_length(state["embeddings.word_embeddings.weight"].shape[1])
    writer.add_feed_forward_length(state["encoder.layer.0.intermediate.dense.weight"].shape[0])
    writer.add_head_count(12)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(2)
    writer.add_token_list([_phantom(token) for token in tokens])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if _is_control(token) else gguf.TokenType.NORMAL for token in tokens]
    )
    for name, add in (
        ("[UNK]", writer.add_unk_token_id),
        ("[SEP]", writer.add_sep_token_id),
        ("[PAD]", writer.add_pad_token_id),
        ("[CLS]", writer.add_bos_token_id),
        ("[MASK]", writer.add_mask_token_id),
    ):
        add(words[name])
    for name, array in state.items():
        if (wanted := _name(name)) is not None:
            _add(writer, wanted, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_control(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _phantom(token: str) -> str:
    """Write a word's beginning with a blank before it and its continuations without ##, as llama.cpp looks them up."""
    if _is_control(token):
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token


def _name(name: str) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    if not name.startswith("encoder.layer."):
        return None
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _add(writer: gguf.GGUFWriter, name: str, array: NDArray[np.float32]) -> None:
    if array.ndim == 2 and name not in ("position_embd.weight", "token_types.weight"):
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array)


class Server:
    """Embeds texts; a client that keeps its connection."""

    def __init__(self, socket: Path, model: str | None) -> None:
        self._client = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket)), timeout=120)
        self._model = {} if model is None else {"model": model}

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        body: dict[str, Any] = {"input": texts, "encoding_format": "float", **self._model}
        reply = self._client.post("http://edge/v1/embeddings", json=body)
        reply.raise_for_status()
        return np.array([item["embedding"] for item in reply.json()["data"]], np.float32)

    def rate(self, texts: list[str]) -> float:
        begun_s = time.perf_counter()
        self.embed(texts)
        return len(texts) / (time.perf_counter() - begun_s)


def texts_of(n_words: int, n_texts: int) -> list[str]:
    golden = [(_ROOT / "tests/golden" / name).read_text(encoding="utf-8") for name in ("prose.txt", "technical.txt")]
    words = " ".join(golden).split()
    return [" ".join(words[(i * 37) % (len(words) - n_words) :][:n_words]) for i in range(n_texts)]


def main() -> None:
    arguments = harness.parse(__doc__)
    store = Store.open(config.load().config.catalog, os.environ)
    manifest = store.get("minilm-l6")
    folder = store.path(manifest, manifest.variant("int8"))
    if folder is None or not (folder.parent / "minilm-l6.safetensors").exists():
        sys.exit("run `edge_rt models pull minilm-l6:fp32` and `edge_rt models pull minilm-l6` first")
    claims: list[harness.Claim] = []
    alike = 1.0
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "minilm-l6.q8_0.gguf"
        write_gguf(folder.parent / "minilm-l6.safetensors", folder.parent / "minilm-l6.tokenizer.json", path)
        flags = ("--embedding", "--threads", "2", "--ctx-size", "8192", "--batch-size", "8192", "--ubatch-size", "8192")
        flags += ("--parallel", "16", "--no-webui")
        with daemon() as (_, own_socket, _), rival(path, flags) as rival_socket:
            own, other = Server(own_socket, "minilm-l6"), Server(rival_socket, None)
            for n_words in _N_WORDS:
                texts = texts_of(n_words, _N_TEXTS)
                a, b = own.embed(texts), other.embed(texts)
                cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
                alike = min(alike, float(cosines.min()))
                if alike < 0.98:
                    sys.exit(f"they do not embed alike: a cosine of {alike:.3f}")

                def run(server: Server, texts: list[str] = texts) -> Callable[[], float]:
                    return lambda: server.rate(texts)

                pair = harness.paired(
                    "edge_rt", run(own), "llama-server", run(other), n_pairs=arguments.pairs(9, quick=3)
                )
                claims.append(harness.Claim(name=f"{n_words} words, texts/s", pair=pair, at_least=0.0))
    print(f"least cosine between the two: {alike:.4f}")
    harness.finish(arguments, claims, {"least_cosine": alike})


if __name__ == "__main__":
    main()
