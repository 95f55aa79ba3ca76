"""The statistic of paired runs: against values by hand, against another implementation, and under
a null and an alternative that are simulated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedgrad_experiments import paired


def test_signs_by_hand():
    # Of the eight signs of 1, 2 and 3, only +++ and --- sum to 6.
    assert paired.sign_flip(np.array([1, 2, 3])) == 2 / 8
    # Those of 2, 1 and 1: 4 and -4 once each, 2 and -2 twice each, and 0 twice.
    assert paired.sign_flip(np.array([2, 1, -1])) == 6 / 8
    assert paired.sign_flip(np.array([2, -1, -1])) == 1
    assert paired.sign_flip(np.zeros(5)) == 1
    assert paired.sign_flip(np.array([0.1 + 0.2, -0.3])) == 1  # rounding decides nothing
    assert paired.sign_flip(np.full(10, 0.1)) == 2 / 1024 == paired.least_p(10)


@settings(max_examples=25)
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=9))
def test_signs_are_those_of_another_implementation(values):
    differences = np.array(values, float)
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert paired.sign_flip(differences) == pytest.approx(theirs.pvalue)


def test_signs_that_are_drawn_are_like_all_signs(monkeypatch):
    differences = np.random.default_rng(3).normal(0.6, 1, 11)
    exact = paired.sign_flip(differences)
    monkeypatch.setattr(paired, "EXACT", 4)
    drawn = paired.sign_flip(differences)
    assert drawn != exact and drawn == pytest.approx(exact, abs=0.003)
    assert paired.sign_flip(np.ones(60)) == 1 / (paired.DRAWN + 1)  # never 0


def test_holm_by_hand():
    # The least times 4, the next times 3, and so on, and never less than one before it.
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.6, 0.9]) == [1, 1]
    assert paired.holm([0.2]) == [0.2] and paired.holm([]) == []


def test_the_interval_by_hand():
    # Mean 3, deviation sqrt(2.5), so the error is sqrt(1/2); t(4) at 97.5 % is 2.776445.
    low, high = paired.interval(np.arange(1, 6))
    assert (low, high) == pytest.approx((3 - 2.776445 / 2**0.5, 3 + 2.776445 / 2**0.5), abs=1e-5)
    theirs = stats.ttest_1samp([0.3, 0.1, -0.2], 0).confidence_interval(0.95)
    assert paired.interval(np.array([0.3, 0.1, -0.2])) == pytest.approx(tuple(theirs))
    assert paired.interval(np.array([0.5])) == (-np.inf, np.inf)
    assert paired.interval(np.zeros(3)) == (0, 0)


def test_how_few_pairs_are_too_few():
    assert paired.least_p(8, 4) < paired.LEVEL < paired.least_p(7, 4)
    assert paired.least_p(1) == 1
    assert paired.detectable(np.array([0.5])) == np.inf and paired.detectable(np.zeros(3)) == 0


def simulated(rng, shift, pairs=10, comparisons=4):
    """Differences of comparisons that share a part, as those with the same fixed runs do."""
    shared = rng.standard_normal(pairs)
    return {i: shared + rng.standard_normal(pairs) + shift for i in range(comparisons)}


def test_where_there_is_no_difference_few_are_found():
    rng = np.random.default_rng(0)
    found = [paired.compare(simulated(rng, 0.0)) for _ in range(500)]
    some = np.mean([any(one.significant for one in each.values()) for each in found])
    assert some < paired.LEVEL + 2 * (0.05 * 0.95 / 500) ** 0.5
    # Without correction it would be more.
    assert np.mean([min(one.p for one in each.values()) < 0.05 for each in found]) > 0.08
    # An interval has the true mean in it 95 times in 100.
    inside = [one.interval[0] < 0 < one.interval[1] for each in found for one in each.values()]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_a_difference_of_the_detectable_size_is_found():
    rng = np.random.default_rng(1)
    spread = stats.norm.ppf((np.arange(12) + 0.5) / 12)
    size = paired.detectable(spread / spread.std(ddof=1), paired.LEVEL / 4)
    drawn = rng.standard_normal((300, 12))
    ps = np.array([[paired.sign_flip(d + shift) for d in drawn] for shift in (size, size / 4)])
    often, seldom = np.mean(ps < paired.LEVEL / 4, axis=1)
    assert often == pytest.approx(paired.POWER, abs=0.07) and seldom < 0.15
