"""A client's picture: decoded within limits, cut and scaled into what a model takes.

Only JPEG and PNG are read. The size is known from the header before a pixel is decoded, and a picture larger than the
limit is refused then. 16 bits a channel are cut to their upper 8; what is transparent is seen on white; CMYK becomes
RGB without a colour profile; an animation is its first picture; EXIF's orientation is applied.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_rt.catalog.pipelines import ImageInput
from edge_rt.devices.memory import give_back
from edge_rt.engine.picture_size import check_png, whole_jpeg
from edge_rt.errors import BackendUnavailableError, InvalidRequestError
from edge_rt.tensor_types import Box, MediaRequest

try:
    from PIL import Image, ImageFile, ImageOps, JpegImagePlugin, PngImagePlugin
except ImportError as exc:
    raise BackendUnavailableError(backend="pipelines of pictures", reason=str(exc), extra="onnx") from exc

_STRIP_PIXELS = 2**20
_LARGE_PIXELS = 2**22  # 32 MB on the way; a video frame of 1920 x 1080 is half of it
_LARGE = threading.Lock()
_READERS = {b"\x89PNG\r\n\x1a\n": PngImagePlugin.PngImageFile, b"\xff\xd8\xff": JpegImagePlugin.JpegImageFile}
_SCAN = b"\xff\xda"  # compressed data never holds it
_MAX_SCANS = 100  # progressive files have some ten; each may be a few bytes and cost seconds
# What Pillow raises for files that are not what they say; a decoder of hostile bytes says it in many ways.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a part of a picture lies in a tensor: tensor = (picture - from) × scale + to."""

    from_x: float
    from_y: float
    scale_x: float
    scale_y: float
    to_x: float = 0.0
    to_y: float = 0.0

    def boxes(self, boxes: NDArray[np.float32], width: int | None, height: int | None) -> NDArray[np.float32]:
        """Turn [n, 4] corners x1 y1 x2 y2 in a tensor into those in the picture, cut at its edges unless None."""
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        to = np.array([self.to_x, self.to_y] * 2, np.float32)
        start = np.array([self.from_x, self.from_y] * 2, np.float32)
        there: NDArray[np.float32] = (boxes - to) / scale + start
        if width is not None and height is not None:
            there = np.clip(there, 0, np.array([width, height] * 2, np.float32))
        return there


def decode(data: bytes, *, max_pixels: int, param: str = "data") -> Image.Image:
    """Decode a JPEG or PNG file to mode RGB or L, upright. Raises InvalidRequestError naming param."""
    if (reader := _reader(data)) is None:
        raise InvalidRequestError(param=param, problem=f"is neither a JPEG nor a PNG file{_guess(data)}")
    if data.startswith(b"\xff\xd8") and (n_scans := data.count(_SCAN)) > _MAX_SCANS:
        problem = f"has {n_scans} scans, the limit is {_MAX_SCANS}: each goes over all pixels again"
        raise InvalidRequestError(param=param, problem=problem)
    try:
        # The readers themselves: Image.open would choose among all formats and has a limit on pixels of its own.
        image: Image.Image = reader(BytesIO(data))
    except _BROKEN as exc:
        raise _broken(param, exc) from exc
    width, height = image.size
    if width < 1 or height < 1 or width * height > max_pixels:
        problem = f"has {width} x {height} pixels, the limit is {max_pixels} in all (limits.max_pixels)"
        raise InvalidRequestError(param=param, problem=problem)
    try:
        if isinstance(image, PngImagePlugin.PngImageFile):
            check_png(data)
        else:
            image = reader(BytesIO(whole_jpeg(data)))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _to_plain(image)
    except _BROKEN as exc:
        raise _broken(param, exc) from exc


@contextmanager
def turn_for(*files: bytes) -> Iterator[None]:
    """Wait until no other large pictures are decoded or used, if these files, of any kind, are large ones.

    In the block they are decoded, used and forgotten. Few small bytes may be a picture of a hundred million; the memory
    that one takes, some 8 bytes a pixel on the way, is there once and not once for each thread, and is given back.
    """
    if sum(map(_n_pixels, files)) < _LARGE_PIXELS:
        yield
        return
    with _LARGE:
        try:
            yield
        finally:
            give_back()


