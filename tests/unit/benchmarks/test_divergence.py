from __future__ import annotations

import numpy as np
import pytest

from benchmarks.divergence import Divergence


def test_it_is_the_kl_divergence_of_the_distributions_and_the_perplexity_of_what_follows() -> None:
    p, q = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]), np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    found = Divergence()
    found.add([2, 0], np.log(p).astype(np.float32) + 3.0, np.log(q).astype(np.float32) - 5.0)
    assert found.mean_kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert found.same_choice == 0.5
    assert (found.reference_perplexity, found.perplexity) == pytest.approx((2.0, 4.0))
    assert found.perplexity_change == pytest.approx(1.0)


def test_windows_add_up() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 2, 5, 7)).astype(np.float32)
    total, together = Divergence(), Divergence()
    for number, (a, b) in enumerate((first, second)):
        one = Divergence()
        one.add([number, 1, 2, 3, 4], a, b)
        total += one
        together.add([number, 1, 2, 3, 4], a, b)
    assert (total.mean_kl, total.perplexity) == (together.mean_kl, together.perplexity)
    assert len(total.kl) == 10
    assert total.n_scored == 8
