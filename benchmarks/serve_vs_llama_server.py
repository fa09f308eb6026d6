"""Many clients at once: edge_rt's daemon against llama-server, the same file, in turns, the same seeded load.

    python benchmarks/serve_vs_llama_server.py [--load streams|tenants|stall|json|restart|all] [--backend native]

streams  1, 4, 8 and 16 answers at a time, prompts and answers of 128 tokens: tokens a second in all.
tenants  12 tenants in turn, each with a system prompt of 700 tokens of its own, 20 turns of a talk each, 4 requests at
         a time: prompt tokens that were computed, and time to the first token (p50, p99).
stall    4 answers run, a prompt of 4,000 tokens comes: the longest wait between two tokens of the four.
json     8 answers at a time that a JSON schema binds, against the same without: tokens a second.
restart  12 pinned system prompts, the daemon ends and starts: time to the first token against the first time ever,
         asked as soon as the model is loaded, and a second later, in which it can read them from the disk.

llama-server has the flags it was fastest with of those in the file: as many slots as edge_rt has, twice its cells, a
prompt cache of 8 GiB; for streams a part of the cells for each slot, for all else, which is longer than such a part,
one pool. With that it computes no token of a prefix twice either, so that the tenants' first bar cannot be reached:
what both compute is what is new. --memory-mib gives both so much for KV and kept prompts together, as a device may
have: 8,192 cells each, the rest for kept prompts, and the rival as many slots as the load asks at a time (--rival-flags
overrule that). --tenants is how many there are.
Guesses at the next tokens are off on both sides unless --drafts: these answers repeat themselves, so that guessing
shows too well. All tokens are greedy; ratios are edge_rt : llama-server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import harness
import httpx2
from footprint import daemon
from llama_rival import rival
from sse_load import Stream, ask

from edge_rt import config
from edge_rt.api.client import Client
from edge_rt.bench.samples import quantile
from edge_rt.catalog.gguf import read_header
from edge_rt.catalog.store import Store, pick_variant
from edge_rt.devices import cpu

T = TypeVar("T")

N_SLOTS = 16
N_CTX = 8192
STREAMS = (1, 4, 8, 16)
N_PROMPT = N_ANSWER = 128
N_TENANTS, N_SYSTEM, N_TURNS, N_AT_ONCE = 12, 700, 20, 4
N_LONG, N_RUNNING = 4000, 900
_STREAM_BARS = {"native": {1: 1.8, 4: 3.0, 8: 3.0, 16: 3.0}, "llama_cpu": dict.fromkeys(STREAMS, 1.0)}
_FLAGS = ("--threads", "2", "--parallel", str(N_SLOTS), "--ctx-size", str(2 * N_CTX), "--no-webui")
# A part each is a fifth faster at 16 streams, but a long prompt or talk does not fit: then one pool.
_PARTS, _POOL = "--no-kv-unified", "--kv-unified"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["crack", "scratch", "stain", "dent", "none"]},
        "severity": {"type": "integer", "minimum": 0, "maximum": 10},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 3, "maxItems": 5},
        "position": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "severity", "notes", "position"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. own is added to the body of each request."""

    name: str
    socket: Path
    own: Mapping[str, Any]

    async def complete(self, prompt: Sequence[int], n_answer: int, *, into: Stream | None = None) -> Stream:
        body = {"prompt": list(prompt), "max_tokens": n_answer, "temperature": 0, "ignore_eos": True, **self.own}
        return await ask(self.socket, "/v1/completions", body, into=into)

    async def chat(self, messages: Sequence[Mapping[str, str]], n_answer: int, **more: Any) -> Stream:
        body = {"messages": list(messages), "max_tokens": n_answer, "temperature": 0, **self.own}
        return await ask(self.socket, "/v1/chat/completions", body | more)


