"""The compiled engine must be here wherever it could be: skipped tests of it must not pass for green ones."""

from __future__ import annotations

import os
import shutil

import pytest

from edge_rt.backends.native_library import isa_names, load_native

COMPILERS = (os.environ.get("CC", ""), "cc", "gcc", "clang")


@pytest.mark.skipif(not any(map(shutil.which, filter(None, COMPILERS))), reason="there is no C compiler")
def test_the_native_library_was_compiled_and_loads() -> None:
    assert "portable" in isa_names(load_native())
