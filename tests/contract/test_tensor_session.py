"""What every TensorSession promises; runs over each tensor back end that is present.

The FPGA's engine is its golden model behind the driver's ring and cache: simulated. Serial boards are the firmware's
build for this machine, behind a modelled line: emulated; their models are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.backends import registry
from edge_rt.backends.base import DTYPES, Absent, Accelerated, ModelFile, TensorBackend, TensorOptions, TensorSession
from edge_rt.backends.tensor_feeds import MAX_ELEMENTS
from edge_rt.errors import BackendStepError, InvalidRequestError, NotOnAcceleratorError
from edge_rt.tensor_types import TensorSpec
from tests.npu.rknn_here import environment

BACKENDS = (
    "null",
    "onnx_cpu",
    "fpga",
    "npu_openvino",
    pytest.param("npu_qnn", marks=pytest.mark.simulator),
    pytest.param("npu_serial", marks=pytest.mark.emulated),
    pytest.param("npu_rknn", marks=[pytest.mark.simulator, pytest.mark.slow]),
)
Load = Callable[[str], TensorSession]


def packages_of(name: str) -> AbstractContextManager[object]:
    """Let a back end find its vendor's packages, where they have an environment of their own."""
    return environment("rknn") if name == "npu_rknn" else nullcontext()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[TensorBackend]:
    if request.param == "fpga":
        pytest.importorskip("onnxruntime")
        from tests.fpga_engines import SimulatedFpga

        yield SimulatedFpga()
        return
    if request.param == "npu_serial":
        pytest.importorskip("onnxruntime")
        from tests.npu.serial_boards import SerialBoards

        yield SerialBoards()
        return
    found: object = registry.get(request.param)
    assert isinstance(found, TensorBackend)
    with packages_of(request.param):
        if isinstance(absent := found.probe(), Absent):
            pytest.skip(f"{request.param}: {absent.reason}")
        yield found


def model_file(backend: TensorBackend, folder: Path, datatype: str = "") -> ModelFile:
    """Give a model from x [n, 4] to y [n, 4] and z [n, 1], rows by themselves; with a datatype from x [n, 2] to y."""
    if backend.name == "null":
        kind = f"{datatype}:-1x2" if datatype else "FP32:-1x4"
        script = f"inputs=x:{kind},outputs=y:{kind}" + ("" if datatype else "+z:FP32:-1x1")
        return ModelFile(model="m", variant=script, path=Path(), quant="")
    from tests import tensor_models

    is_fpga = backend.name == "fpga"
    if backend.name == "npu_serial":
        from tests.npu import serial_boards

        if datatype not in {"", "FP32", "UINT8", "INT8"}:  # what is no integer for it, it refuses
            model = tensor_models.identity(tensor_models.ELEM_TYPES[datatype])
        else:
            model = serial_boards.identity(datatype) if datatype else serial_boards.rows()
    elif datatype:
        identity = tensor_models.identity_beside_product if is_fpga else tensor_models.identity
        model = identity(tensor_models.ELEM_TYPES[datatype])
    else:
        model = tensor_models.rows_with_product() if is_fpga else tensor_models.rows()
    file = tensor_models.saved(model, folder / f"{datatype or 'rows'}.onnx")
    skip_unless_supported(backend, file)
    return file


def skip_unless_supported(backend: TensorBackend, file: ModelFile) -> None:
    if (reason := backend.supports_tensor(file, TensorOptions())) is not None:
        pytest.skip(f"{backend.name}: {reason}")


@pytest.fixture(scope="module")
def session(backend: TensorBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorSession]:
    file = model_file(backend, tmp_path_factory.mktemp("model"))
    loaded = backend.load_tensor(file, TensorOptions(n_threads=1))
    yield loaded
    loaded.close()


def x(n_rows: int) -> NDArray[np.float32]:
    return np.linspace(-1, 1, n_rows * 4, dtype=np.float32).reshape(n_rows, 4)


def test_says_what_it_is(backend: TensorBackend, session: TensorSession) -> None:
    assert session.inputs == (TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),)
    assert [(s.name, s.shape) for s in session.outputs] == [("y", (-1, 4)), ("z", (-1, 1))]
    info = session.info
    assert (info.inputs, info.outputs) == (session.inputs, session.outputs)
    assert info.backend == backend.name
    assert info.n_threads == 1
    assert sum(part.n_nodes for part in info.placement) == sum(n for part in info.placement for _, n in part.kinds) > 0
    if info.backend.startswith("npu_"):
        elsewhere = [part for part in info.placement if part.reason]
        # Nobody stands in for the chip; RKNN's compiler leaves a layer's reshaping to the board's CPU, and says so.
        assert len(elsewhere) < len(info.placement)
        assert not elsewhere or info.backend == "npu_rknn"
    with packages_of(backend.name):
        (device, *_) = backend.probe()  # type: ignore[misc]
    assert info.evidence == device.evidence


def test_runs_and_gives_the_outputs_wanted_only(session: TensorSession) -> None:
    everything = session.run({"x": x(3)})
    assert {name: (a.shape, a.dtype) for name, a in everything.items()} == {
        "y": ((3, 4), DTYPES["FP32"]),
        "z": ((3, 1), DTYPES["FP32"]),
    }
    for wanted in (["z"], ["z", "y"], ["y", "y"]):
        answer = session.run({"x": x(3)}, wanted)
        assert set(answer) == set(wanted)
        for name in answer:
            np.testing.assert_array_equal(answer[name], everything[name])