def _n_pixels(data: bytes) -> int:
    """Tell a picture's size as its header has it, decoding nothing; 0 for what is no picture."""
    try:
        return math.prod(reader(BytesIO(data)).size) if (reader := _reader(data)) is not None else 0
    except _BROKEN:
        return 0


def _reader(data: bytes) -> type[ImageFile.ImageFile] | None:
    return next((reader for magic, reader in _READERS.items() if data.startswith(magic)), None)


def decode_request(
    request: MediaRequest, *, max_pixels: int, with_reference: bool = False, with_turns: bool = False
) -> Image.Image:
    """Decode a request's picture and check its regions. Raises InvalidRequestError, also for what is not wanted."""
    if request.reference and not with_reference:
        raise InvalidRequestError(param="reference", problem="is not taken: this model looks at one picture")
    image = decode(request.data, max_pixels=max_pixels)
    for region in request.regions:
        check_region(region, image)
        if region.turn_deg and not with_turns:
            raise InvalidRequestError(param="regions", problem="must be upright for a model that finds places in them")
    return image


def _guess(data: bytes) -> str:
    known = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"RIFF": "WebP or WAV"}
    name = next((name for magic, name in known.items() if data.startswith(magic)), "")
    return f" but looks like {name}" if name else ""


def _broken(param: str, exc: Exception) -> InvalidRequestError:
    detail = str(exc) if isinstance(exc, OSError | SyntaxError | ValueError) else type(exc).__name__
    return InvalidRequestError(param=param, problem=f"is a broken or cut picture: {detail[:200]}")


