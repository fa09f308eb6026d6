"""A daemon with a real model whose worker runs as fast as a modelled board's clock lets it, and requests for it.

MODELLED WATTS, REAL INFERENCE: tokens and seconds are real, of this machine slowed down; watts and joules are the
board's model's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from edge_rt.devices.meter_choice import choose, find
from edge_rt.devices.meters import Meter
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.monitor import EnergyMonitor
from tests.api.daemon import Daemon
from tests.plants.board import POLICIES
from tests.plants.closed_loop import cpu_s
from tests.plants.fuse_board import FuseBoard

MODEL, VARIANT = "smollm2-135m-instruct", "q4_0"
N_PROMPT_WORDS = 240

_PROSE = Path(__file__).resolve().parent.parent / "golden/prose.txt"
_SETTINGS = """
[engine]
n_threads = 1
max_prefix_bytes = 0
stream_interval_s = 0.0

[models.{model}]
variant = "{variant}"

[power]
meter = "none"
socket_path = "{socket}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    n_prompt: int
    n_tokens: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a span of time gave: real seconds and tokens, modelled joules, and what edge_rt's meter made of them.

    meter_coverage  the share of the span for which the meter had values
    cpu_s           that the worker took
    """

    name: str
    answers: tuple[Answer, ...]
    span_s: float
    board_j: float
    soc_j: float
    meter_j: float
    meter_coverage: float
    mean_hz: float
    cpu_s: float

    @property
    def n_tokens(self) -> int:
        return sum(answer.n_tokens for answer in self.answers)

    @property
    def tokens_hz(self) -> float:
        return self.n_tokens / self.span_s

    @property
    def board_j_per_token(self) -> float:
        return self.board_j / self.n_tokens

    @property
    def soc_j_per_token(self) -> float:
        return self.soc_j / self.n_tokens

    @property
    def meter_error(self) -> float:
        """How far the meter's joules, over what it covered, are from the model's."""
        return abs(self.meter_j / self.meter_coverage / self.board_j - 1.0)


class Loop:
    """The closed loop of board, worker and daemon; requests are drawn by a seed. quota: what slows the worker down."""

    def __init__(
        self, board: FuseBoard, daemon: Daemon, monitor: EnergyMonitor, quota: str, pids: Sequence[int]
    ) -> None:
        self.board, self.daemon, self.quota, self._monitor, self._pids = board, daemon, quota, monitor, pids
        self._words = _PROSE.read_text(encoding="utf-8").split()
        self._n_prefill = self._n_decode = 0

    def set_governor(self, governor: str, max_khz: int) -> None:
        self.board.write(f"{POLICIES}/policy0/scaling_governor", governor)
        self.board.write(f"{POLICIES}/policy0/scaling_max_freq", str(max_khz))

    def run(self, name: str, gaps_s: Sequence[float], *, seed: int, max_tokens: int, is_closed: bool) -> Run:
        """Send a request after each gap: closed, once the one before is answered; else whether or not it is."""
        rng = random.Random(seed)
        prompts = [" ".join(rng.choices(self._words, k=N_PROMPT_WORDS)) for _ in gaps_s]
        begun_s, before = self._monitor.mark(), self.board.tell("state")
        cycles, used_s = self.board.tell("cycles"), sum(cpu_s(pid) for pid in self._pids)
        answers = asyncio.run(self._play(prompts, gaps_s, max_tokens, is_closed=is_closed))
        ended_s, after = self._monitor.mark(), self.board.tell("state")
        window = self._monitor.window(begun_s, ended_s)
        used = {part: after["energy_j"][part] - before["energy_j"][part] for part in ("board", "soc")}
        return Run(
            name=name,
            answers=tuple(answers),
            span_s=ended_s - begun_s,
            board_j=used["board"],
            soc_j=used["soc"],
            meter_j=window.energy_j,
            meter_coverage=window.coverage,
            mean_hz=(self.board.tell("cycles") - cycles) / (ended_s - begun_s),
            cpu_s=sum(cpu_s(pid) for pid in self._pids) - used_s,
        )

    async def _play(
        self, prompts: Sequence[str], gaps_s: Sequence[float], max_tokens: int, *, is_closed: bool
    ) -> list[Answer]:
        async with self.daemon.async_client() as client:
            if is_closed:
                return [await self._answer(client, prompt, max_tokens) for prompt in prompts]
            async with asyncio.TaskGroup() as group:
                tasks = []
                for prompt, gap_s in zip(prompts, gaps_s, strict=True):
                    await asyncio.sleep(gap_s)
                    tasks.append(group.create_task(self._answer(client, prompt, max_tokens)))
            return [task.result() for task in tasks]

    async def _answer(self, client: httpx2.AsyncClient, prompt: str, max_tokens: int) -> Answer:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, first_s, last_s, usage = time.monotonic(), 0.0, 0.0, {}
        self._note(1, 0)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    usage = event.get("usage") or usage
                    if any(choice.get("text") for choice in event["choices"]):
                        last_s = time.monotonic()
                        if not first_s:
                            first_s = last_s
                            self._note(-1, 1)
        finally:
            self._note(*((0, -1) if first_s else (-1, 0)))
        n_tokens = usage["completion_tokens"]
        return Answer(
            n_prompt=usage["prompt_tokens"],
            n_tokens=n_tokens,
            ttft_s=first_s - sent_s,
            tpot_s=(last_s - first_s) / max(1, n_tokens - 1),
        )

    def _note(self, prefill: int, decode: int) -> None:
        self._n_prefill += prefill
        self._n_decode += decode
        phase = "prefill" if self._n_prefill else "decode" if self._n_decode else "idle"
        self.board.tell("phase", phase=phase)


@contextmanager
def loop(
    profile: str, directory: Path, store: Path, before: Callable[[FuseBoard], None] | None = None
) -> Iterator[Loop]:
    """Mount a board, start a daemon and couple the two. directory has a short name; powerd's socket is its "p".

    before  is called with the board before the daemon starts, so that powerd is there when the daemon looks for it
    """
    with ExitStack() as stack:
        board = stack.enter_context(FuseBoard(profile, directory / "root"))
        if before is not None:
            before(board)
        extra = _SETTINGS.format(socket=directory / "p", model=MODEL, variant=VARIANT)
        environ = {"EDGE_RT__CATALOG__STORE_DIR": str(store)}
        daemon = stack.enter_context(Daemon(directory, extra=extra, environ=environ))
        with daemon.client() as client:
            client.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 2}).raise_for_status()
        pids = [child.pid for child in psutil.Process(daemon.process.pid).children()]
        quota = board.tell("couple", pids=pids, n_cpus=1)
        stack.callback(board.tell, "uncouple")
        monitor = EnergyMonitor(board_meter(board))
        monitor.start()
        stack.callback(monitor.close)
        stack.callback(monitor.abandon, monitor.begin("the loop"))  # so that it reads 20 times a second
        yield Loop(board, daemon, monitor, quota, pids)


def board_meter(board: FuseBoard) -> Meter:
    """Give the meter that edge_rt chooses for the whole board."""

    def no_program(*_: object) -> str:
        raise FileNotFoundError("vcgencmd")

    found = find(SysfsRoot(board.root), call=no_program)
    meters = [source.meter for source in found.sources]
    chosen = choose(meters, {meter.name: meter.read(time.monotonic()) for meter in meters}).board
    assert chosen is not None
    return chosen
