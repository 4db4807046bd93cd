"""Distances of log-probs by position, as the drift studies report them."""

import numpy as np
import pytest

from experiments.positions import by_position, compare


def test_gap_and_kl_are_those_of_the_distributions():
    rng = np.random.default_rng(0)
    reference, logits = rng.normal(size=(2, 6, 11)).astype(np.float32)
    following = rng.integers(0, 11, 6)
    p, q = (np.exp(a.astype(np.float64)) for a in (reference, logits))
    p, q = (a / a.sum(-1, keepdims=True) for a in (p, q))
    gap, kl = compare(reference, logits, following)
    at = np.arange(6), following
    np.testing.assert_allclose(gap, np.log(q[at] / p[at]), atol=1e-5)
    np.testing.assert_allclose(kl, np.sum(p * np.log(p / q), axis=-1), atol=1e-5)


def test_rows_are_buckets_of_positions_and_nan_does_not_count():
    gap = np.array([[np.nan, -1.0, 3.0, 2.0], [np.nan, np.nan, 5.0, -4.0]])
    values = np.stack([gap, np.where(np.isnan(gap), np.nan, 0.25)])
    first, second = by_position(values, np.arange(1, 5), 3)
    assert (first["position"], first["tokens"]) == (0, 1)
    assert (first["gap_mean_abs"], first["gap_mean"]) == (1.0, -1.0)
    assert (second["position"], second["tokens"], second["kl"]) == (3, 4, 0.25)
    assert (second["gap_mean_abs"], second["gap_mean"]) == pytest.approx((3.5, 1.5))