def _to_plain(image: Image.Image) -> Image.Image:
    """Give the picture in mode RGB or L."""
    if image.mode in {"RGB", "L"} and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would clip all above 255 to white
        plain = Image.new("L", image.size)
        for top, strip in _strips(image):
            plain.paste(Image.fromarray((np.asarray(strip).astype(np.uint32) >> 8).astype(np.uint8)), (0, top))
        return plain
    if image.mode in {"LA", "PA", "RGBA"} or "transparency" in image.info:
        plain = Image.new("RGB", image.size, "white")
        for top, strip in _strips(image):
            colors = strip.convert("RGBA")
            plain.paste(colors, (0, top), mask=colors.getchannel("A"))
        return plain
    return image.convert("L" if image.mode == "1" else "RGB")


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Cut a picture into strips, each with its first row: what is made of one on the way stays small."""
    n_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, n_rows):
        yield top, image.crop((0, top, image.width, min(top + n_rows, image.height)))


def is_inside(region: Box, image: Image.Image) -> bool:
    """Tell whether a region has an area inside the picture; of a turned one the middle, and it is no larger."""
    sides = (region.x, region.y, region.width, region.height, region.turn_deg)
    if not all(map(math.isfinite, sides)) or region.width <= 0 or region.height <= 0:
        return False
    if region.turn_deg:
        x, y = region.x + region.width / 2, region.y + region.height / 2
        fits = max(region.width, region.height) <= image.width + image.height
        fits = fits and region.width * region.height <= image.width * image.height
        return fits and 0 <= x <= image.width and 0 <= y <= image.height
    right, bottom = region.x + region.width, region.y + region.height
    # Half a pixel over the edge: clients send rounded what they were told.
    fits = right <= image.width + 0.5 and bottom <= image.height + 0.5
    return fits and 0 <= region.x < image.width and 0 <= region.y < image.height


def check_region(region: Box, image: Image.Image) -> None:
    """Raise InvalidRequestError unless a region is inside the picture."""
    if not is_inside(region, image):
        what = f"{region.width:g} x {region.height:g} at {region.x:g}, {region.y:g}"
        problem = f"{what} does not lie inside the picture of {image.width} x {image.height} pixels"
        raise InvalidRequestError(param="regions", problem=problem)


def whole(image: Image.Image) -> Box:
    return Box(x=0, y=0, width=image.width, height=image.height)


def prepare(image: Image.Image, spec: ImageInput, region: Box | None = None) -> tuple[NDArray[Any], Fit]:
    """Make the tensor of a picture or a part of it: [channels, height, width] or [height, width, channels].

    A turned part is straightened first; its fit then leads back into the straightened part.
    """
    if region is not None and region.turn_deg:
        image, region = straightened(to_color(image, spec.color), region), None
    area = region or whole(image)
    fit, size = _fit(area, spec)
    cut = area if spec.resize != "crop" else _middle(area, spec)
    part, left, top = to_color(image, spec.color), 0, 0
    if region is not None:  # cut out, because resize would look at the pixels around it
        left, top = math.floor(area.x), math.floor(area.y)
        right, bottom = math.ceil(area.x + area.width), math.ceil(area.y + area.height)
        part = part.crop((left, top, min(right, image.width), min(bottom, image.height)))
    x, y = cut.x - left, cut.y - top
    box = (x, y, min(x + cut.width, part.width), min(y + cut.height, part.height))
    scaled = part.resize(size, _FILTERS[spec.filter], box=box)
    if spec.resize == "letterbox":
        canvas = Image.new(scaled.mode, (spec.width, spec.height), (spec.pad,) * len(scaled.getbands()))
        canvas.paste(scaled, (int(fit.to_x), int(fit.to_y)))
        scaled = canvas
    return to_array(scaled, spec), fit


def _fit(area: Box, spec: ImageInput) -> tuple[Fit, tuple[int, int]]:
    """Say where the area goes, and the size it is scaled to."""
    if spec.resize == "letterbox":
        scale = min(spec.width / area.width, spec.height / area.height)
        width = max(1, min(spec.width, round(area.width * scale)))
        height = max(1, min(spec.height, round(area.height * scale)))
        left, top = (spec.width - width) // 2, (spec.height - height) // 2
        return Fit(area.x, area.y, width / area.width, height / area.height, left, top), (width, height)
    cut = _middle(area, spec) if spec.resize == "crop" else area
    return Fit(cut.x, cut.y, spec.width / cut.width, spec.height / cut.height), (spec.width, spec.height)


def _middle(area: Box, spec: ImageInput) -> Box:
    """Cut out the middle of an area, in the input's proportions."""
    scale = min(area.width / spec.width, area.height / spec.height) * spec.crop_fraction
    width, height = spec.width * scale, spec.height * scale
    return Box(x=area.x + (area.width - width) / 2, y=area.y + (area.height - height) / 2, width=width, height=height)


def straightened(image: Image.Image, region: Box) -> Image.Image:
    """Cut a turned region out, upright."""
    width, height = max(1, round(region.width)), max(1, round(region.height))
    middle_x, middle_y = region.x + region.width / 2, region.y + region.height / 2
    cos, sin = math.cos(math.radians(region.turn_deg)), math.sin(math.radians(region.turn_deg))
    left = middle_x - cos * width / 2 + sin * height / 2
    top = middle_y - sin * width / 2 - cos * height / 2
    turn = (cos, -sin, left, sin, cos, top)
    return image.transform((width, height), Image.Transform.AFFINE, turn, Image.Resampling.BICUBIC)


def to_color(image: Image.Image, color: str) -> Image.Image:
    """Give the picture in mode L for gray, else RGB; to_array turns RGB into BGR."""
    mode = "L" if color == "gray" else "RGB"
    return image if image.mode == mode else image.convert(mode)


def to_array(image: Image.Image, spec: ImageInput) -> NDArray[Any]:
    """Give a picture of the final size as the tensor that spec describes, without the batch's dimension."""
    pixels: NDArray[Any] = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, np.newaxis]
    if spec.color == "bgr":
        pixels = pixels[:, :, ::-1]
    if spec.datatype == "FP32":
        pixels = (pixels.astype(np.float32) - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    if spec.layout == "nchw":
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels)
