"""What the arrays given to a tensor model must be; every tensor back end checks its feeds here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import DTYPES
from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import TensorSpec

# No honest request comes near: the worker channel's largest frame has fewer bytes. An empty tensor of a huge shape has
# none, and yet may make a model allocate what the shape says.
MAX_ELEMENTS = 2**28


def check_feeds(specs: Sequence[TensorSpec], feeds: Mapping[str, NDArray[Any]]) -> None:
    """Raise InvalidRequestError naming the input, what it is and what it may be, unless feeds fit specs exactly."""
    known = {spec.name for spec in specs}
    if unknown := next((name for name in feeds if name not in known), None):
        raise InvalidRequestError(param=unknown, problem=f"is no input; the model takes {_listed(known)}")
    for spec in specs:
        if (array := feeds.get(spec.name)) is None:
            raise InvalidRequestError(
                param=spec.name, problem=f"is missing; it is {spec.datatype} of shape {shown(spec.shape)}"
            )
        if array.dtype != DTYPES[spec.datatype] and not (spec.datatype == "BYTES" and array.dtype.kind in "SU"):
            raise InvalidRequestError(
                param=spec.name, problem=f"has type {array.dtype}, the model takes {spec.datatype}"
            )
        if len(array.shape) != len(spec.shape) or any(
            want not in (-1, have) for want, have in zip(spec.shape, array.shape, strict=True)
        ):
            raise InvalidRequestError(
                param=spec.name, problem=f"has shape {shown(array.shape)}, the model takes {shown(spec.shape)}"
            )
        if math.prod(max(1, size) for size in array.shape) > MAX_ELEMENTS:
            raise InvalidRequestError(
                param=spec.name, problem=f"has shape {shown(array.shape)}, the limit is {MAX_ELEMENTS} elements"
            )


class FeedCheck:
    """check_feeds for one model, called for every request: what fits is told from what does not without a word made."""

    __slots__ = ("_fast", "_specs")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(specs)
        self._fast = [
            (spec.name, DTYPES[spec.datatype], len(spec.shape), [(i, n) for i, n in enumerate(spec.shape) if n != -1])
            for spec in specs
        ]

    def __call__(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Raise as check_feeds does."""
        if len(feeds) != len(self._fast):
            check_feeds(self._specs, feeds)
            return
        for name, dtype, n_dims, sizes in self._fast:
            array = feeds.get(name)
            # An empty array may have a huge shape, and text fits BYTES: those are looked at closely.
            if array is None or array.dtype != dtype or not 0 < array.size <= MAX_ELEMENTS or array.ndim != n_dims:
                check_feeds(self._specs, feeds)
                return
            shape = array.shape
            for i, n in sizes:
                if shape[i] != n:
                    check_feeds(self._specs, feeds)
                    return


def check_outputs(specs: Sequence[TensorSpec], outputs: Sequence[str]) -> tuple[str, ...]:
    """Give the outputs wanted, all for none, each once. Raises InvalidRequestError for a name that is no output."""
    known = [spec.name for spec in specs]
    for name in outputs:
        if name not in known:
            raise InvalidRequestError(param=name, problem=f"is no output; the model gives {_listed(known)}")
    return tuple(dict.fromkeys(outputs)) or tuple(known)


def shown(shape: Sequence[int]) -> str:
    """Write a shape for people: -1 in it takes any size."""
    return f"[{', '.join(map(str, shape))}]"


class Texts:
    """The inputs and outputs of a model that are texts: UTF-8 bytes outside, str inside onnxruntime."""

    __slots__ = ("_names",)

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self._names = frozenset(spec.name for spec in (*inputs, *outputs) if spec.datatype == "BYTES")

    def read(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Give feeds as the model takes them. Raises InvalidRequestError for a text that is none."""
        if not self._names:
            return feeds
        return {name: texts(array, name) if name in self._names else array for name, array in feeds.items()}

    def written(self, answers: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Give answers as who asked takes them."""
        if not self._names:
            return answers
        return {name: raw(array) if name in self._names else array for name, array in answers.items()}


def texts(array: NDArray[Any], param: str) -> NDArray[np.object_]:
    """Give an array of UTF-8 bytes, or of str, as one of str. Raises InvalidRequestError for other elements."""
    out = np.empty(array.shape, dtype=np.object_)
    for at, element in enumerate(array.flat):
        if isinstance(element, str):
            out.flat[at] = element
            continue
        if not isinstance(element, bytes):
            raise InvalidRequestError(param=param, problem=f"element {at} is {type(element).__name__}, not bytes")
        try:
            out.flat[at] = element.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(param=param, problem=f"element {at} is not UTF-8: {exc.reason}") from exc
    return out


def raw(array: NDArray[Any]) -> NDArray[np.object_]:
    """Give an array of str as one of UTF-8 bytes."""
    out = np.empty(array.shape, dtype=np.object_)
    for at, element in enumerate(array.flat):
        out.flat[at] = element.encode("utf-8")
    return out


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
