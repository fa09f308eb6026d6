"""Looks for devices that take long, by hand: nothing here waits for a time to pass but for what must not come."""

from __future__ import annotations

import threading

import pytest

from edge_rt.backends.npu.looks import Looks
from tests.patience import PATIENCE_S, until

SOON_S = 0.01  # for what has not come by then and must not


class Library:
    """Answers each look when it is told to."""

    def __init__(self) -> None:
        self.ends: list[threading.Event] = []
        self.results: list[object] = []
        self.n_done = 0

    def __call__(self) -> object:
        number, end = len(self.ends), threading.Event()
        self.results.append(None)
        self.ends.append(end)
        assert end.wait(PATIENCE_S)
        result = self.results[number]
        self.n_done += 1
        if isinstance(result, Exception):
            raise result
        return result

    def end(self, number: int, result: object) -> None:
        self.results[number] = result
        self.ends[number].set()
        until(lambda: self.n_done >= sum(end.is_set() for end in self.ends))


def late(looks: Looks[object], library: Library) -> None:
    """Ask in vain."""
    n_begun = len(library.ends)
    with pytest.raises(TimeoutError):
        looks.ask(SOON_S)
    until(lambda: len(library.ends) == n_begun + 1)


def test_a_look_that_was_not_waited_for_answers_the_next_question() -> None:
    library = Library()
    looks: Looks[object] = Looks(library)
    late(looks, library)
    library.end(0, "found")
    assert looks.ask(SOON_S) == "found"
    until(lambda: len(library.ends) == 2)
    library.end(1, "older than what comes next")
    late(looks, library)


def test_one_that_hangs_keeps_nobody_from_the_new_one() -> None:
    library = Library()
    looks: Looks[object] = Looks(library)
    late(looks, library)

    def answer() -> None:
        until(lambda: len(library.ends) == 2)
        library.end(1, "found")

    helper = threading.Thread(target=answer)
    helper.start()
    assert looks.ask(PATIENCE_S) == "found"
    helper.join()
    library.end(0, None)


def test_several_may_ask_at_a_time() -> None:
    library = Library()
    looks: Looks[object] = Looks(library)
    answers: list[object] = []
    first = threading.Thread(target=lambda: answers.append(looks.ask(PATIENCE_S)))
    first.start()
    until(lambda: len(library.ends) == 1)
    second = threading.Thread(target=lambda: answers.append(looks.ask(PATIENCE_S)))
    second.start()
    until(lambda: len(library.ends) == 2)
    library.end(1, "by the second")
    second.join()
    library.end(0, "by the first")
    first.join()
    assert answers == ["by the second", "by the first"]


def test_what_an_old_one_raises_is_nothing_and_what_the_new_one_raises_is_told() -> None:
    library = Library()
    looks: Looks[object] = Looks(library)
    late(looks, library)
    library.end(0, ValueError("old"))
    late(looks, library)
    library.end(1, "found")
    assert looks.ask(SOON_S) == "found"
    with pytest.raises(ZeroDivisionError):
        Looks(lambda: 1 / 0).ask(PATIENCE_S)
