from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_rt.backends.base import DTYPES, ModelFile, TensorBackend, TensorOptions
from edge_rt.backends.null import NullBackend
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.errors import BackendLoadError, BackendStepError
from edge_rt.tensor_types import TensorSpec


def session(script: str = "", naps: list[float] | None = None) -> NullTensorSession:
    file = ModelFile(model="m", variant=script, path=Path(), quant="")
    return NullTensorSession(file, TensorOptions(), sleep=[].append if naps is None else naps.append)


def x(n_rows: int, start: float = 0) -> dict[str, np.ndarray]:
    return {"x": np.arange(n_rows * 4, dtype=np.float32).reshape(n_rows, 4) + np.float32(start)}


def test_is_a_tensor_back_end_that_is_here_only_to_simulate() -> None:
    backend = NullBackend()
    assert isinstance(backend, TensorBackend)
    assert all(device.simulated for device in backend.probe())


def test_a_row_is_answered_the_same_whatever_is_beside_it_and_each_row_differently() -> None:
    many = session().run(x(5))["y"]
    one_by_one = [session().run({"x": x(5)["x"][i : i + 1]})["y"] for i in range(5)]
    np.testing.assert_array_equal(many, np.concatenate(one_by_one))
    assert len(np.unique(many)) == many.size


def test_speed_is_as_scripted() -> None:
    naps: list[float] = []
    loaded = session("run_s=0.5,row_s=0.25,load_s=2,power_w=3", naps)
    loaded.run(x(3))
    assert naps == [2, 1.25]
    assert loaded.power_w == 3


def test_faults_are_as_scripted() -> None:
    def outcomes(script: str, n: int) -> str:
        loaded, right = session(script), session().run(x(1))["y"]
        seen = ""
        for _ in range(n):
            try:
                seen += "." if np.array_equal(loaded.run(x(1))["y"], right) else "w"
            except BackendStepError:
                seen += "F"
        return seen

    assert outcomes("fail_every=3", 7) == "..F..F."
    assert outcomes("fail_after=2", 5) == "..FFF"
    assert outcomes("fail_after=2,fail_until=4", 6) == "..FF.."
    assert outcomes("wrong_after=2", 4) == "..ww"
    assert outcomes("fail_after=0", 2) == "FF"


def test_tensors_are_as_scripted() -> None:
    loaded = session("inputs=x:UINT8:-1x2+state:FP32:2x1x3,outputs=y:BYTES:-1+new:FP32:2x1x3+b:BOOL:-1x4")
    assert loaded.inputs[1] == TensorSpec(name="state", datatype="FP32", shape=(2, 1, 3))
    feeds = {"x": np.ones((5, 2), np.uint8), "state": np.zeros((2, 1, 3), np.float32)}
    first, again = loaded.run(feeds), loaded.run(feeds)
    assert {name: (a.shape, a.dtype) for name, a in first.items()} == {
        "y": ((5,), DTYPES["BYTES"]),
        "new": ((2, 1, 3), DTYPES["FP32"]),
        "b": ((5, 4), DTYPES["BOOL"]),
    }
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    moved = loaded.run({**feeds, "state": first["new"]})
    assert not np.array_equal(moved["new"], first["new"])


@pytest.mark.parametrize("script", ["run=1", "run_s=fast", "run_s=-1", "run_s=nan", "fail_every=0.5", "inputs=x:F32:1"])
def test_a_script_with_an_error_is_refused(script: str) -> None:
    with pytest.raises(BackendLoadError, match="NAME=VALUE of run_s"):
        session(script)
    with pytest.raises(BackendLoadError):
        NullBackend().estimate_tensor(ModelFile(model="m", variant=script, path=Path(), quant=""), TensorOptions())
