from __future__ import annotations

import struct
import subprocess
import sys
import threading
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from edge_rt.catalog.pipelines import ImageInput
from edge_rt.engine.images import check_region, decode, prepare, turn_for
from edge_rt.engine.picture_size import _ADAM7 as ADAM7
from edge_rt.errors import InvalidRequestError
from edge_rt.tensor_types import Box
from tests.pictures import encoded, noise

MAX_PIXELS = 1_000_000


def png(width: int, height: int, *, depth: int = 8, color: int = 2, data: bytes = b"") -> bytes:
    """Write a PNG file by hand, so that its header can lie."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_png_comes_back_as_it_was() -> None:
    pixels = noise(7, 5)
    assert np.array_equal(np.asarray(decode(encoded(pixels), max_pixels=MAX_PIXELS)), pixels)


def test_jpeg_is_what_pillow_makes_of_it() -> None:
    data = encoded(noise(16, 24), "JPEG", quality=80)
    assert np.array_equal(np.asarray(decode(data, max_pixels=MAX_PIXELS)), np.asarray(Image.open(BytesIO(data))))


@pytest.mark.parametrize("side", [1_001, 30_000, 2**31 - 1])
def test_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{side} x {side} pixels, the limit is {MAX_PIXELS}"):
        decode(png(side, side), max_pixels=MAX_PIXELS)


def test_jpeg_with_too_many_pixels_is_refused_by_its_header() -> None:
    data = bytearray(encoded(noise(8, 8), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(InvalidRequestError, match="60000 x 60000 pixels"):
        decode(bytes(data), max_pixels=MAX_PIXELS)


def test_limit_itself_is_allowed() -> None:
    assert decode(encoded(noise(1000, 1000)), max_pixels=MAX_PIXELS).size == (1000, 1000)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.95])
def test_cut_file_is_refused(kind: str, part: float) -> None:
    data = encoded(noise(64, 64), kind)
    with pytest.raises(InvalidRequestError, match=r"^reference: "):
        decode(data[: int(len(data) * part)], max_pixels=MAX_PIXELS, param="reference")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_broken_bytes_are_pictures_or_refused(kind: str) -> None:
    good = encoded(noise(16, 16), kind)
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for at in random.integers(0, len(data), 3):
            data[at] = random.integers(256)
        try:
            decode(bytes(data), max_pixels=MAX_PIXELS)
        except InvalidRequestError:
            refused += 1
    assert refused > 20


def test_jpeg_with_a_thousand_scans_is_refused() -> None:
    data = encoded(noise(64, 64), "JPEG", progressive=True)
    assert 1 < data.count(b"\xff\xda") < 20
    assert decode(data, max_pixels=MAX_PIXELS).size == (64, 64)
    start = data.rindex(b"\xff\xda")
    with pytest.raises(InvalidRequestError, match="scans, the limit is 100"):
        decode(data[:start] + data[start:-2] * 1000 + data[-2:], max_pixels=MAX_PIXELS)


def test_text_in_a_png_that_unpacks_to_much_is_refused() -> None:
    body = b"Comment\0\0" + zlib.compress(bytes(100_000_000), 9)
    text = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    whole = encoded(noise(4, 4))
    with pytest.raises(InvalidRequestError, match="broken or cut"):
        decode(whole[:33] + text + whole[33:], max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_other_formats_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="neither a JPEG nor a PNG"):
        decode(encoded(noise(8, 8), kind), max_pixels=MAX_PIXELS)


def test_file_that_is_no_picture_is_named_for_what_it_looks_like() -> None:
    with pytest.raises(InvalidRequestError, match="looks like PDF"):
        decode(b"%PDF-1.7 ...", max_pixels=MAX_PIXELS)


def test_exif_orientation_is_applied() -> None:
    pixels = noise(4, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it 90 degrees clockwise
    data = encoded(pixels, exif=exif)
    assert np.array_equal(np.asarray(decode(data, max_pixels=MAX_PIXELS)), np.rot90(pixels, -1))


def test_16_bits_of_grey_keep_their_upper_8() -> None:
    pixels = np.array([[0, 255, 256, 0x1234, 65535]], np.uint16)
    picture = decode(encoded(pixels), max_pixels=MAX_PIXELS)
    assert picture.mode == "L"
    assert np.asarray(picture).tolist() == [[0, 0, 1, 0x12, 255]]


def test_16_bits_of_color_keep_their_upper_8() -> None:
    row = b"\0" + struct.pack(">3H", 0x0102, 0x80FF, 0xFFFF)
    picture = decode(png(1, 1, depth=16, data=row), max_pixels=MAX_PIXELS)
    assert np.asarray(picture).tolist() == [[[0x01, 0x80, 0xFF]]]


def test_what_is_transparent_is_seen_on_white() -> None:
    pixels = np.array([[[200, 0, 0, 255], [200, 0, 0, 0], [200, 0, 0, 128]]], np.uint8)
    clear, half = np.asarray(decode(encoded(pixels), max_pixels=MAX_PIXELS))[0, 1:]
    assert clear.tolist() == [255, 255, 255]
    assert np.abs(half.astype(int) - [227, 127, 127]).max() <= 1


def test_palette_with_a_transparent_color() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    data = encoded(image, transparency=1)
    assert np.asarray(decode(data, max_pixels=MAX_PIXELS))[0].tolist() == [[10, 20, 30], [255, 255, 255]]


def test_one_bit_a_pixel() -> None:
    picture = decode(encoded(Image.fromarray(np.array([[True, False]]))), max_pixels=MAX_PIXELS)
    assert np.asarray(picture).tolist() == [[255, 0]]


def test_cmyk_becomes_rgb() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = np.asarray(decode(encoded(image, "JPEG"), max_pixels=MAX_PIXELS))[4, 4]
    assert red > 240
    assert green < 15
    assert blue < 15


def test_stretch_is_pillows_resize() -> None:
    image = Image.fromarray(noise(30, 50))
    tensor, fit = prepare(image, ImageInput(width=20, height=10, mean=(1.0, 2.0, 3.0), std=(4.0,)))
    expected = (np.asarray(image.resize((20, 10), Image.Resampling.BILINEAR), np.float32) - [1, 2, 3]) / 4
    assert tensor.dtype == np.float32
    assert np.allclose(tensor, expected.transpose(2, 0, 1), atol=1e-6)
    assert fit.boxes(np.array([[0, 0, 20, 10]], np.float32), 50, 30).tolist() == [[0, 0, 50, 30]]


def test_bgr_nhwc_bytes() -> None:
    pixels = noise(4, 4)
    spec = ImageInput(width=4, height=4, color="bgr", layout="nhwc", datatype="UINT8", filter="nearest")
    tensor, _ = prepare(Image.fromarray(pixels), spec)
    assert np.array_equal(tensor, pixels[:, :, ::-1])
    assert tensor.flags.c_contiguous


def test_letterbox_keeps_the_whole_picture_and_its_proportions() -> None:
    image = Image.new("RGB", (200, 100), (9, 9, 9))
    spec = ImageInput(width=64, height=64, resize="letterbox", pad=7, datatype="UINT8")
    tensor, fit = prepare(image, spec)
    assert (tensor[:, :16] == 7).all()
    assert (tensor[:, 48:] == 7).all()
    assert (tensor[:, 16:48] == 9).all()
    box = fit.boxes(np.array([[32, 16, 64, 48]], np.float32), 200, 100)
    assert box.tolist() == [[100, 0, 200, 100]]


def test_crop_takes_the_middle_of_the_shorter_side() -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[10:30, 30:50] = 200  # half of the shorter side, around the centre
    spec = ImageInput(width=10, height=10, resize="crop", crop_fraction=0.5, datatype="UINT8", filter="nearest")
    tensor, fit = prepare(Image.fromarray(pixels), spec)
    assert (tensor == 200).all()
    assert fit.boxes(np.array([[0, 0, 10, 10]], np.float32), 80, 40).tolist() == [[30, 10, 50, 30]]


def test_region_is_prepared_as_if_it_had_been_cut_out() -> None:
    pixels = noise(40, 40)
    spec = ImageInput(width=8, height=8)
    part, fit = prepare(Image.fromarray(pixels), spec, Box(x=4, y=8, width=16, height=24))
    alone, _ = prepare(Image.fromarray(pixels[8:32, 4:20]), spec)
    assert np.array_equal(part, alone)
    assert fit.boxes(np.array([[0, 0, 4, 8]], np.float32), 40, 40).tolist() == [[4, 8, 12, 32]]


def test_region_rounded_over_the_edge_is_taken() -> None:
    image = Image.fromarray(noise(40, 40))
    region = Box(x=30.0, y=20.0, width=10.4, height=20.3)
    check_region(region, image)
    cut, _ = prepare(image, ImageInput(width=10, height=20, datatype="UINT8"), region)
    assert np.array_equal(cut, np.asarray(image)[20:, 30:].transpose(2, 0, 1))


@pytest.mark.parametrize(
    "box",
    [
        (-1, 0, 4, 4),
        (40, 0, 0.4, 4),
        (0, 0, 0, 4),
        (38, 0, 4, 4),
        (0, 0, float("nan"), 4),
        (0, 0, 4, float("inf")),
        (0, 0, -4, 4),
    ],
)
def test_region_outside_the_picture_is_refused(box: tuple[float, float, float, float]) -> None:
    x, y, width, height = box
    with pytest.raises(InvalidRequestError, match=r"regions: .* inside the picture of 40 x 40"):
        check_region(Box(x=x, y=y, width=width, height=height), Image.new("L", (40, 40)))


def test_large_pictures_are_looked_at_one_after_the_other_and_small_ones_at_any_time() -> None:
    large, small = encoded(Image.new("L", (2048, 2048))), encoded(noise(8, 8))
    is_in, may_leave, other_is_in = threading.Event(), threading.Event(), threading.Event()

    def look(first: threading.Event, *files: bytes) -> None:
        with turn_for(*files):
            first.set()
            assert may_leave.wait(60)

    one, two = (threading.Thread(target=look, args=args) for args in ((is_in, large), (other_is_in, small, large)))
    one.start()
    assert is_in.wait(60)
    two.start()
    with turn_for(small, b"no picture", png(9, 0)):
        assert not other_is_in.is_set()
    assert not other_is_in.wait(0.05)
    may_leave.set()
    assert other_is_in.wait(60)
    one.join()
    two.join()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "L"])
def test_a_large_picture_takes_8_bytes_a_pixel_and_gives_them_back(mode: str) -> None:
    """In a process of its own, because a process knows only its highest peak."""
    program = """
