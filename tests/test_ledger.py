"""Code and route agreement over the audit rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.ledger import canonical, code_ledger, fed_tokens
from trace_jax.model import NOT_RECORDED, Guidance
from trace_jax.model.sites import Codes
from trace_jax.rollout import Rollout

LAYERS, ROWS, LENGTH, EXTRA = 2, 2, 6, 1  # EXTRA rows of the rollout are not audited
LENGTHS = np.array([6, 4, 5], np.int32)
WIDTHS = {"k": (1, 16), "expert_in": (1, 32), "expert_mid": (2, 16)}


def codes_of(seed: int = 0) -> dict[str, Codes]:
    rng = np.random.default_rng(seed)

    def one(rows, width):
        shape = (LAYERS, ROWS, LENGTH, rows)
        codes = rng.integers(1, 8, (*shape, width), dtype=np.uint8)
        scales = np.full((*shape, -(-width // 16)), 56, np.uint8)  # 56 is 1.0 in E4M3
        one = np.ones((*shape, 1), np.uint8)
        return Codes(codes, scales, np.float32(one), one)

    return {site: one(*shape) for site, shape in WIDTHS.items()}


def rollout_of(audit) -> Rollout:
    rows = ROWS + EXTRA
    return Rollout(
        tokens=jnp.zeros((rows, LENGTH), jnp.int32),
        prompt_length=jnp.full(rows, 2),
        length=jnp.asarray(LENGTHS),
        logp=jnp.zeros((rows, LENGTH)),
        mask=jnp.zeros((rows, LENGTH), bool),
        finished=jnp.zeros(rows, bool),
        guidance=Guidance({}, jnp.zeros((rows, LENGTH), bool), jnp.zeros(rows, jnp.int32)),
        routes=jnp.asarray(routes()).astype(jnp.int16),
        audit=audit,
    )


def routes() -> np.ndarray:
    fed = np.arange(LENGTH)[None] < (LENGTHS - 1)[:, None]
    ids = np.arange(LENGTH)[None, None, :, None] % 3 + np.arange(2)
    return np.where(fed[None, :, :, None], np.broadcast_to(ids, (LAYERS, 3, LENGTH, 2)), -1)


def ledger(trainer, audit=None, live=None):
    live = np.where(routes() < 0, 3, routes())[:, :ROWS] if live is None else live
    found = code_ledger(rollout_of(codes_of() if audit is None else audit), trainer, live)
    return {name: float(value) for name, value in found.items()}


def flipped(site: str, place: tuple[int, ...], code=None) -> dict[str, Codes]:
    """Codes of the rollout with one of them changed."""
    codes = codes_of()
    changed = codes[site].codes.copy()
    changed[place] = changed[place] ^ 1 if code is None else code
    codes[site] = codes[site]._replace(codes=changed)
    return codes


def test_agreement_is_named_by_the_layers_that_have_the_site():
    """Keys lie in every fourth layer of some models."""
    codes = codes_of()
    layers = {site: tuple(range(3, 4 * LAYERS, 4)) for site in codes}
    found = code_ledger(
        rollout_of(codes), codes, np.where(routes() < 0, 3, routes())[:, :ROWS], layers
    )
    names = {name for name in found if name.startswith("agreement/") and "layer" in name}
    assert names == {f"agreement/{site}/layer{i}" for site in codes for i in layers[site]}


def test_the_last_sampled_token_was_never_fed():
    fed = np.asarray(fed_tokens(rollout_of({})))
    np.testing.assert_array_equal(fed.sum(1), LENGTHS - 1)
    assert fed[0].tolist() == [True] * 5 + [False]


def test_equal_sides_agree_everywhere_and_absent_sites_are_left_out():
    trainer = codes_of()
    del trainer["k"]  # BF16 in the trainer
    found = ledger(trainer)
    names = {f"agreement/{site}/layer{i}" for site in ("expert_in", "expert_mid") for i in (0, 1)}
    names |= {"agreement/mean", "routes/agreement/layer0", "routes/agreement/layer1"}
    assert found.pop("guidance/unsolved") == 0.0
    assert set(found) == names and set(found.values()) == {1.0}


def test_one_flipped_code_counts_once_at_its_layer_and_site():
    found = ledger(flipped("expert_in", (1, 0, 2, 0, 7)))
    fed = 5 + 3
    assert found["agreement/expert_in/layer1"] == pytest.approx(1 - 1 / (fed * 32), abs=1e-6)
    assert found["agreement/mean"] == pytest.approx(1 - 1 / (fed * 32) / 6, abs=1e-6)
    others = {k: v for k, v in found.items() if k not in ("agreement/expert_in/layer1",)}
    del others["agreement/mean"], others["guidance/unsolved"]
    assert set(others.values()) == {1.0}


@pytest.mark.parametrize("place", [(0, 0, 5, 0, 3), (0, 1, 3, 0, 3), (1, 1, 5, 0, 0)])
def test_the_last_sampled_token_and_padding_do_not_count(place):
    assert ledger(flipped("expert_in", place))["agreement/mean"] == 1.0


def test_plus_and_minus_zero_are_the_same_value():
    place = (0, 0, 1, 0, 4)
    audit, trainer = flipped("k", place, code=0), flipped("k", place, code=8)
    assert ledger(trainer, audit)["agreement/mean"] == 1.0
    assert ledger(flipped("k", place, code=9), audit)["agreement/k/layer0"] < 1.0
    assert canonical(jnp.arange(16, dtype=jnp.uint8)).tolist() == [*range(8), 0, *range(9, 16)]


def test_a_mode_without_codes_still_reports_routes():
    found = ledger({})
    assert set(found) == {"routes/agreement/layer0", "routes/agreement/layer1"}


def test_routes_are_compared_as_sets_where_they_were_recorded():
    live = np.where(routes() < 0, 3, routes())[:, :ROWS]
    assert ledger({}, live=live[..., ::-1])["routes/agreement/layer0"] == 1.0
    other = live.copy()
    other[1, 1, 0, 0] = 3
    found = ledger({}, live=other)
    assert found["routes/agreement/layer0"] == 1.0
    assert found["routes/agreement/layer1"] == pytest.approx(1 - 1 / 8)
    assert NOT_RECORDED == -1


def test_rows_whose_checks_fail_are_counted():
    codes = codes_of()
    holds = codes["expert_mid"].holds.copy()
    holds[1, 0, 1, 0] = holds[0, 1, LENGTHS[1] - 1] = 0  # the second lies beyond what was fed
    found = ledger(codes | {"expert_mid": codes["expert_mid"]._replace(holds=holds)})
    rows = LAYERS * 2 * (LENGTHS[:ROWS] - 1).sum()
    np.testing.assert_allclose(found["guidance/unsolved"], 1 / rows / len(WIDTHS), rtol=1e-6)
