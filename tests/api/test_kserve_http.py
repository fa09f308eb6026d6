"""The Open Inference Protocol over HTTP, in process."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_rt import errors
from edge_rt.api.callers import ApiKeys
from edge_rt.tensor_types import ITEM_BYTES, Tensor
from tests.api.asgi import Call, FakeTensorRuntime, Reply, app_of, ask

INFER = "/v2/models/eyes/infer"
LENGTH = "inference-header-content-length"


def tensor(name: str, datatype: Any, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def infer(
    *inputs: dict[str, Any], binary: bytes | None = None, runtime: FakeTensorRuntime | None = None, **fields: Any
) -> Reply:
    """Ask eyes, with the binary tensors behind the JSON if there are some."""
    head = json.dumps({"inputs": inputs, **fields}).encode()
    headers = {} if binary is None else {LENGTH: str(len(head))}
    return ask(runtime or FakeTensorRuntime(), "POST", INFER, head + (binary or b""), headers=headers)


def sent(*inputs: dict[str, Any], **more: Any) -> Tensor:
    """Give the first input as the runtime got it."""
    runtime = FakeTensorRuntime()
    reply = infer(*inputs, runtime=runtime, **more)
    assert reply.status == 200, reply.body
    return runtime.inferences[0].inputs[0]


def refused(*inputs: dict[str, Any], **more: Any) -> str:
    """Give the message of an input that is refused."""
    reply = infer(*inputs, **more)
    assert reply.status == 400, (reply.status, reply.body)
    message: str = reply.json["error"]
    return message


# Health, metadata, repository


def test_the_server_says_what_it_is() -> None:
    reply = ask(FakeTensorRuntime(), "GET", "/v2")
    assert reply.status == 200
    assert reply.json["name"] == "edge_rt"
    assert "binary_tensor_data" in reply.json["extensions"]


@pytest.mark.parametrize(
    ("path", "is_ready", "status"), [("live", False, 200), ("ready", True, 200), ("ready", False, 400)]
)
def test_health(path: str, is_ready: bool, status: int) -> None:
    reply = ask(FakeTensorRuntime(is_ready=is_ready), "GET", f"/v2/health/{path}", peer=None)
    assert reply.status == status
    assert reply.json == {path: status == 200}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("eyes", 200),
        ("eyes/versions/int8", 200),
        ("eyes/versions/fp32", 400),
        ("eyes/versions/x", 404),
        ("far", 400),
        ("sick", 400),
        ("text", 400),
        ("nobody", 404),
    ],
)
def test_a_model_is_ready(path: str, status: int) -> None:
    assert ask(FakeTensorRuntime(), "GET", f"/v2/models/{path}/ready").status == status


def test_metadata_loads_what_is_not_in_memory() -> None:
    runtime = FakeTensorRuntime()
    for _ in range(2):
        assert ask(runtime, "GET", "/v2/models/eyes").json == {
            "name": "eyes",
            "versions": ["int8"],
            "platform": "fake",
            "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 4]}],
            "outputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 4]}],
        }
    assert runtime.loads == ["eyes"]


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("far", 404, "pull"),
        ("text", 400, "language model"),
        ("nobody", 404, "nobody"),
        ("eyes/versions/fp32", 404, "edge_rt models pull eyes:fp32"),
        ("eyes/versions/x", 404, "eyes/versions/fp32"),
    ],
)
def test_no_metadata(path: str, status: int, word: str) -> None:
    runtime = FakeTensorRuntime()
    reply = ask(runtime, "GET", f"/v2/models/{path}")
    assert reply.status == status
    assert word in reply.json["error"]
    assert runtime.loads == []


def test_the_repository() -> None:
    runtime = FakeTensorRuntime()
    entries = ask(runtime, "POST", "/v2/repository/index").json
    assert [(e["name"], e["version"], e["state"]) for e in entries] == [
        ("eyes", "int8", "READY"),
        ("far", "int8", "UNAVAILABLE"),
        ("sick", "int8", "UNAVAILABLE"),
    ]
    assert "pull" in entries[1]["reason"]
    assert [e["name"] for e in ask(runtime, "POST", "/v2/repository/index", {"ready": True}).json] == ["eyes"]
    assert ask(runtime, "POST", "/v2/repository/models/eyes/load").status == 200
    assert ask(runtime, "POST", "/v2/repository/models/eyes/unload", {"parameters": {}}).status == 200
    assert runtime.loads == ["eyes", "-eyes"]
    refusal = ask(runtime, "POST", "/v2/repository/models/eyes/load", {"parameters": {"config": "{}"}})
    assert refusal.status == 400
    assert "parameters.config" in refusal.json["error"]
    assert ask(runtime, "POST", "/v2/repository/models/text/unload").status == 400


def test_errors_have_the_protocols_form() -> None:
    runtime = FakeTensorRuntime()
    for method, path in (("GET", "/v2/nothing"), ("GET", INFER), ("POST", "/v2/health/live")):
        reply = ask(runtime, method, path)
        assert reply.status == 404
        assert isinstance(reply.json["error"], str)
    reply = ask(runtime, "POST", INFER, app=app_of(runtime, api_keys=ApiKeys(("secret",))), peer=None)
    assert reply.status == 401
    assert isinstance(reply.json["error"], str)
    assert isinstance(ask(runtime, "GET", "/v1/nothing").json["error"], dict)
    reply = infer(tensor("a", "UINT8", [1], data=[1]), runtime=FakeTensorRuntime(outputs=errors.DeadlineError(2.0)))
    assert reply.status == 503
    assert (reply.json["code"], reply.json["details"]) == ("deadline_exceeded", {"deadline_s": 2.0})


# What reaches the runtime

NUMBERS = {
    "BOOL": ([True, False], b"\1\0"),
    "UINT8": ([0, 255], b"\0\xff"),
    "UINT16": ([0, 65535], b"\0\0\xff\xff"),
    "UINT32": ([1, 2**32 - 1], b"\1\0\0\0\xff\xff\xff\xff"),
    "UINT64": ([1, 2**64 - 1], struct.pack("<2Q", 1, 2**64 - 1)),
    "INT8": ([-128, 127], b"\x80\x7f"),
    "INT16": ([-32768, 1], struct.pack("<2h", -32768, 1)),
    "INT32": ([-(2**31), 1], struct.pack("<2i", -(2**31), 1)),
    "INT64": ([-(2**63), 1], struct.pack("<2q", -(2**63), 1)),
    "FP16": ([0.5, -2], struct.pack("<2e", 0.5, -2)),
    "FP32": ([0.1, 3], struct.pack("<2f", 0.1, 3)),
    "FP64": ([0.1, 1e300], struct.pack("<2d", 0.1, 1e300)),
    "BYTES": (["é", ""], b"\2\0\0\0\xc3\xa9\0\0\0\0"),
}


@pytest.mark.parametrize("datatype", ITEM_BYTES)
def test_every_datatype_in_json_and_binary(datatype: str) -> None:
    values, raw = NUMBERS[datatype]
    for shape, data in (([2], values), ([2, 1], [[v] for v in values]), ([1, 2], [values]), ([1, 2], values)):
        assert sent(tensor("a", datatype, shape, data=data)) == Tensor(
            name="a",
            datatype=datatype,  # type: ignore[arg-type]
            shape=tuple(shape),
            data=raw,
        )
    binary = tensor("a", datatype, [2], parameters={"binary_data_size": len(raw)})
    assert sent(binary, binary=raw).data == raw
    reply = infer(binary, binary=raw)
    assert reply.headers["content-type"] == "application/json"
    [output] = reply.json["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, [2])
    assert output["data"] == (pytest.approx(values) if datatype.startswith("FP") else values)
    reply = infer(binary, binary=raw, parameters={"binary_data_output": True})
    assert reply.headers["content-type"] == "application/octet-stream"
    n_bytes = int(reply.headers[LENGTH])
    assert json.loads(reply.body[:n_bytes])["outputs"][0]["parameters"] == {"binary_data_size": len(raw)}
    assert reply.body[n_bytes:] == raw


def test_json_and_binary_tensors_are_mixed() -> None:
    runtime = FakeTensorRuntime()
    reply = infer(
        tensor("a", "UINT8", [2], parameters={"binary_data_size": 2}),
        tensor("b", "INT16", [1], data=[-5]),
        tensor("c", "UINT8", [3], parameters={"binary_data_size": 3}),
        binary=b"12345",
        runtime=runtime,
        id="mine",
        outputs=[{"name": "a"}, {"name": "b", "parameters": {"binary_data": True}}, {"name": "c"}],
    )
    assert [t.data for t in runtime.inferences[0].inputs] == [b"12", b"\xfb\xff", b"345"]
    n_bytes = int(reply.headers[LENGTH])
    head = json.loads(reply.body[:n_bytes])
    assert (head["id"], head["model_name"], head["model_version"]) == ("mine", "eyes", "int8")
    assert [output.get("data") for output in head["outputs"]] == [[0x31, 0x32], None, [0x33, 0x34, 0x35]]
    assert reply.body[n_bytes:] == b"\xfb\xff"


def test_long_json_data_is_converted_whole() -> None:
    values = [i % 251 for i in range(40_000)]
    body = tensor("a", "UINT8", [200, 200], data=[values[i : i + 200] for i in range(0, 40_000, 200)])
    runtime = FakeTensorRuntime()
    app = app_of(runtime)
    head = json.dumps({"inputs": [{**body, "datatype": "FP32", "shape": [5, 100], "data": [0.5] * 500}]}).encode()
    assert ask(runtime, "POST", INFER, head, app=app).status == 200  # within this app's max_body_bytes of 10,000
    big = json.dumps({"inputs": [body]}).encode()
    reply = ask(runtime, "POST", INFER, big, app=app_of(runtime, max_body_bytes=2**20))
    assert reply.json["outputs"][0]["data"] == values
    assert runtime.inferences[-1].inputs[0].data == bytes(values)


def test_parameters_become_the_requests_options() -> None:
    runtime = FakeTensorRuntime()
    one = tensor("a", "UINT8", [1], data=[1])
    for parameters in (
        {"sequence_id": 7, "sequence_start": True},
        {"sequence_id": "7", "sequence_end": True, "timeout": 1_500_000, "anything": "passes"},
        {"sequence_id": 0, "sequence_end": True, "priority": 0},
    ):
        assert infer(one, runtime=runtime, parameters=parameters).status == 200
    asked = [(r.stream, r.is_first, r.is_last, r.deadline_s, r.tenant) for r in runtime.inferences]
    assert asked == [
        ("7", True, False, None, "uid:1000"),
        ('"7"', False, True, 1.5, "uid:1000"),
        ("", False, False, None, "uid:1000"),
    ]


def test_a_client_that_hangs_up_ends_its_inference() -> None:
    async def hang_up() -> FakeTensorRuntime:
        runtime = FakeTensorRuntime(hold=asyncio.Event())
        body = json.dumps({"inputs": [tensor("a", "UINT8", [1], data=[1])]}).encode()
        call = Call(app_of(runtime), "POST", INFER, body).start()
        await runtime.arrived.wait()
        call.hang_up()
        assert (await call.reply()).status == 0
        return runtime

    assert asyncio.run(hang_up()).n_closed == 1


# What is refused


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "word"),
    [
        ("UINT8", [2], [1, 256], "data[1]"),
        ("UINT8", [1], [-1], "data[0]"),
        ("INT64", [1], [2**63], "range of INT64"),
        ("UINT64", [1], [-1], "range of UINT64"),
        ("UINT64", [2], [1, 2**64], "data[1]"),
        ("INT32", [1], [1.0], "float"),
        ("INT8", [1], [True], "bool"),
        ("FP32", [1], [True], "bool"),
        ("BOOL", [1], [1], "int"),
        ("FP32", [2], [1, 1e39], "data[1]"),
        ("FP16", [1], [65536], "range of FP16"),
        ("FP32", [1], ["1"], "str"),
        ("FP32", [1], [None], "null"),
        ("BYTES", [1], [1], "strings"),
        ("UINT8", [2], [1], "1 elements"),
        ("UINT8", [2], [1, 2, 3], "3 elements"),
        ("UINT8", [0], [1], "holds elements"),
        ("UINT8", [1], [], "0 elements"),
        ("UINT8", [2, 2], [[1, 2], [3]], "nested"),
        ("UINT8", [2, 2], [[1, 2, 3], [4]], "nested"),
        ("UINT8", [4], [[1, 2], [3, 4]], "nested"),
        ("UINT8", [2, 1, 2], [[1, 2], [3, 4]], "nested"),
        ("BYTES", [2, 2], [["a", "b"], ["c"]], "nested"),
        ("BYTES", [2], ["a"], "1 elements"),
        ("UINT8", [1], 1, "array"),
        ("UINT8", [1], {"a": 1}, "array"),
        ("BF16", [1], [1], "BF16"),
        ("FLOAT", [1], [1], "FLOAT"),
        ("UINT8", [2**31 - 1], [1], "max_tensor_bytes"),
        ("FP64", [2**20, 2**20, 2**20], [1], "2^40"),
        ("BYTES", [2**30], ["a"], "max_tensor_bytes"),
        ("UINT8", [0, 2**31 - 1], [[1]], "nested"),
        ("UINT8", [-1], [1], "shape"),
        ("UINT8", [1] * 9, [1], "shape"),
        ("UINT8", [1.0], [1], "shape"),
    ],
)
def test_json_data_that_lies(datatype: str, shape: list[int], data: Any, word: str) -> None:
    assert word in refused(tensor("a", datatype, shape, data=data))


@pytest.mark.parametrize(
    "data", ["[1e400]", "[NaN]", "[Infinity]", f"[{'9' * 5000}]", "[1,,2]", "[1,2,]", "[[[[", "[1 2]"]
)
@pytest.mark.parametrize("datatype", ["FP32", "INT64"])
def test_json_data_that_is_no_number(datatype: str, data: str) -> None:
    body = json.dumps({"inputs": [tensor("a", datatype, [1], data="DATA")]}).replace('"DATA"', data)
    reply = ask(FakeTensorRuntime(), "POST", INFER, body.encode())
    assert reply.status == 400
    assert isinstance(reply.json["error"], str)


def test_empty_tensors_pass() -> None:
    for shape, data in (([0], []), ([2, 0], [[], []]), ([0, 2**31 - 1], []), ([3, 0], [])):
        assert sent(tensor("a", "FP32", shape, data=data)).data == b""
        assert sent(tensor("a", "BYTES", shape, data=data)).data == b""
    assert sent(tensor("a", "FP32", [], data=[0.5])).data == struct.pack("<f", 0.5)


@pytest.mark.parametrize(
    ("shape", "size", "binary", "word"),
    [
        ([2], 3, b"123", "takes 2 bytes, got 3"),
        ([2], 2, b"1", "1 bytes are left"),
        ([2], 2, b"123", "belong to no input"),
        ([2], -2, b"12", "binary_data_size"),
        ([2], 2.0, b"12", "binary_data_size"),
        ([2], True, b"12", "binary_data_size"),
        ([2], "2", b"12", "binary_data_size"),
        ([2], 2**70, b"12", "binary_data_size"),
        ([2**31 - 1], 2, b"12", "max_tensor_bytes"),
    ],
)
def test_binary_data_that_lies(shape: list[int], size: Any, binary: bytes, word: str) -> None:
    assert word in refused(tensor("a", "UINT8", shape, parameters={"binary_data_size": size}), binary=binary)


@pytest.mark.parametrize("length", ["", "-1", "1e3", "99999", "0x10", "9" * 5000, "٣", "12 "])
def test_a_header_length_that_lies(length: str) -> None:
    body = json.dumps({"inputs": [tensor("a", "UINT8", [1], data=[1])]}).encode()
    reply = ask(FakeTensorRuntime(), "POST", INFER, body, headers={LENGTH: length} if length.isascii() else {})
    assert (reply.status == 200) == (not length.isascii())
    if length.isascii():
        assert "Inference-Header-Content-Length" in reply.json["error"]


def test_data_and_binary_data_at_once_or_neither() -> None:
    assert "give one of" in refused(tensor("a", "UINT8", [1]))
    both = tensor("a", "UINT8", [1], data=[1], parameters={"binary_data_size": 1})
    assert "give one of" in refused(both, binary=b"1")


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"sequence_id": 1.5}, "sequence_id"),
        ({"sequence_id": True}, "sequence_id"),
        ({"sequence_id": "x" * 300}, "sequence_id"),
        ({"sequence_id": 1, "sequence_start": 1}, "sequence_start"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 1.5}, "timeout"),
        ({"timeout": 2**60}, "timeout"),
        ({"priority": 3}, "priority"),
        ({"binary_data_output": "yes"}, "binary_data_output"),
        ({"x": []}, "parameters"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, Any], word: str) -> None:
    assert word in refused(tensor("a", "UINT8", [1], data=[1]), parameters=parameters)


def test_other_things_that_are_refused() -> None:
    one = tensor("a", "UINT8", [1], data=[1])
    assert "classification" in refused(one, outputs=[{"name": "a", "parameters": {"classification": 3}}])
    assert "binary_data" in refused(one, outputs=[{"name": "a", "parameters": {"binary_data": 1}}])
    assert "twice" in refused(one, one)
    assert "at least one" in refused()
    assert "inputs" in ask(FakeTensorRuntime(), "POST", INFER, {}).json["error"]
    assert "empty" in ask(FakeTensorRuntime(), "POST", INFER).json["error"]
    assert ask(FakeTensorRuntime(), "POST", INFER, b"x" * 20_000).status == 413
    assert ask(FakeTensorRuntime(), "POST", INFER, b"x", headers={"content-encoding": "gzip"}).status == 415


@pytest.mark.parametrize(
    ("output", "word"),
    [
        (Tensor(name="p", datatype="FP32", shape=(1,), data=struct.pack("<f", float("nan"))), "NaN"),
        (Tensor(name="p", datatype="FP64", shape=(1,), data=struct.pack("<d", float("inf"))), "NaN"),
        (Tensor(name="p", datatype="BYTES", shape=(1,), data=b"\1\0\0\0\xff"), "UTF-8"),
        (Tensor(name="p", datatype="UINT8", shape=(5 * 2**20,), data=bytes(5 * 2**20)), "5242880 bytes"),
    ],
)
def test_answers_that_json_cannot_hold(output: Tensor, word: str) -> None:
    one = tensor("a", "UINT8", [1], data=[1])
    reply = infer(one, runtime=FakeTensorRuntime(outputs=[output]))
    assert reply.status == 400
    assert word in reply.json["error"]
    assert "binary_data" in reply.json["error"]
    reply = infer(one, runtime=FakeTensorRuntime(outputs=[output]), parameters={"binary_data_output": True})
    assert reply.body[int(reply.headers[LENGTH]) :] == output.data


# Fuzz

parameters = st.dictionaries(
    st.sampled_from(["binary_data_size", "sequence_id", "timeout", "binary_data", "binary_data_output", "x"]),
    st.none() | st.booleans() | st.integers(-2, 20) | st.floats() | st.text(max_size=3),
    max_size=2,
)
numbers = st.integers() | st.floats() | st.booleans() | st.text(max_size=3) | st.none()
data = st.recursive(st.lists(numbers, max_size=4), lambda inner: st.lists(inner, max_size=3)) | numbers
tensors = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", ""]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 4, -1, 2**31 - 1, 2**31, 2**70]), max_size=4),
        "datatype": st.sampled_from([*ITEM_BYTES, "BF16", "", "fp32"]),
    },
    optional={"data": data, "parameters": parameters},
)


def check(reply: Reply) -> None:
    assert reply.status in (200, 400, 413, 415), (reply.status, reply.body)
    assert reply.whole
    if reply.status != 200:
        assert isinstance(reply.json["error"], str)
        assert len(reply.json["error"]) < 1000


@given(
    st.lists(tensors, max_size=3),
    parameters,
    st.binary(max_size=12),
    st.none() | st.integers(-2, 2),
    st.lists(st.fixed_dictionaries({"name": st.sampled_from("ab")}, optional={"parameters": parameters}), max_size=2),
)
@example([tensor("a", "UINT8", [2**31 - 1], data=[0])], {}, b"", None, [])
@example([tensor("a", "BYTES", [1], parameters={"binary_data_size": 4})], {}, b"\xff\xff\xff\xff", 0, [])
def test_shapes_datatypes_and_lengths_that_lie(
    inputs: list[dict[str, Any]], asked: dict[str, Any], binary: bytes, off: int | None, outputs: list[dict[str, Any]]
) -> None:
    body = {"inputs": inputs, "parameters": asked, "outputs": outputs}
    head = json.dumps({name: value for name, value in body.items() if value}).encode()
    headers = {} if off is None else {LENGTH: str(len(head) + off)}
    check(ask(FakeTensorRuntime(), "POST", INFER, head + binary, headers=headers))


@given(st.binary(max_size=80), st.none() | st.text("0123456789-", max_size=4))
def test_any_bytes(body: bytes, length: str | None) -> None:
    check(ask(FakeTensorRuntime(), "POST", INFER, body, headers={} if length is None else {LENGTH: length}))


@given(st.integers(0, 300), st.binary(min_size=1, max_size=3))
def test_a_good_body_with_some_bytes_changed(place: int, change: bytes) -> None:
    head = json.dumps(
        {
            "id": "é",
            "inputs": [
                tensor("a", "FP32", [2, 2], data=[[1.5, -2], [3e10, 4]]),
                tensor("b", "BYTES", [2], data=["x", "\ud83d\ude00"]),
                tensor("c", "UINT8", [4], parameters={"binary_data_size": 4}),
            ],
            "outputs": [{"name": "a", "parameters": {"binary_data": True}}, {"name": "c"}],
            "parameters": {"sequence_id": 5, "timeout": 10},
        }
    ).encode()
    place %= len(head)
    body = head[:place] + change + head[place + 1 :] + b"1234"
    check(ask(FakeTensorRuntime(), "POST", INFER, body, headers={LENGTH: str(len(body) - 4)}))
