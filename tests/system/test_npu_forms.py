"""Forms of the catalog for NPUs, derived as a pull derives them, in Qualcomm's simulator: wholly there, and right.

Only what comes with edge_rt is used, so nothing need be pulled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnxruntime_qnn", reason="the extra npu-qnn is not installed")

import onnx

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorBackend, TensorOptions
from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest
from edge_rt.convert.npu import W8A16, quantize
from edge_rt.worker.recipe import apply
from tests.unit.convert.test_npu import PIXEL_RANGES, pixels
from tools.npu_accuracy import on_cpu
from tools.npu_inputs import board_feed, judge_boards
from tools.pcb.average_precision import mean_average_precision
from tools.pcb.detect import boxes_of

pytestmark = [pytest.mark.simulator, pytest.mark.slow]


@pytest.mark.parametrize(("form", "cosine"), [("npu-w8a8", 0.999), ("npu-w4a16", 0.99999)])
def test_pcb_defect_runs_wholly_on_the_npu(form: str, cosine: float, tmp_path: Path) -> None:
    manifest = load_manifest(SHIPPED_DIR / "pcb-defect.toml")
    variant = manifest.variant(form)
    assert variant is not None
    beside = next(material.file for material in manifest.materials if material.id == variant.derive_with)
    path = tmp_path / variant.file
    apply(variant.derive, SHIPPED_DIR / "pcb-defect.int8.onnx", path, SHIPPED_DIR / beside)
    backend = registry.get(variant.backends[0])
    assert isinstance(backend, TensorBackend)
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    file = ModelFile(model=manifest.id, variant=form, path=path, quant=variant.quant)
    session = backend.load_tensor(file, TensorOptions(npu=NpuOptions(require="npu")))
    (board,) = judge_boards(1)
    try:
        assert session.info.evidence == "simulator"
        assert [part.reason for part in session.info.placement] == [""]  # every node is on the NPU
        answer = session.run(board_feed(board))
    finally:
        session.close()
    (expected,) = on_cpu(onnx.load(path), [board_feed(board)])
    found_cosine = {name: _cosine(value, expected[name]) for name, value in answer.items()}
    assert found_cosine["heat"] > cosine
    # Offsets are small numbers of both signs: a step of 8 bits is more of them.
    assert min(found_cosine.values()) > 1 - 50 * (1 - cosine)
    boxes = boxes_of(answer["heat"], answer["offset"], answer["size"])
    assert mean_average_precision([boxes], [board.marks]).mean > 0.7


def test_pixels_are_on_the_npu_where_activations_have_16_bits(tmp_path: Path) -> None:
    """No layer takes 8-bit inputs beside 16-bit outputs: left as bytes, they would go to the CPU."""
    path = tmp_path / "pixels.onnx"
    onnx.save(quantize(pixels(), PIXEL_RANGES, W8A16), path)
    backend = registry.get("npu_qnn")
    assert isinstance(backend, TensorBackend)
    if isinstance(found := backend.probe(), Absent):
        pytest.skip(found.reason)
    file = ModelFile(model="pixels", variant="", path=path, quant="W8A16")
    session = backend.load_tensor(file, TensorOptions(npu=NpuOptions(require="npu")))
    feed = {"image": np.random.default_rng(2).integers(0, 256, (1, 4, 4, 3), np.uint8)}
    try:
        assert [part.reason for part in session.info.placement] == [""]
        answer = session.run(feed)
    finally:
        session.close()
    (expected,) = on_cpu(onnx.load(path), [feed])
    np.testing.assert_allclose(answer["y"], expected["y"], atol=0.01)


def _cosine(found: NDArray[Any], expected: NDArray[Any]) -> float:
    a, b = (np.asarray(values, np.float64).ravel() for values in (found, expected))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
