from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.manifest import load_manifest
from edge_rt.catalog.regular import open_regular
from edge_rt.errors import ModelFormatError


def test_pipes_devices_and_directories_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            open_regular(path)
    with pytest.raises(ModelFormatError, match="not a regular file"):
        load_manifest(pipe)
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_header(pipe)


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    with open_regular(path) as file:
        assert file.read() == b"content"
