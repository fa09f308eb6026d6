"""Rockchip's runtime for boards where there is no chip: the real package on arm64's Python, by an emulator (qemu-user).

It shows what the package says and gives on such a machine. No chip takes part, and the emulator says nothing of speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_rt.backends.npu.client import Client, HostAnswerError
from edge_rt.backends.npu.rknn import LITE, NAME
from edge_rt.backends.npu.stacks import stack
from tests.npu.rknn_here import aarch64_python

pytestmark = [pytest.mark.emulated, pytest.mark.slow]
_START_S = 120.0


@pytest.fixture
def client() -> Iterator[Client]:
    if os.path.exists("/proc/device-tree/compatible"):  # noqa: PTH110
        pytest.skip("this is a board, with a device tree")
    python, _ = aarch64_python(stack("rknn-lite").packages)
    made = Client(NAME, LITE.driver, python)
    yield made
    made.close()


def test_without_a_chip_the_probe_says_why(client: Client) -> None:
    told, _, _ = client.call("probe", {}, timeout_s=_START_S)
    assert told == {
        "absent": "no NPU of Rockchip's is here: there is no /proc/device-tree/compatible that names a board"
    }


def test_the_runtime_s_own_refusal_is_a_reason(client: Client, tmp_path: Path) -> None:
    (tmp_path / "model.rknn").write_bytes(
        b"RKNN" + bytes(60)
    )  # load_rknn reads it, init_runtime looks at the machine first
    arguments = {"folder": str(tmp_path), "soc": "rk3588", "device": "npu", "options": {}, "rows": 1, "facts": {}}
    with pytest.raises(HostAnswerError) as refused:
        client.call("load", arguments, timeout_s=_START_S)
    assert refused.value.kind == "failed"
    assert "init_runtime gave -1: the runtime misses" in refused.value.said
    assert "/proc/device-tree/compatible" in refused.value.said
