"""What each model of the catalog that has forms for NPUs is calibrated with, and what its forms are compared on.

Nothing is in both. What can be given away is drawn, rendered or our own text; photographs are fetched for measuring
(samples.py, picture_set.py).

    model               calibrated with                         compared on
    efficientnet-lite0  photographs of scikit-image, -learn     picture_set.py: 200 photographs, 200 labelled views
    pcb-defect          drawn boards                            other drawn boards, or DeepPCB's test pairs
    minilm-l6           paragraphs.txt, and for 4 bit their     sentence_pairs.py; halves of its other paragraphs
                        sentences
    pp-ocrv4-det        rendered lines of text                  other rendered lines
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer

from edge_rt.catalog.manifest import Manifest
from edge_rt.catalog.pipelines import Classify, DetectText
from edge_rt.engine.images import prepare
from tools.pcb.boards import Board
from tools.pcb.drawn import draw_boards
from tools.samples import sample

Feed = Mapping[str, NDArray[Any]]

MODELS = ("efficientnet-lite0", "minilm-l6", "pcb-defect", "pp-ocrv4-det")
N_TOKENS = 128  # of a text, filled up
MAP_SHAPE = (480, 640)  # of a picture with text: height, width
_PHOTOGRAPHS = (
    ("scikit-image", "0.26.0", "skimage/data/", "astronaut.png chelsea.png coffee.png motorcycle_left.png rocket.jpg"),
    (
        "scikit-image",
        "0.26.0",
        "skimage/data/",
        "camera.png coins.png brick.png grass.png gravel.png motorcycle_right.png",
    ),
    ("scikit-learn", "1.8.0", "sklearn/datasets/images/", "china.jpg flower.jpg"),
)
_VIEWS = 4  # of each photograph
_CALIBRATION_SEED, _JUDGE_SEED = 7, 1000
_PARAGRAPHS = Path(__file__).with_name("paragraphs.txt")
_MIN_SENTENCE = 20  # characters


def calibration(manifest: Manifest, tokenizer: Path | None = None) -> list[Feed]:
    """Give what a model is calibrated with, one sample at a time. Raises ValueError for a model not in MODELS."""
    readers: dict[str, Callable[[], Iterator[Feed]]] = {
        "efficientnet-lite0": lambda: (picture_feed(manifest, view) for view in _photographs()),
        "minilm-l6": lambda: (text_feed(Texts(tokenizer).ids(text)) for text in paragraphs()[0]),
        "pcb-defect": lambda: (board_feed(board) for board in draw_boards(16, _CALIBRATION_SEED)),
        "pp-ocrv4-det": lambda: (map_feed(manifest, plate) for plate, _ in plates(24, _CALIBRATION_SEED)),
    }
    if (reader := readers.get(manifest.id)) is None:
        raise ValueError(f"{manifest.id} has no forms for NPUs; these have: {', '.join(MODELS)}")
    return list(reader())


def picture_feed(manifest: Manifest, picture: NDArray[np.uint8]) -> Feed:
    """Prepare RGB pixels as the manifest's pipeline says."""
    assert isinstance(manifest.pipeline, Classify)
    array, _ = prepare(Image.fromarray(picture), manifest.pipeline.image)
    return {manifest.pipeline.image.input or "image": array[None]}


def _photographs() -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(_CALIBRATION_SEED)
    for package, version, folder, names in _PHOTOGRAPHS:
        for name in names.split():
            with Image.open(io.BytesIO(sample(package, version, folder + name))) as image:
                pixels = np.asarray(image.convert("RGB"))
            yield pixels
            for _ in range(_VIEWS - 1):
                side = int(rng.uniform(0.4, 1) * min(pixels.shape[:2]))
                top, left = (int(rng.integers(0, size - side + 1)) for size in pixels.shape[:2])
                yield np.ascontiguousarray(pixels[top : top + side, left : left + side])


def board_feed(board: Board) -> Feed:
    return {"image": board.picture[None, None], "golden": board.golden[None, None]}


