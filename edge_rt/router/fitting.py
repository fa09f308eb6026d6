"""Fit the router's weights to labelled requests: logistic and softmax regression by L-BFGS. Needs numpy.

Runs in tools and benchmarks; ten thousand requests take a minute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_rt.errors import InvalidRequestError
from edge_rt.router import calibration, features
from edge_rt.router.scorer import MAX_Z, VECTOR_SCALE, Embedder, gain_inputs, log_odds, moved_by, softmax
from edge_rt.router.sparse import Sparse, summed
from edge_rt.router.weights import MAX_TOPICS, N_KIND_BINS, N_SURFACE, N_VECTOR, Weights

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Loss = Callable[[F64], tuple[float, F64]]

_DENSE_L2 = 1000.0  # of 280 correlated columns
_TERMS_L2 = 2.0
_TOPICS_L2 = 30.0
_TOPIC_TERMS_L2 = 0.3
_ENOUGH_FOR_TERMS = 1e-2  # of the first slope: the kinds are told no better after more steps
_GAIN_L2 = 1000.0  # of standardised columns
_N_GAIN_FOLDS = 5
_GAIN_TOLERANCE = 1.005  # of the squared error on unseen rows: a better ranking hardly shows in it, fitted noise does
_TOPIC_PRIOR = 10.0  # rows of the mean outcome that each kind begins with
_MIN_ROWS = 50
_N_FOLDS = 3
# Shares of dense, terms and topics. Choosing them by APGR on unseen rows was worse on the next ones than equal shares.
_BLEND = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A request and what each answer to it was worth, 0..1; NaN is not known. topic "" is not known either."""

    text: str
    local: float
    cloud: float
    topic: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Examples as numbers: surface [n, N_SURFACE], vectors [n, N_VECTOR], terms as rows of (bin, 1 + log count)."""

    surface: F64
    vectors: F64
    terms: Sparse
    outcomes: F64
    topics: tuple[str, ...]
    folds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.surface)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        topics = tuple(self.topics[i] for i in rows)
        terms = self.terms.take(rows)
        return Rows(self.surface[rows], self.vectors[rows], terms, self.outcomes[rows], topics, self.folds[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Judges:
    """What is fitted on one set of rows."""

    mean: F64
    deviation: F64
    dense: F64
    rarity: F64
    terms: F64
    term_bias: F64
    topic_names: tuple[str, ...]
    topics: F64
    topic_terms: F32
    topic_odds: F64

    def log_odds(self, rows: Rows) -> F64:
        """Give [3, n, 2]: of each judge, row and head; zeros of topics where there are none."""
        terms = rows.terms.weighted(self.rarity)
        votes = np.zeros((3, len(rows), 2))
        votes[0] = _dense(rows, self.mean, self.deviation) @ self.dense.T
        votes[1] = np.stack([terms.times(self.terms[head]) for head in range(2)], axis=1) + self.term_bias
        if self.topic_names:
            votes[2] = log_odds(self.kinds(rows) @ self.topic_odds.T.astype(np.float32))
        return votes

    def kinds(self, rows: Rows) -> NDArray[np.float32]:
        """Give [n, n_topics]: how likely each row is of each kind."""
        if not self.topic_names:
            return np.zeros((len(rows), 0), np.float32)
        by_dense = _dense(rows, self.mean, self.deviation) @ self.topics.T
        by_terms = rows.terms.weighted(self.rarity).folded(N_KIND_BINS).times_many(self.topic_terms)
        return softmax(by_dense.astype(np.float32) + by_terms)


def prepare(examples: Sequence[Example], embedder: Embedder) -> Rows:
    """Turn texts into numbers. A row's fold comes from its text, so equal texts are never on both sides."""
    surface = np.array([features.surface(e.text) for e in examples], np.float64).reshape(-1, N_SURFACE)
    vectors = np.asarray(embedder.embed([e.text for e in examples]), np.float64).reshape(-1, N_VECTOR)
    counts = [features.hashed_terms(e.text) for e in examples]
    sizes = np.array([len(c) for c in counts], np.int64)
    column = np.fromiter((b for c in counts for b in c), np.int64, sizes.sum())
    value = 1 + np.log(np.fromiter((n for c in counts for n in c.values()), np.float64, sizes.sum()))
    terms = Sparse(np.repeat(np.arange(len(examples)), sizes), column, value, len(examples))
    outcomes = np.array([(e.local, e.cloud) for e in examples], np.float64).reshape(-1, 2)
    folds = np.array([fold_of(e.text, 60) for e in examples], np.int64)
    return Rows(surface, vectors, terms, outcomes, tuple(e.topic for e in examples), folds)


