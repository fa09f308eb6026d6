from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, Backend, Device, LoadOptions, ModelFile, TensorBackend, TensorOptions
from edge_rt.backends.dispatch import AUTO, PREFERENCE, TENSOR_PREFERENCE, dispatch, dispatch_tensor
from edge_rt.backends.null import NullBackend
from edge_rt.errors import BackendLoadError, BackendUnavailableError

FILE = ModelFile(model="m", variant="", path=Path("none"), quant="")
OPTIONS = LoadOptions(n_ctx=64)


class Answering(NullBackend):
    """Answers dispatch as it is told to, and notes that it was asked."""

    def __init__(self, *, reason: str | None = None, absent: Absent | None = None, reference: bool = False) -> None:
        self._reason, self._absent, self._reference = reason, absent, reference
        self.is_asked = False

    def probe(self) -> tuple[Device, ...] | Absent:  # type: ignore[override]
        self.is_asked = True
        return self._absent or (Device(id="x", kind="cpu", detail="slow kernels", reference=self._reference),)

    def supports(self, file: ModelFile, options: LoadOptions) -> str | None:
        return self._reason


def run(wanted: str, **backends: Answering) -> tuple[Backend, str]:
    def find(name: str) -> Backend:
        return backends[name]

    return dispatch(wanted, FILE, OPTIONS, find=find)


def test_the_first_that_supports_the_model_takes_it_and_no_other_is_asked() -> None:
    native, llama = Answering(), Answering()
    assert run(AUTO, native=native, llama_cpu=llama) == (native, "")
    assert not llama.is_asked


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (Answering(reason="it does not know gru"), "it does not know gru"),
        (Answering(absent=Absent(reason="no compiler")), "no compiler"),
        (Answering(reference=True), "slow kernels"),
    ],
    ids=["unsupported", "absent", "reference"],
)
def test_what_the_first_does_not_take_goes_to_the_next_with_the_reason(native: Answering, reason: str) -> None:
    llama = Answering()
    backend, why = run(AUTO, native=native, llama_cpu=llama)
    assert backend is llama
    assert reason in why


def test_a_named_back_end_takes_the_model_or_nobody_does() -> None:
    llama = Answering()
    assert run("llama_cpu", native=Answering(), llama_cpu=llama) == (llama, "")
    slow = Answering(reference=True)
    assert run("native", native=slow, llama_cpu=llama) == (slow, "")
    with pytest.raises(BackendLoadError, match=r'does not know gru; backend = "auto"') as unsupported:
        run("native", native=Answering(reason="it does not know gru"), llama_cpu=llama)
    assert unsupported.value.model == "m"
    with pytest.raises(BackendUnavailableError, match="no compiler"):
        run("native", native=Answering(absent=Absent(reason="no compiler")), llama_cpu=llama)


def test_what_nobody_takes_fails_as_the_last_one_says() -> None:
    native = Answering(reason="it does not know gru")
    with pytest.raises(BackendUnavailableError) as absent:
        run(AUTO, native=native, llama_cpu=Answering(absent=Absent(reason="not installed", extra="llama")))
    assert absent.value.extra == "llama"
    with pytest.raises(BackendLoadError, match="too small"):
        run(AUTO, native=native, llama_cpu=Answering(reason="too small"))


def test_configuration_and_registry_know_the_same_names() -> None:
    assert set(get_args(config.Backend)) == {AUTO, *registry.names()}
    assert set(PREFERENCE) <= set(registry.names())


TENSOR_OPTIONS = TensorOptions()


class TensorAnswering(Answering):
    def supports_tensor(self, file: ModelFile, options: TensorOptions) -> str | None:
        return self._reason


class TextOnly:
    """A back end for language models alone."""

    name = "llama_cpu"


def run_tensor(wanted: str, *order: str, **backends: object) -> tuple[TensorBackend, str]:
    def find(name: str) -> Any:
        if name not in backends:
            raise BackendUnavailableError(backend=name, reason=f"no back end {name}")
        return backends[name]

    return dispatch_tensor(wanted, FILE, TENSOR_OPTIONS, backends=order, find=find)


def test_a_tensor_model_goes_to_the_first_of_its_own_back_ends_that_takes_it() -> None:
    npu, cpu = TensorAnswering(reason="no operator Conv"), TensorAnswering()
    assert run_tensor(AUTO, "npu", "onnx_cpu", npu=npu, onnx_cpu=cpu) == (cpu, "no operator Conv")
    assert run_tensor(AUTO, "rknn", "onnx_cpu", onnx_cpu=cpu) == (cpu, "no back end rknn")
    assert run_tensor(AUTO, onnx_cpu=cpu) == (cpu, "")
    assert run_tensor("npu", "onnx_cpu", npu=cpu, onnx_cpu=npu) == (cpu, "")


def test_a_tensor_model_that_nobody_takes_is_refused_with_every_reason() -> None:
    refuses, absent = TensorAnswering(reason="too small"), TensorAnswering(absent=Absent(reason="no chip", extra="x"))
    with pytest.raises(BackendLoadError, match="no chip; too small"):
        run_tensor(AUTO, "npu", "onnx_cpu", npu=absent, onnx_cpu=refuses)
    with pytest.raises(BackendUnavailableError, match="no chip") as alone:
        run_tensor("npu", npu=absent)
    assert alone.value.extra == "x"
    with pytest.raises(BackendLoadError, match="llama_cpu runs language models, m takes tensors"):
        run_tensor("llama_cpu", llama_cpu=TextOnly())


def test_the_preferred_tensor_back_ends_are_registered() -> None:
    assert set(TENSOR_PREFERENCE) <= set(registry.names())
