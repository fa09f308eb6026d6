"""Every tensor model of the catalog does what it is there for: from the store, by the library, with its pipeline."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_rt import config
from edge_rt.errors import ModelNotPulledError, UnsupportedFeatureError
from edge_rt.library import load_tensors
from edge_rt.tensor_library import TensorModel
from edge_rt.text_vectors import TextVectors
from tests import samples
from tools.sentence_pairs import PAIRS

Image = pytest.importorskip("PIL.Image", reason="the extra onnx is not installed")
from PIL import ImageDraw, ImageFont  # noqa: E402

pytestmark = pytest.mark.model

Load = Callable[[str], TensorModel]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Load models once for the module; its tests skip where one is not in the store."""
    settings = config.load()  # before _clean_environment empties it
    models: dict[str, TensorModel] = {}

    def loaded(name: str) -> TensorModel:
        if name not in models:
            try:
                models[name] = load_tensors(name, settings=settings)
            except ModelNotPulledError as exc:
                pytest.skip(str(exc))
        return models[name]

    yield loaded
    for model in models.values():
        model.close()


RATE_HZ = 16_000


def wav(signal: NDArray[np.float32]) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((np.clip(signal, -1, 1) * 32767).astype("<i2").tobytes())
    return out.getvalue()


def speech() -> NDArray[np.float32]:
    """Ten seconds of somebody reading, with pauses."""
    with wave.open(io.BytesIO(samples.sample(*samples.SPEECH))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE_HZ, 1, 2)
        raw = file.readframes(file.getnframes())
    return (np.frombuffer(raw, "<i2") / 32768).astype("f")


@pytest.mark.parametrize("variant", ["fp32", "fp32-16k"])
def test_silero_hears_speech_where_it_is(variant: str, load: Load) -> None:
    model = load(f"silero-vad:{variant}")
    clip = speech()
    alone = model.look(wav(clip)).spans
    assert len(alone) >= 5  # sentences with pauses between
    assert 0.4 < sum(span.end_s - span.start_s for span in alone) / (clip.size / RATE_HZ) < 0.7
    silence = np.zeros(3 * RATE_HZ, "f")
    later = model.look(wav(np.concatenate([silence, clip, silence]))).spans
    assert later[0].start_s == pytest.approx(alone[0].start_s + 3, abs=0.1)
    assert later[-1].end_s == pytest.approx(alone[-1].end_s + 3, abs=0.2)


@pytest.mark.parametrize("variant", ["fp32", "fp32-16k"])
def test_silero_hears_no_speech_in_noise(variant: str, load: Load) -> None:
    rng = np.random.default_rng(0)
    hum = 0.3 * np.sin(2 * np.pi * 100 * np.arange(10 * RATE_HZ) / RATE_HZ)
    for signal in (np.zeros(10 * RATE_HZ), rng.normal(0, 0.1, 10 * RATE_HZ), hum + rng.normal(0, 0.01, hum.size)):
        assert load(f"silero-vad:{variant}").look(wav(signal.astype("f"))).spans == ()


def test_silero_with_its_state_is_surer_than_without(load: Load) -> None:
    """Window by window as a stream, against each window by itself: the state is what tells speech."""
    model, clip = load("silero-vad:fp32"), speech()
    frames = [np.concatenate([np.zeros(64, "f"), clip])[at : at + 576] for at in range(0, clip.size - 512, 512)]
    rate = np.array(RATE_HZ, np.int64)

    def scores(stream: str) -> NDArray[np.float32]:
        feeds = [{"input": frame[None], "sr": rate} for frame in frames]
        return np.array([model.run(feed, ["output"], stream=stream)["output"][0, 0] for feed in feeds])

    streamed, alone = scores("microphone"), scores("")
    assert (streamed > 0.5).mean() > 0.4
    assert (streamed > 0.5).sum() > 1.5 * (alone > 0.5).sum()


def imagenet() -> list[tuple[bytes, int]]:
    pictures = samples.samples(*samples.IMAGENET)
    return [(data, int(name.rsplit("_", 1)[1].removesuffix(".jpg"))) for name, data in pictures.items()]


def test_efficientnet_names_what_it_sees_in_both_forms(load: Load) -> None:
    """On 20 pictures fp32 has 18 right, int8 17; one picture is 5 points, so this guards against faults only."""
    pictures = imagenet()
    assert len(pictures) == 20
    best = {
        form: [load(f"efficientnet-lite0:{form}").look(data).labels[0].index for data, _ in pictures]
        for form in ("fp32", "int8")
    }
    classes = [index for _, index in pictures]
    n_right = {form: sum(map(int.__eq__, found, classes)) for form, found in best.items()}
    assert n_right["fp32"] >= 18
    assert n_right["int8"] >= 17
    assert sum(map(int.__eq__, best["fp32"], best["int8"])) >= 18


