"""Files through a real daemon: pictures, recordings, chains, and what is wrong with them."""

from __future__ import annotations

import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import edge_rt
from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.catalog.store import Store
from edge_rt.cli import main
from edge_rt.errors import InvalidRequestError, ModelNotPulledError, UnsupportedFeatureError
from edge_rt.tensor_types import Box, MediaRequest
from tests.api.daemon import Daemon
from tests.pictures import encoded, noise
from tests.tiny_tensors import write_forms, write_models
from tests.unit.engine.test_audio import wav

PULLED = ("colors", "colors-large", "flaws", "speech", "lines")
MAX_FILE_BYTES = 300_000


@dataclass
class Media:
    """A daemon with the tiny models, and where its files are."""

    daemon: Daemon
    folder: Path
    settings: config.Loaded
    client: Client


@pytest.fixture(scope="module")
def media() -> Iterator[Media]:
    folder = Path(tempfile.mkdtemp(prefix="ert-"))
    models = folder / "models"
    models.mkdir()
    write_models(models)
    write_forms(models)
    (models / "torn.toml").write_text("id = \n")
    extra = f"\n[limits]\nmax_pixels = 1000000\n\n[server]\nmax_file_bytes = {MAX_FILE_BYTES}\n"
    variables = {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(models)}
    try:
        with Daemon(folder, extra=extra, environ=variables) as daemon, Client(daemon.socket) as client:
            settings = config.load(folder / "config.toml", environ=variables)
            store = Store.open(settings.config.catalog, {})
            for model in PULLED:
                store.pull(model, progress=lambda _: None, offline=False, derive=lambda *_: None)
            store.pull("colors-forms", "fp32", progress=lambda _: None, offline=False, derive=lambda *_: None)
            yield Media(daemon, folder, settings, client)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def request(model: str, data: bytes, **options: object) -> MediaRequest:
    return MediaRequest(id="", model=model, data=data, **options)  # type: ignore[arg-type]


def board(*, flaw: bool) -> bytes:
    pixels = np.full((64, 64), 100, np.uint8)
    if flaw:
        pixels[16:24, 40:48] = 255
    return encoded(pixels)


def test_daemon_and_library_find_the_same(media: Media) -> None:
    data = encoded(noise(40, 30), "JPEG")
    asked = media.client.look("classify", request("colors", data))
    with edge_rt.load_tensors("colors", settings=media.settings) as model:
        found = model.look(data)
    assert [(a.label, round(a.score, 6)) for a in found.labels] == [(b.label, b.score) for b in asked.labels]
    assert (asked.width, asked.height, asked.place) == (30, 40, "onnx_cpu:cpu")
    assert asked.timings is not None


def test_flaw_beside_its_reference(media: Media) -> None:
    answer = media.client.look("detect", request("flaws", board(flaw=True), reference=board(flaw=False)))
    assert [(b.x, b.y, b.width, b.height, b.label) for b in answer.boxes] == [(40, 16, 8, 8, "flaw")]
    region = Box(x=0, y=0, width=32, height=32)
    asked = request("flaws", board(flaw=True), reference=board(flaw=False), regions=(region,))
    assert media.client.look("detect", asked).boxes == ()


def test_speech(media: Media) -> None:
    samples = np.zeros(32_000, "<i2")
    samples[5120:16_384] = 8000
    (span,) = media.client.look("vad", request("speech", wav(samples.tobytes()))).spans
    assert (span.start_s, span.end_s) == (pytest.approx(0.29, abs=0.04), pytest.approx(1.05, abs=0.05))


def test_cascade_stops_early_and_is_counted(media: Media) -> None:
    sure, unsure = (encoded(Image.new("RGB", (8, 8), color)) for color in ((250, 0, 0), (100, 110, 100)))
    stages = [media.client.look("classify", request("colors-both", data)).stage for data in (sure, unsure, sure)]
    assert stages == ["colors", "colors-large", "colors"]
    count = 'edge_rt_chain_answers_total{chain="colors-both",stage="%s"}'
    assert [media.daemon.metric(count % stage) for stage in ("colors", "colors-large")] == [2, 1]


def test_models_and_chains_are_listed_with_their_tasks(media: Media) -> None:
    cards = {card["id"]: card for card in media.client.models()}
    assert {name: cards[name]["task"] for name in (*PULLED, "colors-both")} == {
        "colors": "classify", "colors-large": "classify", "flaws": "detect", "speech": "vad", "lines": "detect-text",
        "colors-both": "classify",
    }  # fmt: skip
    assert "page" not in cards  # one of its models has not been pulled
    with pytest.raises(ModelNotPulledError, match="reader is not in the local store"):
        media.client.look("ocr", request("page", encoded(np.full((64, 64), 255, np.uint8))))


