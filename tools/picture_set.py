"""Two hundred photographs to compare two forms of a model by, the same ones in the same order everywhere.

pictures()           20 of ImageNet's validation set, which the package foolbox ships, and 180 of Debian's
                     gcompris-qt-data: animals, things, places. efficientnet-lite0:fp32 puts 147 different classes first
                     among them. No truth comes with most, so two forms are compared with each other.
labelled_pictures()  views of the 20, which have a class: crops of them, every other one mirrored. Answers for views of
                     one picture go together, so 200 of them say less than 200 pictures would.

None of them was calibrated with: models/*-ranges.json come from photographs of scikit-image and scikit-learn. All are
fetched into a cache for measuring and given to nobody.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tools.samples import IMAGENET, SamplesAbsentError, debian_package, samples

Picture = NDArray[np.uint8]  # [height, width, 3], RGB

MAX_PICTURES = 200
_PACKAGE = "gcompris-qt-data"
_FILES = "usr/share/gcompris-qt/rcc"
_CHOSEN = Path(__file__).with_suffix(".txt")
_N_DIGITS = 24  # of SHA-256, in _CHOSEN
_MAX_PIXELS = 2**24
_MIN_SIDE = 0.6  # of a picture's shorter side, that a view has at least


def pictures(n: int = MAX_PICTURES) -> Iterator[Picture]:
    """Give the first n pictures as RGB uint8 [height, width, 3]; their sizes differ, the least side is 200.

    Raises SamplesAbsentError where packages cannot be fetched, or hold other pictures than the chosen ones.
    """
    _check_number(n)
    for picture, _ in _labelled()[:n]:
        yield picture
    for digest in _chosen()[: max(n - len(_labelled()), 0)]:
        if (data := _photographs().get(digest)) is None:
            raise SamplesAbsentError(f"{_PACKAGE} holds no picture {digest}; the set was chosen from its version 3.1-2")
        yield _decoded(data)


def labelled_pictures(n: int = MAX_PICTURES) -> Iterator[tuple[Picture, int]]:
    """Give n views of pictures with ImageNet's class, 0 to 999: the whole pictures first, then parts of them.

    Raises SamplesAbsentError where the package cannot be fetched.
    """
    _check_number(n)
    rng = np.random.default_rng(0)
    whole = _labelled()
    for index in range(n):
        picture, label = whole[index % len(whole)]
        is_mirrored = bool(index // len(whole) % 2)
        view = picture if index < len(whole) else _crop(picture, rng)
        yield (np.ascontiguousarray(view[:, ::-1]) if is_mirrored else view), label


def _check_number(n: int) -> None:
    if not 1 <= n <= MAX_PICTURES:
        raise ValueError(f"{n} pictures: there are 1 to {MAX_PICTURES}")


def _crop(picture: Picture, rng: np.random.Generator) -> Picture:
    height, width = picture.shape[:2]
    side = int(rng.uniform(_MIN_SIDE, 1) * min(height, width))
    top, left = (int(rng.integers(0, size - side + 1)) for size in (height, width))
    return np.ascontiguousarray(picture[top : top + side, left : left + side])


def _decoded(data: bytes) -> Picture:
    with Image.open(io.BytesIO(data)) as image:
        if image.width * image.height > _MAX_PIXELS:
            raise SamplesAbsentError(f"a picture has {image.width} × {image.height} pixels, at most {_MAX_PIXELS}")
        return np.asarray(image.convert("RGB"))


@cache
def _labelled() -> list[tuple[Picture, int]]:
    found = samples(*IMAGENET)
    return [(_decoded(data), int(name.rsplit("_", 1)[1].removesuffix(".jpg"))) for name, data in found.items()]


@cache
def _chosen() -> list[str]:
    lines = _CHOSEN.read_text(encoding="ascii").splitlines()
    return [line.split()[0] for line in lines if not line.startswith("#")]


@cache
def _photographs() -> dict[str, bytes]:
    """Give all WebP pictures by their digests: Qt's resource files hold them as they are, one behind the other."""
    found: dict[str, bytes] = {}
    for path in sorted((debian_package(_PACKAGE) / _FILES).glob("*.rcc")):
        data = path.read_bytes()
        at = data.find(b"RIFF")
        while at >= 0:
            size = 8 + int.from_bytes(data[at + 4 : at + 8], "little")
            is_picture = data[at + 8 : at + 12] == b"WEBP"
            if is_picture:
                picture = data[at : at + size]
                found[sha256(picture).hexdigest()[:_N_DIGITS]] = picture
            at = data.find(b"RIFF", at + (size if is_picture else 4))
    return found
