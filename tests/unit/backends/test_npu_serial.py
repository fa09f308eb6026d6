"""The back end npu_serial on the real firmware, built for this machine, behind a line with a fake clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_rt.backends.base import Absent, Device, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.backends.npu.serial_ports import NAME, PortSpec, PortWatch, parse_port
from edge_rt.backends.npu.serial_vendor import SerialBackend, SerialVendor
from edge_rt.backends.npu.session import NpuEvent, NpuSession
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.errors import AcceleratorLostError, BackendLoadError, ConfigError, NotOnAcceleratorError
from tests.npu.serial_firmware import FirmwareDevice
from tests.npu.serial_onnx import crop_model, crops, kind_found, whole_model
from tests.npu.serial_wire import Bench

pytestmark = pytest.mark.emulated

PORT = PortSpec("/dev/ttyNPU0")


def backend(bench: Bench, *ports: PortSpec) -> tuple[SerialBackend, list[NpuEvent]]:
    vendor = SerialVendor(lambda: ports or (PORT,), bench.open, bench.clock, bench.pause, bench.exists)
    made, events = SerialBackend(vendor), []  # type: ignore[var-annotated]
    made.session_parts = {"clock": bench.clock, "start": lambda work: work(), "tell": events.append}
    return made, events


def options(**npu: Any) -> TensorOptions:
    return TensorOptions(n_threads=1, npu=NpuOptions(**npu))


@pytest.fixture
def bench() -> Bench:
    return Bench(FirmwareDevice())


def probed(found: tuple[Device, ...] | Absent) -> Device:
    assert not isinstance(found, Absent)
    (device,) = found
    return device


def test_ports_as_the_configuration_names_them() -> None:
    assert parse_port("/dev/ttyACM0") == PortSpec("/dev/ttyACM0", 921_600)
    assert parse_port("/dev/serial/by-id/usb-Arm_x-if00@115200").baud == 115_200
    for wrong in ("", "ttyACM0", "/dev/tty@fast", "/dev/tty\0"):
        with pytest.raises(ConfigError, match=r"npu\.serial_ports"):
            parse_port(wrong)


def test_no_port_is_opened_that_is_not_named() -> None:
    opened: list[PortSpec] = []
    vendor = SerialVendor(lambda: (), opened.append)  # type: ignore[arg-type]
    found = vendor.probe()
    assert isinstance(found, Absent)
    assert "no port is configured" in found.reason
    assert opened == []


def test_a_board_says_what_it_is(bench: Bench) -> None:
    device = probed(backend(bench)[0].probe())
    assert (device.id, device.kind, device.evidence, device.reference) == ("ttyNPU0", "npu", "emulated", True)
    assert device.detail == "emulated host build on /dev/ttyNPU0: INT4 and INT8 weights, plain kernels"
    assert bench.wire.is_closed
    bench.device = FirmwareDevice(is_emulated=False)
    device = probed(backend(bench)[0].probe())
    assert (device.evidence, device.reference) == ("device", False)


@pytest.mark.parametrize(
    ("problem", "fault"),
    [
        (FileNotFoundError(2, "gone"), "/dev/ttyNPU0 is not plugged in"),
        (PermissionError(13, "denied"), "may not be opened: add yourself to the group dialout"),
        (OSError(16, "busy"), "is in use by another program"),
    ],
)
def test_a_port_that_cannot_be_used_is_a_fault(bench: Bench, problem: OSError, fault: str) -> None:
    bench.problem = problem
    assert fault in probed(backend(bench)[0].probe()).fault


def test_a_port_that_a_model_has_is_what_it_was_before(bench: Bench) -> None:
    made, _ = backend(bench)
    before = probed(made.probe())
    bench.problem = BlockingIOError(11, "Could not exclusively lock port")
    assert probed(made.probe()) == before


def test_silence_is_a_fault(bench: Bench) -> None:
    from tests.lossy_line import Noise

    opened = bench.open

    def silent(spec: PortSpec) -> Any:
        wire = opened(spec)
        wire.to_host.noise = Noise(drop=1.0)
        return wire

    vendor = SerialVendor(lambda: (PORT,), silent, bench.clock, bench.pause)
    assert "no device answers there" in probed(vendor.probe()).fault


@pytest.mark.parametrize("variant", ["int8", "int4"])
def test_a_crop_is_what_the_golden_path_gives_and_its_kind_is_onnxruntimes(
    bench: Bench, tmp_path: Path, variant: str
) -> None:
    file = crop_model(tmp_path, variant)
    made, events = backend(bench)
    session = made.load_tensor(file, options())
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
    for feeds, _ in crops(4):
        answers = session.run(feeds)
        assert session.computed_on == f"{NAME}:ttyNPU0"
        expected = cpu.run(feeds)
        assert kind_found(answers["heat"]) == kind_found(expected["heat"])
        for name, values in expected.items():
            assert np.abs(answers[name] - values).max() < 0.1 * np.abs(values).max()
    told = session.telemetry()
    assert min(told.upload_s or 0, told.download_s or 0) > 0
    assert told.compute_s is not None
    placement = {part.provider: (part.n_nodes, part.reason) for part in session.info.placement}
    assert placement["CPUExecutionProvider"] == (4, "Conv heat: its weights are not quantised")
    assert placement["serial NPU"][0] == sum(n for _, n in file.onnx.kinds) - 4
    assert placement["serial NPU"][1] == ""
    assert session.info.evidence == "emulated"
    assert events == []
    session.close()
    cpu.close()


def test_the_form_for_npus_is_wholly_there_and_its_kinds_are_onnxruntimes(bench: Bench, tmp_path: Path) -> None:
    file = crop_model(tmp_path, "npu-w8a8")
    session = backend(bench)[0].load_tensor(file, options(require="npu"))
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
    for feeds, _ in crops(4):
        answers, expected = session.run(feeds), cpu.run(feeds)
        assert kind_found(answers["heat"]) == kind_found(expected["heat"])
        for name, values in expected.items():
            assert np.abs(answers[name] - values).max() < 0.1 * np.abs(values).max()
    (part,) = session.info.placement
    assert (part.n_nodes, part.reason) == (sum(n for _, n in file.onnx.kinds), "")
    session.close()
    cpu.close()


def test_the_whole_detector_runs_at_its_own_size(bench: Bench, tmp_path: Path) -> None:
    bench.bytes_hz = 1e8
    file = crop_model(tmp_path, "int4", side=640)
    session = backend(bench)[0].load_tensor(file, options())
    rng = np.random.default_rng(1)
    picture = (rng.random((1, 1, 80, 80)) > 0.5).repeat(8, 2).repeat(8, 3).astype(np.uint8) * 255
    answers = session.run({"image": picture, "golden": picture})
    assert answers["heat"].shape == (1, 6, 80, 80)
    assert session.computed_on == f"{NAME}:ttyNPU0"
    session.close()


def test_all_of_a_quantised_model_is_there_and_require_npu_holds(bench: Bench, tmp_path: Path) -> None:
    made, _ = backend(bench)
    file = whole_model(tmp_path)
    session = made.load_tensor(file, options(require="npu", artifacts=tmp_path / "kept"))
    assert [(part.provider, part.n_nodes, part.reason) for part in session.info.placement] == [("serial NPU", 9, "")]
    feeds = {"x": np.random.default_rng(2).standard_normal((1, 3, 12, 12)).astype(np.float32)}
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
    assert session.run(feeds)["out"] == pytest.approx(cpu.run(feeds)["out"], abs=0.0032)
    bench.unplug()
    with pytest.raises(AcceleratorLostError, match="the port is gone"):
        session.run(feeds)
    with pytest.raises(AcceleratorLostError):
        session.run(feeds)
    session.close()
    cpu.close()


def test_require_npu_refuses_what_is_not_wholly_there(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(NotOnAcceleratorError) as told:
        backend(bench)[0].load_tensor(crop_model(tmp_path), options(require="npu"))
    assert told.value.n_elsewhere == 4


@pytest.mark.parametrize(
    ("npu", "words"),
    [
        ({"soc": {"npu_serial": "ethos-u55"}}, r"npu\.soc\.npu_serial is 'ethos-u55', .*: leave it out"),
        ({"options": {"npu_serial": {"turbo": "on"}}}, r"npu\.options has npu_serial\.turbo, .*: leave it out"),
    ],
)
def test_a_chip_or_options_that_are_named_are_refused(
    bench: Bench, tmp_path: Path, npu: dict[str, Any], words: str
) -> None:
    with pytest.raises(BackendLoadError, match=words):
        backend(bench)[0].load_tensor(crop_model(tmp_path), options(**npu))


def test_a_float_model_is_refused_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, 4, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "float", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    file = ModelFile(model="float", variant="fp32", path=tmp_path / "m.onnx", quant="FP32")
    with pytest.raises(BackendLoadError, match="it is not quantised"):
        backend(bench)[0].load_tensor(file, options())


def test_a_port_has_returned_once_each_time_it_was_away() -> None:
    there = [True, False, False, True, True, False, True]
    watch = PortWatch("/dev/ttyACM0", lambda _: there.pop(0))
    assert [watch() for _ in range(7)] == [False, False, False, True, False, False, True]


def test_a_board_that_is_back_before_the_next_request_is_tried_with_it(bench: Bench, tmp_path: Path) -> None:
    made, events = backend(bench)
    session = made.load_tensor(crop_model(tmp_path), options(retry_s=60.0))
    feeds = crops(1)[0][0]
    session.run(feeds)
    bench.unplug()
    session.run(feeds)
    bench.plug_in(FirmwareDevice())
    session.run(feeds)
    assert session.computed_on == f"{NAME}:ttyNPU0"
    assert [event.kind for event in events] == ["lost", "back"]
    session.close()


def lost_and_back(session: NpuSession, bench: Bench, events: list[NpuEvent], feeds: dict[str, Any]) -> None:
    right = session.run(feeds)
    bench.unplug()
    answers = session.run(feeds)
    assert session.computed_on == "onnx_cpu:cpu"
    assert [event.kind for event in events] == ["lost"]
    assert "the port is gone" in events[0].reason
    assert session.state() == "open"
    for name, values in right.items():
        assert np.abs(answers[name] - values).max() < 0.1 * np.abs(values).max()
    for _ in range(20):
        bench.pause(1.0)
        session.run(feeds)
    assert session.computed_on == "onnx_cpu:cpu"
    returned_s = bench.clock()
    bench.plug_in(FirmwareDevice())
    back = session.run(feeds)  # the port is there: nothing is waited for, however long it was away
    assert session.computed_on == f"{NAME}:ttyNPU0"
    assert bench.clock() - returned_s < 4
    assert [event.kind for event in events] == ["lost", "back"]
    assert all((back[name] == values).all() for name, values in right.items())
    assert session.device_counts().n_faults == 1


def test_a_board_that_is_unplugged_costs_one_event_and_is_used_again(bench: Bench, tmp_path: Path) -> None:
    made, events = backend(bench)
    session = made.load_tensor(crop_model(tmp_path), options())
    lost_and_back(session, bench, events, crops(1)[0][0])
    session.close()


def test_a_board_that_is_not_there_when_a_model_is_loaded_is_used_when_it_comes(bench: Bench, tmp_path: Path) -> None:
    bench.unplug()
    made, events = backend(bench)
    session = made.load_tensor(crop_model(tmp_path), options())
    feeds = crops(1)[0][0]
    session.run(feeds)
    assert session.computed_on == "onnx_cpu:cpu"
    bench.plug_in(FirmwareDevice())
    while session.computed_on != f"{NAME}:ttyNPU0":
        bench.pause(0.5)
        session.run(feeds)
        assert bench.clock() < 60
    assert [event.kind for event in events] == ["lost", "back"]
    session.close()


def test_what_was_compiled_is_kept_and_its_numbers_are_the_golden_ones(bench: Bench, tmp_path: Path) -> None:
    made, _ = backend(bench)
    file = crop_model(tmp_path)
    kept = tmp_path / "kept"
    for _ in range(2):
        session = made.load_tensor(file, options(artifacts=kept))
        session.close()
    (compiled,) = kept.glob("**/model.ern")
    model = serial_format.unpack(compiled.read_bytes())
    feeds, _ = crops(1)[0]
    inputs = [(feeds[name][0] ^ 0x80).view(np.int8).transpose(1, 2, 0) for name in ("image", "golden")]
    (golden,) = serial_golden.run(model, inputs)
    assert golden.shape == (16, 16, 32)
