"""Public models' chat templates, as llama.cpp's sources have them inside llama-cpp-python's source distribution."""

from __future__ import annotations

from collections.abc import Iterator

from tests.source_archives import folder_of
from tools.build_llama import wanted_version


def all_templates() -> Iterator[tuple[str, str]]:
    """Give each template's name and source; fetch them once (77 MB, of which 0.4 are kept), or skip the test."""
    package = f"llama-cpp-python=={wanted_version()}"
    folder = folder_of(package, "vendor/llama.cpp/models/templates", "chat-templates")
    for file in sorted(folder.glob("*.jinja")):
        yield file.stem, file.read_text(encoding="utf-8")
