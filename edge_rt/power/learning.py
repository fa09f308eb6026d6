"""What the clock policy remembers, and what it learns from hints: times of both phases, and promises that were kept.

A prompt teaches how long its tokens take only if it was computed alone, from its beginning to its first token. Whether
the clock changed meanwhile does not matter: what must have been computed at each clock is counted. To learn only from
prompts that ended before the machine had to race would be to learn from those that were told too long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edge_rt.power import advice, phase_model
from edge_rt.power.advice import Advised
from edge_rt.power.clamp import Ceiling, Heat
from edge_rt.power.levels import Model
from edge_rt.power.phase_model import Phase
from edge_rt.power.state import Hint, Limits, Observation

TPOT_ROOM = 0.80  # of the objective: what a level is chosen for
SHARED = 2.0  # how much longer an inference takes beside running answers, which have their own process

_SPREAD, _SPREAD_WEIGHT, _MAX_SPREAD = 0.2, 0.1, 2.0  # how wrong the tokens told of a prompt are, relative; at first
_N_SLACK = 5  # hints in a row that are fast enough before one level is given back
_MAX_CAUTION = 2.0
_STEADY_S = 0.3  # of nothing but decoding, until the time per token is that of decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is known from before; the empty one is where to begin.

    level, since_s     in force, and since when; -1: not yet decided
    looked_s           the last call
    switched_s         the last changes
    hint               the last one
    prompt_s           since when its prompt is computed with that many tokens left
    done               tokens of it that must have been computed since
    is_counted         its tokens were counted by its engine, not estimated
    waiting_since_s    a request waits since then
    pressing           a second prompt came while one was computed
    prefill, decode    learned times of a token; None: nothing is known of them yet
    job                learned time of what has no tokens: a tensor model's inference
    boost, n_slack     levels added because tokens came late; hints in a row that were early
    caution            factor on the foretold time of a prompt
    spread             by how much a prompt's time is off what its tokens foretell, relative, in the mean
    promised           the prompt that runs was expected to be in time
    cap, hot, heat     the clamps' own
    is_busy, calm_since_s  other programs compute; since when they do not
    advised            the advice's own; None where nobody measured fewer threads
    """

    level: int = -1
    since_s: float = -math.inf
    looked_s: float = -math.inf
    switched_s: tuple[float, ...] = ()
    hint: Hint | None = None
    prompt_s: float | None = None
    done: float = 0.0
    is_counted: bool = False
    waiting_since_s: float | None = None
    pressing: bool = False
    prefill: Phase | None = None
    decode: Phase | None = None
    job: Phase | None = None
    boost: int = 0
    n_slack: int = 0
    caution: float = 1.0
    spread: float = _SPREAD
    promised: bool = False
    cap: Ceiling | None = None
    hot: Ceiling | None = None
    heat: Heat | None = None
    is_busy: bool = False
    calm_since_s: float | None = None
    advised: Advised | None = None


def learned(observation: Observation, limits: Limits, model: Model, memory: Memory) -> Memory:
    """Take in a new hint: what it says of the times of both phases, and of promises that were kept or not."""
    if memory.prefill is None and model.is_calibrated:
        points = [(model.share(level.hz), level.decode_s) for level in model.levels]
        decode = advice.prior(memory.advised) or phase_model.fit(points)
        memory = replace(memory, prefill=prior_prefill(model), decode=decode)
    hint, before = observation.hint, memory.hint
    if hint is None:
        return replace(memory, hint=None, waiting_since_s=None, pressing=False)
    if before is not None and hint.sent_s <= before.sent_s:
        return _advanced(observation.now_s, before, model, memory)
    if not observation.throttled:
        memory = _learned_times(observation, hint, before, model, memory)
    # A daemon that does not count a prompt's tokens down tells the same again every half second.
    is_same = _is_same_prompt(hint, before)
    if is_same and before is not None:
        memory = _advanced(observation.now_s, before, model, memory)
    prompt_s: float | None = None
    if is_same:
        prompt_s = memory.prompt_s
    elif hint.work == "prefill" and not hint.n_waiting and not _goes_on(hint, before):
        prompt_s = hint.sent_s
    waiting_since_s = None
    if hint.n_waiting:
        waiting_since_s = hint.sent_s if memory.waiting_since_s is None else memory.waiting_since_s
    memory = _promises_kept(hint, before, _boosted(hint, before, limits, model, memory))
    return replace(
        memory,
        hint=hint,
        prompt_s=prompt_s,
        done=memory.done if is_same else 0.0,
        is_counted=memory.is_counted if is_same else before is not None and hint.tells_anew(before),
        waiting_since_s=waiting_since_s,
        pressing=hint.work == "prefill" and (memory.pressing or _has_grown(hint, before)),
    )


def _boosted(hint: Hint, before: Hint | None, limits: Limits, model: Model, memory: Memory) -> Memory:
    """Add levels when tokens come late, and give them back one by one when they have come early for a while."""
    if hint.tpot_s is None or not _is_steady(hint, before):
        return memory
    if hint.tpot_s > limits.tpot_slo_s:
        return replace(memory, boost=min(memory.boost + 2, model.top), n_slack=0)
    if not memory.boost or hint.tpot_s >= limits.tpot_slo_s * TPOT_ROOM:
        return replace(memory, n_slack=0)
    if memory.n_slack + 1 < _N_SLACK:
        return replace(memory, n_slack=memory.n_slack + 1)
    return replace(memory, boost=memory.boost - 1, n_slack=0)


