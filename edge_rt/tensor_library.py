"""A tensor model in the caller's own process.

    import edge_rt

    with edge_rt.load("efficientnet-lite0") as model:
        print(model.look("part.jpg").labels[0])
        outputs = model.run({"image": pixels})

Several threads may use one model at the same time: what they ask is joined, as in the daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_rt.backends.base import DTYPES, TensorSession
from edge_rt.config import Config
from edge_rt.engine.arrays import datatype_of
from edge_rt.engine.calls import Call
from edge_rt.engine.infer import Inferred
from edge_rt.engine.pipeline import Pipeline
from edge_rt.engine.tensors import TensorEngine
from edge_rt.engine.waiting import WaitingInfer, infer_once
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.guard.limits import check_media
from edge_rt.library_engine import Running
from edge_rt.regular import open_regular
from edge_rt.tensor_types import MediaAnswer, MediaRequest, TensorModelInfo, TensorSpec
from edge_rt.types import EngineStats
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.tensor_load import load_tensor_session
from edge_rt.worker.tensors import start_tensors, substitute_of

_log = logging.getLogger(__name__)

_OBJECT = np.dtype(np.object_)


def start_model(message: Load, settings: Config) -> TensorModel:
    """Load a tensor model and start its engine. Raises ModelError, BackendError and ConfigError."""
    tensor = message.tensor or TensorLoad()
    session = load_tensor_session(message)
    try:
        engine, pipeline = start_tensors(tensor, session)
        engine.warm_up()
        return TensorModel(session, engine, pipeline, settings, max_streams=tensor.max_streams)
    except BaseException:
        session.close()
        raise


class TensorModel(Running):
    """A loaded tensor model, as Running says."""

    def __init__(
        self,
        session: TensorSession,
        engine: TensorEngine,
        pipeline: Pipeline | None,
        settings: Config,
        *,
        max_streams: int,
    ) -> None:
        self._session = session
        info = self.info
        super().__init__(info.model, engine.stop, session.close, settings.power)
        self._place = f"{info.backend}:{info.device}"
        self._substitute = substitute_of(session, self._place)
        self._engine = engine
        self._pipeline = pipeline
        self._max_streams = max_streams
        self._specs = {spec.name: spec for spec in info.inputs}
        self._ids = count(1)
        self._begin()

    @property
    def info(self) -> TensorModelInfo:
        """What was loaded and where it is now: an NPU may be lost, and come back."""
        return self._session.info

    def run(
        self, feeds: Mapping[str, ArrayLike], outputs: Sequence[str] = (), *, stream: str = "", is_last: bool = False
    ) -> dict[str, NDArray[Any]]:
        """Compute once, and give the outputs by name; () gives all.

        feeds    arrays of the inputs' own types and shapes; what is no array is made one of the input's type
        stream   names the state that a stateful model goes on from; "" starts fresh and keeps nothing
        is_last  forget the stream's state after this

        Raises InvalidRequestError for feeds that do not fit, and BackendStepError.
        """
        return dict(self.infer(feeds, outputs, stream=stream, is_last=is_last).outputs)

    def infer(
        self, feeds: Mapping[str, ArrayLike], outputs: Sequence[str] = (), *, stream: str = "", is_last: bool = False
    ) -> Inferred:
        """Compute as run does, and tell also what it took."""
        arrays = {name: _array(value, self._specs.get(name)) for name, value in feeds.items()}
        with self._using():
            call = Call(id=self._id(), feeds=arrays, outputs=tuple(outputs), stream=stream, is_last=is_last)
            with self._energy.computing(self._engine_name, n_threads=self.info.n_threads) as measured:
                found = infer_once(self._engine, call)[0]
                energy = measured.energy(found.timings)
            return found if energy is None else replace(found, energy=energy)

    def look(self, file: str | Path | bytes, *, reference: str | Path | bytes = b"", **options: Any) -> MediaAnswer:
        """Run the model's pipeline on a picture, a recording or a text.

        file, reference  paths, or the files' bytes
        options          fields of MediaRequest: top_k, min_score, regions

        Raises InvalidRequestError for a file that cannot be read or is not of its kind, and UnsupportedFeatureError
        for a model without a pipeline.
        """
        if self._pipeline is None:  # before a file is read
            raise _no_pipeline(self.info.model)
        return self.answer(media_request(self._id(), self.info.model, file, reference, options))

    def answer(self, request: MediaRequest) -> MediaAnswer:
        """Run the model's pipeline for a request as it is. Raises as look does."""
        if self._pipeline is None:
            raise _no_pipeline(self.info.model)
        check_media(request)
        with self._using():
            infer = WaitingInfer(self._engine, request_id=request.id, max_streams=self._max_streams)
            with self._energy.computing(self._engine_name, n_threads=self.info.n_threads) as measured:
                try:
                    answer = self._pipeline.run(request, infer)
                finally:
                    infer.abandon()  # an interrupt may leave a call behind
                    infer.close()
                energy = None if answer.timings is None else measured.energy(answer.timings)
        place = self._substitute() or self._place
        return replace(answer, place=place, variant=self.info.variant, energy=energy)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _run(self) -> None:
        try:
            self._engine.run()
        except Exception:  # noqa: BLE001 - who waited has heard of it from the engine
            _log.exception("the engine of %s ended", self.info.model)

    def _id(self) -> str:
        return str(next(self._ids))


def media_request(
    request_id: str, model: str, file: str | Path | bytes, reference: str | Path | bytes, options: Mapping[str, Any]
) -> MediaRequest:
    """Read the files of a request. Raises InvalidRequestError."""
    data, beside = _bytes("data", file), _bytes("reference", reference)
    try:
        return MediaRequest(id=request_id, model=model, data=data, reference=beside, **options)
    except TypeError as exc:
        raise InvalidRequestError(param="options", problem=str(exc)) from exc


def _no_pipeline(model: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=f"a file for {model}", remedy="it has no pipeline: run it with arrays")


def _array(value: ArrayLike, spec: TensorSpec | None) -> NDArray[Any]:
    """Give what a caller feeds as an array that a session takes; its type and shape are checked later."""
    if type(value) is np.ndarray and spec is not None and value.dtype == DTYPES[spec.datatype] != _OBJECT:
        return value
    if spec is not None and not isinstance(value, np.ndarray | np.generic):
        try:
            value = np.asarray(value, DTYPES[spec.datatype])
        except (TypeError, ValueError, OverflowError) as exc:
            raise InvalidRequestError(param=spec.name, problem=f"is no array of {spec.datatype}: {exc}") from exc
    array = np.asarray(value)
    datatype = datatype_of(array.dtype)
    if datatype == "BYTES":
        texts = np.empty(array.shape, object)
        for i, element in enumerate(array.flat):
            texts.flat[i] = element.encode() if isinstance(element, str) else element
        return texts
    return array if datatype is None else array.astype(DTYPES[datatype], copy=False)


def _bytes(param: str, file: str | Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    try:
        with open_regular(Path(file)) as opened:
            return opened.read()
    except OSError as exc:
        raise InvalidRequestError(param=param, problem=f"{file} cannot be read: {exc.strerror or exc}") from exc
