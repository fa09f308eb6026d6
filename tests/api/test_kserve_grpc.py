"""The Open Inference Protocol over gRPC, in process, asked by tritonclient."""

from __future__ import annotations

import asyncio
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_rt import errors
from edge_rt.api.context import Api
from edge_rt.config import Catalog, Config, Server
from edge_rt.errors import ConfigError, EdgeRtError
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import ITEM_BYTES, Tensor, TensorAnswer, TensorRequest
from tests.api.asgi import FakeTensorRuntime
from tests.patience import PATIENCE_S

pytest.importorskip("grpc", reason="grpcio is not installed: edge_rt[grpc]")
triton = pytest.importorskip("tritonclient.grpc.aio", reason="tritonclient[grpc] is not installed")
from tritonclient.grpc import service_pb2  # noqa: E402
from tritonclient.utils import InferenceServerException, np_to_triton_dtype  # noqa: E402

from edge_rt.api.grpc_server import GrpcServer  # noqa: E402

Client = Any


def api_of(runtime: FakeTensorRuntime, **server: Any) -> Api:
    config = Config(server=Server(**server), catalog=Catalog(default_model="default"))
    return Api(runtime=runtime, config=config, telemetry=Telemetry())


@asynccontextmanager
async def serving(api: Api, path: Path) -> AsyncIterator[Client]:
    server = GrpcServer(api, path)
    await server.start()
    client = triton.InferenceServerClient(f"unix:{path}")
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0.0)


def ask(runtime: FakeTensorRuntime, path: Path, call: Callable[[Client], Awaitable[Any]], **server: Any) -> Any:
    """Start a server, make one call, stop it again."""

    async def run() -> Any:
        async with serving(api_of(runtime, **server), path / "g") as client:
            return await call(client)

    return asyncio.run(run())


def refused(path: Path, call: Callable[[Client], Awaitable[Any]], runtime: FakeTensorRuntime | None = None) -> Any:
    """Give the error that tritonclient raises."""
    with pytest.raises(InferenceServerException) as found:
        ask(runtime or FakeTensorRuntime(), path, call)
    return found.value


def input_of(name: str, values: Any) -> Any:
    sent = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    sent.set_data_from_numpy(values)
    return sent


def raw_call(request: Any) -> Callable[[Client], Awaitable[Any]]:
    """Send a message that tritonclient's own calls would not make."""

    async def call(client: Client) -> Any:
        try:
            return await client._client_stub.ModelInfer(request)
        except Exception as exc:
            raise InferenceServerException(msg=exc.details(), status=str(exc.code())) from exc  # type: ignore[attr-defined]

    return call


def test_health_metadata_and_repository(tmp_path: Path) -> None:
    async def call(client: Client) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("eyes")
        assert await client.is_model_ready("eyes", "int8")
        assert not await client.is_model_ready("eyes", "fp32")
        assert not await client.is_model_ready("far")
        assert (await client.get_server_metadata()).name == "edge_rt"
        assert await client.get_model_metadata("eyes", as_json=True) == {
            "name": "eyes",
            "versions": ["int8"],
            "platform": "fake",
            "inputs": [{"name": "image", "datatype": "UINT8", "shape": ["-1", "4"]}],
            "outputs": [{"name": "image", "datatype": "UINT8", "shape": ["-1", "4"]}],
        }
        models = (await client.get_model_repository_index()).models
        assert [(m.name, m.state) for m in models] == [
            ("eyes", "READY"),
            ("far", "UNAVAILABLE"),
            ("sick", "UNAVAILABLE"),
        ]
        await client.load_model("eyes")
        await client.unload_model("eyes")

    runtime = FakeTensorRuntime()
    ask(runtime, tmp_path, call)
    assert runtime.loads == ["eyes", "eyes", "-eyes"]


