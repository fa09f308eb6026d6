"""What a process may load, and in which direction modules import each other."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import edge_rt
from edge_rt.version import VERSION

ROOT = Path(__file__).parents[2]

# The front process answers /health in a small memory and must survive a bad model: no native inference code in it.
HEAVY = (
    "numpy",
    "llama_cpp",
    "jinja2",
    "edge_rt.engine",
    "edge_rt.backends",
    "edge_rt.convert",
    "onnx",
    "gguf",
    "grpc",
    "google",
)


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["edge_rt", "edge_rt.cli", "edge_rt.daemon", "edge_rt.worker.process"])
def test_the_front_process_loads_nothing_heavy(module: str) -> None:
    assert [name for name in loaded_by(module) for root in HEAVY if f"{name}.".startswith(f"{root}.")] == []


def test_the_daemon_reads_no_metadata_of_packages() -> None:
    # importlib.metadata brings zipfile, csv and three dozen more, 0.9 MiB in all.
    modules = loaded_by("edge_rt.cli.serve")
    assert modules & {"importlib.metadata", "zipfile", "tarfile", "csv", "pydantic", "PIL", "ml_dtypes"} == set()


def test_the_version_is_the_packages() -> None:
    assert version("edge_rt") == edge_rt.__version__ == VERSION


def test_the_command_line_starts_without_the_server() -> None:
    assert not loaded_by("edge_rt.cli") & {"starlette", "uvicorn", "prometheus_client", "httpx2", "tqdm", "psutil"}


def test_importing_the_library_loads_next_to_nothing() -> None:
    assert not loaded_by("edge_rt") & {"click", "msgspec", "starlette", "httpx2"}


def test_the_worker_of_a_tensor_model_loads_nothing_of_language_models_or_of_the_front_process() -> None:
    # Every process of a model has them in memory once more; jinja2 and asyncio bring 60 modules of theirs.
    roots = ("jinja2", "asyncio", "ssl", "argparse", "shutil", "statistics", "tomllib", "onnx", "PIL", "tokenizers")
    own = ("edge_rt.engine.tokens", "edge_rt.engine.chat", "edge_rt.catalog.manifest", "edge_rt.catalog.gguf")
    modules = loaded_by("edge_rt.worker.main, edge_rt.worker.tensors, edge_rt.backends.onnx_cpu")
    assert modules & {*roots, *own} == set()


def test_the_worker_of_a_language_model_loads_nothing_of_tensor_models() -> None:
    modules = loaded_by("edge_rt.worker.main, edge_rt.worker.tokens, edge_rt.backends.native")
    assert modules & {"asyncio", "ssl", "edge_rt.engine.tensors", "edge_rt.worker.tensors", "onnxruntime"} == set()


def test_imports_go_down_only() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_beside_the_clone_imports_the_package_and_not_the_directory(tmp_path: Path) -> None:
    (tmp_path / "edge_rt").mkdir()
    code = "import edge_rt; edge_rt.load"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}; an installation from before: make venv"


@pytest.mark.parametrize("module", ["edge_rt.devices.meter_choice", "edge_rt.devices.devfreq", "edge_rt.power.domains"])
def test_meters_and_clocks_need_the_standard_library_only(module: str) -> None:
    roots = {name.partition(".")[0] for name in loaded_by(module)}
    # What .pth files of the environment load at each start of Python is nobody's import.
    assert roots - loaded_by("sys") - set(sys.stdlib_module_names) <= {"edge_rt"}


@pytest.mark.parametrize("module", ["edge_rt.daemon", "edge_rt.cloud.endpoints"])
def test_without_an_endpoint_nothing_of_a_client_is_loaded(module: str) -> None:
    assert not loaded_by(module) & {"httpcore2", "h11"}
