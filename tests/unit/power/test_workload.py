from __future__ import annotations

import asyncio
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

from edge_rt.power.state import Hint
from edge_rt.power.workload import Workload, estimated_tokens
from edge_rt.types import GenerateRequest, Message
from tests import virtual_time

REQUEST = ContextVar("REQUEST", default="none")


@dataclass
class Ear:
    problem: str = ""
    hints: list[Hint] = field(default_factory=list)
    is_closed: bool = False

    def send(self, hint: Hint) -> bool:
        self.hints.append(hint)
        return not self.problem

    def close(self) -> None:
        self.is_closed = True

    @property
    def works(self) -> list[str]:
        return [hint.work for hint in self.hints]


def asked(model: str, n_tokens: int) -> GenerateRequest:
    return GenerateRequest(id="r", model=model, prompt_token_ids=(7,) * n_tokens)


def make(ear: Ear | None) -> Workload:
    return Workload(ear, ttft_slo_s=1.0, n_threads=lambda: 3)


def test_one_answer_from_its_arrival_to_its_end() -> None:
    async def main() -> None:
        ear, loop = Ear(), asyncio.get_running_loop()
        workload = make(ear)
        begun_s = loop.time()
        with workload.answer(asked("m", 40)) as progress:
            progress.begin()
            await asyncio.sleep(0)
            await asyncio.sleep(0.3)
            progress.came(1)
            await asyncio.sleep(0.05)
            for _ in range(10):
                progress.came(2)
                await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        first, *_, last = ear.hints
        # Before the work begins, and with all that is known of it.
        assert first == Hint(
            work="prefill", n_running=1, n_prompt_tokens=40, ttft_left_s=1.0, n_threads=3, sent_s=begun_s
        )
        assert last.work == "idle"
        assert ear.works[0:3] == ["prefill", "decode", "decode"]
        decoding = [hint for hint in ear.hints if hint.work == "decode"]
        assert decoding[0].sent_s == begun_s + 0.3  # at the change, which ends the span in which it prefilled
        assert decoding[-1].tpot_s is not None
        assert 0.03 < decoding[-1].tpot_s < 0.06
        assert decoding[-1].n_prompt_tokens == 0
        assert decoding[-1].ttft_left_s is None

    virtual_time.run(main())


def test_hints_belong_to_no_request() -> None:
    """What is logged beside them would have the id of whichever came last."""

    async def main() -> None:
        seen: list[str] = []

        class Listener(Ear):
            def send(self, hint: Hint) -> bool:
                seen.append(REQUEST.get())
                return super().send(hint)

        workload = make(Listener())
        REQUEST.set("r-7")
        with workload.answer(asked("m", 40)):
            await asyncio.sleep(2)
        assert set(seen) == {"none"}

    virtual_time.run(main())


def test_hints_are_repeated_while_there_is_work_and_only_then() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        with workload.answer(asked("m", 4000)) as progress:
            progress.begin()
            await asyncio.sleep(10)
        assert 20 <= len(ear.hints) <= 22
        assert ear.hints[-1].ttft_left_s is not None
        assert ear.hints[-1].ttft_left_s < -8
        await asyncio.sleep(0.2)
        n_hints = len(ear.hints)
        assert ear.hints[-1].work == "idle"
        await asyncio.sleep(60)
        assert len(ear.hints) == n_hints

    virtual_time.run(main())


def test_what_has_no_place_yet_waits() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        with ExitStack() as stack:
            first = stack.enter_context(workload.answer(asked("m", 10)))
            first.begin()
            await asyncio.sleep(0.1)
            first.came(1)
            await asyncio.sleep(0.1)
            assert (ear.hints[-1].work, ear.hints[-1].n_waiting) == ("decode", 0)
            stack.enter_context(workload.answer(asked("m", 20)))
            await asyncio.sleep(0.03)
            assert (ear.hints[-1].work, ear.hints[-1].n_waiting, ear.hints[-1].n_running) == ("prefill", 1, 1)
            assert ear.hints[-1].n_prompt_tokens == 20
        await asyncio.sleep(1)
        assert ear.hints[-1] == Hint(work="idle", n_threads=3, sent_s=ear.hints[-1].sent_s)

    virtual_time.run(main())


