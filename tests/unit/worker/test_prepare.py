from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from edge_rt.catalog.place import Place, Record
from edge_rt.errors import BackendLoadError, ModelFormatError
from edge_rt.worker.channel import Load, TensorLoad
from edge_rt.worker.prepare import load_prepared, prepare
from tests.tensor_models import rows

# What a worker that serves the model has no use for; some of it is large, and each worker would have it once more.
UNUSED = {"onnx", "google.protobuf", "ml_dtypes", "asyncio", "ssl", "jinja2", "argparse", "subprocess", "tarfile"}
WORKER = """
import sys
import msgspec, numpy
import edge_rt.worker.main
from edge_rt.worker import tensors
from edge_rt.worker.channel import Load
session = tensors.load_prepared(msgspec.json.decode(sys.argv[1], type=Load))
engine, _ = tensors.start_tensors(msgspec.json.decode(sys.argv[1], type=Load).tensor, session)
engine.warm_up()
print("\\n".join(sys.modules))
"""


def stored(path: Path, data: bytes) -> Load:
    Place(path).write_record(Record(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)))
    path.write_bytes(data)
    return load(path)


def load(path: Path, backend: str = "auto", **tensor: object) -> Load:
    settings = TensorLoad(assets={"labels": "/labels"}, **tensor)  # type: ignore[arg-type]
    return Load(model="m", variant="v", path=str(path), quant="", backend=backend, n_ctx=0, tensor=settings)


def test_the_process_checks_and_optimises_and_the_worker_needs_no_more_than_onnxruntime(tmp_path: Path) -> None:
    message = stored(tmp_path / "m.onnx", rows().SerializeToString())
    prepare(message)
    made = Place(tmp_path / "m.onnx").graph.stat()
    text = msgspec.json.encode(message).decode()
    done = subprocess.run([sys.executable, "-c", WORKER, text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "onnxruntime" in modules
    assert modules & UNUSED == set()
    assert Place(tmp_path / "m.onnx").graph.stat().st_mtime_ns == made.st_mtime_ns


def test_the_first_worker_has_the_model_checked_elsewhere(tmp_path: Path) -> None:
    text = msgspec.json.encode(stored(tmp_path / "m.onnx", rows().SerializeToString())).decode()
    done = subprocess.run([sys.executable, "-c", WORKER, text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & UNUSED == {"subprocess"}


def test_errors_come_from_the_process_as_they_are(tmp_path: Path) -> None:
    data = rows().SerializeToString()
    with pytest.raises(ModelFormatError, match="no ONNX model, or it is cut"):
        load_prepared(stored(tmp_path / "m.onnx", data[:-10]))
    unknown = rows()
    unknown.graph.node[0].op_type = "Abacus"
    with pytest.raises(BackendLoadError, match="onnxruntime says"):
        load_prepared(stored(tmp_path / "u.onnx", unknown.SerializeToString()))


def test_only_what_can_be_kept_is_prepared_and_only_once(tmp_path: Path) -> None:
    asked: list[Load] = []
    data = rows().SerializeToString()
    (tmp_path / "own.onnx").write_bytes(data)
    prepare(load(tmp_path / "own.onnx"), asked.append)  # not the store's
    prepare(load(tmp_path / "own.onnx", "null"), asked.append)
    prepare(load(tmp_path / "own.onnx", backends=("null",)), asked.append)
    message = stored(tmp_path / "m.onnx", data)
    prepare(load(tmp_path / "m.onnx", graph_cache=False), asked.append)
    prepare(load(tmp_path / "m.onnx", custom_op_libraries=("/lib.so",)), asked.append)
    assert asked == []
    prepare(message, asked.append)
    assert [(told.path, told.tensor and told.tensor.assets) for told in asked] == [(str(tmp_path / "m.onnx"), {})]
    prepare(message)
    prepare(message, asked.append)
    assert len(asked) == 1
