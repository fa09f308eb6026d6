from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from edge_rt.api.app import build_app
from edge_rt.api.rerank import cosine, ranked
from edge_rt.catalog.chains import Chain, Ocr
from edge_rt.config import Config, Server
from edge_rt.errors import ContextLengthError, InvalidRequestError
from edge_rt.guard.limits import check_media
from edge_rt.telemetry import Telemetry
from edge_rt.tensor_types import Box, Label, MediaAnswer, MediaRequest, Span, TensorTimings
from tests.api.asgi import Call, FakeRuntime, FakeStatus, Reply

TIMINGS = TensorTimings(queue_s=0.1, compute_s=0.2, batch_size=3)
TASKS = {
    "sorter": "classify", "finder": "detect", "lines": "detect-text", "reader": "read-text", "text": "ocr",
    "ears": "vad", "places": "embed",
}  # fmt: skip


class MediaRuntime(FakeRuntime):
    def tasks(self) -> dict[str, str]:
        return TASKS

    def chains(self) -> Sequence[Chain]:
        return (Ocr(id="text", name="Text", detect="lines", read="reader"),)

    def models(self) -> list[FakeStatus]:
        return [FakeStatus(model) for model in (*TASKS, "bare") if model != "text"]


def ask(runtime: FakeRuntime, path: str, body: bytes, headers: dict[str, str]) -> Reply:
    server = Server(max_file_bytes=20_000, max_body_bytes=5_000)
    app = build_app(runtime, Config(server=server), Telemetry())
    return asyncio.run(Call(app, "POST", path, body, headers=headers).reply())


def form(runtime: FakeRuntime, path: str, files: dict[str, bytes], fields: dict[str, Any]) -> Reply:
    request = httpx2.Request(
        "POST", "http://x/", data=fields, files={name: (f"{name}.bin", data) for name, data in files.items()}
    )
    return ask(runtime, path, request.read(), {"content-type": request.headers["content-type"]})


def test_classification_of_a_form() -> None:
    found = MediaAnswer(
        task="classify",
        labels=(Label(index=4, label="part", score=0.75),),
        width=8,
        height=6,
        stage="small",
        timings=TIMINGS,
        place="onnx_cpu:cpu",
    )
    runtime = MediaRuntime(findings={"sorter": found})
    fields = {"model": "sorter", "top_k": "3", "min_score": "0.5", "deadline_s": "2"}
    reply = form(runtime, "/v1/vision/classify", {"file": b"picture"}, fields)
    assert reply.status == 200
    assert reply.json == {
        "object": "vision.classification",
        "model": "sorter",
        "labels": [{"index": 4, "label": "part", "score": 0.75}],
        "width": 8,
        "height": 6,
        "stage": "small",
        "place": "onnx_cpu:cpu",
        "timings": {"queue_s": 0.1, "compute_s": 0.2, "batch_size": 3},
    }
    (asked,) = runtime.looks
    assert (asked.model, asked.data, asked.top_k, asked.min_score, asked.deadline_s) == (
        "sorter", b"picture", 3, 0.5, 2.0,
    )  # fmt: skip
    assert asked.tenant == "uid:1000"


def test_detection_of_a_body_with_a_query() -> None:
    box = Box(x=1.234, y=2, width=3, height=4, label="hole", score=0.5)
    runtime = MediaRuntime(findings={"finder": MediaAnswer(task="detect", boxes=(box,), width=8, height=6)})
    reply = ask(runtime, "/v1/vision/detect?model=finder&min_score=0.1", b"\x89PNG", {"content-type": "image/png"})
    assert reply.json == {
        "object": "vision.detection",
        "model": "finder",
        "boxes": [{"x": 1.23, "y": 2.0, "width": 3.0, "height": 4.0, "score": 0.5, "label": "hole"}],
        "width": 8,
        "height": 6,
    }
    assert runtime.looks[0].data == b"\x89PNG"


