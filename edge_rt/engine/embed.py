"""Embeddings: a text's tokens go to a model, the mean of their states is the text's place among others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import Embed
from edge_rt.engine.facts import ModelFacts, asset, check_tensor, misfit, refuse_picture_options
from edge_rt.engine.infer import Infer
from edge_rt.errors import (
    BackendStepError,
    BackendUnavailableError,
    ContextLengthError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedFeatureError,
)
from edge_rt.regular import open_regular
from edge_rt.tensor_types import MediaAnswer, MediaRequest

try:
    from tokenizers import Tokenizer
except ImportError as exc:
    raise BackendUnavailableError(backend="pipelines of texts", reason=str(exc), extra="onnx") from exc

_MAX_TOKEN_BYTES = 256  # of a text's tokens on average; more is not even counted, which takes time
_MAX_TOKENIZER_BYTES = 64 * 2**20


class EmbedPipeline:
    """One embedding for one text in UTF-8, or its token ids. A text that is too long is refused, unless it may be cut.

    A model for one number of tokens, as NPUs have them, gets each text filled up to it.
    """

    task = "embed"

    def __init__(self, spec: Embed, model: ModelFacts, assets: Mapping[str, Path]) -> None:
        self._spec = spec
        self._inputs = {name: model.input(name, field) for field, name in _inputs(spec).items() if name}
        for field, name in _inputs(spec).items():
            if name:
                check_tensor(field, self._inputs[name], (-1, -1), "INT64")
        fixed = self._inputs[spec.ids_input].shape[1]
        self._fixed_tokens = max(0, fixed)
        self._max_tokens = min(spec.max_tokens, self._fixed_tokens or spec.max_tokens)
        self._output = model.output(spec.output)
        if len(self._output.shape) != 3 or self._output.datatype != "FP32":
            raise misfit("output", f"must be FP32 [n, tokens, size], {self._output.name} is {self._output.shape}")
        self._tokenizer = _read_tokenizer(asset(spec.tokenizer, assets, "tokenizer"))

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        refuse_picture_options(request, "texts")
        n_dimensions = self._n_dimensions(request.dimensions)
        ids = self._ids(request)
        answer = infer(self._feeds(ids))
        states = np.asarray(answer.outputs[self._output.name], np.float32)[0, : len(ids)]
        vector = (states.mean(axis=0) if self._spec.pooling == "mean" else states[0])[:n_dimensions]
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or (self._spec.normalize and length == 0):
            raise BackendStepError(reason="the embedding is not finite, or has no direction")
        if self._spec.normalize:
            vector = vector / np.float32(length)
        return MediaAnswer(task=self.task, embedding=tuple(vector.tolist()), n_tokens=len(ids), timings=answer.timings)

    def _n_dimensions(self, wanted: int | None) -> int | None:
        size = self._output.shape[2]
        if wanted is None or wanted == size:
            return None
        if wanted not in self._spec.matryoshka:
            sizes = ", ".join(map(str, self._spec.matryoshka))
            remedy = f"it gives {sizes} or all" if sizes else "its first numbers alone mean little: take all of them"
            raise UnsupportedFeatureError(feature=f"dimensions {wanted} of this model", remedy=remedy)
        return wanted

    def _ids(self, request: MediaRequest) -> list[int]:
        """Give a text's token ids, as many as the model takes. Raises InvalidRequestError and ContextLengthError."""
        if request.token_ids:
            n_vocab = self._tokenizer.get_vocab_size()
            for i, token_id in enumerate(request.token_ids):
                if not 0 <= token_id < n_vocab:
                    problem = f"token id {token_id} is outside the vocabulary of {n_vocab}"
                    raise InvalidRequestError(param=f"token_ids[{i}]", problem=problem)
            ids, n_last = list(request.token_ids), 0
        else:
            encoding = self._tokenizer.encode(self._text(request), add_special_tokens=self._spec.special_tokens)
            ids, mask = encoding.ids, encoding.special_tokens_mask
            n_last = next((i for i, is_special in enumerate(reversed(mask)) if not is_special), 0)
        if not ids:
            raise InvalidRequestError(param="data", problem="holds nothing but what the tokenizer leaves out")
        if len(ids) <= self._max_tokens:
            return ids
        if not request.truncate:
            raise ContextLengthError(prompt_tokens=len(ids), n_ctx=self._max_tokens)
        return [*ids[: self._max_tokens - n_last], *ids[len(ids) - n_last :]]  # the special tokens at the end stay

    def _text(self, request: MediaRequest) -> str:
        data, limit_bytes = request.data, self._max_tokens * _MAX_TOKEN_BYTES
        is_cut = request.truncate and len(data) > limit_bytes
        if len(data) > limit_bytes and not is_cut:
            problem = f"is {len(data)} bytes long, the limit is {limit_bytes} for {self._max_tokens} tokens"
            raise InvalidRequestError(param="data", problem=problem)
        try:
            return data[:limit_bytes].decode()
        except UnicodeDecodeError as exc:
            if is_cut and exc.start > limit_bytes - 4:  # the cut fell into a character
                return data[: exc.start].decode()
            raise InvalidRequestError(
                param="data", problem=f"is no UTF-8 text: byte {exc.start} is not part of any"
            ) from exc

    def _feeds(self, ids: list[int]) -> dict[str, NDArray[Any]]:
        """Fill up to whole steps with tokens that the mask tells the model to leave out."""
        spec = self._spec
        n_tokens = min(-(-len(ids) // spec.token_step) * spec.token_step, max(spec.max_tokens, len(ids)))
        n_tokens = self._fixed_tokens or n_tokens
        feeds = {name: np.zeros((1, n_tokens), np.int64) for name in self._inputs}
        feeds[spec.ids_input][0, : len(ids)] = ids
        if spec.mask_input:
            feeds[spec.mask_input][0, : len(ids)] = 1
        return feeds


def _inputs(spec: Embed) -> dict[str, str]:
    return {"ids_input": spec.ids_input, "mask_input": spec.mask_input, "types_input": spec.types_input}


def _read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json that cuts and pads nothing. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_TOKENIZER_BYTES + 1)
        if len(raw) > _MAX_TOKENIZER_BYTES:
            raise ModelFormatError(path=str(path), field="file", problem=f"longer than {_MAX_TOKENIZER_BYTES} bytes")
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except Exception as exc:  # the package raises nothing more special, whatever is wrong
        raise ModelFormatError(path=str(path), field="tokenizer", problem=str(exc)[:200]) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
