"""Tensor models through the library: the null model, and a small ONNX file where onnxruntime is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_rt
from edge_rt import config
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.engine.infer import Infer
from edge_rt.engine.tensors import TensorEngine, TensorSettings
from edge_rt.errors import (
    BackendStepError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
    ShuttingDownError,
    UnsupportedFeatureError,
)
from edge_rt.power.calibration import write
from edge_rt.tensor_library import TensorModel
from edge_rt.tensor_types import MediaAnswer, MediaRequest
from tests.patience import PATIENCE_S
from tests.system.test_tensor_workers import BATCHING, MANIFEST, STATE
from tests.unit.engine.tensor_sessions import STATEFUL, alone, rows
from tests.unit.power.test_calibration import FOUND


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., TensorModel]]:
    opened: list[TensorModel] = []

    def loaded(variant: str = "", more: str = BATCHING, **flags: Any) -> TensorModel:
        text = MANIFEST.format(id="m", more=more, sha256="0" * 64)
        (tmp_path / "m.toml").write_text(text, encoding="utf-8")
        own = {"catalog.manifest_dirs": [str(tmp_path)], "models.m.backend": "null", "models.m.variant": variant}
        model = edge_rt.load("m", settings=config.load(environ={}, flags=own | flags))
        assert isinstance(model, TensorModel)
        opened.append(model)
        return model

    yield loaded
    for model in opened:
        model.close()


def test_arrays_in_arrays_out(load: Callable[..., TensorModel]) -> None:
    model = load()
    assert (model.info.max_batch, model.info.backend) == (8, "null")
    assert np.array_equal(model.run({"x": rows(3)})["y"], alone("", {"x": rows(3)})["y"])
    inferred = model.infer({"x": [[3, 3, 3, 3]]})  # what is no array becomes one of the model's type
    assert np.array_equal(inferred.outputs["y"], alone("", {"x": rows(3)})["y"])
    assert inferred.timings.batch_size == 1
    assert model.stats().rows_total == 2


def test_what_the_cpu_computes_in_a_devices_place_says_so() -> None:
    class Lost(NullTensorSession):
        computed_on = "onnx_cpu:cpu"

    class Look:
        task = "classify"

        def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
            return MediaAnswer(task="classify")

    lost = Lost(ModelFile(model="m", variant="", path=Path(), quant="none"), TensorOptions())
    with TensorModel(lost, TensorEngine(lost, TensorSettings()), Look(), config.Config(), max_streams=1) as model:
        assert (model.look(b"picture").place, model.info) == ("onnx_cpu:cpu", lost.info)
        lost.info = replace(lost.info, device="back")
        assert model.info.device == "back"
        lost.computed_on = "null:null"
        assert model.look(b"picture").place == "null:null"


def test_text_and_other_byte_orders_are_taken(load: Callable[..., TensorModel]) -> None:
    model = load("inputs=t:BYTES:-1,outputs=u:BYTES:-1")
    both = [model.run({"t": given})["u"].tolist() for given in (np.array(["ü"]), np.array(["ü".encode()], object))]
    assert both[0] == both[1]
    other = load()
    assert np.array_equal(other.run({"x": rows(3).astype(">f4")})["y"], alone("", {"x": rows(3)})["y"])


@pytest.mark.parametrize(
    "feeds", [{"x": rows(1).astype("f8")}, {"x": [["a"]]}, {"x": rows(1)[0]}, {}, {"z": rows(1)}, {"x": [[1], [1, 2]]}]
)
def test_what_does_not_fit_is_refused(load: Callable[..., TensorModel], feeds: Any) -> None:
    with pytest.raises(InvalidRequestError):
        load().run(feeds)


def test_streams_go_on_and_end(load: Callable[..., TensorModel]) -> None:
    model = load(STATEFUL, STATE)
    first = model.run({"x": rows(1)}, ["y"], stream="a")["y"]
    second = model.run({"x": rows(1)}, ["y"], stream="a", is_last=True)["y"]
    again = model.run({"x": rows(1)}, ["y"], stream="a")["y"]
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_threads_share_a_model(load: Callable[..., TensorModel]) -> None:
    model, wrong = load(), []

    def ask(value: int) -> None:
        if not np.array_equal(model.run({"x": rows(value)})["y"], alone("", {"x": rows(value)})["y"]):
            wrong.append(value)

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert model.stats().rows_total == 16


def test_a_model_without_a_pipeline_says_so_before_it_reads(load: Callable[..., TensorModel]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="no pipeline"):
        load().look("/nowhere")


class FakePipeline:
    task = "fake"

    def run(self, request: MediaRequest, infer: Infer) -> MediaAnswer:
        made = infer({"x": rows(len(request.data))})
        return MediaAnswer(task="fake", embedding=tuple(made.outputs["y"][0].tolist()), width=request.top_k or 0)


def test_files_go_through_the_pipeline(load: Callable[..., TensorModel], tmp_path: Path) -> None:
    model = load()
    model._pipeline = FakePipeline()
    file = tmp_path / "part.jpg"
    file.write_bytes(b"12345")
    answer = model.look(file, top_k=3)
    assert answer.embedding == tuple(alone("", {"x": rows(5)})["y"][0].tolist())
    assert answer.width == 3
    assert model.look(b"12345") == model.look(str(file))
    for bad in (tmp_path / "none", tmp_path, b""):
        with pytest.raises(InvalidRequestError):
            model.look(bad)
    with pytest.raises(InvalidRequestError, match="zoom"):
        model.look(file, zoom=2)


def test_a_closed_model_takes_nothing(load: Callable[..., TensorModel]) -> None:
    model = load()
    model.close()
    model.close()
    with pytest.raises(ShuttingDownError):
        model.run({"x": rows(1)})


def test_a_run_that_fails_is_told(load: Callable[..., TensorModel]) -> None:
    model = load("fail_after=2")
    with pytest.raises(BackendStepError):
        model.run({"x": rows(1)})


def test_the_wrong_kind_of_model_is_refused_before_it_is_loaded(load: Callable[..., TensorModel]) -> None:
    settings = config.load(environ={}, flags={"models.null.backend": "null"})
    with pytest.raises(UnsupportedFeatureError, match="language model"):
        edge_rt.load_tensors("null", settings=settings)
    with pytest.raises(ModelNotFoundError):
        edge_rt.load("no-such-model", settings=settings)


def test_an_onnx_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["y"])],
        "square",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])],
    )
    path = tmp_path / "square.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    with edge_rt.load_tensors(path, settings=config.load(environ={}, flags={"worker.force": True})) as model:
        ours = model.run(feeds)["y"]
        assert (model.info.model, model.info.backend) == ("square", "onnx_cpu")
    theirs = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    assert ours.tobytes() == theirs.tobytes()
    with pytest.raises(UnsupportedFeatureError, match="tensor model"):
        edge_rt.load_text(path, settings=config.load(environ={}))
    path.write_bytes(b"no model")
    with pytest.raises(ModelFormatError):
        edge_rt.load(str(path), settings=config.load(environ={}))


def test_inferences_and_findings_say_what_they_took(load: Callable[..., TensorModel], tmp_path: Path) -> None:
    table = tmp_path / "power.json"
    write(table, FOUND)
    model = load(variant="run_s=0.3", **{"power.meter": "model", "power.model_file": str(table)})
    model.run({"x": rows(1)})
    energy = model.infer({"x": rows(1)}).energy
    assert energy is not None
    assert (energy.quality, energy.prefill_j) == ("modelled", None)
    assert energy.total_j > 0
