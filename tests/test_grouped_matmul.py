"""Grouped products over experts, against a loop over experts in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.kernels import grouped_matmul as gm

EXPERTS, K, N = 4, 24, 10
TOKENS, TOP_K = 37, 2

group_tokens = jax.jit(gm.group_tokens, static_argnums=1)


def routes(name, tokens=TOKENS, top_k=TOP_K):
    """Expert ids [tokens, top_k], a token's experts distinct where there are enough."""
    rng = np.random.default_rng(0)
    random = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top_k]
    return {
        "balanced": random,
        "two empty experts": 2 * (random % 2),  # BR-084: sizes [n, 0, m, 0]
        "all rows in one expert": np.full((tokens, top_k), 3),
        "five rows in one expert": np.where(np.arange(tokens)[:, None] < 5, [[1, 2]], [[0, 2]]),
        "last expert alone": np.tile([[3, 0]], (tokens, 1)),
    }[name].astype(np.int32)


CASES = (
    "balanced",
    "two empty experts",
    "all rows in one expert",
    "five rows in one expert",
    "last expert alone",
)


def operands(tokens=TOKENS, top_k=TOP_K):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, K)).astype(np.float32)
    weight = rng.standard_normal((EXPERTS, N, K)).astype(np.float32)
    gate = rng.random((tokens, top_k)).astype(np.float32)
    g = rng.standard_normal((tokens, N)).astype(np.float32)
    return x, weight, gate, g


@jax.jit
def layer_and_gradients(x, weight, gate, g, ids):
    """y = sum over slots of gate * (W[id] x), and the gradients of <y, g>."""

    def layer(x, weight, gate):
        groups = gm.group_tokens(ids, EXPERTS)
        rows = gm.grouped_matmul(gm.tokens_to_rows(x, groups), weight, groups)
        rows = rows * gm.slots_to_rows(gate[..., None], groups)
        return jnp.sum(gm.rows_to_slots(rows, groups), axis=1)

    y, pull = jax.vjp(layer, x, weight, gate)
    return y, *pull(g)


def loop_over_experts(x, weight, gate, g, ids):
    """The same in float64, one (token, slot) at a time."""
    x, weight, gate, g = (a.astype(np.float64) for a in (x, weight, gate, g))
    y, dx, dw, dgate = (np.zeros_like(a) for a in (g, x, weight, gate))
    for token, slots in enumerate(ids):
        for slot, expert in enumerate(slots):
            out = weight[expert] @ x[token]
            y[token] += gate[token, slot] * out
            dx[token] += gate[token, slot] * weight[expert].T @ g[token]
            dw[expert] += gate[token, slot] * np.outer(g[token], x[token])
            dgate[token, slot] = out @ g[token]
    return y, dx, dw, dgate


def assert_equal_to_the_loop(ids, args):
    ours = layer_and_gradients(*args, ids)
    for a, b in zip(ours, loop_over_experts(*args, ids), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        assert np.abs(b).max() > 0.5
    return ours


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_equal_a_loop_over_experts(case):
    """BR-021: five rows, and BR-084: no rows, are not multiples of anything a kernel likes."""
    assert_equal_to_the_loop(routes(case), operands())


@pytest.mark.parametrize("case", CASES[1:])
def test_experts_without_rows_get_a_zero_gradient(case):
    """BR-084: not NaN, not the neighbour's."""
    ids = routes(case)
    _, _, dw, _ = layer_and_gradients(*operands(), ids)
    sizes = np.bincount(ids.ravel(), minlength=EXPERTS)
    touched = np.abs(np.asarray(dw)).max(axis=(1, 2)) > 0
    np.testing.assert_array_equal(touched, sizes > 0)
    assert np.isfinite(dw).all() and (sizes == 0).any()


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 3)])
def test_a_single_token_works(tokens, top_k):
    ids = np.arange(EXPERTS - top_k, EXPERTS, dtype=np.int32).reshape(tokens, top_k)
    assert_equal_to_the_loop(ids, operands(tokens, top_k))


