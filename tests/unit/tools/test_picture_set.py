"""The photographs that forms of a model are compared by: the same ones every time, and enough of them differ."""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import pytest

pytest.importorskip("PIL.Image", reason="the extra onnx is not installed")
from tools.picture_set import MAX_PICTURES, labelled_pictures, pictures
from tools.samples import SamplesAbsentError


def test_pictures_are_two_hundred_different_ones() -> None:
    try:
        found = list(pictures())
    except SamplesAbsentError as exc:
        pytest.skip(str(exc))
    assert len(found) == MAX_PICTURES
    assert len({sha256(picture.tobytes()).digest() for picture in found}) == MAX_PICTURES
    for picture in found:
        assert picture.dtype == "uint8"
        assert picture.shape[2] == 3
        assert min(picture.shape[:2]) >= 200
    fewer = list(pictures(30))
    assert all((a == b).all() for a, b in zip(fewer, found, strict=False))
    assert len(fewer) == 30


def test_views_keep_their_pictures_class() -> None:
    try:
        found = list(labelled_pictures(60))
    except SamplesAbsentError as exc:
        pytest.skip(str(exc))
    assert len({label for _, label in found}) == 19  # two of the twenty are of one class
    labels = [label for _, label in found]
    assert labels[:20] == labels[20:40] == labels[40:]
    assert not any(a.shape == b.shape and (a == b).all() for (a, _), (b, _) in pairwise(found))
    again = list(labelled_pictures(60))
    assert all((a == b).all() for (a, _), (b, _) in zip(found, again, strict=True))


@pytest.mark.parametrize("n", [0, MAX_PICTURES + 1])
def test_more_pictures_than_there_are_is_an_error(n: int) -> None:
    with pytest.raises(ValueError, match="there are 1 to 200"):
        next(pictures(n))
    with pytest.raises(ValueError, match="there are 1 to 200"):
        next(labelled_pictures(n))
