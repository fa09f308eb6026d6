"""A model's inputs made of a request's picture, and of its reference where the model compares two."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_rt.catalog.pipelines import ImageInput
from edge_rt.engine.facts import ModelFacts, check_image_input, check_tensor, misfit
from edge_rt.engine.images import Fit, decode, decode_request, prepare
from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import Box, MediaRequest


class PictureFeeds:
    """How a manifest wants pictures to reach its model. Raises ModelFormatError where the two do not fit."""

    def __init__(
        self, image: ImageInput, model: ModelFacts, reference: Literal["", "channels", "input"], reference_input: str
    ) -> None:
        self._image = image
        self._reference = reference
        self._input = check_image_input(model, image, n_pictures=2 if reference == "channels" else 1)
        self._reference_input = ""
        if (reference == "input") != bool(reference_input):
            raise misfit("reference_input", 'belongs to reference = "input"')
        if reference == "input":
            tensor = model.input(reference_input, "reference_input")
            check_tensor("reference_input", tensor, self._input.shape, self._input.datatype)
            self._reference_input = tensor.name

    def pictures(
        self, request: MediaRequest, *, max_pixels: int, with_turns: bool = False
    ) -> tuple[Image.Image, Image.Image | None]:
        """Decode a request's picture, and its reference if there is to be one. Raises InvalidRequestError."""
        picture = decode_request(
            request, max_pixels=max_pixels, with_reference=bool(self._reference), with_turns=with_turns
        )
        if not self._reference:
            return picture, None
        if not request.reference:
            problem = "is missing: this model compares the picture with one of a part that is as it should be"
            raise InvalidRequestError(param="reference", problem=problem)
        reference = decode(request.reference, max_pixels=max_pixels, param="reference")
        if reference.size != picture.size:
            have, want = (f"{size[0]} x {size[1]}" for size in (reference.size, picture.size))
            problem = f"has {have} pixels, the picture has {want}; the two must show the same view"
            raise InvalidRequestError(param="reference", problem=problem)
        return picture, reference

    def make(
        self, picture: Image.Image, reference: Image.Image | None, region: Box | None
    ) -> tuple[dict[str, NDArray[Any]], Fit]:
        """Make the inputs for a picture or a part of it, and tell where it lies in them."""
        pixels, fit = prepare(picture, self._image, region)
        feeds = {self._input.name: pixels[np.newaxis]}
        if reference is not None:
            other = prepare(reference, self._image, region)[0][np.newaxis]
            if self._reference_input:
                feeds[self._reference_input] = other
            else:
                axis = 1 if self._image.layout == "nchw" else 3
                feeds[self._input.name] = np.concatenate((feeds[self._input.name], other), axis=axis)
        return feeds, fit
