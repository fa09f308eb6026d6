"""The Open Inference Protocol on a real daemon with real workers, asked by tritonclient over HTTP and gRPC."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.api.client import Client
from edge_rt.api.kserve_wire import RegionPart
from edge_rt.api.shm_client import SharedMemory, SharedTensor
from edge_rt.backends.base import ModelFile, TensorOptions
from edge_rt.backends.null_tensor import NullTensorSession
from edge_rt.errors import InvalidRequestError, ModelNotFoundError
from edge_rt.tensor_types import ITEM_BYTES, Tensor
from tests.api.daemon import CONFIG, Daemon

onnx = pytest.importorskip("onnx", reason="onnx is not installed: edge_rt[onnx]")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: edge_rt[onnx]")
triton_http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
triton_grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype  # noqa: E402

KEY = "a-key-of-this-test"
COUNTER = "inputs=x:FP32:1x4+s:FP32:1x8,outputs=y:FP32:1x4+t:FP32:1x8"
MANIFEST = """
id = "{id}"
name = "{id}"
license = "Apache-2.0"
kind = "tensor"
n_params = 1

[[variants]]
id = "fp32"
quant = "FP32"
file = "{id}.onnx"
source = "file:{path}"
size_bytes = {size}
sha256 = "{sha256}"
"""
STATE = """
[[state]]
input = "s"
output = "t"
shape = [1, 8]
"""
SETTINGS = f"""
[server]
tcp_host = "127.0.0.1"
tcp_port = 0
api_keys_file = "{{directory}}/keys"
grpc_socket_path = "{{directory}}/g"
shm_socket_path = "{{directory}}/m"

[models.counter]
backend = "null"
variant = "{COUNTER}"

