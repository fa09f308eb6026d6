from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_rt.errors import InvalidRequestError, ModelFormatError
from edge_rt.router import features, learning, metrics
from edge_rt.router.calibration import Isotonic
from edge_rt.router.drift import Drift
from edge_rt.router.learning import Labels, refit
from edge_rt.router.scorer import Sketch
from edge_rt.router.weights import N_DENSE, N_KIND_BINS, N_SURFACE, N_VOTES, Weights

_MAP = Isotonic(scores=(-4.0, 4.0), probabilities=(0.02, 0.98))


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Judges without an opinion: what they say is in each sketch."""
    return Weights(
        mean=np.zeros(N_SURFACE, np.float32),
        deviation=np.ones(N_SURFACE, np.float32),
        dense=np.zeros((2, N_DENSE + 1), np.float32),
        rarity=np.zeros(features.N_HASHED, np.uint8),
        terms=np.zeros((2, features.N_HASHED), np.int16),
        term_scale=np.ones(2, np.float32),
        term_bias=np.zeros(2, np.float32),
        topics=np.zeros((0, N_DENSE + 1), np.float16),
        topic_terms=np.zeros((N_KIND_BINS, 0), np.int8),
        topic_scale=np.zeros(0, np.float32),
        topic_odds=np.zeros((2, 0), np.float32),
        gain=np.zeros(N_VOTES + 1, np.float32),
        blend=np.array([1, 0, 0], np.float32),
        calibration=(_MAP, _MAP),
    )


def sketch(rng: np.random.Generator, kind: int, log_odds: tuple[float, float] = (0.5, 1.5)) -> Sketch:
    """A request of one of two kinds, which the shipped judges do not tell apart."""
    vector = rng.standard_normal(256) * 0.04
    vector[kind] += 1
    surface = rng.standard_normal(N_SURFACE) * 0.5
    surface[0] += 2 * kind
    return Sketch((surface).astype(np.float32), (vector / np.linalg.norm(vector)).astype(np.float32), log_odds)


def labelled(n: int, seed: int, *, chance: tuple[float, float] = (0.9, 0.2), clouds: bool = True) -> Labels:
    rng = np.random.default_rng(seed)
    labels = Labels()
    for _ in range(n):
        kind = int(rng.integers(2))
        local = float(rng.random() < chance[kind])
        cloud = float(rng.random() < 0.9) if clouds else None
        labels.add(sketch(rng, kind), local=local, cloud=cloud, source="shadow", tenant=str(rng.integers(9)))
    return labels


def test_what_the_shipped_judges_cannot_tell_apart_is_learnt(weights: Weights) -> None:
    found = refit(labelled(500, 1), weights)
    assert (found.is_better, found.by) == (True, "apgr")
    assert found.before == pytest.approx(0.5, abs=0.05)
    assert found.after > 0.7
    assert found.learnt is not None
    rng = np.random.default_rng(2)
    kinds = [[found.learnt.correct(sketch(rng, kind)) for _ in range(40)] for kind in (0, 1)]
    easy, hard = (np.mean([p[0] for p in each if p is not None]) for each in kinds)
    assert easy > 0.7
    assert hard < 0.4


def test_log_loss_decides_where_only_the_device_was_judged(weights: Weights) -> None:
    found = refit(labelled(300, 3, clouds=False), weights)
    assert (found.is_better, found.by) == (True, "log loss")
    assert found.after < found.before
    assert found.learnt is not None
    assert found.learnt.coefficients[1] is None  # the cloud keeps its shipped judge


def test_labels_by_chance_swap_nothing_in_that_is_worse(weights: Weights) -> None:
    """What is swapped in is no worse on labels of another day, up to chance."""
    for seed in range(6):
        found = refit(labelled(120, 100 + seed, chance=(0.5, 0.5)), weights, seed=seed)
        assert found.is_better == (found.after > found.before if found.by == "apgr" else found.after < found.before)
        assert (found.learnt is not None) == found.is_better


def test_a_correction_in_use_is_kept_when_the_new_one_is_worse(weights: Weights) -> None:
    good = refit(labelled(600, 1), weights).learnt
    spoilt = labelled(600, 2)
    train = ~spoilt.held(0)
    rows = spoilt._rows
    rows["outcome"][train, 0] = 1 - rows["outcome"][train, 0]  # somebody praises what is bad; the held slice is honest
    found = refit(spoilt, weights, good)
    assert not found.is_better
    assert found.learnt is None
    assert found.after < found.before


def test_few_labels_change_nothing(weights: Weights) -> None:
    found = refit(labelled(30, 1), weights)
    assert (found.is_better, found.learnt, found.by) == (False, None, "too few labels")
    assert not refit(Labels(), weights).is_better


def test_labels_come_back_from_their_file(tmp_path: Path) -> None:
    labels = labelled(50, 4, clouds=False)
    labels.save(tmp_path / "labels")
    again = Labels.load(tmp_path / "labels")
    assert again._rows.tobytes() == labels._rows.tobytes()
    assert (tmp_path / "labels").stat().st_mode & 0o077 == 0  # only the owner reads what was asked here
    assert [p.name for p in tmp_path.iterdir()] == ["labels"]


def test_old_labels_leave_and_nobody_owns_more_than_half() -> None:
    rng = np.random.default_rng(0)
    labels = Labels(max_rows=20)
    for i in range(15):
        labels.add(sketch(rng, 0), source="feedback", local=1.0, tenant="other")
        labels.add(sketch(rng, 1), source="regenerate", local=0.2, tenant=str(i))
    for _ in range(100):
        labels.add(sketch(rng, 0), source="feedback", local=0.0, tenant="flood")
    assert len(labels) <= 20
    assert (labels.outcomes[:, 0] == 0).sum() == 10
    assert np.isnan(labels.outcomes[:, 1]).all()


@pytest.mark.parametrize(
    "wrong",
    [{"local": 1.5}, {"local": -0.1}, {"cloud": math.nan}, {"local": math.inf}, {}, {"local": 1.0, "source": "rumour"}],
)
def test_a_label_that_says_nothing_sensible_is_refused(wrong: dict[str, object]) -> None:
    labels = Labels()
    with pytest.raises(InvalidRequestError):
        labels.add(sketch(np.random.default_rng(0), 0), **{"source": "feedback"} | wrong)
    assert len(labels) == 0


def sealed(body: bytes) -> bytes:
    return b"ERTLABL1" + hashlib.sha256(body).digest() + body


def with_rows(data: bytes, change: Callable[[np.ndarray], None]) -> bytes:
    n_header = int.from_bytes(data[40:44], "little")
    rows = np.frombuffer(data[44 + n_header :], learning._ROW).copy()
    change(rows)
    return sealed(data[40 : 44 + n_header] + rows.tobytes())


def put(name: str, value: float) -> Callable[[np.ndarray], None]:
    def change(rows: np.ndarray) -> None:
        rows[name][3] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda d: b"",
        lambda d: b"ERTLABL2" + d[8:],
        lambda d: d[:-1],
        lambda d: d[:60] + b"\xff" + d[61:],
        lambda d: sealed(d[40:-10]),
        lambda d: sealed(b"\xff\xff\xff\x7f" + d[44:]),
        lambda d: sealed(b"\x02\0\0\0{}" + d[60:]),
        lambda d: sealed(b"\x02\0\0\0[]"),
        lambda d: with_rows(d, put("vector", math.nan)),
        lambda d: with_rows(d, put("log_odds", math.inf)),
        lambda d: with_rows(d, put("surface", 1e9)),
        lambda d: with_rows(d, put("outcome", 2)),
        lambda d: with_rows(d, put("outcome", math.nan)),
        lambda d: with_rows(d, put("source", 9)),
        lambda d: d + bytes(10**7),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    labelled(10, 1).save(tmp_path / "labels")
    (tmp_path / "labels").write_bytes(change((tmp_path / "labels").read_bytes()))
    with pytest.raises(ModelFormatError):
        Labels.load(tmp_path / "labels")


def test_drift_alarms_for_other_requests_and_not_for_more_of_the_same() -> None:
    rng = np.random.default_rng(0)
    drift = Drift(n_reference=400, n_recent=200)
    for score in rng.normal(0, 0.1, 900):
        drift.add(float(score))
    assert drift.index is not None
    assert not drift.is_alarming
    for score in rng.normal(0.15, 0.1, 200):
        drift.add(float(score))
    assert drift.is_alarming
    drift.reset()
    assert drift.index is None


def test_refits_improve_requests_that_were_never_labelled(weights: Weights) -> None:
    """The held slice stands for the future: what it lets in also helps there."""
    learnt = refit(labelled(400, 7), weights).learnt
    assert learnt is not None
    rng = np.random.default_rng(8)
    kinds = rng.integers(2, size=300)
    found = [learnt.correct(sketch(rng, int(kind))) for kind in kinds]
    weak = [float(rng.random() < (0.9, 0.2)[kind]) for kind in kinds]
    strong = [float(rng.random() < 0.9) for _ in kinds]
    gains = [p[1] - p[0] for p in found if p is not None]
    assert metrics.curve(gains, weak, strong).apgr > 0.7
