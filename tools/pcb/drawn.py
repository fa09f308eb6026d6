"""Boards drawn from nothing: conductors, pads and pours in the manner of DeepPCB's binary pictures, with the six flaws.

They are the project's own, so whatever is trained on them alone can be given away; and they need no download.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from tools.pcb.boards import KINDS, SIDE, Board, Picture

_COPPER, _BARE = 0, 255
_MAX_GAP = 90  # pixels, of copper or bare board, that an open or a short crosses
_TRIES = 150  # places looked at for a flaw before it is left out

Mask = NDArray[np.bool_]  # True: copper
Point = NDArray[np.float64]  # x, y
Box = tuple[float, float, float, float]
Strokes = list[tuple[list[tuple[float, float]], int]]  # points and width of each


def draw_boards(n: int, seed: int, *, side: int = SIDE) -> list[Board]:
    """The same seed draws the same boards."""
    rng = np.random.default_rng(seed)
    return [draw_board(f"drawn-{seed}-{i}", rng, side=side) for i in range(n)]


def draw_board(name: str, rng: np.random.Generator, *, side: int = SIDE) -> Board:
    layout = _layout(rng, side)
    picture = Image.fromarray(layout.copy())
    places = _Places(layout < 128)
    marks: list[tuple[float, ...]] = []
    order = rng.permutation(np.repeat(np.arange(len(KINDS)), 3))[: int(rng.integers(6, 17))]
    for kind in order:
        mark = _flaw(picture, places, KINDS[kind], rng, marks)
        if mark is not None:
            marks.append((*mark, float(kind)))
    shift = tuple(rng.uniform(-1.2, 1.2, 2))
    return Board(
        name=name,
        picture=_as_photographed(picture, rng, (0.0, 0.0)),
        golden=_as_photographed(Image.fromarray(layout), rng, shift),
        marks=np.array(marks, np.float32).reshape(-1, 5),
    )


def _layout(rng: np.random.Generator, side: int) -> Picture:
    """Draw conductors on a grid whose pitch and widths are the board's own."""
    image = Image.new("L", (side, side), _BARE)
    draw = ImageDraw.Draw(image)
    pitch = int(np.exp(rng.uniform(np.log(20), np.log(110))))
    width = int(pitch * rng.uniform(0.22, 0.62))
    n_cells = side // pitch + 2
    taken = np.zeros((n_cells, n_cells), bool)
    origin = rng.integers(-pitch, 1, 2)
    _pours(draw, taken, pitch, origin, rng)
    for _ in range(int(n_cells**2 * rng.uniform(0.05, 0.5))):
        path = _route(taken, rng)
        points = [(float(x * pitch + origin[0]), float(y * pitch + origin[1])) for x, y in path]
        if len(points) > 1:
            draw.line(points, _COPPER, width, joint="curve")
        if len(points) == 1 or rng.random() < 0.5:
            for x, y in dict.fromkeys((points[0], points[-1])):
                _pad(draw, x, y, pitch * rng.uniform(0.3, 0.46), rng)
    layout = np.asarray(image).copy()
    return (
        255 - layout if rng.random() < 0.3 else layout
    )  # a plane with cut-outs is as common as conductors on bare board


