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
    """One embedding for one text in UTF-8. Nothing is cut: a text that is too long is refused.

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
        try:
            text = request.data.decode()
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(
                param="data", problem=f"is no UTF-8 text: byte {exc.start} is not part of any"
            ) from exc
        if len(request.data) > (limit_bytes := self._max_tokens * _MAX_TOKEN_BYTES):
            problem = f"is {len(request.data)} bytes long, the limit is {limit_bytes} for {self._max_tokens} tokens"
            raise InvalidRequestError(param="data", problem=problem)
        ids = self._tokenizer.encode(text).ids
        if len(ids) > self._max_tokens:
            raise ContextLengthError(prompt_tokens=len(ids), n_ctx=self._max_tokens)
        if not ids:
            raise InvalidRequestError(param="data", problem="holds nothing but what the tokenizer leaves out")
        answer = infer(self._feeds(ids))
        states = np.asarray(answer.outputs[self._output.name], np.float32)[0, : len(ids)]
        vector = states.mean(axis=0) if self._spec.pooling == "mean" else states[0]
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or (self._spec.normalize and length == 0):
            raise BackendStepError(reason="the embedding is not finite, or has no direction")
        if self._spec.normalize:
            vector = vector / np.float32(length)
        return MediaAnswer(task=self.task, embedding=tuple(vector.tolist()), n_tokens=len(ids), timings=answer.timings)

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
