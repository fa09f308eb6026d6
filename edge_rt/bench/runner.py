"""Measures cases on the bare model: TokenSession.decode without engine, tokenizer or sampling, as llama-bench does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from edge_rt.backends.base import Backend, LoadOptions, ModelFile, SeqRows, TokenSession
from edge_rt.bench.metering import Metering
from edge_rt.bench.workload import Case, token_ids
from edge_rt.devices import memory, thermal
from edge_rt.devices.base import Reading
from edge_rt.devices.sysfs import SysfsRoot
from edge_rt.power.meter import Chosen
from edge_rt.types import ModelInfo

_N = TypeVar("_N", int, float)
_SEED = 42
_SEQ = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model on a back end; detail describes the back end's build."""

    backend: Backend
    detail: str
    file: ModelFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One timed pass. prompt_ns is None without a prompt; token_ns has one entry per decoded token."""

    elapsed_ns: int
    prompt_ns: int | None
    token_ns: tuple[int, ...]
    energy_j: Reading[float]


@dataclass(frozen=True, slots=True)
class PowerSource:
    """What measured energy: as in devices.meters.Meter; None without a meter."""

    name: str
    boundary: str | None = None
    quality: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A measured case, with the hottest, largest and throttled state seen around its repetitions."""

    case: Case
    target: Target
    info: ModelInfo
    kv_type: str
    started_at: str
    repetitions: tuple[Repetition, ...]
    peak_temp_c: Reading[float]
    throttled: Reading[bool]
    rss_bytes: Reading[int]
    power: PowerSource


