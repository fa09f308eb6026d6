"""Two sources of one answer. Waiting takes no time: the loop's clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from edge_rt.cloud.hedge import HedgePolicy, Source, hedged
from edge_rt.types import Chunk
from tests import virtual_time


class Script:
    """A source that says its texts, each after a pause; what is an error is raised."""

    def __init__(self, *steps: tuple[float, str | Exception]) -> None:
        self.steps = steps
        self.n_begun = self.n_closed = 0

    async def __call__(self) -> AsyncGenerator[Chunk, None]:
        self.n_begun += 1
        try:
            for pause_s, said in self.steps:
                await asyncio.sleep(pause_s)
                if isinstance(said, Exception):
                    raise said
                yield Chunk(text=said)
            yield Chunk(text="", finish_reason="stop")
        finally:
            self.n_closed += 1


def run(
    first: Source, second: Source, *, after_s: float = 1.0, may: Callable[[], bool] = lambda: True
) -> tuple[str, float]:
    """Give the answer and how long it took."""

    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        texts = [chunk.text async for chunk in hedged(first, second, after_s=after_s, may=may)]
        return "".join(texts), round(loop.time() - began_s, 3)

    return virtual_time.run(main())


def test_a_first_source_in_time_is_alone() -> None:
    first, second = Script((0.9, "a"), (5.0, "b")), Script((0.0, "x"))
    assert run(first, second) == ("ab", 5.9)
    assert (second.n_begun, first.n_closed) == (0, 1)


def test_a_second_source_helps_a_late_one() -> None:
    first, second = Script((9.0, "a")), Script((0.5, "x"), (0.5, "y"))
    assert run(first, second) == ("xy", 2.0)
    assert (first.n_closed, second.n_closed) == (1, 1)


def test_a_late_first_source_may_still_win() -> None:
    first, second = Script((1.5, "a")), Script((9.0, "x"))
    assert run(first, second) == ("a", 1.5)
    assert second.n_closed == 1


def test_where_none_is_left_the_first_source_is_waited_for() -> None:
    second = Script((0.0, "x"))
    assert run(Script((9.0, "a")), second, may=lambda: False) == ("a", 9.0)
    assert second.n_begun == 0


def test_a_first_source_that_fails_is_made_up_for_at_once() -> None:
    assert run(Script((0.2, ValueError())), Script((0.3, "x"))) == ("x", 0.5)


def test_an_error_of_the_second_source_is_not_the_answer_s() -> None:
    assert run(Script((3.0, "a")), Script((0.1, ValueError()))) == ("a", 3.0)


def test_the_first_source_s_error_is_told_where_both_fail() -> None:
    with pytest.raises(KeyError):
        run(Script((1.2, KeyError())), Script((0.1, ValueError())))
    with pytest.raises(KeyError):
        run(Script((0.1, KeyError())), Script((0.1, ValueError())), may=lambda: False)


def test_what_fails_after_its_text_fails() -> None:
    with pytest.raises(ValueError, match="late"):
        run(Script((0.1, "a"), (0.1, ValueError("late"))), Script((0.0, "x")))


def test_empty_pieces_win_nothing() -> None:
    assert run(Script((0.1, ""), (9.0, "a")), Script((0.1, "x"))) == ("x", 1.1)


def test_an_empty_answer_is_an_answer() -> None:
    second = Script((0.0, "x"))
    assert run(Script(), second)[0] == ""
    assert second.n_begun == 0


@pytest.mark.parametrize("leave_after_s", [0.5, 1.5])
def test_leaving_stops_both(leave_after_s: float) -> None:
    first, second = Script((9.0, "a")), Script((9.0, "x"))

    async def main() -> None:
        async with aclosing(hedged(first, second, after_s=1.0, may=lambda: True)) as answer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(answer), leave_after_s)

    virtual_time.run(main())
    assert first.n_begun == first.n_closed == 1
    assert second.n_begun == second.n_closed == (leave_after_s > 1)


def test_few_requests_are_asked_twice() -> None:
    policy = HedgePolicy(0.05)
    n_taken = sum(policy.after_s(1.0, 100) is not None and policy.take() for _ in range(1000))
    assert 40 <= n_taken <= 53
    assert policy.after_s(1.0, 3) is None
    assert policy.after_s(None, 100) is None
