from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.router import confidence
from edge_rt.router.confidence import NAMES, Judge, Table
from edge_rt.types import TokenSignal

SURE = TokenSignal(logprob=-0.02, margin=0.97, entropy=0.1)
TORN = TokenSignal(logprob=-1.6, margin=0.05, entropy=3.5)


def named(signals: list[TokenSignal], text: str, *, is_whole: bool = False) -> dict[str, float]:
    return dict(zip(NAMES, confidence.summary(signals, text, is_whole=is_whole), strict=True))


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge.load()


def test_it_has_an_opinion_from_the_first_checkpoint_on(judge: Judge) -> None:
    assert judge.doubt([SURE] * 7, "The capital of France") is None
    assert judge.doubt([SURE] * 8, "The capital of France is Paris") is not None
    assert judge.doubt([SURE] * 3, "Paris.", is_whole=True) is not None
    assert judge.doubt([], "", is_whole=True) is None


@pytest.mark.parametrize("n", [8, 16, 32])
def test_a_torn_model_is_doubted_more_than_a_sure_one(judge: Judge, n: int) -> None:
    sure, torn = (judge.doubt([each] * n, "One two three four five six.", is_whole=True) for each in (SURE, TORN))
    assert sure is not None
    assert torn is not None
    assert torn > sure + 0.1


def test_a_long_answer_of_a_small_model_is_doubted_more(judge: Judge) -> None:
    whole = judge.doubt([SURE] * 8, "The capital of France is Paris.", is_whole=True)
    running = judge.doubt([SURE] * 32, "To find the answer, we first need to")
    assert whole is not None
    assert running is not None
    assert running > whole


def test_only_what_is_new_since_a_checkpoint_waits_for_the_next(judge: Judge) -> None:
    text = "The answer is a long one"
    assert judge.doubt([SURE] * 15, text) == judge.doubt([SURE] * 8, text)
    assert judge.doubt([SURE] * 8 + [TORN] * 8, text) != judge.doubt([SURE] * 15, text)


def test_features_say_what_they_are_named_after() -> None:
    found = named([SURE] * 9 + [TORN], "I'm not sure, but")
    assert found["hedges"] == 1
    assert found["logprob_least"] == TORN.logprob
    assert found["margin_50"] == SURE.margin
    assert found["log_tokens"] == pytest.approx(math.log(10))
    assert named([SURE], "Sure, here it is")["hedges"] == 0
    assert named([SURE], "Unfortunately, I cannot")["hedges"] == 1
    assert named([SURE], "la la la la la la")["repeated_share"] == pytest.approx(3 / 4)
    assert named([SURE], "each word is another one")["repeated_share"] == 0


floats = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.builds(TokenSignal, logprob=floats, margin=floats, entropy=floats), min_size=1, max_size=40), st.text()
)
def test_any_signals_give_a_probability(signals: list[TokenSignal], text: str) -> None:
    judge = Judge.load()
    found = judge.doubt(signals, text, is_whole=True)
    assert found is not None
    assert 0 <= found <= 1


def test_no_signals_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        confidence.summary([], "text", is_whole=True)


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: Any) -> None:
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("version", value=2),
        put("features", 0, value="shoe_size"),
        put("stages", value=[]),
        put("stages", 0, "weights", value=[1.0]),
        put("stages", 0, "deviation", 0, value=0.0),
        put("stages", 0, "bias", value="1"),
        put("stages", 0, "probabilities", 0, value=1.5),
        put("stages", 0, "scores", 0, value=1e9),
        put("more", value=1),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    table = json.loads(confidence.SHIPPED.read_text())
    change(table)
    (tmp_path / "c.json").write_text(json.dumps(table))
    with pytest.raises(ModelFormatError):
        Judge.load(tmp_path / "c.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", bytes(2**19)])
def test_what_is_no_table_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.json").write_bytes(data)
    with pytest.raises(ModelFormatError):
        Judge.load(tmp_path / "c.json")


def test_the_shipped_table_says_what_it_was_measured_on() -> None:
    table = msgspec.json.decode(confidence.SHIPPED.read_bytes(), type=Table)
    assert "smollm2-135m-instruct" in table.note
    assert confidence.SHIPPED.stat().st_size < 10_000
