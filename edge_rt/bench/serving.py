"""Drives a running daemon with concurrent streams and measures what its clients see."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from edge_rt.api.status import rebuild
from edge_rt.bench.samples import quantile
from edge_rt.devices.base import Reading

_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
_N_POOL_WORDS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCase:
    """One load: n_streams clients send n_requests together. rate_hz 0 sends the next as soon as one has ended.

    With a rate, arrivals are Poisson and a request that finds all clients busy waits; its wait counts as latency.
    max_draft  tokens that may be guessed in a step; 0: how often a model repeats itself says nothing about the machine
    """

    model: str
    n_streams: int
    n_requests: int
    n_prompt: int
    n_gen: int
    rate_hz: float = 0.0
    max_draft: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one request met; times are from its arrival. error is '' for an answer that came whole."""

    error: str = ""
    ttft_s: float | None = None
    latency_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.completion_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    case: ServeCase
    elapsed_s: float
    outcomes: tuple[Outcome, ...]
    energy_j: Reading[float]

    def record(self) -> dict[str, Any]:
        """Make the JSON object; a percentile without samples is null."""
        done = [o for o in self.outcomes if not o.error]
        completion_tokens = sum(o.completion_tokens for o in done)
        energy_j = self.energy_j.value
        return {
            "model": self.case.model,
            "n_streams": self.case.n_streams,
            "n_requests": self.case.n_requests,
            "n_prompt": self.case.n_prompt,
            "n_gen": self.case.n_gen,
            "rate_hz": self.case.rate_hz or None,
            "elapsed_s": round(self.elapsed_s, 6),
            "n_done": len(done),
            "n_errors": len(self.outcomes) - len(done),
            "errors": dict(Counter(o.error for o in self.outcomes if o.error)),
            "prompt_tokens": sum(o.prompt_tokens for o in done),
            "cached_tokens": sum(o.cached_tokens for o in done),
            "completion_tokens": completion_tokens,
            "draft_n": sum(o.drafted_tokens for o in done),
            "draft_n_accepted": sum(o.accepted_tokens for o in done),
            "completion_tps": round(completion_tokens / self.elapsed_s, 3),
            "prompt_tps": round(sum(o.prompt_tokens - o.cached_tokens for o in done) / self.elapsed_s, 3),
            "requests_per_s": round(len(done) / self.elapsed_s, 4),
            **_percentiles("ttft", [o.ttft_s for o in done]),
            **_percentiles("tpot", [o.tpot_s for o in done]),
            **_percentiles("latency", [o.latency_s for o in done]),
            "energy_j": energy_j,
            "joules_per_token": round(energy_j / completion_tokens, 6) if energy_j and completion_tokens else None,
            "avg_watts": round(energy_j / self.elapsed_s, 4) if energy_j is not None else None,
            "energy_reason": "" if energy_j is not None else f"{self.energy_j.source}: {self.energy_j.reason}",
        }


class Energy(Protocol):
    """Tells the energy of a stretch of time; metering.Metering is one."""

    def mark(self) -> float: ...

    def joules_since(self, mark: float) -> Reading[float]: ...


