"""Inputs for calibrating and judging a model: arrays in .npz files, pictures as a manifest's pipeline prepares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from edge_rt.catalog.manifest import load_manifest
from edge_rt.catalog.pipelines import Classify, Detect, ImageInput
from edge_rt.engine.images import decode, prepare

_MAX_PIXELS = 50_000_000

Feed = Mapping[str, NDArray[Any]]


class Feeds(Sequence[Feed]):
    """One input after the other, read when it is asked for.

    paths   .npz files, whose arrays are named as the model's inputs and hold one sample for each index of their first
            axis; pictures; folders of both
    image   how pictures are prepared; None takes none
    """

    def __init__(self, paths: Sequence[Path], model: ModelProto, image: ImageInput | None):
        constants = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in constants]
        self._image = image
        self._places = [place for path in paths for place in self._find(path)]
        if not self._places:
            raise ValueError("no inputs: give .npz files or pictures")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        path, sample = self._places[index]
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name][sample : sample + 1] for name in self._inputs}
        if self._image is None:
            raise ValueError(f"{path}: pictures need --manifest, whose pipeline says how to prepare them")
        array, _ = prepare(decode(path.read_bytes(), max_pixels=_MAX_PIXELS), self._image)
        return {self._image.input or self._inputs[0]: array[None]}

    def _find(self, path: Path) -> Iterator[tuple[Path, int]]:
        if path.is_dir():
            for child in sorted(path.iterdir()):
                if child.suffix.lower() in {".npz", ".png", ".jpg", ".jpeg"}:
                    yield from self._find(child)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                if missing := [name for name in self._inputs if name not in arrays.files]:
                    raise ValueError(f"{path} has no array named {missing[0]}, only {', '.join(arrays.files)}")
                n_samples = {len(arrays[name]) for name in self._inputs}
            if len(n_samples) != 1:
                raise ValueError(f"{path}: the arrays hold {sorted(n_samples)} samples, not as many of each")
            yield from ((path, sample) for sample in range(n_samples.pop()))
        else:
            yield path, 0


def image_input(manifest: Path | None) -> ImageInput | None:
    """Give how a manifest's pipeline prepares pictures. Raises ModelFormatError and ValueError."""
    if manifest is None:
        return None
    pipeline = load_manifest(manifest).pipeline
    if not isinstance(pipeline, Classify | Detect):
        raise ValueError(f"{manifest} has no pipeline that takes pictures")
    return pipeline.image