class Texts:
    """Seeded prompts of real English; no two begin the same."""

    def __init__(self, seed: int = 9) -> None:
        golden = Path(__file__).resolve().parent.parent / "tests/golden"
        whole = " ".join((golden / f"{name}.txt").read_text(encoding="utf-8") for name in ("prose", "technical"))
        self._sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", whole) if s.strip()]
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)

    def text(self, n_words: int) -> str:
        """Give about n_words words in sentences, after a number that no other text begins with."""
        words = f"No. {next(self._numbers)}, {self._random.randrange(10**6)}:".split()
        while len(words) < n_words:
            words += self._random.choice(self._sentences).split()
        return " ".join(words[:n_words])


class Prompts:
    """Token ids of Texts, of exactly the length that is asked for."""

    def __init__(self, tokenize: Callable[[str], list[int]], texts: Texts) -> None:
        self._tokenize, self._texts = tokenize, texts

    def prompt(self, n_tokens: int) -> list[int]:
        ids = self._tokenize(self._texts.text(n_tokens + 16))  # a word is a token at least
        assert len(ids) >= n_tokens
        return ids[:n_tokens]


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]], n_at_once: int) -> list[T]:
    """Run jobs in their order, so many at a time."""
    gate = asyncio.Semaphore(n_at_once)

    async def one(job: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


def streams_tps(server: Server, prompts: Prompts, n_streams: int, n_rounds: int) -> float:
    """Tokens of answers a second, of n_streams clients that ask n_rounds times each."""
    asked = [prompts.prompt(N_PROMPT) for _ in range(n_streams * n_rounds)]
    begun_s = time.perf_counter()
    done = asyncio.run(all_of([server.complete(prompt, N_ANSWER) for prompt in asked], n_streams))
    elapsed_s = time.perf_counter() - begun_s
    n_tokens = sum(stream.n_tokens for stream in done)
    if n_tokens != N_ANSWER * len(asked):
        raise RuntimeError(f"{server.name} gave {n_tokens} tokens, not {N_ANSWER * len(asked)}")
    return n_tokens / elapsed_s


@dataclass(frozen=True, slots=True)
class Talks:
    """What the tenants' load met: prompt tokens that were computed, times to the first token by turn order."""

    n_computed: int
    n_prompt: int
    ttft_s: tuple[float, ...]


def tenants(server: Server, systems: Sequence[str], questions: Sequence[Sequence[str]]) -> Talks:
    """Let each tenant talk: its system prompt, and a question a turn; the tenants take turns, N_AT_ONCE at a time."""
    talks: list[list[dict[str, str]]] = [[{"role": "system", "content": text}] for text in systems]
    met: list[Stream] = []

    async def turn(number: int, question: str) -> None:
        talk = talks[number]
        talk.append({"role": "user", "content": question})
        stream = await server.chat(talk, 24)
        talk.append({"role": "assistant", "content": stream.text})
        met.append(stream)

    async def all_turns() -> None:
        for asked in questions:
            await all_of([turn(number, question) for number, question in enumerate(asked)], N_AT_ONCE)

    asyncio.run(all_turns())
    return Talks(
        sum(s.prompt_n for s in met),
        sum(s.prompt_n + s.n_cached for s in met),
        tuple(s.ttft_s for s in met if s.came_s),
    )


def stall_s(server: Server, prompts: Prompts) -> tuple[float, float]:
    """Give the longest wait between two parts of four answers while a long prompt is computed, and how long that is."""

    async def load() -> tuple[float, float]:
        four = [Stream() for _ in range(4)]
        running = [
            asyncio.create_task(server.complete(prompts.prompt(N_PROMPT), N_RUNNING, into=stream)) for stream in four
        ]
        try:
            for stream in four:
                await asyncio.wait_for(stream.begun.wait(), 60.0)
            await asyncio.sleep(0.5)
            long = await server.complete(prompts.prompt(N_LONG), 2)
            if any(task.done() for task in running):
                raise RuntimeError(f"{server.name}: an answer ended before the long prompt was computed")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        waits = [wait for stream in four for wait in stream.gaps_s(long.sent_s, long.came_s[0])]
        return max(waits), long.ttft_s

    return asyncio.run(load())


def json_tps(server: Server, texts: Texts, n_streams: int, n_rounds: int, **more: Any) -> float:
    """Tokens of answers a second, of n_streams clients that ask for a report n_rounds times each."""
    asked = [
        [{"role": "user", "content": f"Describe the part as JSON. {texts.text(60)}"}]
        for _ in range(n_streams * n_rounds)
    ]
    begun_s = time.perf_counter()
    done = asyncio.run(all_of([server.chat(talk, N_ANSWER, **more) for talk in asked], n_streams))
    return sum(stream.n_tokens for stream in done) / (time.perf_counter() - begun_s)


@contextmanager
def edge_rt(
    model: str, backend: str, *, drafts: bool, keeps_on_disk: bool = False, max_prefix_bytes: int = -1
) -> Iterator[Server]:
    environ = {
        "EDGE_RT__ENGINE__BACKEND": backend,
        "EDGE_RT__ENGINE__N_CTX": str(N_CTX),
        "EDGE_RT__ENGINE__N_PARALLEL": str(N_SLOTS),
        "EDGE_RT__ENGINE__MAX_PREFIX_BYTES": str(max_prefix_bytes),
        "EDGE_RT__SERVER__ACCESS_LOG": "false",
        "EDGE_RT__CACHE__ENABLED": "false",
        "EDGE_RT__SCHEDULER__MAX_WAITING": "256",
    }
    if not keeps_on_disk:  # or a load would find what an earlier one, of the same seed, has left
        environ["EDGE_RT__ENGINE__MAX_PREFIX_DISK_BYTES"] = "0"
    if not drafts:
        environ["EDGE_RT__ENGINE__MAX_DRAFT"] = "0"
    with daemon("--model", model, **environ) as (_, socket, _):
        yield Server(name=f"edge_rt {backend}", socket=socket, own={"model": model})


@contextmanager
def llama_server(file: Path, *flags: str) -> Iterator[Server]:
    with rival(file, (*_FLAGS, *flags)) as socket:
        yield Server(name="llama-server", socket=socket, own={})


class Bench:
    """Runs the loads that were asked for and collects their claims."""

    def __init__(self, arguments: harness.Arguments) -> None:
        self.arguments, self.own = arguments, arguments.own
        self.claims: list[harness.Claim] = []
        self.figures: list[harness.Figure] = []
        self.extra: dict[str, Any] = {}

    def wants(self, load: str) -> bool:
        return self.own.load in {load, "all"}

    def streams(self, ours: Server, its: Server, prompts: Prompts) -> None:
        quick = self.arguments.quick
        for n in (1, 8) if quick else STREAMS:
            pair = harness.paired(
                ours.name,
                lambda n=n: streams_tps(ours, prompts, n, 1),  # type: ignore[misc]
                its.name,
                lambda n=n: streams_tps(its, prompts, n, 1),  # type: ignore[misc]
                n_pairs=self.arguments.pairs(7, quick=1),
            )
            bar = None if self.own.drafts else _STREAM_BARS[self.own.backend][n]
            self.claims.append(harness.Claim(name=f"{n} streams, tokens/s", pair=pair, at_least=bar))

    def tenants(self, ours: Server, its: Server, texts: Texts) -> None:
        n_tenants, n_turns = (4, 3) if self.arguments.quick else (self.own.tenants, self.own.turns)
        met: dict[str, list[Talks]] = {}
        for number in range(self.arguments.pairs(1 if self.own.memory_mib else 3, quick=1)):
            systems = [texts.text(int(N_SYSTEM / 1.35)) for _ in range(n_tenants)]
            questions = [[texts.text(14) for _ in range(n_tenants)] for _ in range(n_turns)]
            for server in (ours, its) if number % 2 == 0 else (its, ours):
                talks = tenants(server, systems, questions)
                met.setdefault(server.name, []).append(talks)
                print(
                    f"{server.name}: {talks.n_computed} of {talks.n_prompt} prompt tokens computed, "
                    f"ttft p50 {quantile(talks.ttft_s, 0.5):.3f} s, p99 {quantile(talks.ttft_s, 0.99):.3f} s",
                    file=sys.stderr,
                )
        mine, rivals = met[ours.name], met[its.name]

        def figure(name: str, at_most: float, value: Callable[[Talks], float]) -> None:
            ratios = tuple(value(a) / value(b) for a, b in zip(mine, rivals, strict=True))
            self.figures.append(harness.Figure(name=name, unit="x llama-server", samples=ratios, at_most=at_most))

        which = f"{n_tenants} tenants" + (f", {self.own.memory_mib} MiB" if self.own.memory_mib else "")
        figure(f"{which}: prompt tokens computed", 0.3, lambda talks: talks.n_computed)
        figure(f"{which}: ttft p50", 0.3, lambda talks: quantile(talks.ttft_s, 0.5))
        figure(f"{which}: ttft p99", 0.5, lambda talks: quantile(talks.ttft_s, 0.99))

    def stall(self, ours: Server, its: Server, prompts: Prompts) -> None:
        waits: dict[str, list[float]] = {}
        for number in range(self.arguments.pairs(5, quick=1)):
            for server in (ours, its) if number % 2 == 0 else (its, ours):
                wait_s, ttft_s = stall_s(server, prompts)
                waits.setdefault(server.name, []).append(wait_s)
                print(
                    f"{server.name}: longest wait {wait_s:.3f} s, the long prompt took {ttft_s:.2f} s", file=sys.stderr
                )
        ratios = tuple(a / b for a, b in zip(waits[ours.name], waits[its.name], strict=True))
        name = f"stall: longest wait during a prompt of {N_LONG}"
        self.figures.append(harness.Figure(name=name, unit="x llama-server", samples=ratios, at_most=0.3))

    def restart(self, model: str, texts: Texts) -> None:
        cold_s, *warm = restart_ttft_s(model, self.own.backend, texts, 4 if self.arguments.quick else N_TENANTS)
        for when, warm_s in zip(("at once", "after a second"), warm, strict=True):
            print(
                f"restart, asked {when}: ttft {quantile(warm_s, 0.5):.3f} s ({min(warm_s):.3f}–{max(warm_s):.3f}), "
                f"cold {quantile(cold_s, 0.5):.3f} s ({min(cold_s):.3f}–{max(cold_s):.3f})",
                file=sys.stderr,
            )
            ratios = tuple(warm / cold for warm, cold in zip(warm_s, cold_s, strict=True))
            name = f"restart: ttft of each tenant's first request, {when}"
            self.figures.append(harness.Figure(name=name, unit="x cold", samples=ratios, at_most=0.15))

    def json(self, ours: Server, texts: Texts) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "report", "schema": _SCHEMA, "strict": True}}
        pair = harness.paired(
            "with a schema",
            lambda: json_tps(ours, texts, 8, 2, response_format=schema),
            "without",
            lambda: json_tps(ours, texts, 8, 2, ignore_eos=True),
            n_pairs=self.arguments.pairs(5, quick=1),
        )
        self.claims.append(harness.Claim(name="json: 8 streams, tokens/s", pair=pair, at_least=0.9))