class Driver:
    """Sends the load over one HTTP client."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        *,
        metering: Energy,
        announce: Callable[[str], None] = lambda _line: None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 42,
    ) -> None:
        self._client = client
        self._metering = metering
        self._announce = announce
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - reproducible on purpose
        self._pool: list[int] = []

    async def prepare(self, model: str) -> None:
        """Collect token ids that real text has, so that prompts have exactly the wanted length.

        Raises the error the daemon answers with.
        """
        words = " ".join(self._random.choices(_TEXT.split(), k=_N_POOL_WORDS))
        response = await self._client.post("/tokenize", json={"model": model, "content": words})
        if response.status_code != 200:
            raise rebuild(response.status_code, response.content)
        self._pool = response.json()["tokens"]

    async def run(self, case: ServeCase) -> ServeResult:
        """Send every request of a case and wait for all answers; failed ones are outcomes, not exceptions."""
        arrivals = self._arrivals(case)
        pending = iter(tuple(enumerate(arrivals)))
        prompts = [self._prompt(case.n_prompt) for _ in arrivals]
        outcomes: list[Outcome] = []
        mark = self._metering.mark()
        start = self._clock()

        async def stream() -> None:
            for number, arrival_s in pending:
                await asyncio.sleep(max(0.0, start + arrival_s - self._clock()))
                arrived = start + arrival_s if case.rate_hz else self._clock()
                outcomes.append(await self._ask(case, prompts[number], arrived))
                self._announce(f"{case.n_streams} streams: {len(outcomes)}/{case.n_requests} answered")

        await asyncio.gather(*(stream() for _ in range(case.n_streams)))
        elapsed_s = max(self._clock() - start, 1e-9)
        energy = self._metering.joules_since(mark)
        return ServeResult(case=case, elapsed_s=elapsed_s, outcomes=tuple(outcomes), energy_j=energy)

    def _arrivals(self, case: ServeCase) -> list[float]:
        if not case.rate_hz:
            return [0.0] * case.n_requests
        now, arrivals = 0.0, []
        for _ in range(case.n_requests):
            arrivals.append(now)
            now += self._random.expovariate(case.rate_hz)
        return arrivals

    def _prompt(self, n_tokens: int) -> list[int]:
        """Mix ids anew for each request: no two share a beginning that a prefix cache could answer from."""
        return [self._random.choice(self._pool) for _ in range(n_tokens)]

    async def _ask(self, case: ServeCase, prompt: Sequence[int], arrived: float) -> Outcome:
        body = {
            "model": case.model,
            "prompt": prompt,
            "max_tokens": case.n_gen,
            "temperature": 0.0,
            "ignore_eos": True,
            "speculative.n_max": case.max_draft,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s: float | None = None
        usage: dict[str, Any] | None = None
        timings: dict[str, Any] = {}
        finished = False
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    error = rebuild(response.status_code, await response.aread())
                    return Outcome(error=error.code, latency_s=self._clock() - arrived)
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    data = line.removeprefix("data: ")
                    event = json.loads(data)
                    if "error" in event:
                        return Outcome(error=rebuild(500, data.encode()).code, latency_s=self._clock() - arrived)
                    if event.get("choices") and first_s is None:
                        first_s = self._clock() - arrived
                    finished = finished or any(c.get("finish_reason") for c in event.get("choices", ()))
                    usage = event.get("usage") or usage
                    timings = event.get("timings") or timings
        except (httpx2.HTTPError, ValueError) as exc:
            return Outcome(error=type(exc).__name__, latency_s=self._clock() - arrived)
        if usage is None or not finished:
            return Outcome(error="answer ended early", latency_s=self._clock() - arrived)
        return Outcome(
            ttft_s=first_s,
            latency_s=self._clock() - arrived,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            completion_tokens=usage["completion_tokens"],
            drafted_tokens=timings.get("draft_n", 0),
            accepted_tokens=timings.get("draft_n_accepted", 0),
        )


def table(results: Sequence[ServeResult]) -> str:
    """Draw the results as a Markdown table, with the errors and what could not be read below it."""
    head = ["model", "streams", "requests", "errors", "prompt", "gen", "t/s", "req/s"]
    head += [f"{name} p50 / p90 / p99" for name in ("ttft ms", "tpot ms", "latency s")] + ["J/token"]
    records = [result.record() for result in results]
    has_guesses = any(result.case.max_draft for result in results)
    head += ["guesses right"] if has_guesses else []
    rows = [
        [
            r["model"],
            str(r["n_streams"]),
            str(r["n_requests"]),
            str(r["n_errors"]),
            str(r["n_prompt"]),
            str(r["n_gen"]),
            f"{r['completion_tps']:.2f}",
            f"{r['requests_per_s']:.2f}",
            _triple(r, "ttft", 1e3),
            _triple(r, "tpot", 1e3),
            _triple(r, "latency", 1),
            "-" if r["joules_per_token"] is None else f"{r['joules_per_token']:.4f}",
            *([f"{r['draft_n_accepted']} of {r['draft_n']}"] if has_guesses else []),
        ]
        for r in records
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [[cell.rjust(w) for cell, w in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * (w - 1) + ":" for w in widths])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    errors = sum((Counter(r["errors"]) for r in records), Counter[str]())
    notes = [f"error {name}: {n}" for name, n in errors.most_common()]
    notes += dict.fromkeys(f"J/token: {r['energy_reason']}" for r in records if r["energy_reason"])
    return text + ("\n" + "\n".join(notes) + "\n" if notes else "")


def _triple(record: dict[str, Any], name: str, factor: float) -> str:
    found = [record[f"{name}_p{p}_s"] for p in (50, 90, 99)]
    return " / ".join(f"{factor * s:.2f}" for s in found) if None not in found else "-"


def _percentiles(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    known = [v for v in values if v is not None]
    return {f"{name}_p{p}_s": round(quantile(known, p / 100), 6) if known else None for p in (50, 90, 99)}
