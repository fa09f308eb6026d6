"""The module map of docs/architecture.md names what there is, and no package or module of edge_rt's top is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "edge_rt"


def entries() -> Iterator[tuple[Path, str]]:
    """Give each entry's folder and text."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    found: list[tuple[Path, str]] = []
    for line in page.partition("## Modules\n")[2].partition("\n## ")[0].splitlines():
        if begun := re.match(r" {4}(  )?(\S+/|\S+\.py)(\s.*|$)", line):
            path = (PACKAGE if begun[1] else ROOT) / begun[2]
            found.append((path if begun[2].endswith("/") else path.parent, begun[2] + begun[3]))
        elif found and line.startswith(" " * 12):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    yield from found


def is_there(name: str, folder: Path) -> bool:
    """Say whether a file or folder is in an entry's own, at the top, or, of the hardware's entries, in the package."""
    inside = [folder] if folder.is_relative_to(PACKAGE) else [folder, PACKAGE]
    return any(any(place.rglob(name)) for place in inside) or any(any(at.glob(name)) for at in (PACKAGE, ROOT))


def test_every_file_and_folder_that_is_named_is_there() -> None:
    n_names = 0
    for folder, text in entries():
        for name in re.findall(r"(?<![\w./])[\w*./]+(?:\.py|/)(?!\w)", text):
            n_names += 1
            assert is_there(name.rstrip("/"), folder), f"{name} of {folder.relative_to(ROOT)}"
    assert n_names > 150


def test_every_package_and_module_at_the_top_is_named() -> None:
    named = " ".join(text for _, text in entries())
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert [name for name in there - {"__init__", "__main__"} if not re.search(rf"(?<!\w){name}\b", named)] == []
