"""Forms for Rockchip's compiler: what a recipe writes is what the driver takes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from PIL import Image

from edge_rt.backends.npu import rknn_driver
from edge_rt.backends.npu.rknn_driver import FORM_KEY
from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest, load_manifests
from edge_rt.convert import rknn
from edge_rt.convert.recipes import run_recipe
from edge_rt.convert.unquantized import is_quantized
from edge_rt.errors import ModelFormatError
from edge_rt.worker.recipe import apply
from tests.npu.picture_model import picture_model


def pcb(form: str, folder: Path) -> ModelProto:
    manifest = load_manifest(SHIPPED_DIR / "pcb-defect.toml")
    variant = manifest.variant(form)
    assert variant is not None
    (calibration,) = (each.file for each in manifest.materials if each.id in variant.beside)
    path = folder / variant.file
    apply(variant.derive, SHIPPED_DIR / "pcb-defect.int8.onnx", path, SHIPPED_DIR / calibration)
    return onnx.load(path)


def test_a_form_is_float_and_brings_options_and_samples(tmp_path: Path) -> None:
    model = pcb("npu-rknn-w8a8", tmp_path)
    assert not is_quantized(model)
    options = rknn_driver.take_form(model, {}, str(tmp_path))
    assert options.pop("dtype") == "w8a8"
    with np.load(options.pop("dataset")) as arrays:
        assert {name: (arrays[name].shape, arrays[name].dtype) for name in arrays.files} == {
            "golden": ((4, 1, 640, 640), np.uint8),
            "image": ((4, 1, 640, 640), np.uint8),
        }
    assert options == {}
    assert list(model.metadata_props) == []  # what a board gets needs no samples
    assert rknn.SAMPLES_KEY not in {tensor.name for tensor in model.graph.initializer}
    assert pcb("npu-rknn-w8a8", tmp_path).SerializeToString() == pcb("npu-rknn-w8a8", tmp_path).SerializeToString()


def test_what_the_user_says_goes_before_the_form(tmp_path: Path) -> None:
    model = with_form({"dtype": "w8a8", "float": "a"}, samples())
    assert rknn_driver.take_form(model, {"dtype": "fp16"}, str(tmp_path)) == {"dtype": "fp16", "float": "a"}
    model = with_form({"dtype": "w8a8"}, samples())
    assert rknn_driver.take_form(model, {"dataset": "mine.npz"}, str(tmp_path))["dataset"] == "mine.npz"


def samples() -> bytes:
    raw = io.BytesIO()
    np.savez(raw, image=np.zeros((1, 2), np.uint8))
    return raw.getvalue()


def with_form(form: object, packed: bytes) -> ModelProto:
    model = picture_model()
    helper.set_model_props(model, {FORM_KEY: json.dumps(form)})
    model.graph.initializer.append(numpy_helper.from_array(np.frombuffer(packed, np.uint8), rknn.SAMPLES_KEY))
    return model


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ([1], "edge_rt.rknn is no form: no table of texts"),
        ({"dtype": 8}, "edge_rt.rknn is no form"),
    ],
)
def test_metadata_that_is_no_form_is_told(form: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(rknn_driver.RknnError, match=told):
        rknn_driver.take_form(with_form(form, b""), {}, str(tmp_path))


def test_4_bit_weights_are_on_the_compiler_s_grid(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(picture_model(n_channels=32).SerializeToString())
    np.savez(tmp_path / "s.npz", image=np.random.default_rng(1).integers(0, 256, (4, 16, 16, 3), np.uint8))
    run_recipe("rknn-w4a16", tmp_path / "m.onnx", tmp_path / "out.onnx", tmp_path / "s.npz")
    made = onnx.load(tmp_path / "out.onnx")
    assert json.loads({e.key: e.value for e in made.metadata_props}[FORM_KEY]) == {
        "dtype": "w4a16",
        "method": "group32",
    }
    (weights,) = (numpy_helper.to_array(t) for t in made.graph.initializer if t.name == "w2")
    rows = weights.reshape(10, 32)
    steps = rows / (np.abs(rows).max(axis=1, keepdims=True) / 7)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)


def test_gelu_of_opset_20_computes_the_same_in_17() -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Gelu", ["x"], ["y"], "gelu")], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = np.linspace(-4, 4, 16, dtype=np.float32).reshape(2, 8)
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (model, rknn.at_opset_17(onnx.ModelProto.FromString(model.SerializeToString())))
    )
    np.testing.assert_allclose(before, after, atol=1e-6)


def test_photographs_become_views_the_same_every_time(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 260, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    found, again = (rknn.read_photographs((tmp_path / "a.png", tmp_path / "a.png"))["image"] for _ in range(2))
    assert (found.shape, found.dtype) == ((20, 224, 224, 3), np.uint8)
    np.testing.assert_array_equal(found, again)


def test_what_is_no_sample_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(picture_model().SerializeToString())
    (tmp_path / "broken.npz").write_bytes(b"PK")
    np.savez(tmp_path / "other.npz", pixels=np.zeros((1, 2)))
    for recipe, beside, told in (
        ("rknn-w8a8", (), "needs samples"),
        ("rknn-w8a8", ("broken.npz",), "broken.npz"),
        ("rknn-w8a8", ("other.npz",), "image"),
        ("efficientnet-lite0-rknn-w8a8", ("broken.npz",), "neither a JPEG nor a PNG"),
        ("minilm-l6-rknn-fp16", ("broken.npz",), "JSON"),
        ("qdq-int8", ("other.npz", "broken.npz"), "names 2 materials, qdq-int8 takes one"),
    ):
        with pytest.raises(ModelFormatError, match=told):
            run_recipe(recipe, tmp_path / "m.onnx", tmp_path / "out.onnx", *(tmp_path / name for name in beside))


def test_every_form_of_the_catalog_names_a_recipe_and_bits_that_fit() -> None:
    found = {v.derive: v for m in load_manifests([SHIPPED_DIR]) for v in m.variants if v.id.startswith("npu-rknn-")}
    assert set(found) <= set(rknn.FORMS)
    for derive, variant in found.items():
        assert variant.requires is not None
        bits = "fp16" if variant.requires.weight_bits == 16 else None
        bits = bits or f"w{variant.requires.weight_bits}a{variant.requires.activation_bits}"
        assert derive.endswith(bits)
        assert variant.id.endswith(bits)
        assert variant.requires.socs == (("rk3576",) if bits == "w4a16" else ())
