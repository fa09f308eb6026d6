"""What a pipeline knows of its model and its assets, and how it checks that they fit the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_rt.catalog.pipelines import ImageInput
from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.regular import open_regular
from edge_rt.tensor_types import MediaRequest, TensorSpec

_MAX_LINES_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's inputs and outputs."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str, field: str = "input") -> TensorSpec:
        return _pick(self.inputs, name, field, "inputs")

    def output(self, name: str, field: str = "output") -> TensorSpec:
        return _pick(self.outputs, name, field, "outputs")


def _pick(specs: Sequence[TensorSpec], name: str, field: str, what: str) -> TensorSpec:
    """Find a tensor by its name, which may be "" where there is only one. Raises ModelFormatError."""
    known = ", ".join(spec.name for spec in specs)
    if not name:
        if len(specs) != 1:
            raise misfit(field, f"must name one of the model's {what}: {known}")
        return specs[0]
    found = next((spec for spec in specs if spec.name == name), None)
    if found is None:
        raise misfit(field, f"{name!r} is not among the model's {what}: {known}")
    return found


def misfit(field: str, problem: str) -> ModelFormatError:
    """Make the error for a manifest's pipeline that does not fit its model."""
    return ModelFormatError(path="manifest", field=f"pipeline.{field}", problem=problem)


def check_image_input(model: ModelFacts, spec: ImageInput, *, n_pictures: int = 1) -> TensorSpec:
    """Give the input that a picture goes to. Raises ModelFormatError unless it takes what spec makes."""
    tensor = model.input(spec.input, "image.input")
    n_channels = (1 if spec.color == "gray" else 3) * n_pictures
    for name in ("mean", "std"):
        if len(getattr(spec, name)) not in {1, n_channels // n_pictures}:
            raise misfit(f"image.{name}", f"must hold 1 or {n_channels // n_pictures} numbers")
    if 0 in spec.std:
        raise misfit("image.std", "must not be 0")
    sides = (n_channels, spec.height, spec.width) if spec.layout == "nchw" else (spec.height, spec.width, n_channels)
    check_tensor("image", tensor, (-1, *sides), spec.datatype)
    return tensor


def check_tensor(field: str, tensor: TensorSpec, shape: Sequence[int], datatype: str) -> None:
    """Raise ModelFormatError unless a model's tensor can have this shape, in which -1 stands for any size."""
    fits = len(tensor.shape) == len(shape) and all(
        -1 in {have, want} or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.datatype != datatype:
        wanted, had = (" x ".join("?" if n < 0 else str(n) for n in sizes) for sizes in (shape, tensor.shape))
        raise misfit(field, f"makes {datatype} {wanted}, the model's {tensor.name} is {tensor.datatype} {had}")


def read_labels(labels: str | tuple[str, ...], assets: Mapping[str, Path], field: str = "labels") -> tuple[str, ...]:
    """Give labels that stand in the manifest, or the lines of the asset. Raises ModelFormatError."""
    if isinstance(labels, tuple):
        return labels
    path = asset(labels, assets, field)
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_LINES_BYTES + 1)
        if len(raw) > _MAX_LINES_BYTES:
            raise ModelFormatError(path=str(path), field="file", problem=f"longer than {_MAX_LINES_BYTES} bytes")
        text = raw.decode("utf-8-sig")
    except OSError as exc:
        raise ModelFormatError(path=str(path), field="file", problem=f"cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ModelFormatError(path=str(path), field="file", problem="is not UTF-8") from exc
    # Not splitlines: a list of characters may hold U+2028 and its like.
    lines = text.removesuffix("\n").split("\n")
    return tuple(line.removesuffix("\r") for line in lines)


def asset(name: str, assets: Mapping[str, Path], field: str) -> Path:
    """Find an asset. Raises ModelFormatError."""
    if name not in assets:
        raise misfit(field, f"{name!r} is not among the manifest's assets: {', '.join(assets) or 'it has none'}")
    return assets[name]


def refuse_picture_options(request: MediaRequest, what: str) -> None:
    """Raise InvalidRequestError for options that mean nothing to a model of something else."""
    for name in ("reference", "regions"):
        if getattr(request, name):
            raise InvalidRequestError(param=name, problem=f"belongs to pictures, and this model takes {what}")
