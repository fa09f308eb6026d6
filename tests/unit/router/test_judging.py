from __future__ import annotations

import pytest

from edge_rt.router.judging import read_verdict, verdict_request
from edge_rt.types import GenerateRequest, Message, Sampling

ASKED = GenerateRequest(
    id="r",
    model="m",
    messages=(Message(role="user", content="2 + 2?"),),
    stop=("4",),
    sampling=Sampling(temperature=1.0),
    top_logprobs=2,
)


def test_question_and_answer_are_put_between_marks_and_nothing_else_goes_along() -> None:
    asked = verdict_request(ASKED, "It is 4.")
    assert asked is not None
    assert asked.messages is not None
    assert asked.messages[-1].content == "<question>\nuser: 2 + 2?\n</question>\n<answer>\nIt is 4.\n</answer>"
    assert (asked.stop, asked.sampling, asked.top_logprobs, asked.cache.no_store) == ((), Sampling(), None, True)


@pytest.mark.parametrize(("question", "answer"), [("", "x"), ("x", ""), ("x", "y" * 9000)])
def test_what_cannot_be_judged_is_not_sent(question: str, answer: str) -> None:
    assert verdict_request(GenerateRequest(id="r", model="m", prompt=question), answer) is None


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("GOOD", 1.0),
        (" **bad**.", 0.0),
        ("Good, because", 1.0),
        ("The answer is GOOD", None),
        ("GOODNESS", None),
        ("", None),
    ],
)
def test_only_a_plain_verdict_is_one(text: str, worth: float | None) -> None:
    assert read_verdict(text) == worth
