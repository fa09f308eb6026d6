"""Who answers, with models, cloud, router and cache that do as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from edge_rt.answering import Answering
from edge_rt.errors import CloudAnswerError, CloudUnreachableError, MustStayError, NotCachedError, ShuttingDownError
from edge_rt.router.decide import Decision
from edge_rt.types import (
    CacheState,
    CacheWishes,
    Choice,
    Chunk,
    GenerateRequest,
    Origin,
    Route,
    Timings,
    TokenSignal,
    Usage,
)
from tests import virtual_time

USAGE = Usage(prompt_tokens=3, completion_tokens=4)
TIMINGS = Timings(queue_s=0, prefill_s=0.1, prefill_tokens=3, decode_s=0.3, decode_tokens=3, ttft_s=0.1)
ASKED = GenerateRequest(id="r", model="m", prompt="why?")


@dataclass
class FakeModel:
    """Says words, a chunk each; fails before the word fails_at."""

    words: Sequence[str] = ("so ", "it ", "is ", "here")
    fails_at: int | None = None
    wait_s: float = 0.0
    error: Exception = field(default_factory=lambda: CloudUnreachableError(endpoint="c", reason="down"))
    asked: list[GenerateRequest] = field(default_factory=list)
    n_open: int = 0
    n_said: int = 0

    async def local(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._say(request, None)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(
        self, request: GenerateRequest, *, due_at_s: float | None = None, reason: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        del due_at_s
        async with aclosing(self._say(request, Origin(endpoint="c", reason=reason))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _say(self, request: GenerateRequest, origin: Origin | None) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        self.n_open += 1
        try:
            for i, word in enumerate(self.words):
                await asyncio.sleep(self.wait_s)
                if i == self.fails_at:
                    raise self.error
                self.n_said += 1
                is_last = i == len(self.words) - 1
                signal = (TokenSignal(logprob=-1.0, margin=0.1, entropy=3.0),) if i < request.max_signals else ()
                yield Chunk(
                    text=word,
                    signals=signal,
                    origin=origin if i == 0 else replace(origin, cost=0.5) if origin and is_last else None,
                    finish_reason="stop" if is_last else None,
                    usage=USAGE if is_last else None,
                    timings=TIMINGS if is_last else None,
                )
        finally:
            self.n_open -= 1


SIMPLE = Choice(where="local", reason="simple")
PROBATION = Choice(where="local", reason="unclear", on_probation=True)
TO_CLOUD = Choice(where="cloud", reason="hard")


@dataclass
class FakeRouter:
    choice: Choice = SIMPLE
    doubts: bool = False
    doubted: list[tuple[str, int, bool]] = field(default_factory=list)
    asks_verdict: bool = False
    ended: list[Origin] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def choose(self, request: GenerateRequest) -> Choice:
        return self.choice

    def explain(self, request: GenerateRequest) -> Decision:
        return Decision(where="cloud", reason="hard", may_go=True, lines=("told",), threshold=0.0)

    def is_doubtful(
        self, request: GenerateRequest, text: str, signals: Sequence[TokenSignal], *, is_whole: bool
    ) -> bool:
        self.doubted.append((text, len(signals), is_whole))
        return self.doubts

    def feedback(self, request_id: str, tenant: str, *, is_good: bool) -> None:
        self.told.append(f"{request_id} {is_good}")

    def repeated(self, request: GenerateRequest) -> None:
        self.told.append("again")

    def wants_verdict(self, request: GenerateRequest, origin: Origin, answer: str) -> bool:
        return self.asks_verdict and not origin.endpoint

    def judged(self, request: GenerateRequest, worth: float) -> None:
        self.told.append(f"{request.id} {worth}")

    def finished(self, request: GenerateRequest, origin: Origin, last: Chunk) -> None:
        self.ended.append(origin)


@dataclass
class FakeHedging:
    wait_s: float | None = 0.0
    n_left: int = 1

    def after_s(self, where: str) -> float | None:
        return self.wait_s

    def take(self) -> bool:
        self.n_left -= 1
        return self.n_left >= 0


@dataclass
class FakeEvents:
    lines: list[str] = field(default_factory=list)

    def routed(self, where: str, reason: str) -> None:
        self.lines.append(f"{where} {reason}")

    def handed_over(self, reason: str) -> None:
        self.lines.append(reason)


@dataclass
class FakeLookup:
    state: CacheState
    stored: tuple[Chunk, ...] | None = None
    key: bytes | None = None
    is_repeated: bool = False
    added: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.added.append(chunk)


@dataclass
class FakeCache:
    lookup: FakeLookup
    joined: list[bytes] = field(default_factory=list)

    async def look_up(self, request: GenerateRequest) -> FakeLookup:
        return self.lookup

    def join(
        self, key: bytes, start: Callable[[], AsyncGenerator[Chunk, None]], *, deadline_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        self.joined.append(key)
        return start()


@dataclass
class Bench:
    """All parts; set them before ask."""

    device: FakeModel = field(default_factory=lambda: FakeModel(words=("de", "vi", "ce ", "says")))
    cloud: FakeModel = field(default_factory=lambda: FakeModel(words=("cl", "oud ", "says")))
    router: FakeRouter = field(default_factory=FakeRouter)
    events: FakeEvents = field(default_factory=FakeEvents)
    cache: FakeCache | None = None
    hedging: FakeHedging | None = None
    hold_back_tokens: int = 2

    def ask(self, request: GenerateRequest = ASKED, n: int | None = None) -> list[Chunk]:
        """Read an answer, or its first n chunks and hang up."""

        async def read() -> list[Chunk]:
            answering = Answering(
                self.device.local,
                self.events,
                cache=self.cache,
                cloud=self.cloud,
                router=self.router,
                hedging=self.hedging,
                hold_back_tokens=self.hold_back_tokens,
            )
            chunks: list[Chunk] = []
            async with aclosing(answering.generate(request)) as answer:
                async for chunk in answer:
                    chunks.append(chunk)
                    if len(chunks) == n:
                        break
            await answering.settle()
            await answering.close(0)
            return chunks

        chunks = asyncio.run(read())
        assert (self.device.n_open, self.cloud.n_open) == (0, 0)
        return chunks


def text(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_the_first_chunk_says_where_the_answer_comes_from() -> None:
    chunks = Bench().ask()
    assert text(chunks) == "device says"
    assert [chunk.origin for chunk in chunks] == [Origin(reason="simple"), None, None, None]


def test_without_a_router_every_request_stays_and_the_cloud_cannot_be_asked() -> None:
    async def ask(request: GenerateRequest) -> list[Chunk]:
        return [chunk async for chunk in Answering(FakeModel().local, FakeEvents()).generate(request)]

    assert asyncio.run(ask(ASKED))[0].origin == Origin(reason="no-cloud")
    with pytest.raises(MustStayError, match=r"no \[cloud.NAME\]"):
        asyncio.run(ask(replace(ASKED, route="cloud")))


def test_a_decision_is_explained() -> None:
    bench = Bench()
    routed = Answering(bench.device.local, bench.events, cloud=bench.cloud, router=bench.router)
    assert routed.explain(ASKED).lines == ("told",)
    alone = Answering(bench.device.local, bench.events)
    assert (alone.explain(ASKED).where, alone.explain(ASKED).reason) == ("local", "no-cloud")
    assert alone.explain(replace(ASKED, route="cloud")).where == "refused"


def test_the_clouds_answer_comes_with_its_cost_and_the_device_does_nothing() -> None:
    bench = Bench(router=FakeRouter(TO_CLOUD))
    chunks = bench.ask()
    assert text(chunks) == "cloud says"
    assert chunks[0].origin == Origin(endpoint="c", reason="hard")
    assert chunks[-1].origin == Origin(endpoint="c", reason="hard", cost=0.5)
    assert (bench.device.asked, bench.router.ended) == ([], [chunks[-1].origin])


@pytest.mark.parametrize("route", ["auto", "cloud"])
def test_when_the_cloud_fails_before_its_first_text_the_device_answers_and_says_so(route: Route) -> None:
    bench = Bench(router=FakeRouter(TO_CLOUD), cloud=FakeModel(fails_at=0))
    chunks = bench.ask(replace(ASKED, route=route))
    assert text(chunks) == "device says"
    assert chunks[0].origin == Origin(reason="cloud-failed")
    assert bench.events.lines == ["cloud hard", "cloud-failed"]


@pytest.mark.parametrize("router", [FakeRouter(TO_CLOUD), FakeRouter(PROBATION, doubts=True)])
def test_an_answer_that_has_begun_is_never_continued_by_the_device(router: FakeRouter) -> None:
    broken = CloudAnswerError(endpoint="c", problem="cut")
    bench = Bench(router=router, cloud=FakeModel(fails_at=1, error=broken))
    with pytest.raises(CloudAnswerError):
        bench.ask()


def test_on_probation_a_confident_answer_is_the_devices_own_whole_one() -> None:
    bench = Bench(router=FakeRouter(PROBATION))
    chunks = bench.ask()
    assert text(chunks) == "device says"
    assert bench.router.doubted == [("devi", 2, False)]
    assert all(not chunk.signals for chunk in chunks)  # for the router, not for clients
    assert bench.cloud.asked == []
    assert bench.device.asked[0].max_signals == 2


def test_on_probation_a_doubtful_answer_is_replaced_before_a_character_leaves() -> None:
    bench = Bench(router=FakeRouter(PROBATION, doubts=True))
    chunks = bench.ask()
    assert text(chunks) == "cloud says"
    assert chunks[0].origin == Origin(endpoint="c", reason="not-sure")
    assert bench.cloud.asked == [ASKED]  # the request as it came
    assert bench.device.n_said == 2


def test_on_probation_the_devices_answer_stands_if_the_cloud_fails() -> None:
    bench = Bench(router=FakeRouter(PROBATION, doubts=True), cloud=FakeModel(fails_at=0))
    chunks = bench.ask()
    assert text(chunks) == "device says"
    assert chunks[0].origin == Origin(reason="cloud-failed")
    assert len(bench.device.asked) == 1  # nothing is computed twice
    assert bench.events.lines == ["local unclear", "not-sure", "cloud-failed"]


def test_on_probation_an_answer_shorter_than_what_is_held_back_is_judged_at_its_end() -> None:
    bench = Bench(router=FakeRouter(PROBATION), device=FakeModel(words=("yes",)), hold_back_tokens=16)
    assert text(bench.ask()) == "yes"
    assert bench.router.doubted == [("yes", 1, True)]


@pytest.mark.parametrize("router", [FakeRouter(), FakeRouter(TO_CLOUD), FakeRouter(PROBATION, doubts=True)])
def test_a_client_that_leaves_stops_whoever_answers(router: FakeRouter) -> None:
    assert len(Bench(router=router).ask(n=1)) == 1  # ask checks that nothing is left open


# -- the end


def closing(wait_s: float, drain_s: float) -> tuple[str, type[BaseException] | None, float]:
    """Close while the cloud says two words, wait_s before each; give what was said, the error, and how long it took."""

    async def main() -> tuple[str, type[BaseException] | None, float]:
        cloud = FakeModel(words=("on ", "and on"), wait_s=wait_s)
        hung_up = asyncio.Event()

        class Cloud:
            async def generate(
                self, request: GenerateRequest, *, due_at_s: float | None = None, reason: str = ""
            ) -> AsyncGenerator[Chunk, None]:
                del due_at_s
                answer = cloud.generate(request, reason=reason)
                yield await anext(answer)
                ended = asyncio.ensure_future(hung_up.wait())
                more = asyncio.ensure_future(anext(answer))
                await asyncio.wait((ended, more), return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if not more.done():
                    more.cancel()
                    await asyncio.gather(more, return_exceptions=True)
                    raise CloudAnswerError(endpoint="c", problem="hung up")
                yield more.result()

        answering = Answering(FakeModel().local, FakeEvents(), cloud=Cloud(), router=FakeRouter(TO_CLOUD))
        said: list[str] = []

        async def read() -> None:
            async for chunk in answering.generate(ASKED):
                said.append(chunk.text)  # noqa: PERF401 - what came before an error counts

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(1.5 * wait_s)
        began_s = asyncio.get_running_loop().time()
        await answering.close(drain_s)
        took_s = asyncio.get_running_loop().time() - began_s
        hung_up.set()
        (error,) = await asyncio.gather(reading, return_exceptions=True)
        with pytest.raises(ShuttingDownError):
            await anext(answering.generate(ASKED))
        return "".join(said), type(error) if error else None, took_s

    return virtual_time.run(main())


def test_closing_waits_for_answers_from_the_cloud() -> None:
    assert closing(wait_s=1.0, drain_s=4.0) == ("on and on", None, pytest.approx(0.5))


def test_what_is_not_done_in_time_ends_as_the_daemon_does() -> None:
    assert closing(wait_s=10.0, drain_s=2.0) == ("on ", ShuttingDownError, pytest.approx(2.0))


# -- what is learnt


@pytest.mark.parametrize(
    ("verdict", "told"), [(("GOOD",), ["r 1.0"]), (("B", "AD."), ["r 0.0"]), (("maybe",), []), (("GOOD", "x"), [])]
)
def test_the_cloud_judges_an_answer_in_the_background(verdict: tuple[str, ...], told: list[str]) -> None:
    cloud = FakeModel(words=verdict, fails_at=1 if verdict[-1] == "x" else None)
    bench = Bench(router=FakeRouter(asks_verdict=True), cloud=cloud)
    assert text(bench.ask()) == "device says"
    assert bench.router.told == told
    assert "device says" in str(cloud.asked[0].messages)


def test_the_clouds_own_answers_are_not_judged_by_it() -> None:
    bench = Bench(router=FakeRouter(TO_CLOUD, asks_verdict=True))
    bench.ask()
    assert len(bench.cloud.asked) == 1


def test_who_asks_again_at_once_is_reported() -> None:
    bench = Bench(cache=FakeCache(FakeLookup("bypass", is_repeated=True)))
    bench.ask()
    assert bench.router.told == ["again"]


# -- when one is late


def test_who_is_late_is_hedged_by_the_other() -> None:
    bench = Bench(
        router=FakeRouter(replace(SIMPLE, may_go=True)), hedging=FakeHedging(), device=FakeModel(wait_s=3600.0)
    )
    chunks = bench.ask()
    assert text(chunks) == "cloud says"
    assert chunks[0].origin == Origin(endpoint="c", reason="device-late")


@pytest.mark.parametrize(
    ("choice", "asked", "hedging"),
    [
        (replace(SIMPLE, may_go=True), ASKED, FakeHedging(wait_s=None)),
        (replace(SIMPLE, may_go=True), ASKED, FakeHedging(n_left=0)),
        (replace(SIMPLE, may_go=True), replace(ASKED, route="local"), FakeHedging()),
        (SIMPLE, ASKED, FakeHedging()),
    ],
)
def test_what_may_not_go_or_is_not_late_is_asked_once(
    choice: Choice, asked: GenerateRequest, hedging: FakeHedging
) -> None:
    bench = Bench(router=FakeRouter(choice), hedging=hedging)
    assert text(bench.ask(asked)) == "device says"
    assert bench.cloud.asked == []


# -- with a cache


def test_a_stored_answer_is_given_and_nobody_is_asked() -> None:
    stored = (
        Chunk(text="known", finish_reason="stop", usage=USAGE, timings=TIMINGS, origin=Origin(cache="hit-exact")),
    )
    bench = Bench(cache=FakeCache(FakeLookup("miss", stored)))
    assert bench.ask() == list(stored)
    assert (bench.device.asked, bench.cloud.asked) == ([], [])


def test_a_computed_answer_is_stored_with_where_it_came_from() -> None:
    lookup = FakeLookup("miss", key=b"k")
    bench = Bench(router=FakeRouter(TO_CLOUD), cache=FakeCache(lookup))
    chunks = bench.ask()
    assert chunks[0].origin == Origin(endpoint="c", reason="hard", cache="miss")
    assert lookup.added == chunks
    assert chunks[-1].origin == Origin(endpoint="c", reason="hard", cache="miss", cost=0.5)
    assert bench.cache is not None
    assert bench.cache.joined == [b"k"]


def test_an_answer_that_broke_off_or_was_left_never_ends_for_the_cache() -> None:
    lookup = FakeLookup("miss")
    assert len(Bench(cache=FakeCache(lookup)).ask(n=2)) == 2
    with pytest.raises(CloudAnswerError):
        Bench(
            device=FakeModel(fails_at=2, error=CloudAnswerError(endpoint="c", problem="cut")), cache=FakeCache(lookup)
        ).ask()
    assert all(chunk.finish_reason is None for chunk in lookup.added)


def test_only_if_cached_computes_nothing() -> None:
    bench = Bench(cache=FakeCache(FakeLookup("miss")))
    with pytest.raises(NotCachedError):
        bench.ask(replace(ASKED, cache=CacheWishes(only_if_cached=True)))
    assert bench.device.asked == []
