"""Which of the real back ends gets a model, with files that one of them does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_rt.backends import registry
from edge_rt.backends.base import Absent, LoadOptions, ModelFile
from edge_rt.backends.dispatch import AUTO, PREFERENCE, dispatch
from edge_rt.errors import BackendLoadError, ModelFormatError
from edge_rt.worker.channel import Load
from edge_rt.worker.tokens import load_session
from tests.gguf_files import GgufFile, tiny_llama

for _name in PREFERENCE:
    if isinstance(_found := registry.get(_name).probe(), Absent) or all(device.reference for device in _found):
        pytest.skip(f"{_name} is not here or has no kernels for this CPU", allow_module_level=True)

OPTIONS = LoadOptions(n_ctx=64, n_seq_max=2)
UNSUPPORTED = "IQ3_S"


def write(file: GgufFile, path: Path) -> ModelFile:
    path.write_bytes(file.encode())
    return ModelFile(model="tiny", variant="", path=path, quant="")


def test_native_takes_what_it_supports(tmp_path: Path) -> None:
    backend, reason = dispatch(AUTO, write(tiny_llama(), tmp_path / "m.gguf"), OPTIONS)
    assert (backend.name, reason) == ("native", "")


def test_what_it_does_not_support_runs_on_llama_cpp_and_the_model_says_why(tmp_path: Path) -> None:
    path = write(tiny_llama(width=256, linear=UNSUPPORTED), tmp_path / "m.gguf").path
    load = Load(model="tiny", variant="", path=str(path), quant="", backend=AUTO, n_ctx=64, n_seq_max=2, force=True)
    session = load_session(load)
    session.close()
    assert session.info.backend == "llama_cpu"
    assert UNSUPPORTED in session.info.backend_reason


def test_shapes_without_kernels_go_to_llama_cpp_before_any_weight_is_read(tmp_path: Path) -> None:
    file = tiny_llama(width=96, linear="F16", embedding="F16")  # heads of 24
    backend, reason = dispatch(AUTO, write(file, tmp_path / "m.gguf"), OPTIONS)
    assert backend.name == "llama_cpu"
    assert "head dimension" in reason


def test_native_alone_refuses_what_it_does_not_support(tmp_path: Path) -> None:
    with pytest.raises(BackendLoadError, match=UNSUPPORTED):
        dispatch("native", write(tiny_llama(width=256, linear=UNSUPPORTED), tmp_path / "m.gguf"), OPTIONS)


@pytest.mark.parametrize("name", [AUTO, *PREFERENCE])
def test_a_broken_file_is_refused_whoever_is_asked(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ModelFormatError):
        dispatch(name, ModelFile(model="m", variant="", path=path, quant=""), OPTIONS)