def fold_of(text: str, n_folds: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:4], "big") % n_folds


def fit(rows: Rows, *, note: str = "", blend: Sequence[float] = _BLEND) -> Weights:
    """Fit the judges; their calibration comes from rows that each had not seen.

    blend  of dense, terms and topics; without topics the others share

    Raises InvalidRequestError where there are too few labelled rows, or too many topics.
    """
    known = ~np.isnan(rows.outcomes)
    if min(known.sum(axis=0)) < _MIN_ROWS:
        problem = f"{int(min(known.sum(axis=0)))} labelled rows of a head; at least {_MIN_ROWS}"
        raise InvalidRequestError(param="examples", problem=problem)
    judges = fit_judges(rows)
    votes, kinds = np.zeros((3, len(rows), 2)), np.zeros((len(rows), len(judges.topic_names)))
    for fold in range(_N_FOLDS):
        held = rows.folds % _N_FOLDS == fold
        if held.any() and not held.all():
            part, unseen = fit_judges(rows.take(np.flatnonzero(~held))), rows.take(np.flatnonzero(held))
            votes[:, held] = part.log_odds(unseen)
            columns = [judges.topic_names.index(name) for name in part.topic_names]
            kinds[np.ix_(held, columns)] = part.kinds(unseen)
    shares = np.array(blend) * (1, 1, 1 if judges.topic_names else 0)
    shares = shares / shares.sum()
    joined = np.tensordot(shares, votes, 1)
    maps = [
        calibration.fit(joined[k, head].tolist(), rows.outcomes[k, head].tolist()) for head, k in enumerate(known.T)
    ]
    seen = np.array([maps[1](cloud) - maps[0](local) for local, cloud in joined.tolist()])
    gain = _fit_gain(gain_inputs(votes, kinds), rows.outcomes[:, 1] - rows.outcomes[:, 0] - seen)
    return _weights(judges, shares, (maps[0], maps[1]), gain, note)


def predict(weights: Weights, rows: Rows) -> F64:
    """Give p_local and p_cloud of many requests at once, as Scorer does for one without anything learnt: [n, 2]."""
    judges = Judges(
        weights.mean.astype(np.float64),
        weights.deviation.astype(np.float64),
        weights.dense.astype(np.float64),
        weights.rarity / 16,
        weights.terms.astype(np.float64) * weights.term_scale[:, None].astype(np.float64),
        weights.term_bias.astype(np.float64),
        weights.topic_names,
        weights.topics.astype(np.float64),
        weights.topic_terms * weights.topic_scale,
        weights.topic_odds.astype(np.float64),
    )
    votes = judges.log_odds(rows)
    joined = np.tensordot(weights.blend.astype(np.float64), votes, 1)
    gains = gain_inputs(votes, judges.kinds(rows)) @ weights.gain.astype(np.float64)
    local, cloud = weights.calibration
    return np.array(
        [moved_by(gain, local(z[0]), cloud(z[1])) for gain, z in zip(gains.tolist(), joined.tolist(), strict=True)]
    )


def fit_judges(rows: Rows) -> Judges:
    """Fit each judge on all rows."""
    mean = rows.surface.mean(axis=0)
    deviation = rows.surface.std(axis=0)
    deviation = np.where(deviation > 1e-6, deviation, 1.0)  # a feature that never changed says nothing either way
    x = _dense(rows, mean, deviation)
    n_rows_with = np.bincount(rows.terms.column, minlength=features.N_HASHED)
    rarity = np.where(n_rows_with >= 2, np.log((1 + len(rows)) / (1 + n_rows_with)) + 1, 0.0)
    rarity = np.minimum(np.round(rarity * 16), 255) / 16  # as the file keeps it
    terms = rows.terms.weighted(rarity)
    dense, words = [], []
    for head in range(2):
        known = np.flatnonzero(~np.isnan(rows.outcomes[:, head]))
        y = rows.outcomes[known, head]
        dense.append(_logistic(x[known], y))
        words.append(_logistic_terms(terms.take(known), y))
    names, topics, topic_terms, odds = _fit_topics(rows, x, terms)
    stacked = np.stack(words)
    return Judges(
        mean, deviation, np.stack(dense), rarity, stacked[:, :-1], stacked[:, -1], names, topics, topic_terms, odds
    )


