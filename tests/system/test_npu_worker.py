"""A model on Qualcomm's simulator behind the runtime: its host is killed, the CPU answers, and it comes back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_rt import config
from edge_rt.backends.base import Absent
from edge_rt.backends.npu import qnn, qnn_driver
from edge_rt.catalog.store import Store
from edge_rt.engine.arrays import to_array, to_tensor
from edge_rt.errors import NotOnAcceleratorError
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import TensorAnswer, TensorRequest
from edge_rt.worker.derive import derive
from tests.system.test_workers import configured, pid_of, run, until
from tests.tiny_tensors import MANIFEST

pytestmark = pytest.mark.simulator
MODEL = "tiny"
STEP = 8 / 256  # of the model's answers, of which the simulator's differ by up to four
X = np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)


@pytest.fixture
def flags(store_dir: Path, tmp_path: Path) -> dict[str, object]:
    """Give the settings of a runtime whose store has a small quantised model, to be run on QNN."""
    from onnx import TensorProto

    if isinstance(absent := qnn.installed(), Absent):
        pytest.skip(absent.reason)
    path = tmp_path / "tiny.onnx"
    path.write_bytes(data := qnn_driver.tiny_model(TensorProto.INT8, TensorProto.UINT8))
    sha256 = hashlib.sha256(data).hexdigest()
    manifest = MANIFEST.format(id=MODEL, path=path, size_bytes=len(data), sha256=sha256)
    (tmp_path / "tiny.toml").write_text(manifest, encoding="utf-8")
    flags = {
        "catalog.store_dir": str(store_dir),
        "catalog.manifest_dirs": [str(tmp_path)],
        f"models.{MODEL}.backend": "npu_qnn",
    }
    loaded = config.load(environ={}, flags=flags, system_file=store_dir / "none")
    Store.open(loaded.config.catalog, {}).pull(MODEL, progress=lambda _: None, offline=False, derive=derive)
    return flags


def request(number: int) -> TensorRequest:
    return TensorRequest(id=str(number), model=MODEL, inputs=(to_tensor("x", X),))


def y(answer: TensorAnswer) -> np.ndarray:
    return to_array(answer.outputs[0])


def total(telemetry: Telemetry, name: str) -> float:
    return telemetry.registry.get_sample_value(f"edge_rt_device_{name}_total", {"model": MODEL}) or 0.0


def test_a_killed_simulator_costs_no_answer_and_is_back_soon(
    store_dir: Path, flags: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edge_rt.worker")

    async def main() -> None:
        async with configured(store_dir, flags) as (runtime, telemetry):
            first = await runtime.infer(request(0))
            assert first.place == "npu_qnn:htp"
            info = runtime.model(MODEL).tensor
            assert info is not None
            assert info.evidence in {"simulator", "device"}
            (part,) = info.placement
            assert (part.provider, part.reason) == ("QNN", "")
            worker = psutil.Process(pid_of(runtime, MODEL))
            (host,) = worker.children()
            os.kill(host.pid, signal.SIGKILL)
            second = await runtime.infer(request(1))
            assert second.place == "onnx_cpu:cpu"
            np.testing.assert_allclose(y(second), y(first), atol=8 * STEP)
            number, begun_s = 2, asyncio.get_running_loop().time()
            while (answer := await runtime.infer(request(number))).place == "onnx_cpu:cpu":
                number += 1
                await asyncio.sleep(0.05)
            assert answer.place == "npu_qnn:htp"
            np.testing.assert_array_equal(y(answer), y(first))
            print(f"back after {asyncio.get_running_loop().time() - begun_s:.1f} s")
            await until(lambda: total(telemetry, "fallbacks") == number - 1)  # figures come each second
            assert total(telemetry, "faults") == 1.0
            assert total(telemetry, "products") >= 2.0
            assert pid_of(runtime, MODEL) == worker.pid
            told = [record.levelname for record in caplog.records if "event=npu_" in record.getMessage()]
            assert told == ["WARNING", "INFO"]  # lost and back, once each

    run(main())


def test_a_simulator_that_the_configuration_names_is_not_benchmarked(flags: dict[str, object]) -> None:
    environ = {"EDGE_RT_CONFIG": str(Path(str(flags["catalog.store_dir"])) / "config.toml")}
    Path(environ["EDGE_RT_CONFIG"]).write_text(
        f'[catalog]\nstore_dir = "{flags["catalog.store_dir"]}"\nmanifest_dirs = {flags["catalog.manifest_dirs"]}\n'
        f'[models.{MODEL}]\nbackend = "npu_qnn"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "edge_rt", "bench", "-m", MODEL],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "a benchmark of npu_qnn is not supported" in done.stderr
    assert "simulator" in done.stderr


def test_where_the_npu_is_required_a_model_it_has_not_is_an_error(
    store_dir: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    import onnx
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4, 4]) for name in ("x", "d")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    nodes = [helper.make_node("Relu", ["x"], ["d"]), helper.make_node("Det", ["d"], ["y"])]
    graph = helper.make_graph(nodes, "g", value[:1], [out])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    path = tmp_path / "det.onnx"
    path.write_bytes(data)
    onnx.checker.check_model(onnx.load(path))
    sha256 = hashlib.sha256(data).hexdigest()
    (tmp_path / "det.toml").write_text(MANIFEST.format(id="det", path=path, size_bytes=len(data), sha256=sha256))
    settings = flags | {"models.det.backend": "npu_qnn", "npu.require": "npu"}
    loaded = config.load(environ={}, flags=settings, system_file=store_dir / "none")
    Store.open(loaded.config.catalog, {}).pull("det", progress=lambda _: None, offline=False, derive=derive)

    async def main() -> None:
        async with configured(store_dir, settings) as (runtime, _):
            x = to_tensor("x", np.eye(4, dtype=np.float32)[None])
            with pytest.raises(NotOnAcceleratorError, match="Det"):
                await runtime.infer(TensorRequest(id="d", model="det", inputs=(x,)))

    run(main())