def test_efficientnet_int8_follows_the_float_model(load: Load) -> None:
    """The logits' direction, over a part of each picture: an error of rounding, not of kind."""
    parts = []
    for data, _ in imagenet():
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        side = min(picture.size)
        parts.append(np.asarray(picture.resize((224, 224), Image.Resampling.BICUBIC, (0, 0, side, side))))
    cosines = []
    for part in parts:
        exact, rounded = (
            load(f"efficientnet-lite0:{form}").run({"image": part[None]})["logits"][0] for form in ("fp32", "int8")
        )
        cosines.append(exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded))
    assert np.mean(cosines) > 0.99
    assert min(cosines) > 0.95


LINES = ("SN 4711-0815", "LOT A7X-2031", "EXP 2027-03-31", "MODEL EDGE 9000", "Batch 000123", "230V 50Hz 16A")


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("size", [32, 48])
def test_ocr_reads_lines(size: int, load: Load) -> None:
    for line in LINES:
        font = ImageFont.load_default(size)
        picture = Image.new("RGB", (int(font.getlength(line)) + 24, size + 20), "white")
        ImageDraw.Draw(picture).text((12, 8), line, fill="black", font=font)
        (found,) = load("pp-ocrv4-rec").look(png(picture)).texts
        assert found.label == line
        assert found.score > 0.9


def test_ocr_finds_lines_on_a_plate(load: Load) -> None:
    picture = Image.new("RGB", (640, 480), (205, 205, 200))
    places = [(40, 30), (60, 120), (80, 210), (40, 300), (300, 390)]
    for place, line in zip(places, LINES, strict=False):
        ImageDraw.Draw(picture).text(place, line, fill=(20, 20, 30), font=ImageFont.load_default(36))
    boxes = load("pp-ocrv4-det").look(png(picture)).boxes
    assert len(boxes) == len(places)
    for box, (x, y) in zip(boxes, places, strict=True):
        assert (box.x, box.y) == (pytest.approx(x, abs=8), pytest.approx(y, abs=12))
    texts = load("pp-ocrv4-rec").look(png(picture), regions=boxes).texts
    # In cuts this tight the spaces between words get lost.
    assert [text.label.replace(" ", "") for text in texts] == [line.replace(" ", "") for line in LINES[: len(places)]]


def embed(model: TensorModel, texts: list[str]) -> NDArray[np.float64]:
    return np.array([model.look(text.encode()).embedding for text in texts])


def test_minilm_finds_what_means_the_same(load: Load) -> None:
    texts = [text for pair in PAIRS for text in pair]
    vectors = embed(load("minilm-l6:int8"), texts)
    assert vectors.shape == (len(texts), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    likeness = vectors @ vectors.T - 2 * np.eye(len(texts))
    nearest = likeness.argmax(axis=1)
    assert (nearest == np.arange(len(texts)) ^ 1).mean() >= 0.9


def test_minilm_int8_follows_its_float_parent(load: Load) -> None:
    texts = [text for pair in PAIRS for text in pair]
    exact, rounded = (embed(load(f"minilm-l6:{form}"), texts) for form in ("fp32", "int8"))
    cosines = (exact * rounded).sum(axis=1)
    assert cosines.mean() > 0.999
    assert cosines.min() > 0.998
    nearest = [(v @ v.T - 2 * np.eye(len(texts))).argmax(axis=1) for v in (exact, rounded)]
    assert (nearest[0] == nearest[1]).mean() >= 0.9


def test_static_embeddings_are_the_package_authors_at_every_size(load: Load) -> None:
    model = load("wordllama-256")
    texts = [text for pair in PAIRS for text in pair]
    vectors = embed(model, texts)
    np.testing.assert_allclose(vectors, TextVectors.load().embed(texts), atol=1e-6)
    for size in (128, 64):
        shorter = np.array([model.look(text.encode(), dimensions=size).embedding for text in texts])
        kept = vectors[:, :size]
        np.testing.assert_allclose(shorter, kept / np.linalg.norm(kept, axis=1, keepdims=True), atol=1e-6)
        nearest = (shorter @ shorter.T - 2 * np.eye(len(texts))).argmax(axis=1)
        assert (nearest == np.arange(len(texts)) ^ 1).mean() >= 0.6
    with pytest.raises(UnsupportedFeatureError, match="it gives 64, 128 or all"):
        model.look(b"a", dimensions=100)
