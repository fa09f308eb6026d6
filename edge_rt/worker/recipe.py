"""Derive a variant by a recipe of convert/, in a process of its own.

`python -m edge_rt.worker.recipe RECIPE SRC DST [BESIDE…]` is that process: onnx, numpy and a reader of pickles see what
others made, and take memory that the caller shall not keep. Its stdout holds an error of ours as one JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from edge_rt.catalog.part import disk_full
from edge_rt.catalog.store import free_bytes
from edge_rt.errors import BackendUnavailableError
from edge_rt.same_package import end_with_parent
from edge_rt.worker.child import answer_parent, run_child


def apply(recipe: str, src: Path, dst: Path, *beside: Path) -> None:
    """Write what the recipe makes of src, and of what it takes beside, to dst.

    Raises ModelFormatError naming what it cannot take, BackendUnavailableError without the extra `onnx`, and
    BackendLoadError with the child's last words. dst may then hold a part of the file.
    """
    run_child(
        "edge_rt.worker.recipe", recipe, *map(str, (src, dst, *beside)), model=src.name, what=f"the recipe {recipe}"
    )


def _apply(recipe: str, src: Path, dst: Path, *beside: Path) -> None:
    try:
        from edge_rt.convert.recipes import run_recipe
    except ImportError as exc:
        raise BackendUnavailableError(backend="onnx", reason=str(exc), extra="onnx") from exc
    with disk_full(dst.parent, 0, lambda: free_bytes(dst.parent)):
        run_recipe(recipe, src, dst, *beside)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Run as the child."""
    recipe, src, dst, *beside = argv
    return answer_parent(lambda: _apply(recipe, *map(Path, (src, dst, *beside))))


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
