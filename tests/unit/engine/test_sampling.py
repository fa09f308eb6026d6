"""Sampler against a slow reference that sorts the whole vocabulary in double precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_rt.engine import sampling
from edge_rt.engine.sampling import _FIRST_NUCLEUS, Sampler
from edge_rt.errors import BackendStepError, InvalidRequestError
from edge_rt.types import Sampling

F32 = NDArray[np.float32]


def no_entropy() -> int:
    raise AssertionError("no seed has to be drawn")


def row(*logits: float) -> F32:
    return np.array(logits, np.float32)


def spread(n: int, seed: int = 0, scale: float = 3.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def sampler(n_vocab: int, prompt: tuple[int, ...] = (), **options: Any) -> Sampler:
    return Sampler(Sampling(**{"seed": 1, **options}), n_vocab, prompt, entropy=no_entropy)


def draw(subject: Sampler, logits: F32, n: int) -> list[int]:
    return [subject.sample(logits) for _ in range(n)]


def reference(logits: F32, options: Sampling, slack: float = 0.0) -> dict[int, float]:
    """Kept tokens and their probabilities, by sorting everything. slack moves the cuts, to look past rounding."""
    values = logits.astype(np.float64)
    ids = np.lexsort((np.arange(len(values)), -values))
    ids = ids[values[ids] > -np.inf]
    if options.top_k:
        ids = ids[: options.top_k]
    if options.top_p < 1.0:
        shares = np.exp(values[ids] - values[ids[0]])
        sums = np.cumsum(shares / shares.sum())
        ids = ids[: int(np.searchsorted(sums, options.top_p + slack)) + 1]
    if options.min_p > 0.0:
        ids = ids[np.exp(values[ids] - values[ids[0]]) >= min(options.min_p * (1 - slack), 1.0)]
    weights = np.exp((values[ids] - values[ids[0]]) / options.temperature)
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


def assert_same_distribution(subject: Sampler, logits: F32, options: Sampling) -> None:
    ids, weights = subject._candidates(logits)
    shares = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    # Where the cut falls within rounding of a token's edge, either side is right.
    fewest, most = reference(logits, options, -1e-5), reference(logits, options, 1e-5)
    strangers = (set(fewest) - set(shares)) | (set(shares) - set(most))
    if strangers:
        # Logits this close have the same exponential in single precision; which of them stays is then by id.
        edge = min(logits[list(shares)])
        assert all(abs(float(logits[token_id]) - float(edge)) < 2e-7 for token_id in strangers)
        assert len(fewest) <= len(shares) <= len(most)
    elif len(fewest) == len(most):
        expected = reference(logits, options)
        for token_id, share in shares.items():
            assert share == pytest.approx(expected[token_id], rel=1e-5, abs=1e-12)


# -- greedy


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert sampler(4, temperature=0.0).sample(row(1, 3, 3, 2)) == 1


def test_greedy_needs_no_seed() -> None:
    subject = Sampler(Sampling(seed=None), 3, (), entropy=no_entropy)
    assert draw(subject, row(0, 1, 0), 5) == [1] * 5


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    assert set(draw(sampler(3, temperature=temperature), row(-1e4, 2.0, 1.5), 20)) == {1}


def test_a_very_high_temperature_is_uniform_over_what_is_allowed() -> None:
    counts = Counter(draw(sampler(4, temperature=1e30), row(50, 0, -np.inf, -50), 3000))
    assert set(counts) == {0, 1, 3}
    assert all(900 < count < 1100 for count in counts.values())


# -- broken logits


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"repeat_penalty": 1.2}])
@pytest.mark.parametrize(
    ("bad", "said"), [(np.nan, "NaN or \\+inf"), (np.inf, "NaN or \\+inf"), (-np.inf, "no finite value")]
)
@pytest.mark.parametrize("n_vocab", [5, 5000])
def test_broken_logits_are_an_error(
    options: dict[str, float], more: dict[str, float], bad: float, said: str, n_vocab: int
) -> None:
    logits = np.full(n_vocab, -np.inf, np.float32) if bad == -np.inf else spread(n_vocab)
    logits[-1] = bad
    with pytest.raises(BackendStepError, match=f"{said}.* models verify.* adapter"):
        sampler(n_vocab, (0, 1), **options, **more).sample(logits)


def test_logits_of_another_vocabulary_are_an_error() -> None:
    with pytest.raises(BackendStepError, match="shape"):
        sampler(5).sample(row(1, 2, 3))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.1}]
)
@pytest.mark.parametrize("n_vocab", [9, 4000])
def test_the_only_token_that_is_not_banned_is_chosen(options: dict[str, float], n_vocab: int) -> None:
    logits = np.full(n_vocab, -np.inf, np.float32)
    logits[7] = -3e38
    assert draw(sampler(n_vocab, **{"temperature": 0.7, **options}), logits, 20) == [7] * 20


# -- cuts


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.one_of(st.integers(-4, 4).map(float), st.just(-np.inf)), min_size=1, max_size=40),
    noise=st.sampled_from([0.0, 1.0]),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
def test_small_vocabularies_match_the_reference(
    logits: list[float], noise: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    values = row(*logits) + noise * spread(len(logits), scale=0.3)
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    subject = sampler(len(values), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if not np.isfinite(values).any():
        with pytest.raises(BackendStepError):
            subject.sample(values)
    elif top_k in range(1, len(values)) or top_p < 1.0 or min_p > 0.0:
        assert_same_distribution(subject, values, options)
    else:
        assert subject.sample(values) in reference(values, options)


@settings(max_examples=60, deadline=None)
@given(
    n_vocab=st.sampled_from([3071, 3072, 5000, 49152]),
    seed=st.integers(0, 50),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 8.0]),
    rounded=st.booleans(),
    options=st.sampled_from(
        [
            Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
            Sampling(temperature=0.8, top_k=1),
            Sampling(temperature=1.5, top_k=700),
            Sampling(temperature=1.0, top_k=2999, top_p=0.5),
            Sampling(temperature=1.0, top_p=0.1),
            Sampling(temperature=1.3, top_p=0.95),
            Sampling(temperature=1.0, top_p=0.999, min_p=0.001),
            Sampling(temperature=0.5, min_p=0.02),
        ]
    ),
)
def test_large_vocabularies_match_the_reference(
    n_vocab: int, seed: int, scale: float, rounded: bool, options: Sampling
) -> None:
    logits = spread(n_vocab, seed, scale)
    if rounded:
        logits = np.round(logits)  # many equal logits
    subject = Sampler(options, n_vocab, (), entropy=lambda: 0)
    assert_same_distribution(subject, logits, options)


def test_top_k_keeps_exactly_k_of_equal_logits_by_id() -> None:
    for n_vocab in (10, 49152):
        assert set(draw(sampler(n_vocab, temperature=1.0, top_k=3), np.zeros(n_vocab, np.float32), 60)) == {0, 1, 2}


def test_top_p_and_min_p_cut_before_the_temperature() -> None:
    # Shares 0.66 0.24 0.09 at temperature 1. At 100 they would all be a third, and top_p 0.6 would keep two.
    logits = row(3, 2, 1)
    assert set(draw(sampler(3, temperature=100.0, top_p=0.6), logits, 50)) == {0}
    assert set(draw(sampler(3, temperature=100.0, min_p=0.3), logits, 50)) == {0, 1}


def test_top_p_is_of_what_top_k_left() -> None:
    # 0.40 0.30 0.20 0.10: of the first two the first has 0.57, so 0.5 keeps one; of all four 0.5 keeps two.
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert set(draw(sampler(4, temperature=1.0, top_k=2, top_p=0.5), logits, 50)) == {0}
    assert set(draw(sampler(4, temperature=1.0, top_p=0.5), logits, 50)) == {0, 1}


def test_top_p_zero_keeps_the_most_likely() -> None:
    assert set(draw(sampler(3, temperature=1.0, top_p=0.0), row(1, 2, 1.5), 20)) == {1}


# -- frequencies


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 6, "top_p": 0.95, "min_p": 0.01}],
    ids=str,
)
@pytest.mark.parametrize("n_vocab", [8, 200])
def test_tokens_come_as_often_as_they_should(options: dict[str, float], n_vocab: int) -> None:
    logits = spread(n_vocab, seed=3, scale=2.0)
    n = 8_000
    counts = Counter(draw(sampler(n_vocab, temperature=0.9, seed=5, **options), logits, n))
    expected = reference(logits, Sampling(temperature=0.9, **options))
    assert set(counts) <= set(expected)
    # Chi-square over the tokens expected often enough, the rest in one bin; mean df, deviation sqrt(2 df).
    bins = [(counts[i], share * n) for i, share in expected.items() if share * n >= 10]
    rest = n - sum(e for _, e in bins)
    if rest >= 10:
        bins.append((n - sum(c for c, _ in bins), rest))
    chi = sum((count - e) ** 2 / e for count, e in bins)
    df = len(bins) - 1
    assert chi < df + 4 * np.sqrt(2 * df) + 1


def test_the_whole_vocabulary_is_drawn_from_at_every_block() -> None:
    n_vocab = 1000  # not a multiple of the block
    counts = Counter(draw(sampler(n_vocab, temperature=1.0), np.zeros(n_vocab, np.float32), 20_000))
    assert len(counts) == n_vocab
    assert max(counts) == n_vocab - 1


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.full(130, -np.inf, np.float32)
    logits[[5, 64, 129]] = 0
    assert set(draw(sampler(130, temperature=1.0), logits, 300)) == {5, 64, 129}


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0, 1e300]), min_size=1).filter(any),
    u=st.one_of(st.floats(0, 1), st.just(1 - 2**-53)),
)
def test_a_weight_of_zero_is_never_picked(weights: list[float], u: float) -> None:
    with np.errstate(over="ignore"):
        assert weights[sampling._pick(np.array(weights), u)] > 0


# -- seeds


def test_the_same_seed_gives_the_same_answer_and_another_does_not() -> None:
    logits = spread(500)
    first = draw(sampler(500, temperature=1.0, seed=42), logits, 50)
    assert draw(sampler(500, temperature=1.0, seed=42), logits, 50) == first
    assert draw(sampler(500, temperature=1.0, seed=43), logits, 50) != first


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**80, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= sampler(5, temperature=1.0, seed=seed).sample(spread(5)) < 5


def test_without_a_seed_entropy_draws_one() -> None:
    drawn = Sampler(Sampling(temperature=1.0), 500, (), entropy=lambda: 42)
    assert draw(drawn, spread(500), 20) == draw(sampler(500, temperature=1.0, seed=42), spread(500), 20)


# -- bias and penalties


def test_bias_is_added_to_the_logit() -> None:
    assert sampler(3, temperature=0.0, logit_bias={2: 5.0, 0: -1.0}).sample(row(3, 2.5, -1)) == 2
    assert sampler(3, temperature=0.0, logit_bias={2: 3.9}).sample(row(3, 2.5, -1)) == 0


def test_a_bias_of_minus_100_bans() -> None:
    logits = spread(50)
    best = int(logits.argmax())
    assert best not in draw(sampler(50, temperature=1.0, logit_bias={best: -100.0}), logits, 500)


@pytest.mark.parametrize("token_id", [-1, 3])
def test_a_biased_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        sampler(3, logit_bias={token_id: 1.0})


@pytest.mark.parametrize("token_id", [-1, 3])
def test_a_prompt_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        sampler(3, (0, token_id), repeat_penalty=1.1)


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    # 4/2 = 2 < 3; and -1 * 2 = -2 < -1.5.
    assert sampler(2, (0,), temperature=0.0, repeat_penalty=2.0).sample(row(4, 3)) == 1
    assert sampler(2, (0,), temperature=0.0, repeat_penalty=2.0).sample(row(-1, -1.5)) == 1


def test_repeat_penalty_looks_back_over_the_last_tokens_of_prompt_and_answer() -> None:
    subject = sampler(4, (3, 0, 0), temperature=0.0, repeat_penalty=10.0, repeat_last_n=2)
    logits = row(4, 3, 2, 4)
    assert subject.sample(logits) == 3  # out of the window already
    subject.accept(3)
    assert subject.sample(logits) == 1  # window 0 3
    subject.accept(1)
    assert subject.sample(logits) == 0  # window 3 1
    subject.accept(2)
    assert subject.sample(logits) == 0  # window 1 2


def test_a_window_of_zero_turns_the_repeat_penalty_off() -> None:
    subject = sampler(2, (0,), temperature=0.0, repeat_penalty=10.0, repeat_last_n=0)
    subject.accept(0)
    assert subject.sample(row(4, 3)) == 0


def test_presence_and_frequency_count_the_answer_only() -> None:
    subject = sampler(2, (0, 0, 0), temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert subject.sample(row(4, 3)) == 0
    subject.accept(0)
    assert subject.sample(row(4, 3)) == 1


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 7), max_size=12),
    answer=st.lists(st.integers(0, 7), max_size=40),
    bias=st.dictionaries(st.integers(0, 7), st.floats(-5, 5, width=32), max_size=3),
    repeat=st.sampled_from([1.0, 0.8, 1.3]),
    last_n=st.integers(0, 10),
    presence=st.sampled_from([0.0, 0.6, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
)
def test_penalties_follow_their_definition(
    prompt: list[int],
    answer: list[int],
    bias: dict[int, float],
    repeat: float,
    last_n: int,
    presence: float,
    frequency: float,
) -> None:
    logits = spread(8)
    subject = sampler(
        8,
        tuple(prompt),
        logit_bias=bias,
        repeat_penalty=repeat,
        repeat_last_n=last_n,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for token_id in answer:
        subject.accept(token_id)
    window = set((prompt + answer)[-last_n:] if last_n else ())
    expected = []
    for i, logit in enumerate(logits.tolist()):
        value = logit + bias.get(i, 0.0)
        if i in window:
            value = value / repeat if value > 0 else value * repeat
        count = answer.count(i)
        expected.append(value - frequency * count - presence * (count > 0))
    assert subject._adjust(logits).tolist() == pytest.approx(expected, abs=1e-4)


def test_thousands_of_distinct_answer_tokens_are_all_penalised() -> None:
    n_vocab = 3000
    subject = sampler(n_vocab, temperature=0.0, presence_penalty=1.0)
    for token_id in range(n_vocab - 1):
        subject.accept(token_id)
    assert subject.sample(np.zeros(n_vocab, np.float32)) == n_vocab - 1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_logits_are_left_as_they_are(options: dict[str, float]) -> None:
    logits = spread(4000)
    logits.setflags(write=False)
    before = logits.copy()
    everything = {"logit_bias": {1: 2.0}, "repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    subject = sampler(4000, (1, 2), **{"temperature": 0.8, **everything, **options})
    for _ in range(3):
        subject.accept(subject.sample(logits))
    subject.logprobs(logits, 3, 5)
    assert (logits == before).all()


# -- logprobs


@pytest.mark.parametrize("n_vocab", [30, 49152])
def test_logprobs_are_of_the_unmodified_softmax(n_vocab: int) -> None:
    logits = spread(n_vocab) + np.float32(1000)  # exp would overflow
    values = logits.astype(np.float64)
    expected = values - values.max() - np.log(np.exp(values - values.max()).sum())
    subject = sampler(n_vocab, (3,), temperature=0.3, repeat_penalty=2.0, logit_bias={3: -100.0})
    chosen, top = subject.logprobs(logits, 3, 4)
    assert chosen == pytest.approx(expected[3], abs=1e-6)
    assert [i for i, _ in top] == np.argsort(-logits, kind="stable")[:4].tolist()
    assert [p for _, p in top] == pytest.approx([expected[i] for i, _ in top], abs=1e-6)


def test_logprobs_of_equals_come_by_id_and_without_banned_tokens() -> None:
    chosen, top = sampler(4).logprobs(row(-np.inf, 1, -np.inf, 1), 3, 4)
    assert [i for i, _ in top] == [1, 3]
    assert chosen == pytest.approx(np.log(0.5))


def test_no_rivals_may_be_asked_for() -> None:
    assert sampler(2).logprobs(row(0, 0), 1, 0) == (pytest.approx(np.log(0.5)), [])


@pytest.mark.parametrize("n_vocab", [30, 49152])
def test_a_signal_is_of_the_unmodified_softmax(n_vocab: int) -> None:
    logits = spread(n_vocab) + np.float32(1000)
    logits[7] = -np.inf
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    first, second = np.sort(p)[:-3:-1]
    signal = sampler(n_vocab, (3,), temperature=0.3, repeat_penalty=2.0).signal(logits, 3)
    assert signal.logprob == pytest.approx(np.log(p[3]), abs=1e-5)
    assert signal.margin == pytest.approx(first - second, abs=1e-5)
    assert signal.entropy == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=1e-4)


def test_a_signal_tells_certainty_from_ignorance() -> None:
    certain, ignorant = sampler(4).signal(row(-np.inf, 9, -np.inf, -np.inf), 1), sampler(4).signal(row(1, 1, 1, 1), 2)
    assert (certain.logprob, certain.margin, certain.entropy) == (0.0, 1.0, 0.0)
    assert (ignorant.margin, ignorant.entropy) == (0.0, pytest.approx(np.log(4)))


def test_logprobs_of_broken_logits_are_an_error() -> None:
    with pytest.raises(BackendStepError):
        sampler(2).logprobs(row(0, np.nan), 0, 1)


class Mask:
    """What a form allows, as a set."""

    def __init__(self, ids: set[int], n_vocab: int) -> None:
        self._mask = np.zeros(n_vocab, np.bool_)
        self._mask[list(ids)] = True

    def allows(self, token_id: int) -> bool:
        return bool(self._mask[token_id])

    def first(self, token_ids: Sequence[int], n: int) -> list[int]:
        found = [token_id for token_id in token_ids if self._mask[token_id]]
        return found[:n] if len(found) > len(token_ids) // 3 else []

    def mask(self) -> NDArray[np.bool_]:
        return self._mask


@settings(max_examples=300, deadline=None)
@given(
    n_vocab=st.sampled_from([40, 3000, 6000]),
    share=st.sampled_from([0.001, 0.05, 0.5, 0.98, 1.0]),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    is_rough=st.booleans(),
    penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**32),
)
def test_a_mask_is_as_good_as_minus_infinity(
    n_vocab: int,
    share: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    is_rough: bool,
    penalty: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, n_vocab).astype(np.float32)
    if is_rough:  # many are equal
        logits = np.round(logits)
    allowed = set(np.flatnonzero(rng.random(n_vocab) < share).tolist()) or {int(rng.integers(n_vocab))}
    banned = logits.copy()
    banned[list(set(range(n_vocab)) - allowed)] = -np.inf
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=penalty, seed=seed
    )
    one, two = (Sampler(sampling, n_vocab, [1, 2, 3]) for _ in range(2))
    before = logits.copy()
    for _ in range(3):
        found = one.sample(logits, Mask(allowed, n_vocab))
        assert found in allowed
        same = two.sample(banned)
        if top_k or top_p == 1.0 or len(allowed) <= _FIRST_NUCLEUS:  # else they are drawn in no order
            assert found == same
        one.accept(found)
        two.accept(found)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=5)])
def test_a_mask_that_allows_nothing_is_an_error(sampling: Sampling) -> None:
    with pytest.raises(BackendStepError, match="no finite value"):
        Sampler(sampling, 50, []).sample(np.zeros(50, np.float32), Mask(set(), 50))