[models.slow]
backend = "null"
variant = "run_s=0.5"
"""


def echo_model(path: Path) -> None:
    """Write a model that gives back an input of each datatype."""
    types = {"BYTES": np.object_, **{d: triton_to_np_dtype(d) for d in ITEM_BYTES if d != "BYTES"}}
    nodes, inputs, outputs = [], [], []
    for datatype, dtype in types.items():
        name = datatype.lower()
        kind = onnx.TensorProto.STRING if datatype == "BYTES" else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        nodes.append(onnx.helper.make_node("Identity", [name], [f"{name}_out"]))
        inputs.append(onnx.helper.make_tensor_value_info(name, kind, ["n", 2]))
        outputs.append(onnx.helper.make_tensor_value_info(f"{name}_out", kind, ["n", 2]))
    graph = onnx.helper.make_graph(nodes, "echo", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="ert-") as name:
        directory = Path(name)
        (directory / "keys").write_text(KEY)
        manifests = directory / "manifests"
        manifests.mkdir()
        model = directory / "echo.onnx"
        echo_model(model)
        digest = hashlib.sha256(model.read_bytes()).hexdigest()
        for model_id, more in (("echo", ""), ("counter", STATE), ("slow", "")):
            text = MANIFEST.format(id=model_id, path=model, size=model.stat().st_size, sha256=digest)
            (manifests / f"{model_id}.toml").write_text(text + more)
        environ = {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(manifests)}
        settings = SETTINGS.format(directory=directory)
        (directory / "pull.toml").write_text(CONFIG.format(store_dir=directory / "store") + settings)
        subprocess.run(
            [sys.executable, "-m", "edge_rt", "models", "pull", "echo"],
            check=True,
            env={**os.environ, **environ, "EDGE_RT_CONFIG": str(directory / "pull.toml")},
            capture_output=True,
        )
        with Daemon(directory, extra=settings, environ=environ) as running:
            yield running


@pytest.fixture(scope="module")
def unix_http(daemon: Daemon) -> Iterator[httpx2.Client]:
    with daemon.client() as client:
        yield client


class Http:
    """tritonclient over HTTP, with the key in each call."""

    module = triton_http

    def __init__(self, daemon: Daemon) -> None:
        port = re.search(r"127\.0\.0\.1:(\d+)", daemon.log)
        assert port is not None
        self._client = triton_http.InferenceServerClient(f"127.0.0.1:{port[1]}", network_timeout=60.0)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kw: method(*args, headers={"Authorization": f"Bearer {KEY}"}, **kw)

    def close(self) -> None:
        self._client.close()


class Grpc:
    """tritonclient over gRPC."""

    module = triton_grpc

    def __init__(self, daemon: Daemon) -> None:
        self._client = triton_grpc.InferenceServerClient(f"unix:{daemon.socket.parent / 'g'}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(params=[Http, Grpc])
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    made = request.param(daemon)
    yield made
    made.close()


@pytest.fixture(scope="module")
def forms(daemon: Daemon) -> None:
    """Give the running daemon a model in three forms, 1, 2 and 3 times x; the first two are pulled."""
    directory = daemon.socket.parent
    text = MANIFEST.partition("[[variants]]")[0].format(id="forms")
    for n, form in enumerate(("one", "two", "three"), 1):
        path = directory / f"forms-{form}.onnx"
        onnx.save(times(n), path)
        told = MANIFEST.partition("n_params = 1")[2].replace('"fp32"', f'"{form}"')
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        text += told.format(id=f"forms-{form}", path=path, size=path.stat().st_size, sha256=digest)
    (directory / "manifests" / "forms.toml").write_text(text)
    environ = {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(directory / "manifests")}
    subprocess.run(
        [sys.executable, "-m", "edge_rt", "models", "pull", "forms:one", "forms:two"],
        check=True,
        env={**os.environ, **environ, "EDGE_RT_CONFIG": str(directory / "pull.toml")},
        capture_output=True,
    )


def times(factor: int) -> Any:
    """x FP32 [n, 2] to y, factor times x."""
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [], [factor])
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Mul", ["x", "w"], ["y"])], "times", [x], [y], [weight])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.usefixtures("forms")
def test_every_pulled_form_is_a_version_that_can_be_asked(client: Any) -> None:
    x = input_of(client, "x", np.ones((1, 2), np.float32))
    answers = {version: client.infer("forms", [x], model_version=version) for version in ("one", "two", "one", "")}
    assert {version: a.as_numpy("y")[0, 0] for version, a in answers.items() if version} == {"one": 1, "two": 2}
    is_http = client.module is triton_http
    for version, answer in answers.items():
        told = answer.get_response()["model_version"] if is_http else answer.get_response().model_version
        assert told == version or not version
    for version in ("", "one", "two"):
        metadata = client.get_model_metadata("forms", version, **({} if is_http else {"as_json": True}))
        assert metadata["versions"] == ["one", "two"]
        assert client.is_model_ready("forms", version)
    listed = client.get_model_repository_index(**({} if is_http else {"as_json": True}))
    entries = listed if is_http else listed["models"]
    assert [e["version"] for e in entries if e["name"] == "forms"] == ["one", "two"]
    assert not client.is_model_ready("forms", "three")
    with pytest.raises(InferenceServerException, match="edge_rt models pull forms:three"):
        client.infer("forms", [x], model_version="three")
    with pytest.raises(InferenceServerException, match="forms/versions/two"):
        client.infer("forms", [x], model_version="four")


def input_of(client: Any, name: str, values: NDArray[Any], **options: Any) -> Any:
    datatype = np_to_triton_dtype(values.dtype)
    sent = client.module.InferInput(name, list(values.shape), datatype)
    sent.set_data_from_numpy(values, **options)
    return sent


def sample(datatype: str) -> NDArray[Any]:
    if datatype == "BYTES":
        return np.array([["é", ""], ["x" * 300, "\0"]], np.object_)
    rng = np.random.default_rng(5)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        return rng.normal(size=(2, 2)).astype(dtype)
    if dtype.kind == "b":
        return np.array([[True, False], [False, True]])
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (2, 2), dtype=dtype, endpoint=True)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("echo")
    assert client.is_model_ready("echo", "fp32")
    is_http = client.module is triton_http
    metadata = client.get_model_metadata("echo", **({} if is_http else {"as_json": True}))
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("echo", ["fp32"], "onnx_cpu")
    assert {t["name"]: t["datatype"] for t in metadata["inputs"]} == {d.lower(): d for d in ITEM_BYTES}
    assert all([int(n) for n in t["shape"]] == [-1, 2] for t in metadata["outputs"])
    with pytest.raises(InferenceServerException, match="nobody"):
        client.get_model_metadata("nobody")


def test_every_datatype_through_onnxruntime_and_back(client: Any) -> None:
    values = {datatype.lower(): sample(datatype) for datatype in ITEM_BYTES}
    # gRPC's typed contents are in test_kserve_grpc.py: tritonclient sends raw ones only.
    for how in ({"binary_data": True}, {"binary_data": False}) if client.module is triton_http else ({},):
        # JSON has no FP16 by the protocol: tritonclient refuses to write it.
        inputs = [input_of(client, name, array, **(how if name != "fp16" else {})) for name, array in values.items()]
        outputs = [client.module.InferRequestedOutput(f"{name}_out", **how) for name in values]
        answer = client.infer("echo", inputs, outputs=outputs, request_id="7")
        for name, array in values.items():
            got = answer.as_numpy(f"{name}_out")
            if name == "bytes":
                text = [item.decode() if isinstance(item, bytes) else item for item in got.ravel()]
                got = np.array(text, np.object_).reshape(got.shape)
            np.testing.assert_array_equal(got, array)


def test_only_what_is_wanted_comes_back(client: Any) -> None:
    inputs = [input_of(client, d.lower(), sample(d)) for d in ITEM_BYTES]
    answer = client.infer("echo", inputs, outputs=[client.module.InferRequestedOutput("int8_out")])
    np.testing.assert_array_equal(answer.as_numpy("int8_out"), sample("INT8"))
    assert answer.as_numpy("int16_out") is None


def test_what_does_not_fit_the_model_is_refused(client: Any) -> None:
    good = {d.lower(): input_of(client, d.lower(), sample(d)) for d in ITEM_BYTES}
    wrong_type = input_of(client, "int8", sample("INT16"))
    wrong_shape = input_of(client, "int8", np.zeros((2, 3), np.int8))
    for inputs, word in (
        (list(good.values())[1:], "bool"),
        ([*good.values(), input_of(client, "more", np.zeros(1, np.int8))], "more"),
        ([wrong_type if name == "int8" else sent for name, sent in good.items()], "int8"),
        ([wrong_shape if name == "int8" else sent for name, sent in good.items()], "int8"),
    ):
        with pytest.raises(InferenceServerException, match=word) as found:
            client.infer("echo", inputs)
        assert found.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException, match="nothing_out"):
        client.infer("echo", list(good.values()), outputs=[client.module.InferRequestedOutput("nothing_out")])


def expected(values: list[float]) -> list[NDArray[Any]]:
    """Compute a sequence of the counter in this process."""
    session = NullTensorSession(ModelFile(model="counter", variant=COUNTER, path=Path(), quant="none"), TensorOptions())
    state, answers = np.zeros((1, 8), np.float32), []
    for value in values:
        made = session.run({"x": np.full((1, 4), value, np.float32), "s": state})
        state = made["t"]
        answers.append(made["y"])
    return answers


@pytest.mark.parametrize("sequence_id", [41, "forty-two"])
def test_sequences_keep_their_state(client: Any, sequence_id: int | str) -> None:
    def ask(value: float, **options: Any) -> NDArray[Any]:
        x = input_of(client, "x", np.full((1, 4), value, np.float32))
        answer: NDArray[Any] = client.infer("counter", [x], **options).as_numpy("y")
        return answer

    first = ask(1, sequence_id=sequence_id, sequence_start=True)
    other = ask(5, sequence_id=99, sequence_start=True)
    second = ask(2, sequence_id=sequence_id)
    np.testing.assert_array_equal([first, second], expected([1, 2]))
    np.testing.assert_array_equal([other], expected([5]))
    again = ask(3, sequence_id=sequence_id, sequence_start=True, sequence_end=True)
    np.testing.assert_array_equal([again], expected([3]))
    np.testing.assert_array_equal([ask(2, sequence_id=sequence_id)], expected([2]))
    np.testing.assert_array_equal([ask(2)], expected([2]))
    ask(0, sequence_id=sequence_id, sequence_end=True)
    ask(0, sequence_id=99, sequence_end=True)


def test_deadlines_reach_the_queue(client: Any) -> None:
    """The model takes a second to load; the server ends the wait, not the client."""
    x = input_of(client, "x", np.zeros((1, 4), np.float32))
    client.unload_model("slow")
    with pytest.raises(InferenceServerException, match="deadline") as found:
        client.infer("slow", [x], timeout=200_000)
    assert found.value.status() in ("503", "StatusCode.DEADLINE_EXCEEDED")


def test_the_repository(client: Any, daemon: Daemon) -> None:
    client.unload_model("echo")
    assert client.is_model_ready("echo")  # it is loaded again for whoever asks
    client.load_model("echo")
    is_http = client.module is triton_http
    index = client.get_model_repository_index(**({} if is_http else {"as_json": True}))
    entries = {e["name"]: e["state"] for e in (index if is_http else index["models"])}
    assert entries["echo"] == entries["counter"] == "READY"
    assert entries["silero-vad"] == "UNAVAILABLE"


def test_shared_memory_over_both_protocols(daemon: Daemon) -> None:
    directory = daemon.socket.parent
    x = np.random.default_rng(1).normal(size=(1, 4)).astype(np.float32)
    state = np.zeros((1, 8), np.float32)
    session = NullTensorSession(ModelFile(model="counter", variant=COUNTER, path=Path(), quant="none"), TensorOptions())
    made = session.run({"x": x, "s": state})
    with (
        SharedMemory(directory / "m") as shared,
        shared.region(4096) as region,
        Client(daemon.socket) as client,
        closing(Grpc(daemon)) as grpc,
        closing(Http(daemon)) as tcp,
    ):
        region.buffer[16:32] = x.tobytes()
        answer = client.infer(
            "counter",
            {"x": region.tensor("FP32", (1, 4), offset=16), "s": state},
            regions={"y": region.part(1024, 64), "t": region.part(2048, 32)},
        )
        assert answer.outputs["y"].data == b""
        assert bytes(region.buffer[1024:1040]) == made["y"].tobytes()
        assert bytes(region.buffer[2048:2080]) == made["t"].tobytes()

        for asker in (grpc, tcp):
            sent, wanted = asker.module.InferInput("x", [1, 4], "FP32"), asker.module.InferRequestedOutput("y")
            sent.set_shared_memory(region.name, 16, offset=16)
            wanted.set_shared_memory(region.name, 16, offset=3000)
            if asker is tcp:
                with pytest.raises(InferenceServerException, match="over TCP"):
                    asker.infer("counter", [sent], outputs=[wanted])
            else:
                parameters = asker.infer("counter", [sent], outputs=[wanted]).get_output("y").parameters
                assert parameters["shared_memory_byte_size"].int64_param == 16
                assert bytes(region.buffer[3000:3016]) == made["y"].tobytes()

        with pytest.raises(InvalidRequestError, match="has 8 bytes for output y, which takes 16"):
            client.infer("counter", {"x": x}, regions={"y": region.part(0, 8)})
        name = region.name
    gone = SharedTensor(datatype="FP32", shape=(1, 4), part=RegionPart(name, 0, 16))
    with Client(daemon.socket) as client, pytest.raises(InvalidRequestError, match="no region"):
        client.infer("counter", {"x": gone})


def test_the_client_takes_arrays_and_tensors(daemon: Daemon) -> None:
    values = {d.lower(): sample(d) for d in ITEM_BYTES if d != "BYTES"}
    words = Tensor(name="", datatype="BYTES", shape=(1, 2), data=b"\1\0\0\0a\0\0\0\0")
    with Client(daemon.socket) as client:
        answer = client.infer("echo", {**values, "bytes": words})
        assert answer.outputs["bytes_out"].data == words.data
        for name, array in values.items():
            got = answer.outputs[f"{name}_out"]
            np.testing.assert_array_equal(np.frombuffer(got.data, array.dtype).reshape(got.shape), array)
        assert answer.parameters["place"].startswith("onnx_cpu")
        with pytest.raises(ModelNotFoundError):
            client.infer("nobody", values)
        with pytest.raises(ValueError, match="no tensor has elements of <c8"):
            client.infer("echo", {"x": np.zeros(2, np.complex64)})


BYTES = {"name": "bytes", "datatype": "BYTES", "shape": [1, 2]}
lies = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["int8", "fp32", "bytes", "bool", "x"]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**20, 2**31 - 1, 2**63]), max_size=4),
        "datatype": st.sampled_from([*ITEM_BYTES, "BF16", "x"]),
        "parameters": st.fixed_dictionaries(
            {}, optional={"binary_data_size": st.sampled_from([0, 1, 2, 4, 8, 16, 2**40])}
        ),
    },
    optional={"data": st.lists(st.integers(-1, 300) | st.booleans() | st.text(max_size=2), max_size=4)},
)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["echo", "counter"]),
    st.lists(lies, max_size=3),
    st.binary(max_size=32),
    st.sampled_from([0, 0, 0, 1, -1]),
)
@example("echo", [{"name": "int8", "datatype": "INT8", "shape": [2**31 - 1], "data": [1]}], b"", 0)
@example(
    "echo",
    [{"name": "bytes", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": 8}}],
    b"\xff" * 8,
    0,
)
@example("counter", [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3]}], b"", 0)
def test_no_body_harms_a_worker(
    unix_http: httpx2.Client, model: str, inputs: list[dict[str, Any]], binary: bytes, off: int
) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head) + off)}
    answer = unix_http.post(f"/v2/models/{model}/infer", content=head + binary, headers=headers)
    assert answer.status_code in (200, 400, 413, 415), answer.text
    assert answer.status_code == 200 or isinstance(answer.json()["error"], str)


def test_the_workers_are_the_first_ones_still(daemon: Daemon) -> None:
    """Runs last: no request of this module has cost a worker."""
    with Client(daemon.socket) as client:
        x = np.ones((1, 4), np.float32)
        client.infer("counter", {"x": x})
    assert "is lost" not in daemon.log
    assert "died" not in daemon.log