import resource, sys
from edge_rt.devices.memory import process_rss_bytes
from edge_rt.engine.images import decode, turn_for
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
data = sys.stdin.buffer.read()
decode(bytes.fromhex(sys.argv[1]), max_pixels=10**8)
before = peak()
with turn_for(data):
    decode(data, max_pixels=10**8)
print((peak() - before) / 2**24, (process_rss_bytes().value - before) / 2**24)
"""
    image = Image.new(mode, (4096, 4096))
    small = encoded(image.crop((0, 0, 2, 2))).hex()
    done = subprocess.run(
        [sys.executable, "-c", program, small], input=encoded(image), capture_output=True, check=True, timeout=120
    )
    at_most, afterwards = map(float, done.stdout.split())
    assert at_most < 9.5
    assert afterwards < 1


def told(data: bytes, width: int, height: int) -> bytes:
    """Give the file with another size in its header."""
    lying = bytearray(data)
    if data.startswith(b"\x89PNG"):
        struct.pack_into(">II", lying, 16, width, height)
        struct.pack_into(">I", lying, 29, zlib.crc32(lying[12:29]))
    else:
        at = next(lying.index(marker) for marker in (b"\xff\xc0\0", b"\xff\xc1\0", b"\xff\xc2\0") if marker in data)
        struct.pack_into(">HH", lying, at + 5, height, width)
    return bytes(lying)


KINDS = {
    "png": ("PNG", {}),
    "jpeg": ("JPEG", {"quality": 90}),
    "coarse": ("JPEG", {"quality": 5}),
    "4:4:4": ("JPEG", {"subsampling": 0, "optimize": True}),
    "restarts": ("JPEG", {"restart_marker_rows": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "height"), [(40, 60), (40, 48), (64, 32), (400, 600)])
@pytest.mark.parametrize("content", ["noise", "white"])
def test_a_picture_that_holds_less_than_its_header_tells_is_refused(
    kind: str, width: int, height: int, content: str
) -> None:
    form, options = KINDS[kind]
    pixels = noise(32, 40) if content == "noise" else np.full((32, 40, 3), 255, np.uint8)
    data = encoded(pixels, form, **options)
    assert decode(data, max_pixels=MAX_PIXELS).size == (40, 32)
    with pytest.raises(InvalidRequestError, match="broken or cut picture"):
        decode(told(data, width, height), max_pixels=MAX_PIXELS)


def test_a_progressive_picture_far_from_its_header_is_refused() -> None:
    data = encoded(noise(32, 40), "JPEG", progressive=True)
    assert decode(data, max_pixels=MAX_PIXELS).size == (40, 32)
    with pytest.raises(InvalidRequestError, match=r"its header tells of \d+ bytes at least"):
        decode(told(data, 640, 640), max_pixels=MAX_PIXELS)


def test_a_png_that_holds_more_than_its_header_tells_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="it holds more"):
        decode(told(encoded(noise(32, 40)), 40, 16), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16", "CMYK"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 5), (17, 9), (64, 64)])
def test_pictures_of_every_mode_and_odd_sizes_are_read(mode: str, width: int, height: int) -> None:
    image = Image.fromarray(noise(height, width))
    image = Image.fromarray(noise(height, width, 1).astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    kinds = {"CMYK": ("JPEG",), "L": ("PNG", "JPEG"), "RGB": ("PNG", "JPEG")}.get(mode, ("PNG",))
    for kind in kinds:
        for options in ({}, {"progressive": True}) if kind == "JPEG" else ({},):
            assert decode(encoded(image, kind, **options), max_pixels=MAX_PIXELS).size == (width, height)


def test_an_interlaced_png_is_read() -> None:
    rows = noise(5, 6, 1)
    passes = [rows[top::down, left::across] for left, top, across, down in ADAM7]
    raw = b"".join(b"\0" + row.tobytes() for part in passes if part.size for row in part)
    body = struct.pack(">IIBBBBB", 6, 5, 8, 0, 0, 0, 1)
    chunks = ((b"IHDR", body), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(what)) + name + what + struct.pack(">I", zlib.crc32(name + what)) for name, what in chunks
    )
    assert np.array_equal(np.asarray(decode(data, max_pixels=MAX_PIXELS)), rows)
    with pytest.raises(InvalidRequestError, match="its header tells of"):
        decode(told(data, 6, 8), max_pixels=MAX_PIXELS)