def bomb() -> bytes:
    """A PNG file of 300 kB that would be 10 GB of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(100_001 * 500), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_decompression_bomb_is_refused_and_costs_nothing(media: Media) -> None:
    media.client.look("classify", request("colors", encoded(noise(8, 8))))
    name = 'edge_rt_worker_resident_memory_bytes{model="colors"}'
    before_bytes = media.daemon.metric(name)
    with pytest.raises(InvalidRequestError, match="100000 x 100000 pixels, the limit is 1000000"):
        media.client.look("classify", request("colors", bomb()))
    media.client.look("classify", request("colors", encoded(noise(8, 8))))
    assert media.daemon.metric(name) < before_bytes + 32 * 2**20


@pytest.mark.parametrize(
    ("task", "model", "data", "error", "words"),
    [
        ("classify", "colors", b"GIF89a", InvalidRequestError, "looks like GIF"),
        ("classify", "colors", encoded(noise(64, 64))[:900], InvalidRequestError, "broken or cut"),
        ("classify", "colors", b"x" * MAX_FILE_BYTES, InvalidRequestError, "server.max_file_bytes"),
        ("detect", "flaws", board(flaw=True), InvalidRequestError, "reference: is missing"),
        ("detect", "colors", b"x", UnsupportedFeatureError, "POST /v1/vision/classify"),
        ("vad", "speech", b"ID3", InvalidRequestError, "is not a WAV file"),
        ("embed", "colors", b"x", UnsupportedFeatureError, "embed with colors"),
        ("embed", "colors", b"\xff", InvalidRequestError, "is no UTF-8 text"),
    ],
)
def test_what_is_wrong_comes_back_as_it_was_raised(
    media: Media, task: str, model: str, data: bytes, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        media.client.look(task, request(model, data))


def test_curls_two_ways_of_sending(media: Media) -> None:
    data = encoded(noise(8, 8))
    with media.daemon.client() as http:
        form = http.post("/v1/vision/classify", files={"file": ("part.png", data)}, data={"model": "colors"})
        raw = http.post("/v1/vision/classify?model=colors", content=data, headers={"content-type": "image/png"})
    assert form.status_code == raw.status_code == 200
    assert form.json()["labels"] == raw.json()["labels"]


def test_hostile_multipart_bodies_are_answered(media: Media) -> None:
    random = np.random.default_rng(0)
    whole = httpx2.Request(
        "POST", "http://x/", data={"model": "colors"}, files={"file": ("part.png", encoded(noise(8, 8)))}
    )
    good, headers = whole.read(), {"content-type": whole.headers["content-type"]}
    statuses = set()
    with media.daemon.client() as http:
        for _ in range(150):
            body = bytearray(good)
            for at in random.integers(0, len(body), 4):
                body[at] = random.integers(256)
            sent = bytes(body[: random.integers(len(body) + 1)])
            statuses.add(http.post("/v1/vision/classify", content=sent, headers=headers).status_code)
        assert http.post("/v1/vision/classify", content=good, headers=headers).status_code == 200
    assert statuses <= {200, 400, 404}


# httpcore2 leaves a socket behind when it is closed inside of click's runner.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_command_line_asks_the_daemon(media: Media) -> None:
    (media.folder / "part.png").write_bytes(encoded(Image.new("RGB", (8, 8), (0, 250, 0))))
    args = ["run", "colors", str(media.folder / "part.png"), "--socket", str(media.daemon.socket), "-v"]
    env = {"EDGE_RT__CATALOG__MANIFEST_DIRS": str(media.folder / "models")}
    done = CliRunner().invoke(main, ["--config", str(media.folder / "config.toml"), *args], env=env)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split()[1] == "green"
    assert f"the daemon on {media.daemon.socket}: fp32 on onnx_cpu:cpu" in done.stderr


@pytest.mark.parametrize(("stdin", "words"), [("", "colors is not supported; it takes files"), ("hi\n", "takes files")])
def test_a_chat_with_a_model_of_files_is_refused_at_once(media: Media, stdin: str, words: str) -> None:
    done = CliRunner().invoke(main, ["chat", "colors", "--socket", str(media.daemon.socket)], input=stdin)
    assert (done.exit_code, done.stdout) == (1, "")
    assert words in done.stderr
    assert "edge_rt run colors FILE" in done.stderr


def test_a_chat_without_a_question_is_wrong_use(media: Media) -> None:
    done = CliRunner().invoke(main, ["chat", "null", "--socket", str(media.daemon.socket)], input="")
    assert done.exit_code == 2
    assert "no question on stdin" in done.stderr


def test_the_daemon_says_which_form_answered_and_why(media: Media) -> None:
    store = Store.open(media.settings.config.catalog, {})
    assert media.client.look("classify", request("colors-forms", encoded(noise(8, 8)))).variant == "fp32"
    assert "edge_rt models pull colors-forms:int8" in media.daemon.log
    assert store.path(store.get("colors-forms"), store.get("colors-forms").variants[0]) is None
    assert media.client.model("colors-forms")["meta"]["variant"] == "fp32"


def test_a_daemon_takes_up_new_manifests_and_names_a_bad_one(media: Media) -> None:
    models = media.folder / "models"
    assert "torn.toml: TOML: Invalid value (at line 1" in media.daemon.log  # it was there at the start
    text = (models / "colors.toml").read_text()
    (models / "late.toml").write_text(text.replace('id = "colors"', 'id = "late"'))
    with pytest.raises(ModelNotPulledError):
        media.client.look("classify", request("late", encoded(noise(8, 8))))
    store = Store.open(media.settings.config.catalog, {})
    store.pull("late", progress=lambda _: None, offline=False, derive=lambda *_: None)
    assert media.client.look("classify", request("late", encoded(noise(8, 8)))).variant == "fp32"
    chain = 'id = "late-both"\nname = "x"\nkind = "cascade"\nfirst = "late"\nthen = "colors"\nmin_score = 0.0\n'
    (models / "chains" / "late-both.toml").write_text(chain)
    assert media.client.look("classify", request("late-both", encoded(noise(8, 8)))).stage == "late"
