"""Requests over time, drawn from a seed: the same for every governor that is compared.

How much longer or shorter a request's tokens take than its neighbours' is drawn here too, so that no governor has luck.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """n_prompt counts tokens that no kept prefix holds; the factors are relative times per token.

    told_factor  by how much the front process, which has no tokenizer, is wrong about n_prompt
    """

    arrival_s: float
    n_prompt: int
    n_output: int
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    told_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """frames_hz: frames of a CNN that come beside the requests, evenly."""

    name: str
    span_s: float
    requests: tuple[Request, ...]
    frames_hz: float = 0.0


def poisson(seed: int, *, rate_hz: float, span_s: float) -> Trace:
    """Requests that know nothing of each other."""
    rng = random.Random(f"poisson {rate_hz} {seed}")
    times = _poisson_times(rng, rate_hz, 0.0, span_s)
    return Trace(name=f"poisson {rate_hz:g}/s", span_s=span_s, requests=tuple(_chat(rng, t) for t in times))


def bursts(seed: int, *, span_s: float) -> Trace:
    """A Markov-modulated process: quiet minutes at 0.02/s, bursts of some 20 s at 0.6/s."""
    rng = random.Random(f"bursts {seed}")
    times: list[float] = []
    now_s, is_burst = 0.0, False
    while now_s < span_s:
        length_s = rng.expovariate(1 / 20.0) if is_burst else rng.expovariate(1 / 120.0)
        times += _poisson_times(rng, 0.6 if is_burst else 0.02, now_s, min(now_s + length_s, span_s))
        now_s, is_burst = now_s + length_s, not is_burst
    return Trace(name="bursts", span_s=span_s, requests=tuple(_chat(rng, t) for t in times))


def diurnal(seed: int, *, span_s: float) -> Trace:
    """A day in span_s: the rate swings between 0 and 0.16/s, by thinning."""
    rng = random.Random(f"diurnal {seed}")
    times = [
        t
        for t in _poisson_times(rng, 0.16, 0.0, span_s)
        if rng.random() < 0.5 - 0.5 * math.cos(2 * math.pi * t / span_s)
    ]
    return Trace(name="diurnal", span_s=span_s, requests=tuple(_chat(rng, t) for t in times))


def mixed(seed: int, *, span_s: float) -> Trace:
    """10 frames/s of a CNN beside 0.03 requests/s."""
    drawn = poisson(seed, rate_hz=0.03, span_s=span_s)
    return Trace(name="CNN 10/s + 0.03/s", span_s=span_s, requests=drawn.requests, frames_hz=10.0)


def long_context(seed: int, *, span_s: float) -> Trace:
    """Prompts of 500 to 4,000 tokens and short answers, 0.01/s."""
    rng = random.Random(f"long {seed}")
    requests = tuple(
        Request(
            arrival_s=t,
            n_prompt=int(math.exp(rng.uniform(math.log(500), math.log(4000)))),
            n_output=rng.randint(16, 128),
            prefill_factor=rng.lognormvariate(0.0, 0.03),
            decode_factor=rng.lognormvariate(0.0, 0.03),
            told_factor=rng.lognormvariate(0.0, 0.2),
        )
        for t in _poisson_times(rng, 0.01, 0.0, span_s)
    )
    return Trace(name="long context", span_s=span_s, requests=requests)


def _poisson_times(rng: random.Random, rate_hz: float, start_s: float, end_s: float) -> list[float]:
    def times() -> Iterator[float]:
        now_s = start_s
        while (now_s := now_s + rng.expovariate(rate_hz)) < end_s:
            yield now_s

    return list(times())


def _chat(rng: random.Random, arrival_s: float) -> Request:
    """A turn of a conversation whose earlier turns are kept: median 50 new tokens, about 128 of answer."""
    return Request(
        arrival_s=arrival_s,
        n_prompt=min(max(int(rng.lognormvariate(math.log(50), 0.6)), 8), 1500),
        n_output=min(max(int(rng.lognormvariate(math.log(100), 0.7)), 4), 600),
        prefill_factor=rng.lognormvariate(0.0, 0.03),
        decode_factor=rng.lognormvariate(0.0, 0.03),
        told_factor=rng.lognormvariate(0.0, 0.2),
    )