def restart_ttft_s(model: str, backend: str, texts: Texts, n_tenants: int) -> list[list[float]]:
    """Give the times to the first token of tenants' first requests: cold, and after restarts with pinned prompts.

    After the first restart they ask as soon as the model is loaded, after the second a second later.
    """
    systems = [texts.text(int(N_SYSTEM / 1.35)) for _ in range(n_tenants)]

    def first(server: Server) -> list[float]:
        async def ask_each() -> list[float]:
            found = []
            for text in systems:
                talk = [{"role": "system", "content": text}, {"role": "user", "content": texts.text(14)}]
                found.append((await server.chat(talk, 4)).ttft_s)
            return found

        return asyncio.run(ask_each())

    with edge_rt(model, backend, drafts=False, keeps_on_disk=True) as server, Client(server.socket) as client:
        client.pins(model)  # which loads the model: what that takes is not the prompts'
        cold_s = first(server)
        for number, text in enumerate(systems):
            client.pin(model, f"bench-{number}", text)
        while not all(pin["is_on_disk"] for pin in client.pins(model)):
            time.sleep(0.2)
    found = [cold_s]
    for wait_s in (0.0, 1.0):
        with edge_rt(model, backend, drafts=False, keeps_on_disk=True) as server, Client(server.socket) as client:
            client.pins(model)
            time.sleep(wait_s)
            found.append(first(server))
            if wait_s:
                for number in range(n_tenants):
                    client.unpin(model, f"bench-{number}")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", default="all", choices=("streams", "tenants", "stall", "json", "restart", "all"))
    parser.add_argument("--backend", default="native", choices=("native", "llama_cpu"))
    parser.add_argument("--drafts", action="store_true", help="let edge_rt guess tokens, as it does by default")
    parser.add_argument("--tenants", type=int, default=N_TENANTS, help="of --load tenants")
    parser.add_argument("--turns", type=int, default=N_TURNS, help="of each tenant's talk")
    parser.add_argument("--memory-mib", type=int, default=0, help="for KV and kept prompts of each; 0: as each likes")
    parser.add_argument("--rival-flags", default="", metavar="FLAGS", help="more of llama-server's")