def _fit_topics(rows: Rows, x: F64, terms: Sparse) -> tuple[tuple[str, ...], F64, F32, F64]:
    """Give the kinds' names, their weights over x and over terms, and the odds of success with each.

    The two are fitted apart: together they told kinds worse (0.90 instead of 0.92 of the mix).
    """
    known = np.array([i for i, topic in enumerate(rows.topics) if topic], np.int64)
    names = tuple(sorted({rows.topics[i] for i in known}))
    if len(names) > MAX_TOPICS:
        raise InvalidRequestError(param="topics", problem=f"{len(names)} kinds; at most {MAX_TOPICS}")
    if len(names) < 2:
        return (), np.zeros((0, x.shape[1])), np.zeros((N_KIND_BINS, 0), np.float32), np.zeros((2, 0))
    index = {name: i for i, name in enumerate(names)}
    member = np.zeros((len(known), len(names)))
    member[np.arange(len(known)), [index[rows.topics[i]] for i in known]] = 1
    odds = []
    for head in range(2):
        y = rows.outcomes[known, head]
        mean, is_known = np.nanmean(rows.outcomes[:, head]), ~np.isnan(y)
        total = member[is_known].T @ y[is_known] + _TOPIC_PRIOR * mean
        odds.append(total / (member[is_known].sum(axis=0) + _TOPIC_PRIOR))
    by_terms = _softmax_terms(terms.take(known).folded(N_KIND_BINS), member)
    return names, _softmax_regression(x[known], member), by_terms, np.stack(odds)


def _fit_gain(x: F64, missed: F64) -> F64:
    """Fit weights of x, whose last column is 1, to what the calibrated difference missed of the gains, NaN unknown.

    Zeros where it only fits noise: few rows of many kinds make the error on unseen rows grow.
    """
    known = ~np.isnan(missed)
    inputs, y = x[known, :-1], missed[known]
    nothing = np.zeros(x.shape[1])
    if len(y) < _MIN_ROWS:
        return nothing
    turn = np.random.default_rng(0).permutation(np.arange(len(y)) % _N_GAIN_FOLDS)
    errors = np.zeros(len(y))
    for fold in range(_N_GAIN_FOLDS):
        w = _ridge(inputs[turn != fold], y[turn != fold])
        errors[turn == fold] = y[turn == fold] - inputs[turn == fold] @ w[:-1] - w[-1]
    if float(errors @ errors) > _GAIN_TOLERANCE * float(y @ y):
        return nothing
    return _ridge(inputs, y)


def _ridge(x: F64, y: F64) -> F64:
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    deviation = np.where(deviation > 1e-6, deviation, np.inf)  # what never changed says nothing
    z = (x - mean) / deviation
    w = np.linalg.solve(z.T @ z + _GAIN_L2 * np.eye(z.shape[1]), z.T @ (y - y.mean())) / deviation
    return np.append(w, y.mean() - mean @ w)


def _weights(
    judges: Judges, shares: F64, maps: tuple[calibration.Isotonic, calibration.Isotonic], gain: F64, note: str
) -> Weights:
    scale = np.maximum(np.abs(judges.terms).max(axis=1), 1e-9) / 32767
    topic_scale = np.maximum(np.abs(judges.topic_terms).max(axis=0), np.float32(1e-9)) / np.float32(127)
    return Weights(
        mean=judges.mean.astype(np.float32),
        deviation=judges.deviation.astype(np.float32),
        dense=judges.dense.astype(np.float32),
        rarity=np.round(judges.rarity * 16).astype(np.uint8),
        terms=np.round(judges.terms / scale[:, None]).astype(np.int16),
        term_scale=scale.astype(np.float32),
        term_bias=judges.term_bias.astype(np.float32),
        topics=judges.topics.astype(np.float16),
        topic_terms=np.round(judges.topic_terms / topic_scale).astype(np.int8),
        topic_scale=topic_scale,
        topic_odds=judges.topic_odds.astype(np.float32),
        gain=gain.astype(np.float32),
        blend=shares.astype(np.float32),
        calibration=maps,
        topic_names=judges.topic_names,
        note=note,
    )


def _dense(rows: Rows, mean: F64, deviation: F64) -> F64:
    standard = np.clip((rows.surface - mean) / deviation, -MAX_Z, MAX_Z)
    return np.hstack([standard, rows.vectors * VECTOR_SCALE, np.ones((len(rows), 1))])


def _logistic(x: F64, y: F64) -> F64:
    """Fit weights of x, whose last column is 1 and not held down."""
    hold = np.full(x.shape[1], _DENSE_L2)
    hold[-1] = 0

    def loss(w: F64) -> tuple[float, F64]:
        z = x @ w
        value = float((np.logaddexp(0, z) - y * z).sum() + (hold * w) @ w / 2)
        return value, x.T @ (1 / (1 + np.exp(-z)) - y) + hold * w

    return minimise(loss, np.zeros(x.shape[1]))


