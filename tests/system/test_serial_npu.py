"""The serial NPU's firmware on emulated boards: a Cortex-M55 with Helium and a Cortex-M7 without, in QEMU, by pyserial.

NPU_LAYERS: how many random layers of each board's firmware are held to numpy (make test-npu-serial: 1,000).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt.backends.base import NpuOptions, TensorOptions
from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.backends.npu.serial_ports import NAME, PortSpec
from edge_rt.backends.npu.serial_vendor import SerialBackend, SerialVendor
from edge_rt.backends.npu.session import NpuEvent
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.devices.serial_npu import SerialNpu, SerialWire
from tests.npu.serial_firmware import emulated, missing_tools
from tests.npu.serial_models import random_inputs, random_model
from tests.npu.serial_onnx import crop_model, crops, kind_found

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(missing_tools()), reason=missing_tools()),
]

N_LAYERS = int(os.environ.get("NPU_LAYERS", "0"))
PATIENCE_S = 60.0


@pytest.fixture(scope="module", params=["an547", "an500"])
def board(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with emulated(request.param) as (port, _):
        yield request.param, port


@pytest.fixture
def npu(board: tuple[str, str]) -> Iterator[SerialNpu]:
    opened = SerialNpu(SerialWire(board[1], 921_600))
    opened.open(PATIENCE_S)
    yield opened
    opened.close()


def test_the_firmware_says_that_it_runs_on_no_chip(board: tuple[str, str], npu: SerialNpu) -> None:
    assert npu.facts.is_emulated
    assert npu.facts.kernels == {"an547": "helium", "an500": "plain"}[board[0]]
    assert npu.facts.chip.startswith("Cortex-M")


def test_bytes_come_back_as_they_were_sent(npu: SerialNpu) -> None:
    data = np.random.default_rng(1).bytes(4096)
    assert npu.echo(data, PATIENCE_S) == data


def test_random_layers_are_those_of_numpy_in_every_bit(board: tuple[str, str], npu: SerialNpu) -> None:
    rng = np.random.default_rng(547)
    n_wanted = N_LAYERS or {"an547": 80, "an500": 30}[board[0]]
    bits = {4: 0, 8: 0}
    n_layers = 0
    while n_layers < n_wanted:
        data = serial_format.pack(random_model(rng, 10))
        model = serial_format.unpack(data)
        inputs = random_inputs(rng, model)
        expected = serial_golden.run(model, inputs)
        npu.load(data, PATIENCE_S)
        outputs, _ = npu.run([values.tobytes() for values in inputs], [values.size for values in expected], PATIENCE_S)
        for at, want, got in zip(model.outputs, expected, outputs, strict=True):
            layer = next(step for step in reversed(model.layers) if step.output == at)
            assert got == want.tobytes(), layer
            n_layers += 1
            if layer.weights is not None:
                bits[layer.weight_bits] += 1
    assert min(bits.values()) > 0
    print(f"{board[0]}: {n_layers} layers equal, {bits[8]} with INT8 and {bits[4]} with INT4 weights")


def backend(port: Path, events: list[NpuEvent]) -> SerialBackend:
    made = SerialBackend(SerialVendor(lambda: (PortSpec(str(port)),)))
    made.session_parts = {"tell": events.append}
    return made


def plug_in(link: Path, port: str) -> None:
    """Let a name that stays lead to QEMU's pseudo terminal, as udev's names do to a board's port."""
    link.unlink(missing_ok=True)
    link.symlink_to(port)


