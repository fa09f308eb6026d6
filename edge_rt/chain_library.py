"""A chain of tensor models in the caller's own process.

with edge_rt.load("pp-ocrv4") as chain:
    for box in chain.look("label.jpg").boxes:
        print(box.text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Self

from edge_rt.catalog.chains import Chain
from edge_rt.chains import run_chain
from edge_rt.errors import ShuttingDownError
from edge_rt.guard.limits import check_media
from edge_rt.tensor_library import TensorModel, media_request
from edge_rt.tensor_types import MediaAnswer, MediaRequest


class ChainModel:
    """A cascade, or OCR: its models are loaded when they are first asked. Close it, or use it in a with statement.

    Any thread may use and close it.
    """

    def __init__(self, chain: Chain, load: Callable[[str], TensorModel]) -> None:
        self.chain = chain
        self._load = load
        self._models: dict[str, TensorModel] = {}
        self._lock = threading.Lock()  # held while a model is loaded
        self._is_closed = False
        self._ids = count(1)

    def look(self, file: str | Path | bytes, *, reference: str | Path | bytes = b"", **options: Any) -> MediaAnswer:
        """Look at a file, as TensorModel.look; the answer's stage names the model of a cascade that answered."""
        request = media_request(str(next(self._ids)), self.chain.id, file, reference, options)
        check_media(request)

        async def look(part: MediaRequest) -> MediaAnswer:
            return self._part(part.model).answer(part)

        return _finish(run_chain(self.chain, request, look, _Uncounted()))

    def close(self, drain_s: float = 0.0) -> None:
        """Free the memory of its models, giving what runs drain_s to finish."""
        with self._lock:
            self._is_closed = True
        for model in self._models.values():
            model.close(drain_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _part(self, name: str) -> TensorModel:
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError
            if (model := self._models.get(name)) is None:
                model = self._models[name] = self._load(name)
            return model


class _Uncounted:
    def chain_answered(self, chain: str, stage: str) -> None:
        """Count nothing: there is no daemon whose metrics it would be."""


def _finish(answering: Coroutine[Any, Any, MediaAnswer]) -> MediaAnswer:
    """Run a coroutine to its end, also for a caller whose thread has an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(answering)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, answering).result()