def _logistic_terms(x: Sparse, y: F64) -> F64:
    def loss(w: F64) -> tuple[float, F64]:
        z = x.times(w) + w[-1]
        rest = 1 / (1 + np.exp(-z)) - y
        slope = x.transposed_times(rest, features.N_HASHED) + _TERMS_L2 * w[:-1]
        value = float((np.logaddexp(0, z) - y * z).sum() + _TERMS_L2 * (w[:-1] @ w[:-1]) / 2)
        return value, np.append(slope, rest.sum())

    return minimise(loss, np.zeros(features.N_HASHED + 1))


def _softmax_regression(x: F64, member: F64) -> F64:
    n_columns, n_topics = x.shape[1], member.shape[1]

    def loss(flat: F64) -> tuple[float, F64]:
        w = flat.reshape(n_topics, n_columns)
        z = x @ w.T
        peak = z.max(axis=1, keepdims=True)
        p = np.exp(z - peak)
        total = p.sum(axis=1, keepdims=True)
        p /= total
        held = w.copy()
        held[:, -1] = 0
        value = float((np.log(total) + peak).sum() - (z * member).sum() + _TOPICS_L2 * np.square(held).sum() / 2)
        return value, ((p - member).T @ x + _TOPICS_L2 * held).ravel()

    return minimise(loss, np.zeros(n_topics * n_columns)).reshape(n_topics, n_columns)


def _softmax_terms(x: Sparse, member: F64) -> F32:
    """Fit weights [N_KIND_BINS, n_topics] of x, without a bias."""
    shape = N_KIND_BINS, member.shape[1]
    by_column = np.argsort(x.column, kind="stable")
    row, column, value = x.row[by_column], x.column[by_column], x.value[by_column]

    def loss(flat: F64) -> tuple[float, F64]:
        w = flat.reshape(shape)
        z = x.times_many(w.astype(np.float32)).astype(np.float64)
        z -= z.max(axis=1, keepdims=True)
        total = np.exp(z).sum(axis=1, keepdims=True)
        rest = (np.exp(z) / total - member).astype(np.float32)
        held = _TOPIC_TERMS_L2 * (flat @ flat) / 2
        return float(np.log(total).sum() - (z * member).sum() + held), (
            summed(column, row, value, rest, N_KIND_BINS) + _TOPIC_TERMS_L2 * w
        ).ravel()

    found = minimise(loss, np.zeros(shape[0] * shape[1]), tolerance=_ENOUGH_FOR_TERMS)
    return found.reshape(shape).astype(np.float32)


def minimise(loss: Loss, x: F64, *, n_steps: int = 100, n_kept: int = 8, tolerance: float = 1e-3) -> F64:
    """Walk to the minimum of a smooth convex loss, which gives value and slope, by L-BFGS from x.

    tolerance  of the slope that is left, of the first one
    """
    value, slope = loss(x)
    enough = tolerance * float(np.linalg.norm(slope))
    moves: list[F64] = []
    turns: list[F64] = []
    for _ in range(n_steps):
        direction = -_curved(slope, moves, turns)
        downhill = float(slope @ direction)
        step = 1.0 if moves else min(1.0, 1 / (float(np.abs(slope).sum()) + 1e-9))
        while True:
            ahead = x + step * direction
            ahead_value, ahead_slope = loss(ahead)
            if ahead_value <= value + 1e-4 * step * downhill or step < 1e-9:
                break
            step /= 2
        move, turn = ahead - x, ahead_slope - slope
        if move @ turn > 1e-12:
            moves, turns = [*moves, move][-n_kept:], [*turns, turn][-n_kept:]
        is_done = bool(np.linalg.norm(ahead_slope) <= enough)
        x, value, slope = ahead, ahead_value, ahead_slope
        if is_done:
            break
    return x


def _curved(slope: F64, moves: list[F64], turns: list[F64]) -> F64:
    """Multiply the slope with what the last steps tell of the inverse curvature."""
    q = slope.copy()
    shares = []
    for move, turn in zip(reversed(moves), reversed(turns), strict=True):
        shares.append(float(move @ q) / float(move @ turn))
        q -= shares[-1] * turn
    if moves:
        q *= float(moves[-1] @ turns[-1]) / float(turns[-1] @ turns[-1])
    for move, turn, share in zip(moves, turns, reversed(shares), strict=True):
        q += move * (share - float(turn @ q) / float(move @ turn))
    return q