def test_reference_and_regions_of_a_form() -> None:
    runtime = MediaRuntime()
    regions = '[{"x": 1, "y": 2, "width": 3, "height": 4}, {"x": 0, "y": 0, "width": 1, "height": 1, "turn_deg": 5}]'
    files = {"file": b"board", "reference": b"golden"}
    assert form(runtime, "/v1/vision/detect", files, {"model": "finder", "regions": regions}).status == 200
    (asked,) = runtime.looks
    assert (asked.data, asked.reference) == (b"board", b"golden")
    assert asked.regions == (Box(x=1, y=2, width=3, height=4), Box(x=0, y=0, width=1, height=1, turn_deg=5))


def test_speech() -> None:
    answer = MediaAnswer(task="vad", spans=(Span(start_s=0.1234, end_s=1.5),), duration_s=2.0)
    reply = ask(
        MediaRuntime(findings={"ears": answer}), "/v1/audio/vad?model=ears", b"RIFF", {"content-type": "audio/wav"}
    )
    assert reply.json == {
        "object": "audio.vad", "model": "ears", "spans": [{"start_s": 0.123, "end_s": 1.5}], "duration_s": 2.0,
    }  # fmt: skip


def test_reading_by_a_chain_by_a_finder_and_by_a_reader() -> None:
    line = Box(x=1, y=2, width=3, height=4, label="text", score=0.5, text="LOT 7")
    texts = (Label(index=0, label="LOT 7", score=0.5),)
    runtime = MediaRuntime(
        findings={
            "text": MediaAnswer(task="ocr", boxes=(line,)),
            "lines": MediaAnswer(task="detect-text", boxes=(line,)),
            "reader": MediaAnswer(task="read-text", texts=texts),
        }
    )
    png = {"content-type": "image/png"}
    chain, finder, reader = (
        ask(runtime, f"/v1/vision/read?model={model}", b"p", png).json for model in ("text", "lines", "reader")
    )
    assert chain["boxes"][0]["text"] == "LOT 7"
    assert "text" not in finder["boxes"][0]
    assert "boxes" not in reader
    assert reader["lines"] == [{"index": 0, "text": "LOT 7", "score": 0.5}]


@pytest.mark.parametrize(
    ("path", "content_type", "body", "status", "message"),
    [
        ("/v1/vision/detect?model=finder", "", b"p", 415, "Content-Type '' is not read here"),
        ("/v1/vision/detect?model=finder", "text/plain", b"p", 415, "image/png, multipart/form-data"),
        ("/v1/vision/detect?model=finder", "audio/wav", b"p", 415, "image/png"),
        ("/v1/audio/vad?model=ears", "image/png", b"p", 415, "audio/wav"),
        ("/v1/vision/detect?model=finder", "image/png", b"", 400, "file: is empty"),
        ("/v1/vision/detect?model=finder", "image/png", b"p" * 20_001, 413, "server.max_file_bytes"),
        ("/v1/vision/detect", "image/png", b"p", 400, "model: is required; there are finder"),
        ("/v1/vision/detect?model=none", "image/png", b"p", 404, "'none' is not in the catalog"),
        ("/v1/vision/detect?model=bare", "image/png", b"p", 400, "it has no pipeline"),
        ("/v1/vision/detect?model=sorter", "image/png", b"p", 400, "POST /v1/vision/classify"),
        ("/v1/vision/detect?model=places", "image/png", b"p", 400, "POST /v1/embeddings"),
        ("/v1/vision/detect?model=finder&top_k=x", "image/png", b"p", 400, "top_k: must be a number, got 'x'"),
        ("/v1/vision/detect?model=finder&top_k=0", "image/png", b"p", 400, "top_k"),
        ("/v1/vision/detect?model=finder&min_score=nan", "image/png", b"p", 400, "min_score: must be a number"),
        ("/v1/vision/detect?model=finder&min_score=2", "image/png", b"p", 400, "min_score"),
        ("/v1/vision/detect?model=finder&colour=red", "image/png", b"p", 400, "colour: is not known"),
        ("/v1/vision/detect?model=finder&model=finder", "image/png", b"p", 400, "model: is there twice"),
        ("/v1/vision/detect?model=finder&regions=7", "image/png", b"p", 400, "regions: must be JSON such as"),
        ("/v1/vision/detect?model=finder", "multipart/form-data", b"p", 400, "the boundary in Content-Type"),
        ("/v1/vision/detect?model=finder", "multipart/form-data; boundary=b", b"p", 400, "begin with its boundary"),
    ],
)
def test_bad_request_is_refused(path: str, content_type: str, body: bytes, status: int, message: str) -> None:
    runtime = MediaRuntime()
    reply = ask(runtime, path, body, {"content-type": content_type})
    assert reply.status == status
    assert message in reply.error["message"]
    assert runtime.looks == []