def assert_nothing_is_lost(ids, experts):
    tokens, top_k = ids.shape
    groups = jax.tree.map(np.asarray, group_tokens(ids, experts))
    rows = groups.slot.shape[0]
    tile = rows // groups.tile_expert.shape[0]
    assert tile == gm.tile_rows(ids.size, experts) and rows % tile == 0
    assert groups.row.shape == ids.shape and len(np.unique(groups.row)) == ids.size
    assert 0 <= groups.row.min() and groups.row.max() < rows
    np.testing.assert_array_equal(groups.slot[groups.row].ravel(), np.arange(ids.size))
    assert (groups.slot == tokens * top_k).sum() == rows - ids.size
    np.testing.assert_array_equal(groups.tile_expert[groups.row // tile], ids)
    np.testing.assert_array_equal(groups.sizes, np.bincount(ids.ravel(), minlength=experts))


@pytest.mark.parametrize("case", CASES)
def test_every_slot_has_one_row_in_a_tile_of_its_expert(case):
    assert_nothing_is_lost(routes(case), EXPERTS)


@given(seed=st.integers(0, 2**31), skew=st.floats(0, 4))
def test_no_token_is_lost_whatever_the_load(seed, skew):
    """Also where every expert has one row more than whole tiles: the layout must still fit."""
    rng = np.random.default_rng(seed)
    share = rng.random(8) ** skew + 1e-9
    ids = rng.choice(8, size=(40, 3), p=share / share.sum()).astype(np.int32)
    assert_nothing_is_lost(ids, 8)


def test_the_worst_load_fills_the_layout_to_the_last_tile():
    """Seven experts with one row each, the eighth with the rest."""
    ids = np.full(120, 7, np.int32)
    ids[:7] = np.arange(7)
    assert_nothing_is_lost(ids.reshape(40, 3), 8)


def test_the_layout_depends_on_shapes_alone():
    """Nothing recompiles when the load moves."""
    group_tokens(routes("balanced"), EXPERTS)
    before = group_tokens._cache_size()
    for case in CASES:
        group_tokens(routes(case), EXPERTS)
    assert group_tokens._cache_size() == before


def test_padding_rows_are_zero_and_give_nothing_to_the_gradient():
    """BR-021: even where the cotangent of a padding row is not zero."""
    ids = routes("five rows in one expert")
    x, weight, _, _ = operands()
    groups = group_tokens(ids, EXPERTS)
    padding = np.asarray(groups.slot) == ids.size

    @jax.jit
    def product(x, weight, groups):
        rows = gm.tokens_to_rows(x, groups)
        out, pull = jax.vjp(functools.partial(_product, groups), x, weight)
        noise = jnp.where((groups.slot == ids.size)[:, None], 1e3, 0.0)
        return rows, out, pull(jnp.broadcast_to(noise, out.shape))

    rows, out, (dx, dw) = product(x, weight, groups)
    assert padding.any()
    assert np.count_nonzero(np.asarray(rows)[padding]) == 0
    slots = gm.slots_to_rows(jnp.ones((*ids.shape, 1)), groups)
    np.testing.assert_array_equal(slots[:, 0], ~padding)
    assert np.count_nonzero(np.asarray(out)[padding]) == 0
    assert np.count_nonzero(dx) == np.count_nonzero(dw) == 0


def _product(groups, x, weight):
    return gm.grouped_matmul(gm.tokens_to_rows(x, groups), weight, groups)


def test_bf16_operands_accumulate_in_fp32_and_keep_their_gradients_dtype():
    ids = routes("balanced")
    x, weight, _, _ = operands()
    x16, w16 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    groups = group_tokens(ids, EXPERTS)
    out, pull = jax.vjp(functools.partial(_product, groups), x16, w16)
    assert out.dtype == jnp.float32
    exact = np.einsum("tsnk,tk->tsn", np.asarray(w16, np.float64)[ids], np.asarray(x16, np.float64))
    np.testing.assert_allclose(gm.rows_to_slots(out, groups), exact, rtol=1e-5, atol=1e-5)
    assert [g.dtype for g in pull(out)] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    ("rows", "experts", "tile"), [(1, 8, 8), (128, 8, 8), (256, 8, 16), (10**6, 8, 256), (5, 1, 8)]
)
def test_tiles_are_powers_of_two_near_half_an_experts_share(rows, experts, tile):
    assert gm.tile_rows(rows, experts) == tile


@pytest.mark.parametrize("case", CASES)
def test_products_of_tpu_equal_those_by_tile(case):
    """Interpreted here; tests/test_kernels_tpu.py compiles them."""
    groups = group_tokens(routes(case), EXPERTS)
    rows, owner = groups.slot.shape[0], groups.tile_expert
    draw = lambda i, shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    x, g, weight = draw(0, (rows, K)), draw(1, (rows, N)), draw(2, (EXPERTS, N, K))
    (by_tile, gradient_by_tile), (ragged, gradient) = gm.VERSIONS["reference"], gm.VERSIONS["tpu"]
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(ragged(x, weight, owner, 2), by_tile(x, weight, owner, 2))
    near(ragged(g, weight, owner, 1), by_tile(g, weight, owner, 1))
    near(gradient(g, x, owner, EXPERTS, interpret=True), gradient_by_tile(g, x, owner, EXPERTS))


def test_products_of_tpu_say_what_they_cannot_take(monkeypatch):
    rows = jnp.zeros((32, K), jnp.bfloat16)
    assert "not on cpu" in gm.tpu_refusal(rows, 16)
    monkeypatch.setattr(gm.dispatch, "platform", lambda: "tpu")
    assert gm.tpu_refusal(rows, 16) is None
    assert "tiles of 16" in gm.tpu_refusal(rows, 8)
    assert "not float32" in gm.tpu_refusal(rows.astype(jnp.float32), 16)
