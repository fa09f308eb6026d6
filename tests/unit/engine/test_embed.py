from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edge_rt.catalog.pipelines import Embed
from edge_rt.engine.pipeline import Pipeline, make_pipeline
from edge_rt.errors import (
    BackendStepError,
    ContextLengthError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedFeatureError,
)
from edge_rt.tensor_types import Box, MediaRequest, TensorSpec
from edge_rt.worker.channel import TensorLoad
from tests.pictures import FakeInfer

WORDS = {"[UNK]": 0, "<s>": 1, "</s>": 2, "hot": 3, "cold": 4}
SPEC = Embed(tokenizer="t", max_tokens=10, token_step=4)
INPUTS = tuple(
    TensorSpec(name=name, datatype="INT64", shape=(-1, -1))
    for name in ("input_ids", "attention_mask", "token_type_ids")
)
OUTPUTS = (TensorSpec(name="y", datatype="FP32", shape=(-1, -1, 5)),)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.enable_truncation(4)  # as many shipped files have it; it must not cut
    made.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def make(tokenizer: Path, spec: Embed = SPEC, inputs: tuple[TensorSpec, ...] = INPUTS) -> Pipeline:
    made = make_pipeline(TensorLoad(pipeline=spec, assets={"t": str(tokenizer)}), inputs, OUTPUTS)
    assert made is not None
    return made


