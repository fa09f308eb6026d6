"""The serial NPU's firmware on emulated boards: a Cortex-M55 with Helium and a Cortex-M7 without, in QEMU, by pyserial.

NPU_LAYERS: how many random layers of each board's firmware are held to numpy (make test-npu-serial: 1,000).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from edge_rt.backends.npu import serial_format, serial_golden
from edge_rt.devices.serial_npu import SerialNpu, SerialWire
from tests.npu.serial_firmware import emulated, missing_tools
from tests.npu.serial_models import random_inputs, random_model

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
    n_wanted = N_LAYERS or {"an547": 120, "an500": 40}[board[0]]
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
