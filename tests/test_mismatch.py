"""The mismatch ledger: estimators against closed forms, counting, agreement of codes and routes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.rl.mismatch import agreement, logprob_ledger, route_agreement

N, T = 4, 9
run = jax.jit(logprob_ledger)
codes_agree, routes_agree = jax.jit(agreement), jax.jit(route_agreement)


def ledger(trainer, rollout, mask, advantages):
    arrays = [np.asarray(x, np.float32) for x in (trainer, rollout, mask, advantages)]
    return {name: float(value) for name, value in run(*arrays).items()}


def reference(trainer, rollout, mask, advantages):
    """float64, over the list of counted tokens."""
    gaps, quarters, signs = [], [], []
    for n in range(N):
        tokens = np.flatnonzero(mask[n])
        for rank, t in enumerate(tokens):
            if np.isfinite(rollout[n, t]):
                gaps.append(float(trainer[n, t]) - float(rollout[n, t]))
                quarters.append(4 * rank // len(tokens))
                signs.append(np.sign(advantages[n]))
    d, quarters, signs = np.array(gaps), np.array(quarters), np.array(signs)
    r = np.exp(d)

    def mean(x):
        return x.mean() if x.size else 0.0

    out = {
        "gap_mean": mean(np.abs(d)),
        "gap_p99": np.quantile(np.abs(d), 0.99) if d.size else 0.0,
        "gap_max": np.abs(d).max(initial=0.0),
        "kl_k1": mean(-d),
        "kl_k3": mean(r - 1 - d),
        "chi2": mean((r - 1) ** 2),
        "ess_share": r.sum() ** 2 / (d.size * (r**2).sum()) if d.size else 0.0,
        "gap_positive": mean(np.abs(d[signs > 0])),
        "gap_negative": mean(np.abs(d[signs < 0])),
        "tokens": d.size,
        "missing": mask.sum() - d.size,
    }
    return out | {f"gap_q{i + 1}": mean(np.abs(d[quarters == i])) for i in range(4)}


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.7, 1.0]))
def test_every_entry_equals_the_reference(seed, density):
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=(N, T)).astype(np.float32)
    trainer = (rollout + 0.5 * rng.normal(size=(N, T))).astype(np.float32)
    mask = rng.random((N, T)) < density
    rollout[rng.random((N, T)) < 0.1] = np.nan
    trainer[~mask] = np.nan
    advantages = rng.integers(-1, 2, N)
    got, expected = (f(trainer, rollout, mask, advantages) for f in (ledger, reference))
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_estimators_equal_the_exact_divergences():
    """Tokens in exact proportion to the rollout's (1/2, 1/4, 1/4), trainer (1/8, 1/8, 3/4)."""
    rollout = np.log([[0.5, 0.5, 0.25, 0.25]])
    trainer = np.log([[0.125, 0.125, 0.125, 0.75]])
    got = ledger(trainer, rollout, np.ones((1, 4)), [1.0])
    kl = 0.5 * np.log(4) + 0.25 * np.log(2) - 0.25 * np.log(3)  # 0.592; trainer to rollout 0.564
    assert got["kl_k1"] == pytest.approx(kl, rel=1e-6)
    assert got["kl_k3"] == pytest.approx(kl, rel=1e-6)
    assert got["chi2"] == pytest.approx(1.34375, rel=1e-6)  # sum p_trainer^2 / p_rollout - 1
    assert got["ess_share"] == pytest.approx(1 / 2.34375, rel=1e-6)  # 1 / (1 + chi2)


def test_only_the_models_own_tokens_count():
    """BR-049: 3 model tokens and 5 tool tokens whose rollout log-prob is a dummy 0."""
    trainer = np.array([[-1.0, -1.0, -7.0, -7.0, -7.0, -7.0, -7.0, -1.0]])
    rollout = np.array([[-1.1, -0.8, 0.0, 0.0, 0.0, 0.0, 0.0, -1.3]])
    got = ledger(trainer, rollout, [[1, 1, 0, 0, 0, 0, 0, 1]], [1.0])
    assert (got["tokens"], got["missing"]) == (3, 0)
    assert got["gap_mean"] == pytest.approx(0.2, rel=1e-6)  # with the tool tokens 4.45
    assert got["gap_max"] == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf])
