"""A draft head in the native engine: loaded with its model's context, asked for all sequences in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_rt.backends.drafting import HeadAsk
from edge_rt.backends.native_library import ERRORS, TYPES, Asked, Tensor
from edge_rt.catalog.draft_head import DraftHead
from edge_rt.errors import BackendStepError, ModelFormatError


class NativeDraft:
    """The head of one context; context gives it, or raises BackendStepError once it is closed.

    Raises ModelFormatError with the engine's reason.
    """

    def __init__(self, lib: Any, context: Callable[[], int], head: DraftHead) -> None:
        self._lib, self._context = lib, context
        tensors = (Tensor * len(head.tensors))()
        kept = []  # until the engine has packed it
        for to, (info, data) in zip(tensors, head.tensors, strict=True):
            if info.type not in TYPES:
                raise ModelFormatError(
                    path=str(head.path), field=f"tensor {info.name}", problem=f"is {info.type}, which has no kernels"
                )
            # Kernels pack from any address, floats want theirs aligned.
            array = np.frombuffer(data, dtype=np.uint8).copy()
            kept.append(array)
            n_rows = info.shape[1] if len(info.shape) == 2 else 1
            to.data, to.n_bytes, to.n_cols, to.n_rows = array.ctypes.data, array.nbytes, info.shape[0], n_rows
            to.type = TYPES[info.type]
        ids = (ctypes.c_int32 * len(head.vocabulary))(*head.vocabulary)
        error = ctypes.create_string_buffer(256)
        status = lib.en_draft_load(context(), tensors, head.n_ff, ids, len(ids), error, len(error))
        if status != 0:
            raise ModelFormatError(path=str(head.path), field="draft head", problem=error.value.decode())
        self.n_bytes = int(lib.en_draft_bytes(context()))

    def can_draft(self, seq_id: int) -> bool:
        return bool(self._lib.en_can_draft(self._context(), seq_id))

    def draft(self, asks: Sequence[HeadAsk]) -> list[tuple[list[int], list[float]]]:
        """Guess for several sequences at once: token ids and chances for each, in order. Raises BackendStepError."""
        if not asks:
            return []
        n_max = max(ask.n_max for ask in asks)
        asked = (Asked * len(asks))(*(Asked(a.seq_id, a.token_id, a.n_max, a.min_chance) for a in asks))
        tokens = (ctypes.c_int32 * (len(asks) * n_max))()
        chances = (ctypes.c_float * (len(asks) * n_max))()
        n_guessed = (ctypes.c_int32 * len(asks))()
        status = self._lib.en_draft(self._context(), asked, len(asks), n_max, tokens, chances, n_guessed)
        if status != 0:
            raise BackendStepError(reason=ERRORS.get(status, f"the native engine gave status {status}"))
        starts = range(0, len(asks) * n_max, n_max)
        return [(tokens[at : at + n], chances[at : at + n]) for at, n in zip(starts, n_guessed, strict=True)]