ARRAYS = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 1], np.int16),
    "INT32": np.array([-(2**31), 1], np.int32),
    "INT64": np.array([-(2**63), 1], np.int64),
    "FP16": np.array([0.5, np.nan], np.float16),
    "FP32": np.array([0.1, np.inf], np.float32),
    "FP64": np.array([0.1, np.nan], np.float64),
    "BYTES": np.array([b"\xff", b""], np.object_),
}
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@pytest.mark.parametrize("datatype", ITEM_BYTES)
def test_every_datatype_raw_and_typed(datatype: str, tmp_path: Path) -> None:
    values = ARRAYS[datatype].reshape(2, 1)
    runtime = FakeTensorRuntime()
    answer = ask(runtime, tmp_path, lambda client: client.infer("eyes", [input_of("x", values)], request_id="mine"))
    np.testing.assert_array_equal(answer.as_numpy("x"), values)
    head = answer.get_response()
    assert (head.model_name, head.model_version, head.id) == ("eyes", "int8", "mine")
    request = service_pb2.ModelInferRequest(model_name="eyes")
    sent = request.inputs.add(name="x", datatype=datatype, shape=[2, 1])
    if datatype == "FP16":
        sent.contents.fp32_contents[:] = [1, 2]
        assert "raw_input_contents" in refused(tmp_path, raw_call(request)).message()
        return
    getattr(sent.contents, CONTENTS[datatype])[:] = values.ravel().tolist()
    ask(runtime, tmp_path, raw_call(request))
    assert runtime.inferences[1].inputs == runtime.inferences[0].inputs


def test_many_typed_values(tmp_path: Path) -> None:
    request = service_pb2.ModelInferRequest(model_name="eyes")
    sent = request.inputs.add(name="x", datatype="INT16", shape=[20_000])
    sent.contents.int_contents[:] = range(-10_000, 10_000)
    runtime = FakeTensorRuntime()
    ask(runtime, tmp_path, raw_call(request))
    assert runtime.inferences[0].inputs[0].data == np.arange(-10_000, 10_000, dtype=np.int16).tobytes()


def test_sequences_outputs_and_deadlines(tmp_path: Path) -> None:
    runtime = FakeTensorRuntime()
    inputs = [input_of("x", np.zeros(1, np.uint8)), input_of("y", np.ones(1, np.uint8))]

    async def call(client: Client) -> None:
        wanted = [triton.InferRequestedOutput("y")]
        answer = await client.infer("eyes", inputs, outputs=wanted, sequence_id=7, sequence_start=True)
        assert [o.name for o in answer.get_response().outputs] == ["y"]
        await client.infer("eyes", inputs, sequence_id="seven", sequence_end=True, timeout=1_500_000)
        await client.infer("eyes", inputs, client_timeout=40.0)

    ask(runtime, tmp_path, call)
    first, second, third = runtime.inferences
    assert (first.stream, first.is_first, first.is_last, first.outputs) == ("7", True, False, ("y",))
    assert (second.stream, second.is_last, second.deadline_s) == ('"seven"', True, 1.5)
    assert (first.deadline_s, first.tenant) == (None, "grpc")
    assert third.deadline_s is not None
    assert 30.0 < third.deadline_s < 41.0  # gRPC rounds it on its way


def test_a_call_that_is_cancelled_ends_its_inference(tmp_path: Path) -> None:
    async def run() -> None:
        runtime = FakeTensorRuntime(hold=asyncio.Event())
        async with serving(api_of(runtime), tmp_path / "g") as client:
            call = asyncio.create_task(client.infer("eyes", [input_of("x", np.zeros(1, np.uint8))]))
            await runtime.arrived.wait()
            call.cancel()
            await asyncio.wait([call])
            while not runtime.n_closed:  # noqa: ASYNC110  the server hears of it some time later
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


