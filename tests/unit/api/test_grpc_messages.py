from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="protobuf is not installed: edge_rt[grpc]")
messages = pytest.importorskip("edge_rt.api.grpc_messages")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient[grpc] is not installed")


def fields(descriptor: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """Describe a message and all that it holds: each field's number, type, label and choice."""
    if descriptor.full_name not in seen:
        seen[descriptor.full_name] = None
        seen[descriptor.full_name] = {
            f.name: (
                f.number,
                f.type,
                f.is_repeated,
                f.containing_oneof.name if f.containing_oneof else "",
                f.message_type.full_name if f.message_type else "",
            )
            for f in descriptor.fields
        }
        for f in descriptor.fields:
            if f.message_type:
                fields(f.message_type, seen)
    return seen


def test_every_message_is_as_a_real_client_has_it() -> None:
    rpcs = messages.load_rpcs()
    assert {"ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer"} <= set(rpcs)
    theirs = {m.name: m for m in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    for name, rpc in rpcs.items():
        for ours, expected in ((rpc.request, theirs[name].input_type), (rpc.response, theirs[name].output_type)):
            found, wanted = fields(ours.DESCRIPTOR, {}), fields(expected, {})
            assert {n: f for n, f in found.items() if n in wanted} == {n: f for n, f in wanted.items() if n in found}
            assert found.keys() == wanted.keys()


def test_bytes_go_through_both_ways() -> None:
    request = messages.load_rpcs()["ModelInfer"].request
    ours = request(model_name="m", raw_input_contents=[b"\0\1"])
    ours.parameters["sequence_id"].int64_param = 7
    ours.inputs.add(name="x", datatype="UINT8", shape=[2]).parameters["p"].string_param = "s"
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert theirs.parameters["sequence_id"].int64_param == 7
    assert theirs.inputs[0].parameters["p"].WhichOneof("parameter_choice") == "string_param"
    assert request.FromString(theirs.SerializeToString()) == ours


@pytest.mark.parametrize(
    "text", ["enum A {", "message A { int32 a = 1; }", "int32 a = 1;", "message A {\nint33 a = 1;\n}"]
)
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        messages.load_rpcs(f"{text}\nservice S {{\nrpc R(A) returns (A) {{}}\n}}\n")