def _promises_kept(hint: Hint, before: Hint | None, memory: Memory) -> Memory:
    """Grow cautious by a prompt that was promised and is late, and slowly less so by each that ends."""
    if memory.promised and hint.ttft_left_s is not None and hint.ttft_left_s < 0:
        return replace(memory, caution=min(memory.caution * 1.25, _MAX_CAUTION), promised=False)
    if before is not None and before.work == "prefill" and hint.work != "prefill":
        return replace(memory, caution=max(1.0, memory.caution - 0.01), promised=False)
    return memory


def _has_grown(hint: Hint, before: Hint | None) -> bool:
    """Tell whether another request has come while a prompt was computed."""
    return (
        before is not None
        and before.work == "prefill"
        and hint.n_waiting + hint.n_running > before.n_waiting + before.n_running
    )


def _is_steady(hint: Hint, before: Hint | None) -> bool:
    """Tell whether the last tokens were decoded by the same answers and nothing else beside them."""
    return (
        before is not None
        and hint.work == before.work == "decode"
        and hint.n_running == before.n_running
        and hint.sent_s - before.sent_s >= _STEADY_S
    )


def _is_same_prompt(hint: Hint, before: Hint | None) -> bool:
    return (
        before is not None
        and hint.work == before.work == "prefill"
        and (hint.n_prompt_tokens, hint.n_waiting, hint.n_running)
        == (before.n_prompt_tokens, before.n_waiting, before.n_running)
    )


def _goes_on(hint: Hint, before: Hint | None) -> bool:
    """Tell whether a prompt is computed since before this hint: beside others, which have changed."""
    return (
        before is not None
        and before.work == "prefill"
        and not before.n_waiting
        and 0 < hint.n_prompt_tokens == before.n_prompt_tokens
    )


def _advanced(now_s: float, hint: Hint, model: Model, memory: Memory) -> Memory:
    """Count what must have been computed of a prompt since the last look, so that it is not asked for twice."""
    phase = memory.prefill if hint.n_prompt_tokens else memory.job
    if hint.work != "prefill" or hint.n_waiting or phase is None or memory.level < 0:
        return memory
    unit_s = phase.seconds(model.share(model.levels[memory.level].hz)) * memory.caution
    if not hint.n_prompt_tokens and hint.n_running:
        unit_s *= SHARED
    return replace(memory, done=memory.done + max(now_s - max(memory.looked_s, hint.sent_s), 0.0) / unit_s)


def _learned_times(observation: Observation, hint: Hint, before: Hint | None, model: Model, memory: Memory) -> Memory:
    """Learn from spans of one kind of work, at the clock that is in force where it was read back."""
    if memory.level < 0 or before is None:
        return memory
    x = model.share(observation.max_hz.get(model.lead, model.levels[memory.level].hz))
    has_stood = memory.since_s <= before.sent_s and _have_stood(memory, before.sent_s)
    if hint.tpot_s is not None and _is_steady(hint, before) and has_stood:
        n = max(hint.n_running, 1)
        decode = memory.decode
        if decode is None:
            points = [(model.share(level.hz), level.decode_s) for level in model.levels]
            decode = phase_model.scaled(phase_model.fit(points), hint.tpot_s, x=x)
        return replace(memory, decode=phase_model.observe(decode, hint.tpot_s, x=x, n=n))
    start_s = memory.prompt_s
    if start_s is None or not _have_stood(memory, start_s):
        return memory
    if _is_same_prompt(hint, before) or hint.tells_anew(before):
        return memory
    passed_s = hint.sent_s - start_s
    was_changed = memory.since_s > start_s
    if not before.n_prompt_tokens:
        if hint.work == "prefill" or before.n_running > 1 or was_changed:
            return memory
        job = memory.job if memory.job is not None else phase_model.scaled(prior_prefill(model), passed_s, x=x)
        return replace(memory, job=phase_model.observe(job, passed_s, x=x))
    n_done = before.n_prompt_tokens - (hint.n_prompt_tokens if hint.work == "prefill" else 0)
    if n_done < 16 or passed_s <= 0 or before.n_running > 1 or hint.n_running > before.n_running or hint.n_waiting:
        return memory
    token_s = passed_s / n_done
    if was_changed:
        if memory.prefill is None:
            return memory
        # So many tokens would have been computed, were the times right that are learned so far.
        n_foretold = _advanced(hint.sent_s, before, model, memory).done * memory.caution
        token_s = memory.prefill.seconds(x) * n_foretold / n_done
    prefill = memory.prefill if memory.prefill is not None else phase_model.scaled(prior_prefill(model), token_s, x=x)
    error = min(abs(token_s / prefill.seconds(x) - 1), _MAX_SPREAD)
    return replace(
        memory,
        prefill=phase_model.observe(prefill, token_s, x=x, noise=memory.spread),
        spread=memory.spread + _SPREAD_WEIGHT * (error - memory.spread),
    )


def prior_prefill(model: Model) -> Phase:
    return phase_model.fit([(model.share(level.hz), level.prefill_s) for level in model.levels])


def _have_stood(memory: Memory, since_s: float) -> bool:
    """Tell whether the threads have been the same since then."""
    return memory.advised is None or memory.advised.since_s + advice.SETTLE_S <= since_s