class Sensors:
    """What is read around each repetition, never inside it."""

    def __init__(self, root: SysfsRoot | None = None, metering: Metering | None = None) -> None:
        self._root = root or SysfsRoot()
        self._metering = metering or Metering(Chosen(None, "none is wanted"))

    @property
    def power(self) -> PowerSource:
        return PowerSource(self._metering.source, self._metering.boundary, self._metering.quality)

    def energy_mark(self) -> float:
        """Begin a stretch whose energy is wanted."""
        return self._metering.mark()

    def energy_j(self, mark: float) -> Reading[float]:
        """Give the energy since a mark."""
        return self._metering.joules_since(mark)

    def temp_c(self) -> Reading[float]:
        return thermal.peak_c(self._root)

    def throttle(self) -> Reading[thermal.Throttle]:
        return thermal.throttle(self._root)

    def rss_bytes(self) -> Reading[int]:
        return memory.process_rss_bytes(root=self._root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run the cases. delay_s lets the device cool down before each."""

    repetitions: int = 5
    warmup: bool = True
    delay_s: float = 0.0
    kv_type: str = "f16"


class Runner:
    """Runs cases on models.

    admit     is called before each load and may refuse it with an error
    announce  gets one line per step, for people
    """

    def __init__(
        self,
        plan: Plan,
        *,
        sensors: Sensors | None = None,
        admit: Callable[[Target, LoadOptions], None] = lambda _target, _options: None,
        announce: Callable[[str], None] = lambda _line: None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plan = plan
        self._sensors = sensors or Sensors()
        self._admit = admit
        self._announce = announce
        self._clock_ns = clock_ns
        self._sleep = sleep

    def run(self, targets: Sequence[Target], cases: Sequence[Case]) -> Iterator[Result]:
        """Yield a result per target and case. Raises what loading and decoding raise.

        Cases that follow each other with the same batch sizes share one loaded model with room for the longest.
        """
        total, done = len(targets) * len(cases), 0
        for target in targets:
            for (n_batch, n_ubatch), group in itertools.groupby(cases, key=lambda c: (c.n_batch, c.n_ubatch)):
                same = tuple(group)
                options = LoadOptions(
                    n_ctx=max(case.n_ctx for case in same),
                    n_seq_max=1,
                    n_batch=n_batch,
                    n_ubatch=n_ubatch,
                    n_threads=same[0].n_threads,
                    kv_type=self._plan.kv_type,
                )
                self._announce(f"benchmark {done + 1}/{total}: loading {target.file.model}")
                self._admit(target, options)
                session = target.backend.load(target.file, options)
                try:
                    for case in same:
                        done += 1
                        yield self._measure(session, target, case, f"benchmark {done}/{total}: {case.name}")
                finally:
                    session.close()

    def _measure(self, session: TokenSession, target: Target, case: Case, title: str) -> Result:
        session.set_threads(case.n_threads)
        pass_ = _Pass(session, case, self._clock_ns)
        if self._plan.delay_s:
            self._announce(f"{title}: cooling for {self._plan.delay_s:g} s")
            self._sleep(self._plan.delay_s)
        started_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if self._plan.warmup:
            self._announce(f"{title}: warm-up")
            pass_.warm_up()
        throttle_before = self._sensors.throttle()
        temps = [self._sensors.temp_c()]
        sizes: list[Reading[int]] = []
        repetitions: list[Repetition] = []
        for number in range(self._plan.repetitions):
            self._announce(f"{title}: run {number + 1}/{self._plan.repetitions}")
            pass_.prepare()
            mark = self._sensors.energy_mark()
            elapsed_ns, prompt_ns, token_ns = pass_.timed()
            energy = self._sensors.energy_j(mark)
            repetitions.append(
                Repetition(elapsed_ns=elapsed_ns, prompt_ns=prompt_ns, token_ns=token_ns, energy_j=energy)
            )
            temps.append(self._sensors.temp_c())
            sizes.append(self._sensors.rss_bytes())
        return Result(
            case=case,
            target=target,
            info=session.info,
            kv_type=self._plan.kv_type,
            started_at=started_at,
            repetitions=tuple(repetitions),
            peak_temp_c=_largest(temps),
            throttled=thermal.throttled_between(throttle_before, self._sensors.throttle()),
            rss_bytes=_largest(sizes),
            power=self._sensors.power,
        )


class _Pass:
    """One case on one session, run again and again from the same context depth."""

    def __init__(self, session: TokenSession, case: Case, clock_ns: Callable[[], int]) -> None:
        self._session, self._case, self._clock_ns = session, case, clock_ns
        vocab = session.vocab
        first = vocab.bos_id if vocab.add_bos and vocab.bos_id >= 0 else None

        def draw(n_tokens: int, seed: int, *, opens: bool) -> list[int]:
            start = first if opens else None
            return token_ids(n_tokens, vocab.n_vocab, seed, is_plain=lambda i: session.piece(i) != b"", first=start)

        self._depth_ids = draw(case.n_depth, _SEED, opens=True)
        self._prompt_ids = draw(case.n_prompt, _SEED + 1, opens=case.n_depth == 0)
        self._gen_ids = draw(case.n_gen, _SEED + 2, opens=case.n_depth + case.n_prompt == 0)
        self._depth_cached = False

    def warm_up(self) -> None:
        """Run the prompt once and decode one token: pages are touched, threads exist, clocks are up."""
        self._session.seq_trim(_SEQ, 0)
        self._prefill(self._prompt_ids, 0)
        if self._gen_ids:
            self._decode(self._gen_ids[:1], len(self._prompt_ids))
        self._depth_cached = False

    def prepare(self) -> None:
        """Leave exactly the depth's tokens in the sequence; where the model can trim they are computed only once."""
        if self._depth_cached and self._session.caps.can_trim:
            self._session.seq_trim(_SEQ, self._case.n_depth)
            return
        self._session.seq_trim(_SEQ, 0)
        self._prefill(self._depth_ids, 0)
        self._depth_cached = True

    def timed(self) -> tuple[int, int | None, tuple[int, ...]]:
        """Return elapsed, prompt and per-token nanoseconds."""
        start = self._clock_ns()
        position = self._case.n_depth
        prompt_ns: int | None = None
        if self._prompt_ids:
            self._prefill(self._prompt_ids, position)
            position += len(self._prompt_ids)
            prompt_ns = self._clock_ns() - start
        token_ns = self._decode(self._gen_ids, position)
        return self._clock_ns() - start, prompt_ns, token_ns

    def _prefill(self, ids: list[int], position: int) -> None:
        n_batch = self._session.caps.n_batch
        for at in range(0, len(ids), n_batch):
            rows = SeqRows(_SEQ, position + at, ids[at : at + n_batch], want_logits=True)
            self._session.decode([rows])

    def _decode(self, ids: list[int], position: int) -> tuple[int, ...]:
        spent: list[int] = []
        before = self._clock_ns()
        for at, token in enumerate(ids, position):
            self._session.decode([SeqRows(_SEQ, at, (token,), want_logits=True)])
            now = self._clock_ns()
            spent.append(now - before)
            before = now
        return tuple(spent)


def _largest(readings: Sequence[Reading[_N]]) -> Reading[_N]:
    """Pick the largest known reading, else the first, which has a reason."""
    best = readings[0]
    for reading in readings:
        if reading.value is not None and (best.value is None or reading.value > best.value):
            best = reading
    return best
