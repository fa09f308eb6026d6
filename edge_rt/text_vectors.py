"""Static embeddings of short texts: the mean of their tokens' vectors, from the weights inside the wordllama wheel.

Only its two files are read. Importing that package would load an HTTP client and half again as much memory, and it
would look for a missing file on the network; here nothing ever does. The weights are mapped, not copied: what is
resident are the rows of words that were met. An import of this module loads numpy: the front process imports it inside
the one function that needs it.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from edge_rt.errors import BackendUnavailableError, ModelFormatError
from edge_rt.regular import open_regular

try:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
except ImportError as exc:
    raise BackendUnavailableError(backend="text vectors", reason=str(exc), extra="vectors") from exc

N_DIMENSIONS = 256
MAX_CHARS = 4096  # of one text; of a longer one its beginning and its end count, which bounds the time

_PACKAGE = "wordllama"
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_TENSOR = "embedding.weight"
_MAX_HEADER_BYTES = 2**16
_MAX_TOKENIZER_BYTES = 16 * 2**20


class TextVectors:
    """Places texts among each other: cosine similarity of two vectors is their product. Safe to use from threads."""

    def __init__(self, rows: NDArray[np.float16], tokenizer: Tokenizer) -> None:
        self._rows = rows
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, package_dir: Path | None = None) -> TextVectors:
        """Read weights and tokenizer of the installed wordllama, or of a directory laid out like it.

        Raises BackendUnavailableError where they are absent, ModelFormatError where they are not what they should be.
        """
        package_dir = package_dir or _installed()
        tokenizer = _read_tokenizer(package_dir / _TOKENIZER)
        rows = _map_weights(package_dir / _WEIGHTS)
        if len(rows) < (n_tokens := tokenizer.get_vocab_size()):
            raise _misfit(package_dir / _WEIGHTS, _TENSOR, f"{len(rows)} rows for {n_tokens} tokens")
        return cls(rows, tokenizer)

    @property
    def n_tokens(self) -> int:
        """Tokens that have a vector."""
        return len(self._rows)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Give one unit vector per text, float32 [n, 256]; zeros for a text without any token."""
        vectors = np.zeros((len(texts), N_DIMENSIONS), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            if ids := self.token_ids(text):
                np.mean(self._rows[ids], axis=0, dtype=np.float32, out=vector)
                np.divide(vector, max(float(np.linalg.norm(vector)), 1e-12), out=vector)
        return vectors

    def token_ids(self, text: str) -> list[int]:
        """Cut a text into tokens, those that embed() takes the mean of."""
        ids: list[int] = self._tokenizer.encode(_shortened(text), add_special_tokens=False).ids
        return ids

    def token_vectors(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Give each token's own vector, float32 [n, 256], not of unit length: what is rare is long."""
        return self._rows[np.asarray(ids, np.intp)].astype(np.float32)


def _shortened(text: str) -> str:
    text = text.encode(errors="replace").decode()  # a lone surrogate is no text to the tokenizer
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS // 2]}\n{text[-MAX_CHARS // 2 :]}"


def _installed() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # finds, and does not run, the package
    if spec is None or spec.origin is None:
        raise BackendUnavailableError(backend="text vectors", reason=f"{_PACKAGE} is not installed", extra="vectors")
    return Path(spec.origin).parent


def _read_tokenizer(path: Path) -> Tokenizer:
    with _open(path) as file:
        raw = file.read(_MAX_TOKENIZER_BYTES + 1)
    if len(raw) > _MAX_TOKENIZER_BYTES:
        raise _misfit(path, "file", f"longer than {_MAX_TOKENIZER_BYTES} bytes")
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as exc:  # the package raises nothing more special, whatever is wrong
        raise _misfit(path, "tokenizer", str(exc)[:200]) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _map_weights(path: Path) -> NDArray[np.float16]:
    """Map the one half-precision tensor of a safetensors file; read-only, and shared with whoever else maps it."""
    with _open(path) as file:
        n_bytes = file.seek(0, 2)
        file.seek(0)
        raw_size = file.read(8)
        header_bytes = struct.unpack("<Q", raw_size)[0] if len(raw_size) == 8 else 0
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, n_bytes - 8):
            raise _misfit(path, "header", f"{header_bytes} bytes long, in a file of {n_bytes}")
        try:
            header = json.loads(file.read(header_bytes))
            tensor = header[_TENSOR]
            n_rows, n_columns = tensor["shape"]
            begin, end = tensor["data_offsets"]
            is_right = tensor["dtype"] == "F16" and n_columns == N_DIMENSIONS and begin >= 0
            is_whole = end - begin == n_rows * n_columns * 2 and 8 + header_bytes + end <= n_bytes and n_rows > 0
        except (ValueError, KeyError, TypeError) as exc:
            raise _misfit(path, "header", f"does not describe {_TENSOR}: {exc!r}"[:200]) from exc
        if not is_right or not is_whole:
            raise _misfit(path, _TENSOR, f"must be F16 [n, {N_DIMENSIONS}] and whole, is {tensor}"[:300])
    return np.memmap(path, np.float16, "r", 8 + header_bytes + begin, (n_rows, n_columns))


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as exc:
        reason = f"{path} cannot be read: {exc.strerror}"
        raise BackendUnavailableError(backend="text vectors", reason=reason, extra="vectors") from exc


def _misfit(path: Path, field: str, problem: str) -> ModelFormatError:
    return ModelFormatError(path=str(path), field=field, problem=problem)
