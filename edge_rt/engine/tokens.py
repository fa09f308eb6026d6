"""The step loop: many requests, one decode call a step.

Requests join and leave between steps. Each step carries one row of every decoding sequence and a part of the prompts
that wait, sized so that running streams are not held up for long. Any thread may submit and cancel; one thread runs
the loop, owns the session's KV and calls the sinks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edge_rt.backends.base import NoCellsError, SeqRows, TokenSession, device_stats
from edge_rt.engine import adapters, line
from edge_rt.engine.batching import share_rows
from edge_rt.engine.beam_sequence import BeamSequence, make_sequence
from edge_rt.engine.choices import Choices
from edge_rt.engine.draft_model import DraftModel
from edge_rt.engine.form import Forms
from edge_rt.engine.prefix import Slot
from edge_rt.engine.prefix_disk import PrefixDisk
from edge_rt.engine.prompt import PromptReader
from edge_rt.engine.row_costs import RowCosts
from edge_rt.engine.sequence import Sequence, Sink, parts_of
from edge_rt.engine.settings import EngineSettings
from edge_rt.engine.slots import Slots
from edge_rt.engine.speculation import Speculation
from edge_rt.engine.threads import AdvisedThreads, ThreadChoice
from edge_rt.engine.totals import Totals
from edge_rt.engine.warm import WarmStart
from edge_rt.errors import (
    BackendStepError,
    CellsExhaustedError,
    DeadlineError,
    DeadlineUnreachableError,
    EdgeRtError,
    RequestError,
    ShuttingDownError,
)
from edge_rt.types import EngineStats, FinishReason, GenerateRequest

_log = logging.getLogger(__name__)

__all__ = ["EngineSettings", "TokenEngine"]

_F32 = NDArray[np.float32]


_REST_S = 2.0  # without a request, until prefixes are written to the disk
_LAST_S = 0.25  # for that, when the loop ends


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    drain_s: float


class TokenEngine:
    """Runs one model for many requests."""

    def __init__(
        self,
        session: TokenSession,
        settings: EngineSettings,
        threads: ThreadChoice,
        *,
        idle_cores: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        entropy: Callable[[], int] = lambda: secrets.randbits(63),
        disk: PrefixDisk | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._session = session
        self._settings = settings
        self.is_isolated = settings.isolate_prefixes
        self._threads = AdvisedThreads(threads)
        self._idle_cores = idle_cores
        self._clock = clock
        self._entropy = entropy
        self._prompts = PromptReader(session)
        self.prompt_ids = self._prompts.token_ids  # any thread may call them
        self.fitting_ids = self._prompts.read
        self._forms = Forms(session, lambda: self._prompts.tool_style)
        self._inbox: SimpleQueue[Sequence | _Cancel | _Stop | Callable[[], None]] = SimpleQueue()
        self._waiting = line.Line()
        self._running: list[Sequence] = []  # in order of admission
        max_bytes = settings.max_prefix_bytes
        self._slots = Slots(session, max_bytes if callable(max_bytes) else lambda _: max_bytes)
        self.warm = WarmStart(self._slots.tree, disk)  # the engine's thread alone calls it
        eog_ids = session.vocab.eog_ids
        self._speculation = Speculation(session.caps, settings, model=draft_model, eog_ids=eog_ids, clock=clock)
        self._adapters = adapters.AdapterTurns(session)
        self._costs = RowCosts()
        self._free_s: float | None = None  # since when nothing is computed, where the loop goes on without a sleep
        self._n_threads = 0
        self._rest_at_s = 0.0
        self._totals = Totals()
        self._choices = Choices(session, self._slots, self._totals)
        self._stop_at_s: float | None = None
        self._accepting = True
        self._lock = Lock()

    # -- any thread ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. Every error, of the request too, goes to sink.failed.

        The prompt is rendered and tokenised on the calling thread, so that a long one does not hold up the loop.
        """
        try:
            if not self._accepting:  # the session may be closed
                raise ShuttingDownError
            adapters.check(request, self._session.caps, self._session.info.backend)
            form, text = self._forms.of(request)
            token_ids = self._prompts.read(request)
            lookup, now_s = self._speculation.lookup(request, token_ids), self._clock()
            sequence = make_sequence(self._session, request, sink, token_ids, lookup, form, text, now_s, self._entropy)
            with self._lock:  # nothing may come behind the loop's last look into the inbox
                if not self._accepting:
                    raise ShuttingDownError
                self._inbox.put(sequence)
        except EdgeRtError as exc:
            sink.failed(exc)

    def cancel(self, request_id: str) -> None:
        """Forget a request before the next step; its sink hears nothing more."""
        self._inbox.put(_Cancel(request_id))

    def call(self, act: Callable[[], None]) -> None:
        """Have the engine's thread call something between two steps; not if it has ended."""
        self._inbox.put(act)

    def advise(self, n_prefill_threads: int | None, n_decode_threads: int | None) -> None:
        """Compute on no more than so many threads from the next step on; None ends that. No answer changes by it."""
        self._threads.advise(n_prefill_threads, n_decode_threads)

    def stop(self, drain_s: float) -> None:
        """End the loop: waiting requests are refused, running ones have drain_s to finish."""
        self._inbox.put(_Stop(drain_s))

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            n_threads=self._n_threads,
            cells_total=self._session.caps.n_ctx,
            grammar_bytes=self._forms.kept_bytes,
            **self._slots.stats(),
            **self.warm.stats(),
            **self._totals.stats(),
            **self._speculation.stats(),
            **device_stats(self._session),
        )

    def tokenize(self, text: str, *, special: bool, add_bos: bool) -> list[int]:
        return self._session.tokenize(text, special=special, add_bos=add_bos)

    def detokenize(self, token_ids: ListOf[int]) -> str:
        """Join the tokens' bytes, control tokens written out; broken UTF-8 becomes U+FFFD."""
        return b"".join(self._session.piece(i, special=True) for i in token_ids).decode("utf-8", "replace")

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compute a few rows, so that the first request finds the weights read and a row's time known."""
        if self._session.info.evidence != "device":  # a stand-in may take minutes, and its time tells nothing
            return
        n_rows = min(16, self._session.caps.n_batch, self._session.caps.n_ctx)
        self._set_threads(self._threads.choice(is_prefill=True).choose(n_rows, self._clock(), None))
        for _ in range(2):  # the first one reads the file
            begun_s = self._clock()
            batch = [SeqRows(0, 0, [0] * n_rows, want_logits=True)]
            self._session.decode(batch)
            seconds = self._clock() - begun_s
            if self._session.caps.can_save:
                self._slots.measure(self._session.seq_bytes(0), n_rows)
            self._session.seq_trim(0, 0)
        self._costs.observe(batch, seconds)
        self._speculation.warm_up()

    def run(self) -> None:
        """Step until stop; then every request has been answered or refused."""
        while self.step(wait=True):
            pass

    def step(self, *, wait: bool = False) -> bool:
        """Take what came in and compute one step; False once stopped. With wait, sleep while there is nothing to do."""
        wait = wait and not (self._running or self._waiting) and self._stop_at_s is None
        if wait:
            self._slots.save_idle(self._inbox.empty, pushes_out=self.warm.awaits_room)
            self.warm.read_ahead(self._inbox.empty)
            if self._inbox.empty() and (asked := self.warm.request()) is not None:
                self.submit(*asked)
        if not self._running:
            self._free_s = None
        self._take_inbox(wait=wait)
        now_s = self._clock()
        if self._stop_at_s is not None and (now_s >= self._stop_at_s or not (self._running or self._waiting)):
            self._refuse_all()
            end_s = now_s + _LAST_S
            self._slots.save_idle(lambda: self._clock() < end_s)
            self.warm.save(lambda: self._clock() < end_s)
            self.warm.close()
            self._speculation.close()
            return False
        if self._waiting:
            self._drop_late(now_s)
            self._admit(now_s)
        if self._running:
            n_free = self._session.caps.n_ctx - self._slots.n_cells
            rows_of, row_s = self._pick(), self._costs.row_s  # nothing is guessed while some wait
            drafts = self._speculation.drafts(self._running, n_free=n_free, row_s=row_s) if all(rows_of) else {}
            self._compute(rows_of, drafts)
        return True

    def _take_inbox(self, *, wait: bool) -> None:
        while wait or not self._inbox.empty():
            item = self._next()  # this thread alone takes, so what is there stays there
            wait = False
            if isinstance(item, _Stop):
                with self._lock:
                    self._accepting = False
                self._stop_at_s = self._clock() + item.drain_s
                for sequence in self._waiting:
                    sequence.sink.failed(ShuttingDownError())
                self._waiting.clear()
            elif isinstance(item, _Cancel):
                self._forget(item.request_id)
            elif not isinstance(item, Sequence):
                item()
            elif self._accepting:
                self._enqueue(item)
            else:
                item.sink.failed(ShuttingDownError())

    def _next(self) -> Sequence | _Cancel | _Stop | Callable[[], None]:
        """Wait for what comes next. A long wait is used to write prefixes to the disk."""
        if self.warm.is_due and not (self._running or self._waiting):
            with suppress(Empty):
                return self._inbox.get(timeout=max(0.0, self._rest_at_s - self._clock()))
            self.warm.save(self._inbox.empty)
        return self._inbox.get()

    def _enqueue(self, sequence: Sequence) -> None:
        """Let a request wait, unless its deadline is out of reach already."""
        owner, now_s = self._owner(sequence), self._clock()
        try:
            line.check_deadline(sequence, self._running, self._waiting, self._costs, self._slots, owner, now_s)
        except DeadlineUnreachableError as exc:
            self._totals.refused += 1
            self._fail(sequence, exc)
        else:
            self._waiting.add(sequence, self._running)

    def _owner(self, sequence: Sequence) -> str:
        return line.owner_of(sequence.request, is_isolated=self.is_isolated)

    def _forget(self, request_id: str) -> None:
        for group in (self._waiting, self._running):
            for sequence in [s for s in group if s.request.id == request_id]:
                group.remove(sequence)
                self._release(sequence)
                self._totals.cancelled += 1

    def _refuse_all(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            self._fail(sequence, ShuttingDownError())
        self._running.clear()
        self._waiting.clear()

    def _drop_late(self, now_s: float) -> None:
        for sequence in [s for s in self._waiting if s.is_past_deadline(now_s)]:
            self._waiting.remove(sequence)
            self._fail(sequence, DeadlineError(deadline_s=sequence.request.deadline_s or 0.0))

    def _admit(self, now_s: float) -> None:
        """Give slots to waiting requests in turn, while slots and cells last or a less urgent one can make room."""
        for sequence in self._waiting.in_turn():
            owner = self._owner(sequence)
            if line.waits_for_another(sequence, self._running, self._slots, owner):
                continue
            while not line.has_room(sequence, self._running, self._slots, self._session.caps):
                # Who comes next is not passed by: small requests would keep a large one out for good.
                priority = sequence.request.priority
                if (victim := line.displaceable(self._waiting.turns, priority, self._running)) is None:
                    return
                self._put_back(victim)
            slot = self._slots.take(sequence.known_ids, owner)
            assert slot is not None
            self._waiting.remove(sequence)
            n_reused = len(slot.token_ids)
            sequence.slot = slot
            if isinstance(sequence, BeamSequence):
                sequence.begin_in(slot, partial(self._slots.take_free, owner=owner), self._slots.cut)
            if sequence.started_s is None:
                sequence.started_s = now_s
                sequence.n_cached = n_reused
                self._totals.prompt_tokens += sequence.n_prompt
                self._totals.cached_tokens += n_reused
                sequence.begin()
            self._running.append(sequence)

    def _pick(self) -> list[int]:
        """Choose how many rows each running sequence gets: prompts in turn, of one set of adapters."""
        chosen = set(self._adapters.choose(self._running))
        order = [i for i in self._waiting.order(self._running) if i in chosen]
        parts = parts_of(self._running)
        stall_s, step_s = self._settings.max_stall_s, self._settings.max_step_s
        if any(n == 1 for i, (_, n) in enumerate(parts) if i not in chosen):
            step_s = stall_s  # streams of other adapters wait for this step
        n_batch = self._session.caps.n_batch - sum(s.n_places - 1 for s in self._running)  # rows of further beams
        return share_rows(parts, order, self._costs, max_stall_s=stall_s, max_step_s=step_s, n_batch=n_batch)

    def _compute(self, rows_of: ListOf[int], drafts: Mapping[int, list[int]]) -> None:
        """Run one step; rows_of says how many rows each running sequence gets, drafts what is guessed for it."""
        asked = enumerate(zip(self._running, rows_of, strict=True))
        parts = [(s, s.rows(n, drafts.get(i, ()))) for i, (s, n) in asked if n]
        batch = [rows for _, own in parts for rows in own]
        n_rows = sum(len(rows.token_ids) for rows in batch)
        threads = self._threads.choice(is_prefill=max(rows_of) > 1)
        begun_s = self._clock()
        try:
            self._set_threads(threads.choose(n_rows, begun_s, self._idle_cores()))
            self._adapters.apply(parts[0][0])
            logits = iter(self._session.decode(batch))
        except NoCellsError:
            if not drafts:  # a guess shall cost nobody his place
                self._make_room()
            if self._running:  # now: in the next step who made room may be back in it
                self._compute(self._pick(), {})
            return
        except BackendStepError as exc:
            self._fail_batch([sequence for sequence, _ in parts], exc)
            return
        ended_s = self._clock()
        # All of the loop's time is somebody's: what lies between two steps is charged to the second one.
        row_engine_s = (ended_s - (begun_s if self._free_s is None else self._free_s)) / n_rows
        self._free_s = ended_s
        threads.observe(n_rows, self._n_threads, ended_s - begun_s, ended_s)
        self._costs.observe(batch, ended_s - begun_s)
        self._speculation.observe(batch, ended_s - begun_s)
        self._totals.count_step(n_rows)
        self.warm.is_due, self._rest_at_s = True, ended_s + _REST_S
        for sequence, own in parts:
            sequence.took(own)
            n_own = sum(len(rows.token_ids) for rows in own)
            sequence.computed(n_own, row_engine_s * n_own)
            self._waiting.charge(sequence, n_own)
            try:
                finish = self._choices.take(sequence, own, logits, ended_s)
            except EdgeRtError as exc:
                self._fail_batch([sequence], exc)
                continue
            if finish is not None:
                self._end(sequence, finish)
            elif sequence.is_due(ended_s, self._settings.stream_interval_s):
                sequence.send(ended_s)
        self._speculation.settle(self._totals.accepted)

    def _set_threads(self, n_threads: int) -> None:
        if n_threads != self._n_threads:
            self._session.set_threads(n_threads)
            self._speculation.set_threads(n_threads)
            self._n_threads = n_threads

    def _end(self, sequence: Sequence, finish: FinishReason) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.finish(finish, self._clock())

    # -- slots and trouble -----------------------------------------------------------------------------------------

    def _release(self, sequence: Sequence) -> Slot | None:
        self._slots.drop(sequence.give_back(), self._clock())
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            self._slots.release(slot, self._clock())
            self._speculation.forget(slot)
        return slot

    def _make_room(self) -> None:
        """Free KV cells: idle prefixes first, then those of the least urgent sequence, which goes on later."""
        if self._slots.drop_oldest_idle():
            return
        if len(self._running) > 1:
            self._put_back(line.least_urgent(self._running))
            return
        (only,) = self._running
        self._running.clear()
        caps = self._session.caps
        needed_cells = only.n_cells(caps, 1)
        error = CellsExhaustedError(needed_cells=needed_cells, n_ctx=caps.n_ctx, n_beams=only.n_places)
        if (slot := self._release(only)) is not None:
            self._slots.empty(slot)
        only.sink.failed(error)

    def _put_back(self, sequence: Sequence) -> None:
        """Take a running sequence's cells; what they held is kept outside the KV while there is room."""
        self._running.remove(sequence)
        others = sequence.give_back()
        slot, sequence.slot = sequence.slot, None
        for each in (slot, *others):
            if each is not None:
                self._slots.shelve(each)
                self._speculation.forget(each)
        self._waiting.add(sequence, self._running)
        self._totals.preempted += 1

    def _fail_batch(self, sequences: ListOf[Sequence], error: EdgeRtError) -> None:
        log = _log.debug if isinstance(error, RequestError) else _log.error  # who asked is told; ours is what we did
        log("a step of %d sequences failed: %s", len(sequences), error)
        for sequence in sequences:
            slot = sequence.slot
            self._running.remove(sequence)
            self._fail(sequence, error)
            if slot is not None:
                self._slots.empty(slot)  # its KV is undefined now

    def _fail(self, sequence: Sequence, error: EdgeRtError) -> None:
        self._release(sequence)
        sequence.sink.failed(error)
