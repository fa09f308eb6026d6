"""Choose the next token from a row of logits.

The stages and their order are llama.cpp's default chain: logit bias, penalties, top_k, top_p, min_p, temperature. So
top_p and min_p cut the distribution of temperature 1, whatever the temperature. Two differences: presence and
frequency penalties count the answer only, as OpenAI defines them, and equal logits are ordered by token id, which
makes every cut exact and every answer repeatable.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.types import Sampling, TokenSignal

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# A group's largest logit stands for it when the k-th largest of all is looked for: n_vocab / _N_GROUPS logits each.
_N_GROUPS = 1536
# The cumulative sum over the whole vocabulary is taken over blocks first.
_BLOCK = 64
# How many tokens are tried as the whole nucleus of top_p before it is searched for.
_FIRST_NUCLEUS = 256
# So few tokens are sorted; among so many more than top_k the likeliest that are allowed are looked for.
_FEW = 2048
_N_SPARE = 64
# A lower temperature leaves nothing but the largest logit and its equals, as this one does.
_MIN_TEMPERATURE = 1e-9


class Allowed(Protocol):
    """Which tokens may be chosen."""

    def allows(self, token_id: int) -> bool: ...

    def first(self, token_ids: Sequence[int], n: int) -> list[int]:
        """Give the first n of the tokens that may be chosen; fewer if many may not, and mask is the faster way."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """Say it of every token: (n_vocab,)."""
        ...


class Sampler:
    """One sequence's choices.

    prompt   the ids before the answer; the repetition penalty's window begins in it
    entropy  draws the seed where the request names none

    Give every token of the answer to accept. The same sampling, prompt, seed and logits give the same tokens.
    Raises InvalidRequestError for a biased or prompt token outside the vocabulary.
    """

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        prompt: Sequence[int],
        *,
        entropy: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._n_vocab = n_vocab
        self._temperature = max(sampling.temperature, _MIN_TEMPERATURE)
        self._top_k = sampling.top_k if 0 < sampling.top_k < n_vocab else 0
        self._top_p = sampling.top_p
        self._min_p = sampling.min_p
        self._rng: np.random.Generator | None = None  # greedy
        if sampling.temperature > 0.0:
            seed = entropy() if sampling.seed is None else sampling.seed
            self._rng = np.random.Generator(np.random.PCG64(seed & (2**64 - 1)))
        self._bias = _Offsets(n_vocab)
        for token_id, bias in sampling.logit_bias.items():
            if not 0 <= token_id < n_vocab:
                raise InvalidRequestError(
                    param="logit_bias", problem=f"token id {token_id} is outside the vocabulary of {n_vocab}"
                )
            self._bias.add(token_id, bias)
        self._repeat = _RepeatPenalty(sampling, n_vocab, prompt)
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._answer = _Offsets(n_vocab)
        self._scratch: F32 | None = None
        self._was_wide = False  # the last mask left more tokens than are sorted
        self._exps: F32 | None = None

    def accept(self, token_id: int) -> None:
        """Count a token of the answer."""
        self._repeat.accept(token_id)
        if self._presence or self._frequency:
            first = token_id not in self._answer
            self._answer.add(token_id, -self._frequency - (self._presence if first else 0.0))

    def sample(self, logits: F32, allowed: Allowed | None = None) -> int:
        """Choose a token.

        logits   (n_vocab,), not modified; -inf bans a token
        allowed  bans all other tokens, before any stage but bias and penalties

        Raises BackendStepError for NaN, +inf, or no finite logit.
        """
        if logits.shape != (self._n_vocab,):
            raise BackendStepError(reason=f"the logits have shape {logits.shape}, the vocabulary {self._n_vocab}")
        adjusted = self._adjust(logits)
        if self._rng is None:
            token_id = int(adjusted.argmax())
            _check_max(float(adjusted[token_id]))
            if allowed is None or allowed.allows(token_id):
                return token_id
            ids = np.flatnonzero(allowed.mask())
            best = int(ids[adjusted[ids].argmax()]) if len(ids) else token_id
            _check_max(float(adjusted[best]) if len(ids) else -math.inf)
            return best
        if allowed is not None:
            return self._sample_allowed(adjusted, allowed, self._rng.random())
        if not self._top_k and self._top_p >= 1.0 and self._min_p <= 0.0:
            return self._draw_any(adjusted, self._rng.random())
        ids, weights = self._candidates(adjusted)
        return int(ids[_pick(weights, self._rng.random())])

    def logprobs(self, logits: F32, token_id: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
        """Give natural-log probabilities under the softmax of the logits as they are, before any stage.

        returns the token's own, and the n_top most likely ids with theirs, most likely first; banned tokens are left
        out of these. Good to 1e-6: single precision exponentials, summed in double.
        """
        peak = _finite_max(logits)
        log_total = math.log(float(self._exponentials(logits, 1.0).sum(dtype=np.float64)))
        top = _largest(logits, n_top) if n_top else ()
        return float(logits[token_id]) - peak - log_total, [(int(i), float(logits[i]) - peak - log_total) for i in top]

    def signal(self, logits: F32, token_id: int) -> TokenSignal:
        """Say how sure the model was, under the softmax of the logits as they are. Good to 1e-5."""
        peak = _finite_max(logits)
        exps = self._exponentials(logits, 1.0)[: self._n_vocab]
        total = float(exps.sum(dtype=np.float64))
        # sum p log p; a banned token's -inf counts nothing
        weighted = float(np.dot(exps, np.maximum(logits - np.float32(peak), np.float32(-1e4))))
        entropy = math.log(total) - weighted / total
        exps[int(logits.argmax())] = 0.0
        margin = (1.0 - float(exps.max())) / total
        return TokenSignal(
            logprob=float(logits[token_id]) - peak - math.log(total), margin=margin, entropy=max(entropy, 0.0)
        )

    def _adjust(self, logits: F32) -> F32:
        """Apply bias and penalties, in a copy where there are any."""
        if not (self._bias or self._repeat or self._answer):
            return logits
        adjusted = self._own()
        np.copyto(adjusted, logits)
        self._bias.apply(adjusted)
        self._repeat.apply(adjusted)
        self._answer.apply(adjusted)
        return adjusted

    def _sample_allowed(self, logits: F32, allowed: Allowed, u: float) -> int:
        """Choose as sample does where all other logits are -inf, without writing them.

        A form leaves few tokens, which are all that is looked at, or nearly all. Then the top_k are among the likeliest
        of all, unless dozens of these are banned. Within a text, where it was so for the last token too, it takes less
        time to ask for each of these than for a mask.
        """
        if self._top_k and self._was_wide:
            likeliest = _largest(logits, min(self._top_k + _N_SPARE, self._n_vocab))
            if len(found := allowed.first(likeliest.tolist(), self._top_k)) == self._top_k:
                ids = np.array(found)
                _check_max(float(logits[ids].max()))
                ids, weights = self._cut(ids, logits[ids].astype(np.float64))
                return int(ids[_pick(weights, u)])
        mask = allowed.mask()
        self._was_wide = bool(np.count_nonzero(mask) > _FEW)
        if not self._was_wide:
            ids = np.flatnonzero(mask)
            ids = ids[logits[ids] > -np.inf]
            if self._top_k or self._top_p < 1.0:
                ids = ids[np.argsort(-logits[ids], kind="stable")[: self._top_k or len(ids)]]
        elif self._top_k:
            ids = _largest(logits, min(self._top_k + _N_SPARE, self._n_vocab))
            ids = ids[mask[ids]][: self._top_k]
            if len(ids) < self._top_k:
                ids = _largest(self._masked(logits, mask), self._top_k)
        else:
            masked = self._masked(logits, mask)
            if self._top_p >= 1.0 and self._min_p <= 0.0:
                return self._draw_any(masked, u)
            ids, weights = self._candidates(masked)
            return int(ids[_pick(weights, u)])
        _check_max(float(logits[ids].max()) if len(ids) else -math.inf)
        ids, weights = self._cut(ids, logits[ids].astype(np.float64))
        return int(ids[_pick(weights, u)])

    def _masked(self, logits: F32, mask: NDArray[np.bool_]) -> F32:
        """Ban all tokens that a mask leaves out, in the sampler's own array."""
        own = self._own()
        if logits is not own:
            np.copyto(own, logits)
        np.copyto(own, np.float32(-np.inf), where=~mask)
        return own

    def _own(self) -> F32:
        if self._scratch is None:
            self._scratch = np.empty(self._n_vocab, np.float32)
        return self._scratch

    def _candidates(self, logits: F32) -> tuple[I64, F64]:
        """Cut by top_k, top_p and min_p, one of which is on: the ids left, and their weights at the temperature."""
        if self._top_k:
            ids = _largest(logits, self._top_k)
        elif self._top_p < 1.0:
            ids = self._nucleus(logits)
        else:
            floor = np.float32(_finite_max(logits) + math.log(self._min_p))
            # Rounding may have moved the floor up past a logit that the exact comparison below keeps.
            ids = np.flatnonzero(logits >= np.nextafter(floor, np.float32(-np.inf)))
        return self._cut(ids, logits[ids].astype(np.float64), has_nucleus=not self._top_k)

    def _cut(self, ids: I64, values: F64, *, has_nucleus: bool = False) -> tuple[I64, F64]:
        """Cut tokens that are ordered by their logits by top_p, unless they are its nucleus already, and by min_p."""
        values -= values.max()
        if self._top_p < 1.0 and not has_nucleus:
            sums = np.exp(values).cumsum()
            n_kept = int(sums.searchsorted(self._top_p * sums[-1])) + 1
            ids, values = ids[:n_kept], values[:n_kept]
        if self._min_p > 0.0:
            kept = values >= math.log(self._min_p)
            ids, values = ids[kept], values[kept]
        return ids, np.exp(values / self._temperature)

    def _nucleus(self, logits: F32) -> I64:
        """Find the tokens that top_p keeps without sorting the vocabulary; only its sum needs all of it."""
        exps = self._exponentials(logits, 1.0)[: self._n_vocab]
        total = float(exps.sum(dtype=np.float64))
        wanted = self._top_p * total
        ids = _largest(logits, min(_FIRST_NUCLEUS, self._n_vocab))
        sums = np.cumsum(exps[ids], dtype=np.float64)
        if sums[-1] < wanted:
            return _heaviest(exps, wanted, total)
        return ids[: int(sums.searchsorted(wanted)) + 1]

    def _draw_any(self, logits: F32, u: float) -> int:
        """Draw from the whole vocabulary: first a block, then a token in it."""
        exps = self._exponentials(logits, self._temperature)
        blocks = exps.reshape(-1, _BLOCK)
        sums = blocks.sum(axis=1, dtype=np.float32).astype(np.float64)
        block = _pick(sums, u)
        before = float(sums[:block].sum())
        inside = (u * float(sums.sum()) - before) / float(sums[block])
        return block * _BLOCK + _pick(blocks[block].astype(np.float64), min(max(inside, 0.0), 1.0))

    def _exponentials(self, logits: F32, temperature: float) -> F32:
        """Compute exp((logits - max) / temperature), with zeros after the vocabulary to fill the last block."""
        if self._exps is None:
            self._exps = np.zeros(-(-self._n_vocab // _BLOCK) * _BLOCK, np.float32)
        exps = self._exps[: self._n_vocab]
        np.subtract(logits, np.float32(_finite_max(logits)), out=exps)
        if temperature != 1.0:
            np.divide(exps, np.float32(temperature), out=exps)
        np.exp(exps, out=exps)
        return self._exps


class _Offsets:
    """What to add to the logits of some tokens: as many array elements as distinct tokens, each kept up to date."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._places: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._values = np.empty(0, np.float32)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._places

    def add(self, token_id: int, value: float) -> None:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                size = min(max(16, 2 * place), self._n_vocab)
                self._ids = np.concatenate((self._ids, np.zeros(size - place, np.int64)))
                self._values = np.concatenate((self._values, np.zeros(size - place, np.float32)))
            self._ids[place] = token_id
        self._values[place] += value

    def apply(self, logits: F32) -> None:
        n = len(self._places)
        if n:
            logits[self._ids[:n]] += self._values[:n]


class _RepeatPenalty:
    """Make the distinct tokens of a sliding window less likely: positive logits divided, others multiplied (CTRL)."""

    def __init__(self, sampling: Sampling, n_vocab: int, prompt: Sequence[int]) -> None:
        self._penalty = np.float32(sampling.repeat_penalty)
        size = sampling.repeat_last_n if sampling.repeat_penalty != 1.0 else 0
        self._window: deque[int] = deque(prompt[max(len(prompt) - size, 0) :] if size else (), maxlen=size)
        self._counts: dict[int, int] = {}
        self._ids: I64 | None = None
        for token_id in self._window:
            if not 0 <= token_id < n_vocab:
                raise InvalidRequestError(
                    param="prompt", problem=f"token id {token_id} is outside the vocabulary of {n_vocab}"
                )
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def __bool__(self) -> bool:
        return bool(self._counts)

    def accept(self, token_id: int) -> None:
        window, counts = self._window, self._counts
        if not window.maxlen:
            return
        if len(window) == window.maxlen:
            oldest = window[0]
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
                self._ids = None
        window.append(token_id)
        if token_id not in counts:
            self._ids = None
        counts[token_id] = counts.get(token_id, 0) + 1

    def apply(self, logits: F32) -> None:
        if self._ids is None:
            self._ids = np.fromiter(self._counts, np.int64, len(self._counts))
        values = logits[self._ids]
        logits[self._ids] = np.where(values > 0, values / self._penalty, values * self._penalty)


def _largest(logits: F32, k: int) -> I64:
    """Give the ids of the k largest logits, largest first, the lower id first among equals; -inf is never one.

    Sorts only what may be among them. The k-th largest of the groups' maxima bounds the k-th largest of all from
    below, and a bound that close leaves little more than k.
    """
    n = len(logits)
    n_rows = n // _N_GROUPS
    if n_rows < 2 or 2 * k > _N_GROUPS:
        floor = np.partition(logits, n - k)[n - k] if k < n else -np.inf
        peak = _finite_max(logits)
    else:
        maxima = logits[: n_rows * _N_GROUPS].reshape(n_rows, _N_GROUPS).max(axis=0)
        rest = logits[n_rows * _N_GROUPS :]
        peak = float(maxima.max())
        if len(rest):
            peak = float(np.maximum(peak, rest.max()))
        floor = np.partition(maxima, _N_GROUPS - k)[_N_GROUPS - k]
    _check_max(peak)
    ids = np.flatnonzero(logits >= floor if floor > -np.inf else logits > -np.inf)
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]


def _heaviest(weights: F32, wanted: float, total: float) -> I64:
    """Give the ids of the fewest weights that make the wanted sum, the largest first chosen, in no order.

    Halves what is in question with each look, as a selection by rank does, so it takes time proportional to n.
    """
    kept: list[I64] = []
    # All weights below this together are less than what may be left out. The factor makes room for rounding.
    ids = np.flatnonzero(weights >= 0.999 * (total - wanted) / len(weights))
    weights = weights[ids]
    while len(ids) > _FIRST_NUCLEUS:
        pivot = np.partition(weights, len(ids) // 2)[len(ids) // 2]
        above, equal = weights > pivot, np.flatnonzero(weights == pivot)
        sum_above = float(weights[above].sum(dtype=np.float64))
        if sum_above >= wanted:
            ids, weights = ids[above], weights[above]
            continue
        kept.append(ids[above])
        wanted -= sum_above
        if len(equal) * float(pivot) >= wanted:
            kept.append(ids[equal[: math.ceil(wanted / float(pivot))]])
            return np.concatenate(kept)
        kept.append(ids[equal])
        wanted -= len(equal) * float(pivot)
        below = weights < pivot
        ids, weights = ids[below], weights[below]
    order = np.argsort(-weights, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(weights[order], dtype=np.float64), wanted)) + 1
    return np.concatenate([*kept, ids[order[:n_kept]]])


def _pick(weights: F64, u: float) -> int:
    """Give the index where the cumulative weight passes the share u, never one of weight 0."""
    sums = weights.cumsum()
    index = int(sums.searchsorted(u * sums[-1], side="right"))
    # Rounding may carry u * total onto the total itself.
    return index if index < len(sums) else int(weights.nonzero()[0][-1])


def _finite_max(logits: F32) -> float:
    return _check_max(float(logits.max()))


def _check_max(value: float) -> float:
    """Hand on a maximum; NumPy's is NaN if anything is."""
    if not math.isfinite(value):
        what = "no finite value" if value == -math.inf else "NaN or +inf"
        remedy = "`edge_rt models verify` tells whether its file is damaged; a LoRA adapter's numbers may be too large"
        reason = f"the model's output holds {what}; {remedy}"
        raise BackendStepError(reason=reason)
    return value