ONE = {"name": "x", "datatype": "UINT8", "shape": [1]}
WHOLE = {"inputs": [ONE], "raw_input_contents": [b"1"]}


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"inputs": [{**ONE, "shape": [2]}], "raw_input_contents": [b"1"]}, "INVALID_ARGUMENT", "takes 2 bytes, got 1"),
        ({"inputs": [{**ONE, "shape": [-1]}], "raw_input_contents": [b"1"]}, "INVALID_ARGUMENT", "shape"),
        ({"inputs": [{**ONE, "shape": [2**62]}], "raw_input_contents": [b"1"]}, "INVALID_ARGUMENT", "shape"),
        ({"inputs": [{**ONE, "shape": [2**31 - 1]}]}, "INVALID_ARGUMENT", "max_tensor_bytes"),
        ({"inputs": [ONE], "raw_input_contents": [b"1", b"2"]}, "INVALID_ARGUMENT", "2 tensors for 1 inputs"),
        ({"inputs": [{**ONE, "datatype": "BF16"}], "raw_input_contents": [b"12"]}, "UNIMPLEMENTED", "BF16"),
        ({"inputs": [{**ONE, "datatype": "X"}], "raw_input_contents": [b"1"]}, "INVALID_ARGUMENT", "datatype"),
        ({"inputs": [{**ONE, "contents": {"uint_contents": [256]}}]}, "INVALID_ARGUMENT", "range of UINT8"),
        ({"inputs": [{**ONE, "contents": {"uint_contents": [1, 2]}}]}, "INVALID_ARGUMENT", "takes 1 bytes, got 2"),
        ({"inputs": [{**ONE, "contents": {"int_contents": [1]}}]}, "INVALID_ARGUMENT", "uint_contents"),
        (
            {"inputs": [{**ONE, "contents": {"uint_contents": [1]}}], "raw_input_contents": [b"1"]},
            "INVALID_ARGUMENT",
            "beside raw_input_contents",
        ),
        ({"inputs": [ONE]}, "INVALID_ARGUMENT", "takes 1 bytes, got 0"),
        ({}, "INVALID_ARGUMENT", "at least one"),
        ({"parameters": {"sequence_id": {"double_param": 1.5}}}, "INVALID_ARGUMENT", "sequence_id"),
        ({"parameters": {"priority": {"uint64_param": 2}}}, "UNIMPLEMENTED", "priority"),
        ({"parameters": {"x": {}}}, "INVALID_ARGUMENT", "parameters.x"),
        (
            {"outputs": [{"name": "x", "parameters": {"classification": {"int64_param": 2}}}]},
            "UNIMPLEMENTED",
            "classif",
        ),
        ({"model_name": "nobody", **WHOLE}, "NOT_FOUND", "nobody"),
        ({"model_version": "x"}, "NOT_FOUND", "versions"),
        ({"model_name": "text", **WHOLE}, "UNIMPLEMENTED", "language model"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], status: str, word: str, tmp_path: Path) -> None:
    request = service_pb2.ModelInferRequest(**{"model_name": "eyes", **fields})
    error = refused(tmp_path, raw_call(request))
    assert error.status() == f"StatusCode.{status}"
    assert word in error.message()


@pytest.mark.parametrize("error", [errors.DeadlineError(2.0), errors.ShuttingDownError(), KeyError("secret")])
def test_errors_of_the_runtime(error: Exception, tmp_path: Path) -> None:
    found = refused(
        tmp_path,
        lambda client: client.infer("eyes", [input_of("x", np.zeros(1, np.uint8))]),
        FakeTensorRuntime(outputs=error),
    )
    assert ("secret" in found.message()) is False
    expected = {"DeadlineError": "DEADLINE_EXCEEDED", "ShuttingDownError": "UNAVAILABLE", "KeyError": "INTERNAL"}
    assert found.status() == f"StatusCode.{expected[type(error).__name__]}"
    assert (str(error) == found.message()) is isinstance(error, EdgeRtError)


