"""The parts of RKNN's driver that need no toolkit, and what is said where there is none."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from edge_rt.backends.base import Absent, Device, ModelFile, TensorOptions
from edge_rt.backends.npu import rknn_driver, rknn_layers
from edge_rt.backends.npu.rknn import RknnBackend, RknnVendor
from tests.npu.picture_model import picture_model


def test_without_the_environment_the_reason_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("another stack is for this machine")
    monkeypatch.setenv("EDGE_RT_NPU_DIR", str(tmp_path))
    found = RknnBackend().probe()
    if isinstance(found, Absent):  # unless root has made one for the machine
        assert "`edge_rt npu setup rknn` makes an environment" in found.reason


@pytest.mark.parametrize("op", ["QuantizeLinear", "MatMulNBits"])
def test_models_that_are_quantised_already_are_refused(tmp_path: Path, op: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(picture_model().SerializeToString())
    file = ModelFile(model="m", variant="", path=path, quant="")
    file.__dict__["onnx"] = replace(file.onnx, kinds=((op, 3),))
    device = Device(id="sim", kind="npu", detail="")
    assert "take its FP32 form" in str(RknnVendor().refusal(file, device, TensorOptions()))


def test_pixels_are_cut_to_the_toolkit_s_own_form() -> None:
    proto = picture_model()
    inputs, outputs = rknn_driver.specs(proto, 1)
    plan = rknn_driver.cut_input(proto, 1)
    assert inputs == [{"name": "image", "datatype": "UINT8", "shape": [1, 16, 16, 3]}]
    assert outputs == [{"name": "logits", "datatype": "FP32", "shape": [1, 10]}]
    assert plan == [{"name": "image", "layout": "nhwc", "mean": [127.0] * 3, "std": [128.0] * 3}]
    assert [node.op_type for node in proto.graph.node] == ["Conv", "Relu", "Conv", "GlobalAveragePool", "Flatten"]
    (value,) = proto.graph.input
    assert [dim.dim_value for dim in value.type.tensor_type.shape.dim] == [1, 3, 16, 16]
    onnx.checker.check_model(proto, full_check=True)


def test_the_compiler_s_table_is_read() -> None:
    text = """
D RKNN: [14:04:25.333] ID   OpType        DataType Target InputShape  OutputShape  Cycles(DDR/NPU/Total)  RW(KB) Name
D RKNN: [14:04:25.333] 0    InputOperator FLOAT16  CPU    \\           (1,3,2,2)    0/0/0                  0       In:x
D RKNN: [14:04:25.333] 1    ConvClip      INT8     NPU    (1,3),(2)   (1,32,1,1)   46868/225792/225793    298     Conv:a
D RKNN: [14:04:25.333] 2    Reshape       INT8     CPU    (1,32,1,1)  (1,32)       0/0/7                 298   Reshape:b
D RKNN: [14:04:25.333] 3    OutputOperator INT8    CPU    (1,32)      \\            0/0/0                  0       Out:y
"""
    layers = rknn_layers.read_layers(text + text)
    assert [(layer["kind"], layer["target"], layer["cycles"]) for layer in layers] == [
        ("ConvClip", "NPU", 225793),
        ("Reshape", "CPU", 7),
    ]
    assert rknn_layers.placement(layers) == [
        {"provider": "RKNN", "n_nodes": 1, "kinds": [("ConvClip", 1)], "reason": ""},
        {"provider": "RKNN CPU", "n_nodes": 1, "kinds": [("Reshape", 1)], "reason": rknn_layers.NOT_TAKEN},
    ]
    assert rknn_layers.read_layers("nothing of the kind") == []