@pytest.mark.parametrize(
    ("feeds", "param", "words"),
    [
        ({"x": x(1).astype(np.float64)}, "x", ("float64", "FP32")),
        ({"x": x(1).astype(">f4")}, "x", (">f4", "FP32")),
        ({"x": x(1)[0]}, "x", ("[4]", "[-1, 4]")),
        ({"x": np.zeros((2, 5), np.float32)}, "x", ("[2, 5]", "[-1, 4]")),
        ({"x": np.zeros((1, 4, 1), np.float32)}, "x", ("[1, 4, 1]", "[-1, 4]")),
        ({}, "x", ("missing", "FP32", "[-1, 4]")),
        ({"x": x(1), "w": x(1)}, "w", ("no input", "takes x")),
    ],
)
def test_feeds_that_do_not_fit_are_refused_by_name(
    session: TensorSession, feeds: dict[str, NDArray[Any]], param: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        session.run(feeds)
    assert refused.value.param == param
    for word in words:
        assert word in refused.value.problem


def test_an_output_that_is_none_is_refused_by_name(session: TensorSession) -> None:
    with pytest.raises(InvalidRequestError, match="no output; the model gives y, z") as refused:
        session.run({"x": x(1)}, ["y", "logits"])
    assert refused.value.param == "logits"


def test_an_empty_tensor_of_a_huge_shape_is_refused(backend: TensorBackend, tmp_path: Path) -> None:
    if backend.name == "null":
        file = ModelFile(model="m", variant="inputs=x:FP32:-1x-1", path=Path(), quant="")
    else:
        from tests import tensor_models

        identity = tensor_models.identity_beside_product if backend.name == "fpga" else tensor_models.identity
        file = tensor_models.saved(identity(1, ["n", "m"]), tmp_path / "m.onnx")
        skip_unless_supported(backend, file)
    loaded = backend.load_tensor(file, TensorOptions())
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_ELEMENTS} elements"):
        loaded.run({"x": np.empty((2**40, 0), np.float32)})
    loaded.close()


@given(n_rows=st.integers(0, 40), stride=st.sampled_from([1, 2, -1]))
@settings(max_examples=40, deadline=None)
def test_many_rows_are_as_many_runs_of_one_whatever_their_layout_in_memory(
    session: TensorSession, n_rows: int, stride: int
) -> None:
    feed = x(2 * n_rows)[::stride][:n_rows]
    whole = session.run({"x": feed})
    for name, answer in whole.items():
        assert answer.shape[0] == n_rows
        each = [session.run({"x": feed[i : i + 1]})[name] for i in range(n_rows)]
        np.testing.assert_array_equal(answer, np.concatenate(each) if each else answer)


def test_answers_are_the_callers_and_feeds_stay_as_they_are(session: TensorSession) -> None:
    feed = x(5)
    feed.flags.writeable = False
    first = session.run({"x": feed})
    kept = {name: answer.copy() for name, answer in first.items()}
    session.run({"x": x(7)})
    for name, answer in first.items():
        np.testing.assert_array_equal(answer, kept[name])
        answer[:] = 0  # the next run must not see it
    again = session.run({"x": feed})
    np.testing.assert_array_equal(feed, x(5))
    for name, answer in again.items():
        np.testing.assert_array_equal(answer, kept[name])


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_every_datatype_goes_in_and_comes_out(backend: TensorBackend, datatype: str, tmp_path: Path) -> None:
    try:
        loaded = backend.load_tensor(model_file(backend, tmp_path, datatype), TensorOptions())
    except NotOnAcceleratorError as exc:
        assert datatype != "FP32"
        pytest.skip(f"{backend.name}: {exc}")
    for n_rows in (0, 3):
        feed = np.empty((n_rows, 2), DTYPES[datatype])  # type: ignore[index]
        values: list[Any] = [b"", "\0é漢".encode()] if datatype == "BYTES" else [0, 1]
        feed[:] = np.array(values, feed.dtype)
        answer = loaded.run({"x": feed})["y"]
        assert (answer.shape, answer.dtype) == (feed.shape, feed.dtype)
        if datatype == "BYTES":
            assert all(isinstance(element, bytes) for element in answer.flat)
        if backend.name != "null":
            np.testing.assert_array_equal(answer, feed)
    loaded.close()


def test_as_many_threads_as_it_says_may_run_it_at_a_time(session: TensorSession) -> None:
    feeds = [x(1 + i % 5) + i for i in range(200)]
    expected = [session.run({"x": feed})["y"] for feed in feeds]
    with ThreadPoolExecutor(session.info.max_runs) as runners:
        answers = list(runners.map(lambda feed: session.run({"x": feed})["y"], feeds))
    assert all(np.array_equal(answer, want) for answer, want in zip(answers, expected, strict=True))


def test_what_an_accelerator_computes_is_counted_and_none_of_it_is_the_cpus(session: TensorSession) -> None:
    is_accelerator = session.info.backend == "fpga" or session.info.backend.startswith("npu_")
    assert isinstance(session, Accelerated) == is_accelerator
    if isinstance(session, Accelerated):
        before = session.device_counts()
        session.run({"x": x(1)})
        after = session.device_counts()
        assert after.n_products > before.n_products
        assert (after.n_fallbacks, after.n_faults, after.last_fault) == (0, 0, "")


def test_close_is_final_and_may_be_repeated(backend: TensorBackend, tmp_path: Path) -> None:
    loaded = backend.load_tensor(model_file(backend, tmp_path), TensorOptions())
    loaded.close()
    loaded.close()
    with pytest.raises(BackendStepError, match="closed"):
        loaded.run({"x": x(1)})


def test_the_estimate_needs_no_load(backend: TensorBackend, tmp_path: Path) -> None:
    file = model_file(backend, tmp_path)
    assert backend.supports_tensor(file, TensorOptions()) is None
    assert backend.estimate_tensor(file, TensorOptions()).total_bytes >= 0