@pytest.mark.parametrize(
    ("files", "fields", "message"),
    [
        ({}, {"model": "finder"}, "file: is missing"),
        ({"file": b"p", "other": b"p"}, {"model": "finder"}, "other: is not known"),
        ({"file": b"p"}, {}, "model: is required"),
    ],
)
def test_bad_form_is_refused(files: dict[str, bytes], fields: dict[str, str], message: str) -> None:
    reply = form(MediaRuntime(), "/v1/vision/detect", files or {"reference": b"x"}, fields)
    assert reply.status == 400
    assert message in reply.error["message"]


def test_what_is_wrong_with_the_picture_is_said() -> None:
    error = InvalidRequestError(param="data", problem="is neither a JPEG nor a PNG file")
    reply = form(MediaRuntime(findings={"finder": error}), "/v1/vision/detect", {"file": b"x"}, {"model": "finder"})
    assert (reply.status, reply.error["param"]) == (400, "data")


def test_hung_up_client_cancels_its_request() -> None:
    async def scenario() -> None:
        runtime = MediaRuntime(hold=asyncio.Event())
        app = build_app(runtime, Config(), Telemetry())
        headers = {"content-type": "image/png"}
        asked = Call(app, "POST", "/v1/vision/detect?model=finder", b"p", headers=headers).start()
        await runtime.arrived.wait()
        asked.hang_up()
        assert (await asked.reply()).status == 0
        assert runtime.n_closed == 1

    asyncio.run(scenario())


def embed(runtime: FakeRuntime, **body: Any) -> Reply:
    return ask(runtime, "/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"})


class Embedder(MediaRuntime):
    async def look(self, request: MediaRequest) -> MediaAnswer:
        """Embed a text as its length; the shorter, the later it answers."""
        check_media(request)
        self.looks.append(request)
        for _ in range(50 - len(request.data)):
            await asyncio.sleep(0)
        if request.data == b"bad":
            raise InvalidRequestError(param="data", problem="cannot be read")
        if request.data == b"long":
            raise ContextLengthError(prompt_tokens=300, n_ctx=256)
        return MediaAnswer(task="embed", embedding=(float(len(request.data)), 0.5), n_tokens=3)


def test_embeddings_keep_the_order_of_their_texts() -> None:
    texts = ["a" * (1 + i % 7) for i in range(40)]
    reply = embed(Embedder(), input=texts, model="places")
    assert reply.json["object"] == "list"
    assert reply.json["usage"] == {"prompt_tokens": 120, "total_tokens": 120}
    assert reply.json["data"] == [
        {"object": "embedding", "index": i, "embedding": [float(len(text)), 0.5]} for i, text in enumerate(texts)
    ]