def main() -> None:
    arguments = harness.parse(__doc__, add_options=options)
    bench, own = Bench(arguments), arguments.own
    settings = config.load().config
    model = settings.catalog.default_model
    file = model_file(Store.open(settings.catalog), model, own.backend)
    if bench.wants("restart"):
        bench.restart(model, Texts(time.time_ns()))  # of its own: an earlier run has left prefixes on the disk
    if own.load == "restart":
        harness.finish(arguments, bench.claims, bench.extra, bench.figures)
        return
    with ExitStack() as stack:
        flags = own.rival_flags.split()
        room = (own.memory_mib << 20) - kv_bytes(file) if own.memory_mib else -1
        if own.memory_mib:
            if room < 0:
                sys.exit(f"--memory-mib {own.memory_mib}: {N_CTX} cells alone take {kv_bytes(file) >> 20} MiB")
            few = ("--parallel", str(N_AT_ONCE), "--ctx-size", str(N_CTX), "--cache-ram", str(room >> 20))
            flags = [*few, *flags]  # of two that say something else the last one holds
        ours = stack.enter_context(edge_rt(model, own.backend, drafts=own.drafts, max_prefix_bytes=room))
        texts = Texts()
        prompts = Prompts(tokenizer(ours), texts)
        if bench.wants("streams"):
            with llama_server(file, _PARTS, *flags) as its:
                bench.streams(ours, its, prompts)
        its = stack.enter_context(llama_server(file, _POOL, *flags))
        if bench.wants("tenants"):
            bench.tenants(ours, its, texts)
        if bench.wants("stall"):
            bench.stall(ours, its, prompts)
        if bench.wants("json"):
            bench.json(ours, texts)
    harness.finish(arguments, bench.claims, bench.extra, bench.figures)


def model_file(store: Store, model: str, backend: str) -> Path:
    """Give the file of the model's form that the daemon serves by itself with this back end."""
    manifest = store.get(model)
    variant = pick_variant(manifest, frozenset(cpu.features()), backend=backend)
    if (path := store.path(manifest, variant)) is None:
        sys.exit(f"{model} is not here: edge_rt pull {model}")
    return path


def kv_bytes(file: Path) -> int:
    """Count the bytes of the pool of cells, in 16 bits as both keep it."""
    return 2 * read_header(file).kv_elements_per_token * N_CTX


def tokenizer(server: Server) -> Callable[[str], list[int]]:
    """Tokenise as the served model does."""
    client = httpx2.Client(
        transport=httpx2.HTTPTransport(uds=str(server.socket)), base_url="http://edge_rt", timeout=60.0
    )

    def tokenize(text: str) -> list[int]:
        answer = client.post("/tokenize", json={"content": text, "model": server.own["model"]})
        answer.raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    return tokenize


if __name__ == "__main__":
    main()