def _pours(
    draw: ImageDraw.ImageDraw, taken: Mask, pitch: int, origin: NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Fill rectangles of cells with copper, or keep them empty."""
    for _ in range(int(rng.integers(0, 5))):
        x, y = map(int, rng.integers(0, len(taken), 2))
        width, height = map(int, rng.integers(1, max(2, len(taken) // 2), 2))
        if taken[y : y + height + 1, x : x + width + 1].any():
            continue
        taken[y : y + height + 1, x : x + width + 1] = True
        left, top = x * pitch + int(origin[0]), y * pitch + int(origin[1])
        if rng.random() < 0.7:
            box = (left, top, left + width * pitch, top + height * pitch)
            draw.rounded_rectangle(box, float(rng.uniform(0, pitch / 2)), _COPPER)


def _route(taken: Mask, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Walk over free cells, mostly straight on, marking them as taken."""
    free = np.argwhere(~taken)
    if not len(free):
        return [(0, 0)]
    y, x = map(int, free[rng.integers(len(free))])
    taken[y, x] = True
    path = [(x, y)]
    step = np.array([(1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1)][rng.integers(6)])
    for _ in range(int(rng.integers(0, 14))):
        if rng.random() < 0.2:
            turn = np.array([[0, -1], [1, 0]]) if rng.random() < 0.5 else np.array([[0, 1], [-1, 0]])
            step = turn @ step
        x, y = x + int(step[0]), y + int(step[1])
        if not (0 <= x < len(taken) and 0 <= y < len(taken)) or taken[y, x]:
            break
        if step.all() and (taken[y - step[1], x] or taken[y, x - step[0]]):  # a slant would touch what is there
            break
        taken[y, x] = True
        path.append((x, y))
    return path


def _pad(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, rng: np.random.Generator) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    if rng.random() < 0.5:
        draw.rectangle(box, _COPPER)
        return
    draw.ellipse(box, _COPPER)
    if rng.random() < 0.6:
        hole = radius * rng.uniform(0.25, 0.5)
        draw.ellipse((x - hole, y - hole, x + hole, y + hole), _BARE)


class _Places:
    """Where on a layout flaws can be, and what strokes make them there."""

    def __init__(self, copper: Mask) -> None:
        self._copper = copper
        image = Image.fromarray((copper * 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(3))
        slopes = np.array(np.gradient(np.asarray(image, np.float64)))
        self._slopes: NDArray[np.float64] = slopes[::-1]  # x and y, into the copper
        self._edges = np.argwhere(copper & (np.abs(slopes).sum(axis=0) > 20))

    def strokes(self, kind: str, rng: np.random.Generator) -> Strokes:
        """Try one place; [] if it does not suit."""
        if kind in ("copper", "pin-hole"):
            return _island(self._copper if kind == "pin-hole" else ~self._copper, rng)
        if not len(self._edges):
            return []
        y, x = self._edges[rng.integers(len(self._edges))]
        inwards = self._slopes[:, y, x] / np.linalg.norm(self._slopes[:, y, x])
        in_copper = kind in ("open", "mousebite")
        ground = self._copper if in_copper else ~self._copper
        towards = inwards if in_copper else -inwards
        return _across(ground, np.array([x, y], float), towards, rng, is_through=kind in ("open", "short"))


def _flaw(
    picture: Image.Image, places: _Places, kind: str, rng: np.random.Generator, marks: list[tuple[float, ...]]
) -> Box | None:
    """Draw one flaw somewhere it can be and give its box, or None where no place was found."""
    color = _BARE if kind in ("open", "mousebite", "pin-hole") else _COPPER
    before = np.asarray(picture).copy()
    for _ in range(_TRIES):
        strokes = places.strokes(kind, rng)
        if not strokes:
            continue
        drawn = picture.copy()
        draw = ImageDraw.Draw(drawn)
        for points, width in strokes:
            draw.line(points, color, width, joint="curve")
        box = _changed(before, np.asarray(drawn), rng)
        if box is not None and not any(_touch(box, mark) for mark in marks):
            picture.paste(drawn)
            return box
    return None


def _across(ground: Mask, start: Point, towards: Point, rng: np.random.Generator, *, is_through: bool) -> Strokes:
    """Scratch from an edge over ground, True where it goes: to its other side, or into it by a part of the way."""
    start = start - towards * 2
    there = [_at(ground, start + towards * step) for step in range(4, _MAX_GAP + 6)]
    end = there.index(False) + 4 if False in there else 0
    if is_through:
        if not 8 <= end <= min(_MAX_GAP, 20 + rng.exponential(20)) or there[0] is False:
            return []
        length, n_strokes, spread = end + rng.uniform(1, 4), int(rng.integers(1, 5)), 3.5
    else:
        room = end or _MAX_GAP
        if room < 11 or not there[0]:
            return []
        length, n_strokes, spread = rng.uniform(0.35, 0.7) * min(room, 28), int(rng.integers(1, 5)), 3.0
    side = np.array([-towards[1], towards[0]])
    lean = rng.uniform(-0.5, 0.5) * (1.0 if is_through else 0.6)
    strokes: Strokes = []
    for _ in range(n_strokes):
        first = start + side * rng.normal(0, spread)
        ways = np.linspace(0, length, 4)
        points = [first + towards * w + side * (lean * w + rng.normal(0, 1.2)) for w in ways]
        strokes.append(([(float(p[0]), float(p[1])) for p in points], int(rng.integers(2, 6))))
    return strokes


def _island(ground: Mask, rng: np.random.Generator) -> Strokes:
    """Scribble on ground, away from its edges."""
    side = len(ground)
    reach = rng.uniform(5, 14)
    middle = rng.uniform(reach + 6, side - reach - 6, 2)
    around = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    ring = [_at(ground, middle + r * np.array([np.cos(a), np.sin(a)])) for a in around for r in (reach / 2, reach + 4)]
    if not all(ring):
        return []
    strokes: Strokes = []
    axis = rng.uniform(0, np.pi)
    thin = rng.uniform(0.2, 1)
    for _ in range(int(rng.integers(1, 5))):
        local = rng.uniform(-reach, reach, (int(rng.integers(2, 6)), 2)) * (0.75, 0.75 * thin)
        turned = local @ np.array([[np.cos(axis), np.sin(axis)], [-np.sin(axis), np.cos(axis)]])
        strokes.append(([(float(x), float(y)) for x, y in middle + turned], int(rng.integers(2, 6))))
    return strokes


def _at(ground: Mask, point: Point) -> bool:
    """Outside the picture there is nothing to be drawn on."""
    x, y = round(float(point[0])), round(float(point[1]))
    return 0 <= x < ground.shape[1] and 0 <= y < ground.shape[0] and bool(ground[y, x])


def _changed(before: Picture, after: Picture, rng: np.random.Generator) -> Box | None:
    """Box what changed, as loosely as DeepPCB's boxes are."""
    rows, columns = np.nonzero(before != after)
    if len(rows) < 15:
        return None
    low = np.array([columns.min(), rows.min()]) - rng.uniform(6, 12, 2)
    high = np.array([columns.max(), rows.max()]) + 1 + rng.uniform(6, 12, 2)
    low, high = np.clip(low, 0, len(before)).round(), np.clip(high, 0, len(before)).round()
    return float(low[0]), float(low[1]), float(high[0]), float(high[1])


def _touch(box: Box, mark: tuple[float, ...]) -> bool:
    return box[0] < mark[2] and mark[0] < box[2] and box[1] < mark[3] and mark[1] < box[3]


def _as_photographed(image: Image.Image, rng: np.random.Generator, shift: tuple[float, float]) -> Picture:
    """Move by a part of a pixel, fray the edges and make black and white of it again."""
    moved = image.transform(
        image.size, Image.Transform.AFFINE, (1, 0, shift[0], 0, 1, shift[1]), Image.Resampling.BILINEAR, fillcolor=_BARE
    )
    soft = np.asarray(moved.filter(ImageFilter.GaussianBlur(1.3)), np.float32)
    grain = Image.fromarray(rng.integers(0, 256, (image.height, image.width), np.uint8)).filter(
        ImageFilter.GaussianBlur(1.2)
    )
    level = 128 + (np.asarray(grain, np.float32) - 128) * rng.uniform(0.5, 2.0)
    return np.where(soft > level, _BARE, _COPPER).astype(np.uint8)
