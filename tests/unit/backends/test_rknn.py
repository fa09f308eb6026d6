"""Rockchip's compiler and simulator: the real ones, where `edge_rt npu setup rknn` has been. Says nothing of speed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt.backends.base import Absent, ModelFile, NpuOptions, TensorOptions
from edge_rt.backends.npu import host, rknn_driver
from edge_rt.backends.npu.artifacts import artifacts
from edge_rt.backends.npu.environments import Environment
from edge_rt.backends.npu.rknn import NAME, RknnBackend
from edge_rt.backends.onnx_cpu import OnnxCpuBackend
from edge_rt.catalog.manifest import SHIPPED_DIR, load_manifest
from edge_rt.convert.recipes import run_recipe
from edge_rt.errors import BackendLoadError, InvalidRequestError
from edge_rt.tensor_types import ChipNeeds
from tests import tensor_models
from tests.npu.indexed import TABLE, indexed, indices
from tests.npu.picture_model import picture_model
from tests.npu.rknn_here import environment
from tools.npu_inputs import board_feed, judge_boards
from tools.pcb.average_precision import mean_average_precision
from tools.pcb.detect import boxes_of

pytestmark = [pytest.mark.simulator, pytest.mark.slow]


@pytest.fixture(autouse=True)
def toolkit() -> Iterator[Environment]:
    with environment("rknn") as found:
        yield found


def with_driver(toolkit: Environment, code: str) -> list[Any]:
    """Give the command that runs code with the driver, imported as its host does."""
    begin = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('host', sys.argv[1]); "
        "host = importlib.util.module_from_spec(spec); spec.loader.exec_module(host); "
        "host.load_driver(sys.argv[2]); driver = sys.modules['npu_driver']\n"
    )
    return [toolkit.python, "-I", "-c", begin + code, host.__file__, rknn_driver.__file__]


@pytest.fixture
def backend(toolkit: Environment) -> RknnBackend:
    found = RknnBackend()
    assert not isinstance(found.probe(), Absent)
    return found


def options(soc: str = "rk3588", kept: Path | None = None, **own: str) -> TensorOptions:
    npu = NpuOptions(require="prefer", artifacts=kept, soc={NAME: soc}, options={NAME: own})
    return TensorOptions(n_threads=1, max_batch=8, npu=npu)


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = tmp_path / "picture.onnx"
    path.write_bytes(picture_model().SerializeToString())
    return ModelFile(model="picture", variant="", path=path, quant="FP32")


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    np.savez(tmp_path / "ranges.npz", image=pixels(16, seed=9))
    return str(tmp_path / "ranges.npz")


def pixels(n: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, 16, 16, 3), np.uint8)


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def exact(file: ModelFile, x: NDArray[np.uint8]) -> NDArray[Any]:
    cpu = OnnxCpuBackend().load_tensor(file, options())
    try:
        return cpu.run({"image": x})["logits"]
    finally:
        cpu.close()


def is_heard(port: int) -> bool:
    """Say whether a process listens on a TCP port."""
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    return any(f":{port:04X} " in line and line.split()[3] == "0A" for line in lines)


def test_it_is_a_simulator_and_is_chosen_by_name_only(backend: RknnBackend) -> None:
    (device,) = backend.probe()  # type: ignore[misc]
    assert (device.kind, device.evidence, device.reference, device.fault) == ("npu", "simulator", True, "")
    assert "runs no exported file" in device.detail


@pytest.mark.parametrize(
    ("soc", "dtype", "least"), [("rk3588", "fp16", 0.99999), ("rk3588", "w8a8", 0.999), ("rk3576", "w4a16", 0.97)]
)
def test_a_model_of_pictures_computes_what_the_cpu_does(
    backend: RknnBackend, file: ModelFile, dataset: str, tmp_path: Path, soc: str, dtype: str, least: float
) -> None:
    own = {"dtype": dtype} | ({} if dtype == "fp16" else {"dataset": dataset})
    x, kept = pixels(3), tmp_path / "kept"
    answers = []
    for _ in range(2):  # compiled, and from what was kept
        with closing(backend.load_tensor(file, options(soc, kept, **own))) as session:
            answers.append(session.run({"image": x})["logits"])
            assert session.computed_on == f"{NAME}:sim"
            assert session.info.evidence == "simulator"
            # The toolkit has its own graph: it makes convolutions of a mean, too.
            on_chip = [part for part in session.info.placement if not part.reason]
            assert sum(n for part in on_chip for kind, n in part.kinds if kind.startswith("Conv")) >= 2
    np.testing.assert_array_equal(*answers)
    assert cosine(answers[0], exact(file, x)) > least
    (made,) = artifacts(kept)
    assert (made.folder / "model.rknn").read_bytes()[:4] == b"RKNN"
    assert made.description.target.soc == soc


def test_a_form_says_itself_how_and_for_which_chip_it_is_compiled(
    backend: RknnBackend, file: ModelFile, dataset: str, tmp_path: Path
) -> None:
    path = tmp_path / "form.onnx"
    run_recipe("rknn-w4a16", file.path, path, Path(dataset))
    form = ModelFile(model="picture", variant="npu-rknn-w4a16", path=path, quant="W4A16")
    kept, x = tmp_path / "kept", pixels(3)
    needs = ChipNeeds(weight_bits=4, activation_bits=16, socs=("rk3576",))
    npu = NpuOptions(require="prefer", artifacts=kept, needs=needs)
    with closing(backend.load_tensor(form, TensorOptions(n_threads=1, max_batch=8, npu=npu))) as session:
        assert cosine(session.run({"image": x})["logits"], exact(form, x)) > 0.999  # on the compiler's grid already
        assert session.computed_on == f"{NAME}:sim"
    (made,) = artifacts(kept)
    assert made.description.target.soc == "rk3576"
    assert made.description.compiled.facts["dtype"] == "w4a16"
    wrong = NpuOptions(needs=needs, soc={NAME: "rk3588"})
    with pytest.raises(BackendLoadError, match="it is for rk3576, and the chip is rk3588"):
        backend.load_tensor(form, TensorOptions(npu=wrong))


def test_the_catalog_s_form_of_pcb_defect_is_wholly_on_the_npu_and_right(backend: RknnBackend, tmp_path: Path) -> None:
    variant = load_manifest(SHIPPED_DIR / "pcb-defect.toml").variant("npu-rknn-w8a8")
    assert variant is not None
    path = tmp_path / variant.file
    run_recipe(variant.derive, SHIPPED_DIR / "pcb-defect.int8.onnx", path, SHIPPED_DIR / "pcb-defect-calibration.npz")
    form = ModelFile(model="pcb-defect", variant=variant.id, path=path, quant=variant.quant)
    (board,) = judge_boards(1)
    npu = NpuOptions(require="npu", needs=ChipNeeds(weight_bits=8, activation_bits=8))
    with closing(backend.load_tensor(form, TensorOptions(n_threads=1, npu=npu))) as session:
        assert [part.reason for part in session.info.placement] == [""]
        answer = session.run(board_feed(board))
        assert session.computed_on == f"{NAME}:sim"
    cpu = OnnxCpuBackend().load_tensor(form, options())
    try:
        right = cpu.run(board_feed(board))
    finally:
        cpu.close()
    assert cosine(answer["heat"], right["heat"]) > 0.999
    boxes = boxes_of(answer["heat"], answer["offset"], answer["size"])
    assert mean_average_precision([boxes], [board.marks]).mean > 0.7


def test_a_layer_can_stay_float(backend: RknnBackend, file: ModelFile, dataset: str) -> None:
    right = exact(file, x := pixels(3))
    errors = []
    for own in ({}, {"float": "first,second"}):
        with closing(backend.load_tensor(file, options("rk3576", dtype="w4a16", dataset=dataset, **own))) as session:
            errors.append(float(np.abs(session.run({"image": x})["logits"] - right).max()))
    assert errors[1] < errors[0] / 10


def test_indices_beyond_a_table_are_refused_before_the_chip_is_asked(backend: RknnBackend, tmp_path: Path) -> None:
    file = tensor_models.saved(indexed("Gather"), tmp_path / "m.onnx")
    with closing(backend.load_tensor(file, options("rk3588"))) as session:
        for index in (3, -1, -16):
            answer = session.run({"i": indices("Gather", index)})["y"]
            np.testing.assert_allclose(answer, TABLE[[0, 1, 2, index]], atol=2**-8)
        with pytest.raises(InvalidRequestError, match="holds 16, and may hold -16 to 15"):
            session.run({"i": indices("Gather", 16)})
        assert session.device_counts().n_faults == 0


@pytest.mark.parametrize(
    ("soc", "socs", "words"),
    [
        (
            "rk3588",
            (),
            "wants 4-bit weights and 16-bit activations, and rk3588 was seen to take floats of 16 bits; 8-bit",
        ),
        ("rk3588", ("rk3576",), "it is for rk3576, and the chip is rk3588"),
        ("rk9999", (), "there is no chip rk9999; there are rk3588, rk3576"),
    ],
)
def test_a_form_for_another_chip_is_refused_with_both_named(
    backend: RknnBackend, file: ModelFile, soc: str, socs: tuple[str, ...], words: str
) -> None:
    needs = ChipNeeds(weight_bits=4, activation_bits=16, socs=socs)
    wanted = options(soc)
    with pytest.raises(BackendLoadError, match=words):
        backend.load_tensor(file, replace(wanted, npu=replace(wanted.npu, needs=needs)))


def test_capabilities_are_what_a_compiler_took_and_differ_by_chip(toolkit: Environment, tmp_path: Path) -> None:
    code = (
        "told = {soc: driver.Driver().capabilities('sim', soc) for soc in ('rk3588', 'rk3576')}\n"
        "import json; open(sys.argv[3], 'w').write(json.dumps(told))"
    )
    answer = tmp_path / "told.json"
    subprocess.run([*with_driver(toolkit, code), answer], capture_output=True, check=True)
    told = json.loads(answer.read_text())
    bits = {soc: {(p["weight_bits"], p["activation_bits"]) for p in t["precisions"]} for soc, t in told.items()}
    assert bits == {"rk3588": {(8, 8), (16, 16)}, "rk3576": {(4, 16), (8, 8), (16, 16)}}


@pytest.mark.parametrize(
    ("soc", "own", "words"),
    [
        ("rk3588", {"dtype": "w4a16", "dataset": "D"}, "'w4a16' not support in 'rk3588'"),
        ("rk3588", {"dtype": "w8a8"}, "needs ranges: put calibration data beside the model"),
        ("rk3588", {"dtype": "w8a8", "dataset": "/nowhere.npz"}, "cannot be read: No such file"),
        ("rk3588", {"dtype": "w8a8", "dataset": "D", "float": "nothing"}, "has no tensor nothing"),
        ("rk3588", {"dtype": "w8a8", "dataset": "D", "algorithm": "gdq"}, "algorithm gdq is not offered"),
        ("rk3588", {"dtype": "w3"}, "dtype w3 is not known"),
        ("rk3588", {"speed": "9"}, "option speed is not known"),
        ("rk9999", {}, "there is no chip rk9999"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    backend: RknnBackend, file: ModelFile, dataset: str, soc: str, own: dict[str, str], words: str
) -> None:
    own = {name: dataset if value == "D" else value for name, value in own.items()}
    with pytest.raises(BackendLoadError, match=words):
        backend.load_tensor(file, options(soc, **own))


def test_the_adb_server_that_the_toolkit_starts_is_ended(toolkit: Environment, tmp_path: Path) -> None:
    """init_runtime(target=…) without a board starts one, which stays on TCP 5037; the driver never does that."""
    if is_heard(5037):
        pytest.skip("an adb server runs here already")
    code = (
        "from pathlib import Path\n"
        "from rknn.api import RKNN\n"
        "Path('source.onnx').write_bytes(driver.tiny_model())\n"
        "with driver.stopping_adb():\n"
        "    rknn, _ = driver.build({'soc': 'rk3588', 'dtype': 'fp16', 'plan': []})\n"
        "    try:\n"
        "        code = rknn.init_runtime(target='rk3588')\n"
        "    except BaseException:\n"
        "        code = -1\n"
        "    assert code != 0\n"
        "    print('\\nstarted', len(sys.modules['npu_driver.rknn_toolkit'].adb_servers()))\n"
    )
    done = subprocess.run(
        with_driver(toolkit, code), capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "started 1" in done.stdout
    assert not is_heard(5037)
