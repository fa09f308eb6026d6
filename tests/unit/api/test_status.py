from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import pytest

from edge_rt import errors
from edge_rt.api.grpc_status import GRPC_STATUS, grpc_status
from edge_rt.api.status import STATUS, HttpError, rebuild, reply

VALUES: dict[str, Any] = {"str": "x", "int": 7, "float": 1.5, "tuple[str, ...]": ("a", "b")}


def instance(cls: type[errors.EdgeRtError]) -> errors.EdgeRtError:
    return cls(**{f.name: VALUES[str(f.type)] for f in fields(cls)})


def body(error: BaseException) -> dict[str, Any]:
    return msgspec.json.decode(reply(error).body, type=dict[str, dict[str, Any]])["error"]


@pytest.mark.parametrize("cls", errors.subclasses(), ids=lambda cls: cls.__name__)
def test_every_error_of_the_tree_has_an_entry_of_its_own(cls: type[errors.EdgeRtError]) -> None:
    assert cls in STATUS
    answer = reply(instance(cls))
    assert 400 <= answer.status < 600
    assert set(body(instance(cls))) >= {"message", "type", "param", "code"}
    if cls.retryable and answer.status in (429, 503):
        assert b"retry-after" in dict(answer.headers)


def test_the_tables_name_no_class_that_is_gone() -> None:
    assert set(STATUS) == set(errors.subclasses())
    assert set(GRPC_STATUS) == set(errors.subclasses())


@pytest.mark.parametrize("cls", errors.subclasses(), ids=lambda cls: cls.__name__)
def test_grpc_blames_whom_http_blames(cls: type[errors.EdgeRtError]) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: edge_rt[grpc]")
    error = instance(cls)
    name = grpc_status(error)
    assert hasattr(grpc.StatusCode, name)
    callers_fault = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAUTHENTICATED", "ABORTED"}
    assert (name in callers_fault) == (reply(error).status in (400, 401, 404))
    if cls.retryable:
        assert name in {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}


def test_what_nobody_foresaw_is_internal() -> None:
    assert grpc_status(KeyError("secret")) == "INTERNAL"


@pytest.mark.parametrize(
    "cls", [cls for cls in errors.subclasses() if "__str__" in vars(cls)], ids=lambda cls: cls.__name__
)
def test_an_error_comes_back_as_it_was(cls: type[errors.EdgeRtError]) -> None:
    error = instance(cls)
    answer = reply(error)
    again = rebuild(answer.status, answer.body)
    assert type(again) is cls
    assert again.to_wire() == error.to_wire()
    assert str(again) == str(error)


def test_context_length_says_both_numbers() -> None:
    error = body(errors.ContextLengthError(prompt_tokens=5000, n_ctx=2048))
    assert error["code"] == "context_length_exceeded"
    assert error["details"] == {"prompt_tokens": 5000, "n_ctx": 2048}
    assert "5000" in error["message"]
    assert "2048" in error["message"]


def test_a_full_queue_says_when_to_come_back_in_whole_seconds() -> None:
    answer = reply(errors.QueueFullError(waiting=3, limit=3, retry_after_s=2.2))
    assert answer.status == 429
    assert (b"retry-after", b"3") in answer.headers


def test_the_parameter_is_named() -> None:
    assert body(errors.InvalidRequestError(param="seed", problem="x"))["param"] == "seed"
    assert body(errors.InvalidRequestError(param="", problem="x"))["param"] is None
    assert body(errors.UnsupportedFeatureError(feature="tools"))["param"] == "tools"
    assert body(errors.ModelNotFoundError(model="x"))["param"] == "model"


def test_an_unplanned_exception_shows_nothing_of_itself() -> None:
    answer = reply(ValueError("secret"))
    assert answer.status == 500
    assert answer.code == "internal_error"
    assert b"secret" not in answer.body


def test_http_errors_have_codes() -> None:
    answer = reply(HttpError(413, "too big", headers=[(b"connection", b"close")]))
    assert (answer.status, answer.code, answer.headers) == (413, "request_too_large", [(b"connection", b"close")])
    assert str(rebuild(answer.status, answer.body)) == "too big"


@pytest.mark.parametrize("raw", [b"", b"<html>", b"[]", b'{"error":"x"}', b'{"error":{"message":"m","code":"zzz"}}'])
def test_foreign_bodies_become_errors_too(raw: bytes) -> None:
    assert isinstance(rebuild(404, raw), errors.InvalidRequestError)
    assert isinstance(rebuild(502, raw), errors.BackendStepError)