def test_messages_have_a_size_limit_and_may_be_answered_larger(tmp_path: Path) -> None:
    def call(n_bytes: int) -> Callable[[Client], Awaitable[Any]]:
        return lambda client: client.infer("eyes", [input_of("x", np.zeros(n_bytes, np.uint8))])

    with pytest.raises(InferenceServerException) as found:
        ask(FakeTensorRuntime(), tmp_path, call(600_000), max_body_bytes=100_000)
    assert found.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with pytest.raises(InferenceServerException, match=r"server\.max_body_bytes sets it") as found:
        ask(FakeTensorRuntime(), tmp_path, call(180_000), max_body_bytes=100_000)
    assert found.value.status() == "StatusCode.INVALID_ARGUMENT"
    large = Tensor(name="y", datatype="UINT8", shape=(5_000_000,), data=bytes(5_000_000))
    answer = ask(FakeTensorRuntime(outputs=[large]), tmp_path, call(90_000), max_body_bytes=100_000)
    assert answer.as_numpy("y").nbytes == 5_000_000


def test_any_bytes_are_answered(tmp_path: Path) -> None:
    async def run() -> None:
        api = api_of(FakeTensorRuntime())
        async with serving(api, tmp_path / "g") as client:
            call = client._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for raw in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", struct.pack("<Q", 1), b"\x2a\x02\x10"):
                with pytest.raises(Exception, match=r"(?s)INVALID_ARGUMENT|NOT_FOUND"):
                    await call(raw)
            assert await client.is_server_live()
            assert api.bodies.n_bytes == 0
            assert b'route="/inference.GRPCInferenceService/ModelInfer"' in api.telemetry.exposition()

    asyncio.run(run())


# The socket


def test_the_socket_has_its_mode_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "g"

    async def run() -> None:
        async with serving(api_of(FakeTensorRuntime(), socket_mode="0600"), path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert {p.name for p in path.parent.iterdir()} == {"g", ".g.lock"}
            with pytest.raises(ConfigError, match="is served"):
                await GrpcServer(api_of(FakeTensorRuntime()), path).start()
        assert not path.exists()

    asyncio.run(run())


def test_a_socket_that_cannot_be_had(tmp_path: Path) -> None:
    async def start(path: Path) -> None:
        await GrpcServer(api_of(FakeTensorRuntime()), path).start()

    (tmp_path / "file").write_text("")
    for path, word in (
        (tmp_path / "file", "not a socket"),
        (tmp_path / ("x" * 120), "long"),
        (tmp_path / "file/g", "bound"),
    ):
        with pytest.raises(ConfigError, match=word) as found:
            asyncio.run(start(path))
        assert found.value.key == "server.grpc_socket_path"


class StoredRuntime(FakeTensorRuntime):
    """Gives what it was given, as a result that was stored 7 s ago."""

    async def infer(self, request: TensorRequest) -> TensorAnswer:
        return replace(await super().infer(request), age_s=7.0)


def test_that_metadata_ask_the_cache_and_tell_of_a_hit(tmp_path: Path) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[1])
    message = service_pb2.ModelInferRequest(model_name="eyes", inputs=[tensor], raw_input_contents=[b"\1"])

    async def call(client: Client) -> list[dict[str, str]]:
        told = []
        for control in ((), ("no-store",), ("only-if-cached", "No-Cache")):
            asked = client._client_stub.ModelInfer(message, metadata=tuple(("cache-control", one) for one in control))
            await asked
            told.append(dict(await asked.trailing_metadata()))
        return told

    runtime = StoredRuntime()
    assert ask(runtime, tmp_path, call) == [{"x-edge-cache": "hit-exact", "age": "7"}] * 3
    wished = [(r.no_cache, r.no_store, r.only_if_cached) for r in runtime.inferences]
    assert wished == [(False, False, False), (False, True, False), (True, False, True)]
    assert ask(FakeTensorRuntime(), tmp_path, call) == [{}] * 3
