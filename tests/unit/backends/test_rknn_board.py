"""The board's side of RKNN. A script takes the place of Rockchip's runtime and chip: what it shows is that edge_rt asks
as the runtime's own file says and tells what comes back, nothing of a chip."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu.backend import NpuBackend
from edge_rt.backends.npu.rknn import LITE, NAME, RknnVendor
from edge_rt.backends.npu.session import NpuSession
from edge_rt.errors import BackendLoadError

pytestmark = pytest.mark.stub
BOARD = Path(__file__).parents[2] / "npu" / "stub_rknn_board.py"


class StubRknn(NpuBackend):
    name = NAME


class Board:
    """What a board of the test shows of itself."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setenv("FAKE_RKNN", str(root))
        self.put("proc/device-tree/compatible", "radxa,rock-5b\0rockchip,rk3588\0")
        self.put("usr/lib/librknnrt.so", "\x7fELF librknnrt version: 2.5.0 (c6fe1f9d@2026)")
        self.put("sys/class/devfreq/fdab0000.npu/cur_freq", "1000000000\n")
        self.put("sys/class/devfreq/fdab0000.npu/max_freq", "1000000000\n")
        self.put("sys/class/devfreq/fdab0000.npu/governor", "rknpu_ondemand\n")
        self.put("sys/class/thermal/thermal_zone6/type", "npu-thermal\n")
        self.put("sys/class/thermal/thermal_zone6/temp", "41615\n")
        self.put("sys/kernel/debug/rknpu/version", "RKNPU driver: v0.9.8\n")

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")

    def backend(self) -> StubRknn:
        stack = replace(LITE, driver=BOARD, python=lambda: [sys.executable], installed=lambda: None)
        return StubRknn(RknnVendor(stack))

    def device(self) -> Any:
        found = self.backend().probe()
        assert not isinstance(found, Absent), found.reason
        (device,) = found
        return device

    def calls(self, name: str) -> list[str]:
        lines = (self.root / "calls").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    return Board(tmp_path / "board", monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    """A model y = 2 x of [n, 3], and its compiled form for rk3588 beside it as convert.py leaves it."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in ("x", "y")]
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "two"], ["y"])], "g", values[:1], values[1:], [two])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "twice.onnx"
    path.write_bytes(model.SerializeToString())
    write_compiled(path)
    return ModelFile(model="twice", variant="", path=path, quant="FP32")


def write_compiled(path: Path, **other: Any) -> None:
    spec = {"datatype": "FP32", "shape": [1, 3]}
    part = {"provider": "RKNN", "n_nodes": 1, "kinds": [["Mul", 1]], "reason": ""}
    facts = {"inputs": [{"name": "x", **spec}], "outputs": [{"name": "y", **spec}], "placement": [part]}
    facts["plan"] = [{"name": "x", "layout": ""}]
    data = b"y = 2 x"
    told = {"soc": "rk3588", "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    told |= {"sha256": hashlib.sha256(data).hexdigest(), "facts": facts} | other
    path.with_name("twice.rk3588.rknn").write_bytes(data)
    path.with_name("twice.rk3588.rknn.json").write_text(json.dumps(told))


def options(**own: str) -> TensorOptions:
    return TensorOptions(n_threads=1, max_batch=8, npu=NpuOptions(require="npu", options={NAME: own}))


def loaded(board: Board, file: ModelFile, **own: str) -> Iterator[NpuSession]:
    session = board.backend().load_tensor(file, options(**own))
    yield session
    session.close()


def test_a_board_tells_its_chip_clock_and_versions(board: Board) -> None:
    device = board.device()
    assert (device.kind, device.evidence, device.reference, device.fault) == ("npu", "stub", False, "")
    assert device.detail == (
        "rk3588 by rknn-toolkit-lite2 2.5.0, librknnrt 2.5.0; 1000 of 1000 MHz by rknpu_ondemand; kernel driver v0.9.8"
    )
    assert device.temp_c == 41.615


def test_versions_that_differ_are_told_with_the_mend(board: Board) -> None:
    board.put("usr/lib/librknnrt.so", "librknnrt version: 2.3.0 (x)")
    assert "librknnrt 2.3.0; the two differ: put librknnrt.so 2.5.0 into /usr/lib" in board.device().detail
    assert board.device().skew.startswith("rknn-toolkit-lite2 2.5.0 and librknnrt 2.3.0: the two differ: put")


@pytest.mark.parametrize(("runtime", "fits"), [("2.5.2", True), ("2.10.0", True), ("3.0.0", True), ("2.3.0", False)])
def test_a_file_of_a_newer_compiler_than_the_runtime_is_refused_with_both(
    board: Board, file: ModelFile, runtime: str, fits: bool
) -> None:
    board.put("usr/lib/librknnrt.so", f"librknnrt version: {runtime} (x)")
    made = file.path.with_name("twice.rk3588.rknn.json")
    made.write_text(json.dumps(json.loads(made.read_text()) | {"compiler": "2.5.0"}))
    if fits:
        next(loaded(board, file)).close()
        return
    with pytest.raises(
        BackendLoadError, match=r"by rknn-toolkit2 2\.5\.0, and librknnrt here is 2\.3\.0: put librknnrt\.so"
    ):
        next(loaded(board, file))


def test_a_runtime_that_is_missing_is_a_fault(board: Board) -> None:
    (board.root / "usr/lib/librknnrt.so").unlink()
    assert board.device().fault == "librknnrt.so is not here: Rockchip's runtime 2.5.0 belongs into /usr/lib"


@pytest.mark.parametrize(
    ("compatible", "reason"),
    [
        ("", "no /proc/device-tree/compatible"),
        ("raspberrypi,5\0brcm,bcm2712\0", "the board is raspberrypi,5, brcm,bcm2712"),
    ],
)
def test_another_board_has_none(board: Board, compatible: str, reason: str) -> None:
    board.put("proc/device-tree/compatible", compatible)
    found = board.backend().probe()
    assert isinstance(found, Absent)
    assert reason in found.reason


def test_it_runs_what_was_compiled_elsewhere(board: Board, file: ModelFile) -> None:
    for session in loaded(board, file):
        assert session.info.evidence == "stub"
        assert [(p.provider, p.n_nodes, p.reason) for p in session.info.placement] == [("RKNN", 1, "")]
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        np.testing.assert_array_equal(session.run({"x": x})["y"], 2 * x)
        assert session.computed_on == f"{NAME}:npu"
    assert board.calls("init_runtime") == ["context 1 cores 0"]
    assert board.calls("inference") == ["context 1 nchw (1, 3) float32"] * len(board.calls("inference"))


def test_cores_and_contexts_are_asked_for(board: Board, file: ModelFile) -> None:
    for session in loaded(board, file, cores="0_1_2", contexts="2"):
        session.run({"x": np.ones((1, 3), np.float32)})
    assert board.calls("init_runtime") == ["context 1 cores 7", "context 2 cores 7"]


def test_rows_are_spread_over_contexts(board: Board, file: ModelFile) -> None:
    """As a caller may that hands a session several rows at once; NpuSession gives it one a run."""
    backend = board.backend()
    backend.probe()
    session = backend.load_tensor(file, options(contexts="2"))
    vendor_session = session._npu
    assert vendor_session is not None
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.testing.assert_array_equal(vendor_session.run({"x": x}, ["y"])["y"], 2 * x)
    used = {line.split()[1] for line in board.calls("inference")}
    session.close()
    assert used == {"1", "2"}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"cores": "5"}, "cores 5 is not known"),
        ({"contexts": "0"}, "contexts 0: there are 1 to 8"),
        ({"contexts": "many"}, "contexts many: there are 1 to 8"),
        ({"speed": "9"}, "option speed is not known"),
    ],
)
def test_what_it_does_not_know_is_refused(board: Board, file: ModelFile, own: dict[str, str], words: str) -> None:
    with pytest.raises(BackendLoadError, match=words):
        board.backend().load_tensor(file, options(**own))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"soc": "rk3576"}, "compiled for rk3576"),
        ({"model_sha256": "0"}, "from another file than twice.onnx: convert it anew"),
        ({"sha256": "0"}, "not what was compiled: copy it"),
    ],
)
def test_what_was_compiled_of_something_else_is_refused(
    board: Board, file: ModelFile, other: dict[str, str], words: str
) -> None:
    write_compiled(file.path, **other)
    with pytest.raises(BackendLoadError, match=words):
        board.backend().load_tensor(file, options())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not what convert.py writes"),
        ("[]", "is not what convert.py writes"),
        ('{"soc": "rk3588", "facts": {}}', "is not what convert.py writes"),
        (" " * (2**20 + 1), "has more than 1048576 bytes"),
    ],
    ids=["cut off", "a list", "without its parts", "too large"],
)
def test_a_description_that_convert_did_not_write_is_refused(
    board: Board, file: ModelFile, text: str, words: str
) -> None:
    file.path.with_name("twice.rk3588.rknn.json").write_text(text)
    with pytest.raises(BackendLoadError, match=words):
        board.backend().load_tensor(file, options())


def test_a_board_says_that_it_compiles_nothing(board: Board, file: ModelFile) -> None:
    file.path.with_name("twice.rk3588.rknn").unlink()
    with pytest.raises(
        BackendLoadError,
        match=r"compiles nothing. Make it .* by `edge_rt npu compile MODEL:FORM --soc rk3588`, or hw/npu/rknn/convert",
    ):
        board.backend().load_tensor(file, options())


def test_a_runtime_that_refuses_a_model_is_told_in_its_words(board: Board, file: ModelFile) -> None:
    board.put(
        "init_runtime", "E Catch exception when init runtime!\nE RKNN_ERR_MODEL_INVALID: Invalid RKNN model version 6"
    )
    with pytest.raises(
        BackendLoadError, match="init_runtime gave -1: E RKNN_ERR_MODEL_INVALID: Invalid RKNN model version"
    ):
        board.backend().load_tensor(file, options())


def test_a_run_that_gives_nothing_is_answered_by_the_cpu(board: Board, file: ModelFile) -> None:
    prefer = replace(options(), npu=NpuOptions(require="prefer", options={NAME: {}}))
    session = board.backend().load_tensor(file, prefer)
    board.put("inference", "E Catch exception when running RKNN model.")
    x = np.ones((1, 3), np.float32)
    np.testing.assert_array_equal(session.run({"x": x})["y"], 2 * x)
    assert session.computed_on == "onnx_cpu:cpu"
    session.close()