def judge_boards(n: int) -> list[Board]:
    """Draw boards that the model was not calibrated with; it was trained on others, too."""
    return draw_boards(n, _JUDGE_SEED)


class Texts:
    """A tokenizer that cuts texts at N_TOKENS and fills nothing up."""

    def __init__(self, tokenizer: Path | None):
        if tokenizer is None:
            raise ValueError("texts need the model's tokenizer: edge_rt models pull minilm-l6")
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(N_TOKENS)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


def text_feed(ids: Sequence[int], n_tokens: int = N_TOKENS) -> Feed:
    """Fill a text's tokens up with what the mask leaves out: INT64 [1, n_tokens] each."""
    feed = {name: np.zeros((1, n_tokens), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    feed["input_ids"][0, : len(ids)] = ids
    feed["attention_mask"][0, : len(ids)] = 1
    return feed


def paragraphs() -> tuple[list[str], list[str]]:
    """Give paragraphs of prose: those to calibrate with, and those to compare on."""
    _, calibrated, compared = re.split(r"^\[.*\]\n", _PARAGRAPHS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return calibrated.split("\n")[:-2], compared.split("\n")[:-1]


def sentences(texts: Sequence[str]) -> list[str]:
    """Cut texts at the ends of their sentences and of parts of them."""
    parts = (part.strip() for text in texts for part in re.split(r"(?<=[.:;?!]) ", text))
    return [part for part in parts if len(part) > _MIN_SENTENCE]


def halves(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Cut each text at the end of a sentence near its middle; those of one sentence are left out."""
    found = []
    for text in texts:
        ends = [match.end() for match in re.finditer(r"[.:;] ", text)]
        if ends and 40 < (end := min(ends, key=lambda at: abs(at - len(text) / 2))) < len(text) - 40:
            found.append((text[:end], text[end:]))
    return found


def plates(n: int, seed: int = _JUDGE_SEED) -> Iterator[tuple[Image.Image, list[tuple[int, int, int, int]]]]:
    """Render pictures with two to seven lines of text, with the box x1 y1 x2 y2 of each."""
    height, width = MAP_SHAPE
    letters = "ABCDEFGHJKLMNPRSTUVWXYZabcdefghijkmnopqrstuvwxyz0123456789-./: "
    for index in range(n):
        rng = np.random.default_rng((seed, index))
        light, dark = (tuple(int(v) for v in rng.integers(low, low + 100, 3)) for low in (150, 0))
        picture = Image.new("RGB", (width, height), light)
        draw = ImageDraw.Draw(picture)
        boxes: list[tuple[int, int, int, int]] = []
        top = int(rng.integers(8, 40))
        while len(boxes) < 7:
            font = ImageFont.load_default(int(rng.integers(16, 48)))
            text = "".join(letters[i] for i in rng.integers(0, len(letters), int(rng.integers(4, 20)))).strip()
            left, up, right, down = draw.textbbox((0, 0), text, font=font)
            if top + down > height - 8:
                break
            x = int(rng.integers(8, max(9, int(width - 8 - right))))
            if text and x + right < width:
                draw.text((x, top), text, fill=dark, font=font)
                boxes.append((int(x + left), int(top + up), int(x + right), int(top + down)))
            top += int(down) + int(rng.integers(14, 50))
        yield picture, boxes


def map_feed(manifest: Manifest, picture: Image.Image) -> Feed:
    """Prepare a picture of MAP_SHAPE as the text detector takes it: FP32 [1, 3, height, width]."""
    spec = manifest.pipeline
    assert isinstance(spec, DetectText)
    pixels = np.asarray(picture, np.float32)
    if spec.color == "bgr":
        pixels = pixels[..., ::-1]
    scaled = (pixels - np.array(spec.mean, np.float32)) / np.array(spec.std, np.float32)
    return {spec.input or "x": np.ascontiguousarray(scaled.transpose(2, 0, 1)[None], np.float32)}
