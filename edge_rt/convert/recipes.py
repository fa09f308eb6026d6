"""The recipes that a manifest's variants name: each makes one file of another, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edge_rt.convert.bert import convert_minilm, convert_minilm_static, convert_minilm_w4a16
from edge_rt.convert.efficientnet import convert_lite0
from edge_rt.convert.npu import Precision, convert_npu, convert_w4a16, convert_w8a8, convert_w8a16
from edge_rt.convert.qdq import convert_int8
from edge_rt.convert.rknn import FORMS
from edge_rt.convert.weight_only import convert_minilm_w4, convert_w8
from edge_rt.convert.word_vectors import convert_word_vectors
from edge_rt.errors import ModelFormatError

Recipe = Callable[[Path, Path, Path | None], None]  # src, dst, beside
LongRecipe = Callable[[Path, Path, tuple[Path, ...]], None]  # the same, of any number of materials

_RECIPES: dict[str, Recipe] = {
    "efficientnet-lite0": convert_lite0,
    "minilm-l6": convert_minilm,
    "minilm-l6-static": convert_minilm_static,
    "minilm-l6-w4a16": convert_minilm_w4a16,
    "minilm-l6-w4": convert_minilm_w4,
    "npu-w4a16": convert_w4a16,
    "npu-w4a8": partial(convert_npu, Precision(4, 8)),
    "npu-w8": convert_w8,
    "npu-w8a16": convert_w8a16,
    "npu-w8a8": convert_w8a8,
    "qdq-int8": convert_int8,
    "word-vectors": convert_word_vectors,
}

_LONG_RECIPES: Mapping[str, LongRecipe] = FORMS


def run_recipe(recipe: str, src: Path, dst: Path, *beside: Path) -> None:
    """Write dst. Raises ModelFormatError for files that the recipe cannot take and for a recipe that is not known."""
    if (long := _LONG_RECIPES.get(recipe)) is not None:
        long(src, dst, beside)
    elif (run := _RECIPES.get(recipe)) is None:
        known = ", ".join(sorted({**_RECIPES, **_LONG_RECIPES}))
        raise ModelFormatError(path=dst.name, field="derive", problem=f"no recipe {recipe!r}, there are: {known}")
    elif len(beside) > 1:
        problem = f"names {len(beside)} materials, {recipe} takes one"
        raise ModelFormatError(path=dst.name, field="derive_with", problem=problem)
    else:
        run(src, dst, beside[0] if beside else None)
