from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from edge_rt.catalog.chains import Cascade, Ocr
from edge_rt.catalog.manifest import Manifest, Variant
from edge_rt.catalog.pipelines import Classify, DetectText, ImageInput, Pipeline, ReadText
from edge_rt.chains import run_chain, task_of
from edge_rt.errors import InvalidRequestError, UnsupportedFeatureError
from edge_rt.tensor_types import Box, Label, MediaAnswer, MediaRequest, TensorTimings

CASCADE = Cascade(id="both", name="Both", first="small", then="large", min_score=0.8)
OCR = Ocr(id="text", name="Text", detect="finder", read="reader")
LINES = (Box(x=0, y=0, width=9, height=3, label="text", score=0.7), Box(x=0, y=5, width=9, height=3, turn_deg=4))


@dataclass
class Models:
    """Models that answer what they are told to; it hears what is counted too."""

    answers: dict[str, MediaAnswer]
    asked: list[MediaRequest] = field(default_factory=list)
    counted: list[tuple[str, str]] = field(default_factory=list)

    async def look(self, request: MediaRequest) -> MediaAnswer:
        self.asked.append(request)
        return self.answers[request.model]

    def chain_answered(self, chain: str, stage: str) -> None:
        self.counted.append((chain, stage))

    def run(self, chain: Cascade | Ocr, **options: object) -> MediaAnswer:
        request = MediaRequest(id="r", model=chain.id, data=b"picture", **options)  # type: ignore[arg-type]
        return asyncio.run(run_chain(chain, request, self.look, self))


def labels(*scores: float) -> MediaAnswer:
    timings = TensorTimings(queue_s=1.0, compute_s=2.0, batch_size=3)
    found = tuple(Label(index=i, label=f"l{i}", score=score) for i, score in enumerate(scores))
    return MediaAnswer(task="classify", labels=found, timings=timings)


def boxes(*scores: float) -> MediaAnswer:
    return MediaAnswer(task="detect", boxes=tuple(Box(x=0, y=0, width=1, height=1, score=score) for score in scores))


def test_sure_small_model_answers_alone() -> None:
    models = Models({"small": labels(0.8, 0.2), "large": labels(0.9, 0.1)})
    answer = models.run(CASCADE)
    assert (answer.stage, answer.labels[0].score) == ("small", 0.8)
    assert [request.model for request in models.asked] == ["small"]
    assert models.counted == [("both", "small")]


def test_unsure_small_model_is_followed_by_the_large_one() -> None:
    models = Models({"small": labels(0.79, 0.21), "large": labels(0.6, 0.4)})
    answer = models.run(CASCADE, top_k=1, min_score=0.3)
    assert (answer.stage, answer.labels[0].score) == ("large", 0.6)
    assert [(r.model, r.top_k, r.min_score) for r in models.asked] == [("small", None, None), ("large", 1, 0.3)]
    assert answer.timings == TensorTimings(queue_s=2.0, compute_s=4.0, batch_size=3)
    assert models.counted == [("both", "large")]


def test_what_the_caller_does_not_want_is_cut_from_the_small_ones_answer_too() -> None:
    models = Models({"small": labels(0.9, 0.06, 0.04)})
    assert len(models.run(CASCADE, top_k=2).labels) == 2
    assert len(models.run(CASCADE, min_score=0.5).labels) == 1


@pytest.mark.parametrize(
    ("rule", "answer", "stage"),
    [
        ("best", boxes(0.9, 0.3), "small"),
        ("best", boxes(), "large"),
        ("least", boxes(0.9, 0.3), "large"),
        ("least", boxes(0.95, 0.85), "small"),
        ("least", boxes(), "small"),
    ],
)
def test_confidence_of_a_detector(rule: str, answer: MediaAnswer, stage: str) -> None:
    chain = Cascade(id="both", name="Both", first="small", then="large", min_score=0.8, confidence=rule)  # type: ignore[arg-type]
    assert Models({"small": answer, "large": boxes(0.5)}).run(chain).stage == stage


def test_regions_of_a_cascade_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="regions for the cascade both"):
        Models({}).run(CASCADE, regions=LINES)


def test_deadline_counts_from_the_beginning() -> None:
    models = Models({"small": labels(0.1), "large": labels(0.6)})
    models.run(CASCADE, deadline_s=5.0)
    first, then = (request.deadline_s for request in models.asked)
    assert first == 5.0
    assert then is not None
    assert 4.0 < then < 5.0


def test_all_lines_of_a_picture_are_read_in_one_call() -> None:
    texts = (Label(index=0, label="LOT 7", score=0.99), Label(index=1, label="", score=0.2))
    models = Models(
        {
            "finder": MediaAnswer(task="detect-text", boxes=LINES, width=20, height=10),
            "reader": MediaAnswer(task="read-text", texts=texts, width=20, height=10, place="onnx_cpu:cpu"),
        }
    )
    answer = models.run(OCR, min_score=0.5, top_k=4)
    assert answer.task == "ocr"
    assert answer.boxes == (Box(x=0, y=0, width=9, height=3, label="text", score=0.99, text="LOT 7"),)
    assert (answer.width, answer.height, answer.texts) == (20, 10, ())
    finder, reader = models.asked
    assert (finder.model, finder.min_score, finder.top_k, finder.regions) == ("finder", None, 4, ())
    assert (reader.model, reader.min_score, reader.top_k, reader.regions) == ("reader", 0.5, None, LINES)
    assert models.counted == [("text", "")]


def test_picture_without_text_is_not_read() -> None:
    models = Models({"finder": MediaAnswer(task="detect-text", width=20, height=10)})
    assert models.run(OCR) == MediaAnswer(task="ocr", width=20, height=10)


def test_errors_of_a_model_are_the_chains() -> None:
    class Broken(Models):
        async def look(self, request: MediaRequest) -> MediaAnswer:
            raise InvalidRequestError(param="data", problem="is no picture")

    models = Broken({})
    with pytest.raises(InvalidRequestError, match="is no picture"):
        models.run(OCR)
    assert models.counted == []


def manifest(model: str, pipeline: Pipeline | None) -> Manifest:
    variant = Variant(id="a", quant="FP32", file="f")
    return Manifest(id=model, name="", license="MIT", kind="tensor", n_params=1, variants=(variant,), pipeline=pipeline)


def test_task_of_a_chain_is_that_of_its_models() -> None:
    sort = Classify(image=ImageInput(width=8, height=8), labels=("a",))
    pipelines: dict[str, Pipeline | None] = {
        "small": sort, "large": sort, "finder": DetectText(), "reader": ReadText(characters="c"), "bare": None,
    }  # fmt: skip
    manifests: dict[str, Manifest | None] = {name: manifest(name, spec) for name, spec in pipelines.items()}
    mixed = Cascade(id="mixed", name="", first="small", then="finder", min_score=0.5)
    chains = {chain.id: chain for chain in (CASCADE, OCR, mixed)}
    tasks = {name: task_of(name, manifests, chains) for name in (*manifests, *chains, "unknown")}
    assert tasks == {
        "small": "classify", "large": "classify", "finder": "detect-text", "reader": "read-text", "bare": "",
        "both": "classify", "text": "ocr", "mixed": "", "unknown": "",
    }  # fmt: skip
    assert task_of("both", {"small": manifests["small"]}, chains) == ""
