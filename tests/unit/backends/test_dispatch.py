from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from edge_rt import config
from edge_rt.backends import registry
from edge_rt.backends.base import Absent, Backend, Device, LoadOptions, ModelFile
from edge_rt.backends.dispatch import AUTO, PREFERENCE, dispatch
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
