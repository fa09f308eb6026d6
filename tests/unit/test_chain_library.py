"""edge_rt.load with the name of a chain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import edge_rt
from edge_rt import ChainModel, config
from edge_rt.errors import ModelNotPulledError, ShuttingDownError, UnsupportedFeatureError
from tests.pictures import encoded
from tests.tiny_tensors import write_models


@pytest.fixture
def settings(tmp_path: Path) -> config.Loaded:
    (tmp_path / "models").mkdir()
    write_models(tmp_path / "models")
    flags = {"catalog.manifest_dirs": [str(tmp_path / "models")], "catalog.store_dir": str(tmp_path / "store")}
    return config.load(environ={}, flags=flags)


def picture(*color: int) -> bytes:
    return encoded(Image.new("RGB", (16, 16), color))


def test_a_cascade_says_who_answered_and_loads_what_it_asks(settings: config.Loaded) -> None:
    with pytest.raises(ModelNotPulledError):
        edge_rt.load("colors-both", settings=settings)
    with edge_rt.load("colors-both", settings=settings, pull=True) as chain:
        assert isinstance(chain, ChainModel)
        sure, unsure = chain.look(picture(250, 0, 0)), chain.look(picture(100, 110, 100), top_k=1)
        assert (sure.stage, unsure.stage) == ("colors", "colors-large")
        assert ([label.label for label in unsure.labels], unsure.variant) == (["green"], "fp32")
    with pytest.raises(ShuttingDownError):
        chain.look(picture(1, 2, 3))


def test_ocr_reads_a_file_also_inside_an_event_loop(settings: config.Loaded, tmp_path: Path) -> None:
    pixels = np.zeros((96, 128), np.uint8)
    pixels[10:30, 10:100] = pixels[50:70, 20:60] = 255
    (tmp_path / "label.png").write_bytes(encoded(pixels))

    async def main() -> list[str]:
        with edge_rt.load("page", settings=settings, pull=True) as chain:
            assert isinstance(chain, ChainModel)
            return [box.text for box in chain.look(tmp_path / "label.png").boxes]

    assert asyncio.run(main()) == ["x", "x"]


def test_a_chain_takes_files_only(settings: config.Loaded) -> None:
    for load in (edge_rt.load_text, edge_rt.load_tensors):
        with pytest.raises(UnsupportedFeatureError, match="chain of models that takes files"):
            load("page", settings=settings)
