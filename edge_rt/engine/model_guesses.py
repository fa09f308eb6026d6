"""Guesses of a drafting model for one engine's sequences: asked for where they pay, and seldom where they do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

from edge_rt.engine.draft_gate import BETTER, MAX_JUMP, Credit, DraftCosts, PlainTimes, Plan, plan
from edge_rt.engine.draft_model import Ask, Draft, DraftModel
from edge_rt.engine.draft_record import DraftRecord, SharedRates
from edge_rt.engine.sequence import Sequence
from edge_rt.errors import BackendStepError

_log = logging.getLogger(__name__)

MAX_STREAMS = 7  # beyond, a row of another stream is worth more than one of a guess, and no time is lost on asking
_N_TRIAL = 2  # guesses of a trial, and the steps that one lasts
_N_BURST = 4
_N_PAUSE = 16  # steps without a look where there is nothing to gain
_MIN_INTERVAL, _MAX_INTERVAL = 32, 1024  # steps between trials
_HORIZON = 64  # tokens of an answer that are counted on when its prompt is computed
_N_EXPLORED = 16  # in every such draft, guesses are made however unsure they are
_RESUME_STEPS = 6.0  # of credit, after it was used up
_N_WARM = 32
_N_FEW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """What the next step is without the drafting model.

    n_rows, n_max_rows  rows without guesses, each of which gives a token; rows there is room for
    others     of each sequence: tokens that guesses from its own words are expected to bring, and their rows
    step_s     what a step of so many rows takes, 0 if unknown
    n_left     tokens that each answer may still have
    max_hold_s that a part of a prompt may hold up the step
    """

    n_rows: int
    n_max_rows: int
    others: ListOf[tuple[float, int]]
    step_s: Callable[[int], float]
    n_left: ListOf[int]
    max_hold_s: float


class ModelGuesses:
    """Asks a drafting model, and measures what that takes and brings.

    min_chance  below which its own probability ends a draft, however cheap a guess is

    A model whose call fails is closed, and said so once; everything goes on without.
    """

    def __init__(
        self, model: DraftModel, eog_ids: frozenset[int], *, clock: Callable[[], float], min_chance: float = 0.0
    ) -> None:
        self._model: DraftModel | None = model
        self.name = model.name
        self._eog_ids = eog_ids
        self._clock = clock
        self._min_chance = min_chance
        self._costs = DraftCosts()
        self._plain = PlainTimes()
        self._credit = Credit()
        self._shared = SharedRates()
        self._n_paused = self._n_burst = self._n_drafts = 0
        self._interval = _MIN_INTERVAL
        self._n_threads = self._n_applied = 0
        self._is_spent = self._is_able = False
        self._base_rate = self._spent_s = self._step_s = self._usual_s = 0.0
        self.total_s = 0.0

    @property
    def n_bytes(self) -> int:
        return 0 if self._model is None else self._model.n_bytes

    def warm_up(self) -> None:
        """Draft once for nobody, twice over, so that the first real draft finds weights read and times known."""
        for _ in range(2):
            if self._model is None:
                return
            try:
                self._warm_up(self._model)
            except BackendStepError as exc:
                self._lose(exc)

    def guess(self, running: ListOf[Sequence], wanted: ListOf[int], plain: PlainStep) -> dict[int, Draft]:
        """Give guesses for some of the running sequences, by their places.

        wanted  how many each may get; every one of them computes just one row in the next step
        """
        self._base_rate = self._spent_s = self._step_s = 0.0
        self._is_able = self._model is not None and len(running) <= MAX_STREAMS and any(wanted)
        if self._model is None or not self._is_able:
            return {}
        n_free, n_free_rows = sum(tokens for tokens, _ in plain.others), sum(rows for _, rows in plain.others)
        plain_s = self._plain.seconds(plain.n_rows)
        if plain_s is None:
            if not n_free_rows:
                return {}  # this step is the one that is measured
            plain_s = self._plain.usual(plain.n_rows) or plain.step_s(plain.n_rows)
        self._step_s = plain_s
        if self._n_paused:
            self._n_paused -= 1
            return {}
        free_s = plain.step_s(plain.n_rows + n_free_rows) if n_free_rows else 0.0
        self._base_rate = max(plain.n_rows / plain_s, (plain.n_rows + n_free) / free_s if free_s else 0.0)
        base_s = free_s or plain_s
        begun_s = self._clock()
        try:
            drafts, rows_s = self._draft(self._model, running, wanted, plain, plain_s, base_s)
        except BackendStepError as exc:
            self._lose(exc)
            drafts, rows_s = {}, 0.0
        seconds = self._clock() - begun_s
        self._spent_s = min(seconds - rows_s, MAX_JUMP * self._usual_s) if drafts else seconds - rows_s
        self.total_s += seconds
        return drafts

    def settle(self, n_rows: int, n_guesses: int, n_accepted: int, seconds: float, *, usual_s: float) -> None:
        """Take the measured time of a step, and how many guesses of it were right.

        n_rows   of its sequences without guesses
        usual_s  what steps of as many rows with the guesses take: what else held up this one is not the guesses' fault
        """
        if not n_guesses and not self._spent_s:
            self._plain.observe(n_rows, seconds)
        step_s = self._plain.usual(n_rows) or self._step_s
        if step_s and self._is_able:  # what nobody may be drafted for in earns nothing
            seconds = min(seconds, MAX_JUMP * usual_s)
            worth_s = (n_rows + n_accepted) / self._base_rate if self._spent_s and self._base_rate else seconds
            self._credit.settle(seconds + self._spent_s, worth_s, step_s)
        self._spent_s = 0.0

    def forget(self, seq_id: int) -> None:
        if self._model is not None:
            self._model.forget(seq_id)

    def set_threads(self, n_threads: int) -> None:
        self._n_threads = n_threads  # when it computes next: the engine tries counts out, and each change takes time

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None

    def _draft(
        self,
        model: DraftModel,
        running: ListOf[Sequence],
        wanted: ListOf[int],
        plain: PlainStep,
        plain_s: float,
        base_s: float,
    ) -> tuple[dict[int, Draft], float]:
        """Draft for whom it pays; give with it the seconds that missing rows took."""
        for sequence in running:
            if sequence.record is None:
                sequence.record = DraftRecord(self._shared)
        if self._is_spent and self._credit.held_s < _RESUME_STEPS * plain_s:
            return self._pause(_N_PAUSE)
        self._is_spent = self._credit.held_s <= 0.0
        if self._is_spent:
            return self._pause(_N_PAUSE)
        records = [s.record for s in running if s.record is not None]
        limits = [min(n, model.max_draft) for n in wanted]
        expected = [record.expected(n) for record, n in zip(records, limits, strict=True)]
        n_max_rows, n_rows = plain.n_max_rows, plain.n_rows
        found = plan(
            expected,
            plain.others,
            n_rows=n_rows,
            n_max_rows=n_max_rows,
            base_s=base_s,
            draft_s=self._costs.seconds,
            step_s=plain.step_s,
        )
        wins = found is not None and found.gain >= BETTER
        if found is None or not wins:
            found = self._trial(limits, plain, plain_s)
            if found is None:
                return self._pause(self._interval)
        else:
            self._n_burst, self._interval = 0, _MIN_INTERVAL
        self._apply_threads(model)
        asks = {i: self._ask(running[i], min(found.n_guesses, limits[i])) for i in found.places}
        missing = {i: model.n_missing(ask) for i, ask in asks.items()}
        gain = 1.0 - 1.0 / found.gain if wins else 0.0
        rows_s = self._compute_missing(model, asks, missing, gain, plain_s, plain)
        places = [i for i in found.places if missing[i] == 0]
        if not places or (wins and len(places) < len(found.places)):  # who is left out would only be held up
            return ({}, rows_s) if rows_s else self._pause(_N_PAUSE)
        floors = dict.fromkeys(places, 0.0)
        if wins and self._n_drafts % _N_EXPLORED:
            worth = self._worth(len(places), found.n_guesses, plain)
            floors = {i: records[i].floor(worth) for i in places}
        ready = [replace(asks[i], min_chance=max(floors[i], self._min_chance)) for i in places]
        begun_s = self._clock()
        drafts = model.propose(ready)
        n_guesses = max(ask.n_max for ask in ready)
        self._costs.observe(len(ready), n_guesses, self._clock() - begun_s)
        self._usual_s = self._costs.seconds(len(ready), n_guesses)
        self._plain.count_drafted(n_rows)
        self._n_drafts += 1
        self._n_burst += not wins
        for i, ask, draft in zip(places, ready, drafts, strict=True):
            is_over = bool(draft.token_ids) and draft.token_ids[-1] in self._eog_ids
            records[i].note(draft, gave_up=len(draft.token_ids) < ask.n_max and not is_over)
        return {i: draft for i, draft in zip(places, drafts, strict=True) if draft.token_ids}, rows_s

    def _trial(self, limits: ListOf[int], plain: PlainStep, plain_s: float) -> Plan | None:
        """Choose who is drafted for to see what it brings, where the reckoning says that it would not pay.

        None while that costs more than may be lost, or was done a short while ago.
        """
        if self._n_burst == _N_BURST:
            self._n_burst, self._interval = 0, min(2 * self._interval, _MAX_INTERVAL)
            return None
        able = [i for i, n in enumerate(limits) if n]
        for places in (able, able[:1]):
            rows = plain.n_rows + _N_TRIAL * len(places)
            drafting_s = self._costs.seconds(len(places), _N_TRIAL) or _N_TRIAL * plain_s
            cost_s = drafting_s + max(plain.step_s(rows) - plain_s, 0.0)
            n_drafts = 1 if self._n_burst else _N_BURST  # it is begun if it can be brought to its end
            if rows <= plain.n_max_rows and n_drafts * cost_s <= self._credit.held_s:
                return Plan(tuple(places), _N_TRIAL, 0.0)
        return None

    def _compute_missing(
        self,
        model: DraftModel,
        asks: dict[int, Ask],
        missing: dict[int, int | None],
        gain: float,
        plain_s: float,
        plain: PlainStep,
    ) -> float:
        """Compute a part of what the model lacks of one sequence, if that is worth it; give the seconds.

        The one that lacks least comes first. A trial does so only where nobody is ready.
        """
        lacking = [(n, i) for i, n in missing.items() if n]
        if not lacking or (not gain and len(lacking) < len(missing)):
            return 0.0
        if gain and None in missing.values():
            return 0.0
        n_missing, place = min(lacking)
        n_all = sum(n for n, _ in lacking) if gain else n_missing
        n_rows = min(n_missing, _N_FEW)  # to see what a row takes
        if row_s := self._costs.row_s:
            total_s = n_all * row_s
            if total_s > self._credit.held_s + self._credit.saved_s:
                return 0.0
            if gain and total_s > min(*(plain.n_left[i] for i in missing), _HORIZON) * gain * plain_s:
                return 0.0
            n_rows = max(1, min(n_missing, int(plain.max_hold_s / row_s)))
        begun_s = self._clock()
        n_rows = model.compute(asks[place], n_rows)
        seconds = self._clock() - begun_s
        self._credit.pay_for_rows(seconds)
        if not n_rows:  # it has no room
            missing[place] = None
            return 0.0
        self._costs.observe_rows(n_rows, seconds)
        missing[place] = model.n_missing(asks[place])
        return seconds

    def _worth(self, n_sequences: int, n_guesses: int, plain: PlainStep) -> float:
        """Give the chance from which on a guess brings more than it takes."""
        n = n_sequences * n_guesses
        checking_s = plain.step_s(plain.n_rows + n) - plain.step_s(plain.n_rows)
        cost_s = (self._costs.seconds(n_sequences, n_guesses) + max(checking_s, 0.0)) / n
        return min(cost_s * self._base_rate, 0.9)

    def _apply_threads(self, model: DraftModel) -> None:
        if self._n_threads != self._n_applied:
            model.set_threads(self._n_threads)
            self._n_applied = self._n_threads

    def _pause(self, n_steps: int) -> tuple[dict[int, Draft], float]:
        self._n_paused = n_steps
        return {}, 0.0

    def _ask(self, sequence: Sequence, n_max: int) -> Ask:
        assert sequence.slot is not None
        return Ask(
            seq_id=sequence.slot.seq_id,
            token_ids=sequence.token_ids,
            n_max=n_max,
            owner=sequence.slot.owner,
            bias=sequence.request.sampling.logit_bias,
            n_allowed=None if sequence.form is None else sequence.form.n_allowed,
        )

    def _lose(self, error: BackendStepError) -> None:
        _log.warning("the draft model %s failed; answers go on without its guesses: %s", self.name, error)
        self.close()

    def _warm_up(self, model: DraftModel) -> None:
        self._apply_threads(model)
        ask = Ask(seq_id=0, token_ids=[0] * (4 * _N_WARM), n_max=_N_TRIAL)
        n_missing = model.n_missing(ask)
        if n_missing is None:
            return
        begun_s = self._clock()
        while n_missing and (n_rows := model.compute(ask, n_missing)):
            self._costs.observe_rows(n_rows, self._clock() - begun_s)
            begun_s, n_missing = self._clock(), model.n_missing(ask)
        begun_s = self._clock()
        model.propose([ask])
        self._costs.observe(1, _N_TRIAL, self._clock() - begun_s)
        model.forget(0)