@pytest.mark.parametrize("variant", ["int8", "int4", "npu-w8a8", "npu-w4a8"])
def test_a_crop_of_a_board_is_what_the_golden_path_gives(board: tuple[str, str], variant: str, tmp_path: Path) -> None:
    """pcb-defect on the firmware: what its device computes equals numpy's in every bit, its answer onnxruntime's."""
    if board[0] == "an500" and variant != "int4" and not N_LAYERS:
        pytest.skip("one variant on the Cortex-M7 is enough; make test-npu-serial runs all")
    link = tmp_path / "npu"
    plug_in(link, board[1])
    events: list[NpuEvent] = []
    file, kept = crop_model(tmp_path, variant), tmp_path / "kept"
    made = backend(link, events)
    (device,) = made.probe()  # type: ignore[misc]
    assert (device.evidence, device.fault) == ("emulated", "")
    session = made.load_tensor(file, TensorOptions(n_threads=1, npu=NpuOptions(artifacts=kept)))
    (compiled,) = kept.glob("**/model.ern")
    model = serial_format.unpack(compiled.read_bytes())
    cpu = OnnxCpuBackend().load_tensor(file, TensorOptions(n_threads=1))
    for feeds, _ in crops(3 if N_LAYERS else 1):
        answers, expected = session.run(feeds), cpu.run(feeds)
        assert session.computed_on == f"{NAME}:npu"
        golden = golden_answers(session._npu, model, feeds)
        for name, values in golden.items():
            assert np.array_equal(answers[name], values), name
        assert kind_found(answers["heat"]) == kind_found(golden["heat"]) == kind_found(expected["heat"])
    assert (session.info.evidence, events) == ("emulated", [])
    session.close()
    cpu.close()


def golden_answers(session: Any, model: serial_format.Model, feeds: dict[str, Any]) -> dict[str, Any]:
    """Compute a session's answers with numpy in the device's place."""
    inputs = [
        np.frombuffer(port.to_device(feeds[port.name]), np.int8).reshape(port.h, port.w, port.c)
        for port in session._device_inputs
    ]
    found = serial_golden.run(model, inputs)
    ports = zip(session._device_outputs, found, strict=True)
    cut = {port.name: port.from_device(values.tobytes()) for port, values in ports}
    names = ("heat", "offset", "size")
    left = [name for name in names if name not in cut]
    answers = cut | (session._tail.run({**feeds, **cut}, left) if left else {})
    return {name: answers[name] for name in names}


def test_the_acceptance_script_accepts_the_emulated_board(board: tuple[str, str], tmp_path: Path) -> None:
    script, report = Path("hw/npu/serial/accept.py"), tmp_path / "report.json"
    command = [sys.executable, str(script), board[1], "--layers", "10", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    told = json.loads(report.read_text())
    assert (told["times"], told["layers"]["n_different"]) == ("of an emulation: no device's", 0)
    assert told["layers"]["n_run"] >= 10


@pytest.mark.parametrize("keeps_memory", [False, True])
def test_an_emulator_that_is_killed_costs_one_event_and_is_used_again(tmp_path: Path, keeps_memory: bool) -> None:
    """A board that loses its power gets its model again; one whose memory outlives the reset does not."""
    link, events, feeds = tmp_path / "npu", [], crops(1, side=64)[0][0]  # type: ignore[var-annotated]
    memory = tmp_path / "memory" if keeps_memory else None
    made = backend(link, events)
    with emulated("an500", memory) as (port, process):
        plug_in(link, port)
        session = made.load_tensor(crop_model(tmp_path, side=64), TensorOptions(n_threads=1))
        right = session.run(feeds)
        assert session.computed_on == f"{NAME}:npu"
        n_uploaded = session._npu._npu.counts.sent_bytes  # type: ignore[union-attr]
        process.kill()
        process.wait()
        answers = session.run(feeds)  # this very request is answered
        assert session.computed_on == "onnx_cpu:cpu"
        assert answers.keys() == right.keys()
    with emulated("an500", memory) as (port, _):
        plug_in(link, port)
        returned_s = time.monotonic()
        while session.computed_on != f"{NAME}:npu":
            back = session.run(feeds)
            assert time.monotonic() - returned_s < PATIENCE_S
        back_s = time.monotonic() - returned_s
        assert all(np.array_equal(back[name], values) for name, values in right.items())
        assert [event.kind for event in events] == ["lost", "back"]
        counts = session._npu._npu.counts  # type: ignore[union-attr]
        assert (counts.sent_bytes < n_uploaded - 10_000) == keeps_memory  # what a slow emulator had sent twice included
        session.close()
    print(f"used again {back_s:.1f} s after its return, memory kept: {keeps_memory}")