def test_tensor_requests_are_those_of_the_queue_that_are_no_answers() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        workload.queue_changed("vision", running=1, waiting=0)
        await asyncio.sleep(0.01)
        assert (ear.hints[-1].work, ear.hints[-1].n_running) == ("prefill", 1)
        workload.queue_changed("vision", running=4, waiting=2)
        await asyncio.sleep(0.06)
        assert (ear.hints[-1].n_running, ear.hints[-1].n_waiting) == (4, 2)
        with workload.answer(asked("text", 10)) as progress:
            workload.queue_changed("text", running=1, waiting=0)
            progress.begin()
            await asyncio.sleep(0.06)
            assert (ear.hints[-1].n_running, ear.hints[-1].n_waiting) == (5, 2)
            workload.queue_changed("vision", running=0, waiting=0)
            progress.came(1)
            await asyncio.sleep(0.06)
            assert (ear.hints[-1].work, ear.hints[-1].n_running) == ("decode", 1)
        workload.queue_changed("text", running=0, waiting=0)
        await asyncio.sleep(1)
        assert ear.hints[-1].work == "idle"

    virtual_time.run(main())


def test_many_short_requests_share_hints() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        for _ in range(1000):  # two seconds of requests one after the other
            workload.queue_changed("vision", running=1, waiting=0)
            await asyncio.sleep(0.0018)
            workload.queue_changed("vision", running=0, waiting=0)
            await asyncio.sleep(0.0002)
        assert len(ear.hints) <= 2 / 0.05 + 5
        assert set(ear.works) <= {"prefill", "idle"}
        assert ear.works[0] == "prefill"
        await asyncio.sleep(0.2)
        assert ear.works[-1] == "idle"

    virtual_time.run(main())


def test_a_burst_is_told_at_most_every_20_ms() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(workload.answer(asked("m", 10))).begin()
                await asyncio.sleep(0.001)
        assert 2 <= len(ear.hints) <= 7

    virtual_time.run(main())


def test_whether_powerd_listens() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        assert not workload.is_heard
        with workload.answer(asked("m", 10)):
            await asyncio.sleep(0.1)
            assert workload.is_heard
            ear.problem = "gone"
            assert not workload.is_heard
        workload.close()
        assert ear.is_closed
        n_hints = len(ear.hints)
        with workload.answer(asked("m", 10)) as progress:
            progress.begin()
            progress.came(1)
            workload.queue_changed("m", running=1, waiting=0)
            await asyncio.sleep(10)
        assert len(ear.hints) == n_hints

    virtual_time.run(main())


def test_without_a_sender_nothing_is_scheduled() -> None:
    async def main() -> None:
        workload = make(None)
        with workload.answer(asked("m", 10)) as progress:
            progress.begin()
            workload.queue_changed("m", running=1, waiting=0)
            progress.came(1)
            assert workload._timer is None
            assert workload.hint(0.0).work == "decode"
        assert not workload.is_heard
        workload.close()

    virtual_time.run(main())


def test_a_prompts_tokens_are_estimated_by_its_length() -> None:
    assert estimated_tokens(GenerateRequest(id="r", model="m", prompt="x" * 400)) == 100
    assert estimated_tokens(GenerateRequest(id="r", model="m", prompt="")) == 1
    messages = (Message(role="system", content="x" * 100), Message(role="user", content="y" * 300))
    assert estimated_tokens(GenerateRequest(id="r", model="m", messages=messages)) == 100
    assert estimated_tokens(asked("m", 7)) == 7


def test_a_prompt_counts_the_tokens_that_are_computed_once_the_engine_says_so() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        with workload.answer(asked("m", 400)) as progress:
            progress.begin()
            await asyncio.sleep(0.03)
            progress.found(30)
            await asyncio.sleep(0.3)
            progress.came(1)
            progress.found(7)  # told again by a worker that took over: the prompt is done
            await asyncio.sleep(0.3)
        prefill = [hint.n_prompt_tokens for hint in ear.hints if hint.work == "prefill"]
        assert prefill[0] == 400
        assert set(prefill[1:]) == {30}
        assert {hint.n_prompt_tokens for hint in ear.hints if hint.work == "decode"} == {0}

    virtual_time.run(main())


def test_a_prompt_that_is_kept_whole_is_still_one_token() -> None:
    async def main() -> None:
        ear = Ear()
        workload = make(ear)
        with workload.answer(asked("m", 400)) as progress:
            progress.found(0)
            assert workload.hint(0.0).n_prompt_tokens == 1

    virtual_time.run(main())