def test_embedding_in_base64() -> None:
    reply = embed(Embedder(), input="abc", model="places", encoding_format="base64")
    raw = base64.b64decode(reply.json["data"][0]["embedding"])
    assert struct.unpack("<2f", raw) == (3.0, 0.5)


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"input": ["ok", "bad"], "model": "places"}, "input[1]: cannot be read", "invalid_request"),
        ({"input": ["ok", "long"], "model": "places"}, "has 300 tokens, this model's", "context_length_exceeded"),
        ({"input": [], "model": "places"}, "input: holds 0 texts", "invalid_request"),
        ({"input": ["a"] * 2049, "model": "places"}, "input: holds 2049 texts", "request_too_large"),
        ({"input": ["a", ""], "model": "places"}, "input[1]: must not be empty", "invalid_request"),
        ({"input": ["a", 2], "model": "places"}, "input[1]: is a token id between texts", "invalid_request"),
        ({"input": [[1], []], "model": "places"}, "input[1]: must not be empty", "invalid_request"),
        ({"input": [[1], [2, -1]], "model": "places"}, "input[1][1]: must be from 0", "invalid_request"),
        ({"input": "a", "model": "places", "dimensions": 0}, "dimensions: must be from 1", "invalid_request"),
        ({"input": "a"}, "model: is required; there are places", "invalid_request"),
        ({"input": "a", "model": "ears"}, "POST /v1/audio/vad", "unsupported"),
    ],
)
def test_bad_embeddings_request_is_refused(body: dict[str, Any], message: str, code: str) -> None:
    reply = embed(Embedder(), **body)
    assert reply.error["code"] == code
    assert code == "request_too_large" or message in reply.error["message"]


def test_embeddings_of_token_ids() -> None:
    runtime = Embedder()
    assert len(embed(runtime, input=[1, 2], model="places").json["data"]) == 1
    assert len(embed(runtime, input=[[1, 2], [3]], model="places", truncate=True, dimensions=2).json["data"]) == 2
    assert sorted((look.token_ids, look.truncate, look.dimensions) for look in runtime.looks[1:]) == [
        ((1, 2), True, 2),
        ((3,), True, 2),
    ]
    assert runtime.looks[0].token_ids == (1, 2)


def rerank(**body: Any) -> Reply:
    asked = json.dumps({"query": "abc", "model": "places", **body}).encode()
    return ask(Embedder(), "/v1/rerank", asked, {"content-type": "application/json"})


def test_documents_come_back_in_order_of_likeness() -> None:
    reply = rerank(documents=["a" * 40, {"text": "abcd"}, "abc"], return_documents=True)
    assert reply.json["method"] == "embedding-cosine"
    assert [result["index"] for result in reply.json["results"]] == [2, 1, 0]
    assert reply.json["results"][0]["document"] == {"text": "abc"}
    assert reply.json["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert reply.json["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    few = rerank(documents=["a", "abc", "ab"], top_n=1)
    assert few.json["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", "bad"]}, "documents[1]"),
        ({"documents": ["a"], "query": ""}, "query"),
        ({"documents": ["a"], "query": "bad"}, "query"),
        ({"documents": ["a"], "top_n": 0}, "top_n"),
        ({"documents": [1]}, "documents[0]"),
        ({"documents": ["a"], "rank_fields": []}, "rank_fields"),
    ],
)
def test_bad_rerank_request_is_refused(body: dict[str, Any], param: str) -> None:
    reply = rerank(**body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_cosines() -> None:
    assert cosine((1.0, 0.0), (0.0, 2.0)) == 0.0
    assert cosine((1.0, 1.0), (-2.0, -2.0)) == pytest.approx(-1.0)
    assert cosine((0.0, 0.0), (1.0, 0.0)) == 0.0
    assert ranked([0.1, 0.9, 0.9]) == [1, 2, 0]


def test_models_tell_their_task_and_chains_their_models() -> None:
    app = build_app(MediaRuntime(), Config(), Telemetry())
    reply = asyncio.run(Call(app, "GET", "/v1/models").reply())
    cards = {card["id"]: card for card in reply.json["data"]}
    assert cards["sorter"]["task"] == "classify"
    assert "task" not in cards["bare"]
    assert cards["text"]["models"] == ["lines", "reader"]
    assert asyncio.run(Call(app, "GET", "/v1/models/text").reply()).json == cards["text"]
