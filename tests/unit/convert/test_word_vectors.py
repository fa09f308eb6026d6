from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply

pytest.importorskip("onnx", reason="the extra onnx is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

TABLE = np.random.default_rng(0).standard_normal((11, 6)).astype("<f2")


def written(path: Path, table: NDArray[np.float16], dtype: str = "F16", name: str = "embedding.weight") -> Path:
    header = json.dumps({name: {"dtype": dtype, "shape": table.shape, "data_offsets": [0, table.nbytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + table.tobytes())
    return path


def test_tokens_are_looked_up(tmp_path: Path) -> None:
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for file in files:
        apply("word-vectors", written(tmp_path / "w", TABLE), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    session = ort.InferenceSession(files[0].read_bytes(), providers=["CPUExecutionProvider"])
    ids = np.array([[3, 0, 10], [1, 1, 2]], np.int64)
    (rows,) = session.run(None, {"input_ids": ids})
    assert rows.dtype == np.float32
    assert np.array_equal(rows, TABLE[ids].astype(np.float32))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    infinite = TABLE.copy()
    infinite[2, 3] = np.inf
    for source in (
        written(tmp_path / "a", infinite),
        written(tmp_path / "b", TABLE, name="another"),
        written(tmp_path / "c", TABLE.astype("<f4"), "F32"),
        written(tmp_path / "d", TABLE.reshape(-1)),
    ):
        with pytest.raises(ModelFormatError, match=r"embedding\.weight: must be F16"):
            apply("word-vectors", source, tmp_path / "out.onnx")