def one_hot(feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """A model whose state of a token is its id, and nonsense behind the mask."""
    states = np.eye(5, dtype=np.float32)[feeds["input_ids"]]
    states[feeds["attention_mask"] == 0] = 1e6
    return {"y": states}


def ask(text: str | bytes, **options: Any) -> MediaRequest:
    return MediaRequest(id="r", model="m", data=text.encode() if isinstance(text, str) else text, **options)


def test_embedding_is_the_mean_of_the_tokens_of_length_one(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    answer = make(tokenizer).run(ask("hot hot cold"), infer)
    mean = np.array([0, 1, 1, 2, 1]) / 5
    assert np.allclose(answer.embedding, mean / np.linalg.norm(mean))
    assert answer.n_tokens == 5
    assert infer.calls[0][0]["input_ids"].tolist() == [[1, 3, 3, 4, 2, 0, 0, 0]]
    assert infer.calls[0][0]["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert not infer.calls[0][0]["token_type_ids"].any()


def test_first_token_and_length_as_it_is(tokenizer: Path) -> None:
    spec = Embed(tokenizer="t", max_tokens=10, pooling="first", normalize=False)
    double = FakeInfer(lambda feeds: {"y": one_hot(feeds)["y"] * 2})
    assert make(tokenizer, spec).run(ask("hot"), double).embedding == (0, 2, 0, 0, 0)


def test_model_without_token_types(tokenizer: Path) -> None:
    spec = Embed(tokenizer="t", types_input="")
    infer = FakeInfer(one_hot)
    make(tokenizer, spec, INPUTS[:2]).run(ask("hot"), infer)
    assert set(infer.calls[0][0]) == {"input_ids", "attention_mask"}


def test_long_text_is_refused_and_not_cut(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    assert make(tokenizer).run(ask("hot " * 8), infer).n_tokens == 10
    assert infer.calls[0][0]["input_ids"].shape == (1, 10)
    with pytest.raises(ContextLengthError) as caught:
        make(tokenizer).run(ask("hot " * 9), infer)
    assert (caught.value.prompt_tokens, caught.value.n_ctx) == (11, 10)
    with pytest.raises(InvalidRequestError, match="is 2561 bytes long"):
        make(tokenizer).run(ask("x" * 2561), infer)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ask(b"\xff\xfe"), "data: is no UTF-8 text: byte 0"),
        (ask("hot", reference=b"x"), "reference: belongs to pictures"),
        (ask("hot", regions=(Box(x=0, y=0, width=1, height=1),)), "regions: belongs to pictures"),
    ],
)
def test_bad_request_is_refused(tokenizer: Path, request_: MediaRequest, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make(tokenizer).run(request_, FakeInfer(one_hot))


def test_model_that_gives_no_numbers_is_an_error(tokenizer: Path) -> None:
    with pytest.raises(BackendStepError, match="not finite"):
        make(tokenizer).run(ask("hot"), FakeInfer(lambda _: {"y": np.full((1, 4, 5), np.nan, np.float32)}))


def test_tokenizer_that_is_none_fails_the_load(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer.json: tokenizer: "):
        make(path)


def test_inputs_that_the_model_does_not_have_fail_the_load(tokenizer: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"pipeline.types_input: 'token_type_ids' is not among"):
        make(tokenizer, SPEC, INPUTS[:2])


def test_model_of_one_length_gets_every_text_filled_up_to_it(tokenizer: Path) -> None:
    """As NPUs have them; a text that its length does not hold is refused, however many tokens the manifest allows."""
    fixed = tuple(TensorSpec(name=spec.name, datatype="INT64", shape=(-1, 6)) for spec in INPUTS)
    infer = FakeInfer(one_hot)
    assert make(tokenizer, inputs=fixed).run(ask("hot"), infer).n_tokens == 3
    assert infer.calls[0][0]["input_ids"].tolist() == [[1, 3, 2, 0, 0, 0]]
    with pytest.raises(ContextLengthError) as caught:
        make(tokenizer, inputs=fixed).run(ask("hot " * 5), infer)
    assert (caught.value.prompt_tokens, caught.value.n_ctx) == (7, 6)


def test_token_ids_are_taken_as_they_are(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    made = make(tokenizer)
    by_text, by_ids = made.run(ask("hot cold"), infer), made.run(ask("", token_ids=(1, 3, 4, 2)), infer)
    assert by_ids.embedding == by_text.embedding
    assert by_ids.n_tokens == 4
    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\].*outside the vocabulary of 5"):
        made.run(ask("", token_ids=(1, 5)), infer)


def test_what_is_too_long_is_cut_where_that_is_asked_for(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    made = make(tokenizer)
    long = "hot " * 20
    with pytest.raises(ContextLengthError):
        made.run(ask(long), infer)
    answer = made.run(ask(long, truncate=True), infer)
    assert answer.n_tokens == 10
    assert infer.calls[-1][0]["input_ids"][0, :10].tolist() == [1, *[3] * 8, 2]
    made.run(ask("", token_ids=(1, *[4] * 12, 2), truncate=True), infer)
    assert infer.calls[-1][0]["input_ids"][0, :10].tolist() == [1, *[4] * 9]  # nothing says which of them must stay


def test_a_cut_that_falls_into_a_character_takes_it_away(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    for text in ("x" + "😀" * 1000, "hot " * 5000):
        answer = make(tokenizer).run(ask(text, truncate=True), infer)
        assert 3 <= answer.n_tokens <= 10
    with pytest.raises(InvalidRequestError, match="no UTF-8"):
        make(tokenizer).run(ask(b"\xff" + b"x" * 5000, truncate=True), infer)


def test_fewer_dimensions_only_of_models_that_were_trained_for_it(tokenizer: Path) -> None:
    infer = FakeInfer(one_hot)
    whole = make(tokenizer).run(ask("hot hot cold", dimensions=5), infer)
    assert len(whole.embedding) == 5
    with pytest.raises(UnsupportedFeatureError, match=r"dimensions 4 of this model.*take all of them"):
        make(tokenizer).run(ask("hot", dimensions=4), infer)
    able = make(tokenizer, Embed(tokenizer="t", max_tokens=10, token_step=4, matryoshka=(4, 2)))
    part = able.run(ask("hot hot cold", dimensions=4), infer)
    expected = np.array(whole.embedding[:4]) / np.linalg.norm(whole.embedding[:4])
    assert np.allclose(part.embedding, expected)
    with pytest.raises(UnsupportedFeatureError, match="it gives 4, 2 or all"):
        able.run(ask("hot", dimensions=3), infer)