def test_an_empty_mask_gives_zeros_not_nan(junk):
    """BR-049."""
    got = ledger(np.full((2, 3), junk), np.full((2, 3), junk), np.zeros((2, 3)), [1.0, junk])
    assert set(got.values()) == {0.0}


def test_equal_log_probs_have_no_mismatch():
    logp = -np.arange(1.0, 9.0).reshape(2, 4)
    got = ledger(logp, logp, np.ones((2, 4)), [1.0, -1.0])
    assert (got.pop("tokens"), got.pop("ess_share")) == (8, 1)
    assert set(got.values()) == {0.0}


def test_growth_is_by_quarters_of_each_rows_own_tokens():
    gaps = np.array([[1, 2, 3, 4, 9, 9, 9, 9], [1, 1, 2, 2, 3, 3, 4, 4], [9, 1, 9, 2, 9, 3, 4, 9]])
    mask = [[1] * 4 + [0] * 4, [1] * 8, [0, 1, 0, 1, 0, 1, 1, 0]]
    got = ledger(-gaps, np.zeros((3, 8)), mask, [1.0, 1.0, 1.0])
    assert [got[f"gap_q{i}"] for i in range(1, 5)] == [1, 2, 3, 4]


def test_the_gap_splits_by_the_sign_of_the_advantage():
    gaps = np.array([[1.0, 3.0], [5.0, 5.0], [9.0, 9.0]])
    got = ledger(-gaps, np.zeros((3, 2)), np.ones((3, 2)), [0.5, -2.0, 0.0])
    assert (got["gap_positive"], got["gap_negative"]) == (2, 5)


def test_huge_gaps_are_reported_as_they_are_and_their_exponentials_stay_finite():
    got = ledger([[-500.0, -1.0]], [[-1.0, -500.0]], np.ones((1, 2)), [1.0])
    assert (got["gap_max"], got["gap_mean"], got["kl_k1"]) == (499, 499, 0)
    assert np.isfinite(list(got.values())).all()
    assert got["ess_share"] == pytest.approx(0.5, rel=1e-6)


def test_a_nan_of_the_trainer_is_seen():
    got = ledger([[np.nan, -1.0]], [[-1.0, -1.0]], np.ones((1, 2)), [1.0])
    assert np.isnan([got["gap_mean"], got["gap_max"], got["kl_k3"]]).all()


def test_code_agreement_is_a_share_by_layer_over_valid_tokens():
    a = np.arange(48, dtype=np.uint8).reshape(2, 3, 2, 4) % 16
    b = a.copy()
    b[0, 0, 0, :3] ^= 1  # layer 0: 3 of the 16 codes of the two valid tokens
    b[1, 1] ^= 1  # layer 1: one whole valid token
    b[:, 2] ^= 1  # the invalid token differs everywhere
    got = codes_agree(a, b, np.array([True, True, False]))
    np.testing.assert_array_equal(got, [13 / 16, 0.5])
    np.testing.assert_array_equal(codes_agree(a, b, np.zeros(3, bool)), [0.0, 0.0])


def test_routes_agree_as_sets():
    a = np.array([[[3, 1], [0, 2], [4, 5], [6, 7]]])
    b = np.array([[[1, 3], [0, 1], [5, 4], [0, 0]]])
    assert float(routes_agree(a, b, np.array([True, True, True, False]))[0]) == pytest.approx(2 / 3)


def test_routes_that_were_not_recorded_are_left_out():
    a = np.array([[[1, 2], [-1, -1], [1, 2], [1, -1]], [[-1, -1]] * 4])
    b = np.array([[[2, 1], [-1, -1], [-1, -1], [1, -1]], [[1, 2]] * 4])
    # Two -1 sides would "agree"; layer 1 has nothing recorded at all.
    np.testing.assert_array_equal(routes_agree(a, b, np.ones(4, bool)), [1.0, 0.0])


def test_shapes_that_do_not_fit_are_refused():
    ones = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 1\)"):
        logprob_ledger(ones, ones[:, :1], ones, ones[:, 0])
    codes, valid = jnp.zeros((2, 3, 4), jnp.uint8), jnp.ones(3, bool)
    with pytest.raises(ValueError, match="codes"):
        agreement(codes, codes[:, :, :1], valid)
    with pytest.raises(ValueError, match="routes"):
        route_agreement(codes, codes, valid[:1])
