"""Several sequences in a row of the learner's forward: the same loss, gradient and guidance."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MOE, params_of
from hypothesis import strategies as st
from learner_helpers import LENGTH, LENGTHS, ROWS, config_of, learner_of, moe, moe_logp, moe_rollout
from test_layer_kinds import HYBRID, LATENT
from test_learner import ADVANTAGES, LIVE, gradient, rollout

from trace_jax import model
from trace_jax.fp4 import PrecisionPolicy, Rule
from trace_jax.rl.batches import response_window
from trace_jax.rl.learner import new_state
from trace_jax.rl.packing import SHAPES, pack, pack_tokens, packed_window, packing_counts, places

# --- where sequences stand ----------------------------------------------------------------


@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=24), st.integers(12, 30), st.integers(1, 3)
)
def test_every_token_stands_in_exactly_one_cell(lengths, width, pieces):
    """BR-021: nothing is lost or doubled, and padding belongs to no sequence."""
    lengths = np.array(lengths * pieces)
    packing = pack(lengths, 12, width, pieces)
    size = len(lengths) // pieces
    source = packing.source.reshape(pieces, -1)
    for piece in range(pieces):
        mine = lengths[piece * size : (piece + 1) * size]
        wanted = [i * 12 + t for i, n in enumerate(mine) for t in range(n)]
        assert sorted(source[piece][source[piece] >= 0].tolist()) == wanted
        for i, n in enumerate(mine):
            first = packing.first[piece * size + i]
            assert source[piece, first : first + n].tolist() == [i * 12 + t for t in range(n)]
            assert first // width == (first + n - 1) // width, "within one row"
    assert packing.source.shape[0] % pieces == 0 and packing.source.shape[1] == width
    most = -(-size // (width // 12))
    assert len(packing.source) <= pieces * -(-most // SHAPES) * SHAPES


@pytest.mark.parametrize("width, most", [(64, 64), (128, 32)])
def test_batches_take_few_numbers_of_rows(width, most):
    """Each number of rows is a program to compile."""
    rng = np.random.default_rng(0)
    shares = np.linspace(0.05, 1, 40)
    counts = {
        len(pack(np.maximum(rng.binomial(64, p, 64), 1), 64, width, 1).source) for p in shares
    }
    assert 8 < len(counts) <= 16 and max(counts) == most


def test_longest_first_fills_rows():
    packing = pack(np.array([3, 5, 7, 9, 1, 7, 9, 7]), 9, 16, 1)
    assert len(packing.source) == 3, "48 tokens in three rows of 16"
    counts = packing_counts(packing, np.array([3, 5, 7, 9, 1, 7, 9, 7]), 9)
    assert counts == {"rows": 3, "tokens": 48, "padding_before": 1 - 48 / 72, "padding_after": 0}


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="sequence of 9 tokens .* write rl.pack_length=9 or more"):
        pack(np.array([3, 9]), 9, 8, 1)


@pytest.mark.parametrize("ways", [1, 2])
def test_what_is_packed_comes_back_in_its_place(ways):
    rng = np.random.default_rng(1)
    lengths, begin = rng.integers(4, 9, 8), rng.integers(0, 3, 8)
    packing = pack(lengths, 8, 11, ways)
    x = jnp.asarray(rng.integers(1, 99, (2, 8, 8, 3)))  # layers lead
    packed = pack_tokens(x, packing, ways, axis=1, fill=-1)
    assert packed.shape == (2, len(packing.source), 11, 3)
    assert ((np.asarray(packed) == -1).all((0, 3)) == (packing.source < 0)).all()
    window = packed_window(packed[1], packing, jnp.asarray(begin), 4, ways)
    inside = np.arange(4)[None] + begin[:, None] < lengths[:, None]
    wanted = response_window(x[1], jnp.asarray(begin), 4)
    np.testing.assert_array_equal(np.asarray(window)[inside], np.asarray(wanted)[inside])


# --- the forward ----------------------------------------------------------------------------

FP32 = dataclasses.replace(MOE, dtype="float32", num_layers=2, head_dim=16)
KINDS = {
    "plain": FP32,
    "window and sinks": dataclasses.replace(FP32, sinks=True, windows=(3, 0)),
    "latent": dataclasses.replace(LATENT, dtype="float32"),
}
SEQUENCES = np.array([6, 9, 4, 5, 8, 7])
POLICIES = {
    "plain": PrecisionPolicy((Rule("*", "nvfp4"),)),
    "window and sinks": PrecisionPolicy((Rule("[kv]", "nvfp4"),), kv_window=2),
    "latent": PrecisionPolicy((Rule("[kv]", "nvfp4"),)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_sequence_sees_itself_alone(kind):
    """BR-045: its values are those of its solo run, and its neighbours' tokens change no bit."""
    config = KINDS[kind]
    numerics = model.numerics(config, POLICIES[kind].resolve(config.num_layers))
    params = params_of(config)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 41, (6, 9)), jnp.int32)
    packing = pack(SEQUENCES, 9, 15, 1)
    where = places(packing, 9)
    valid = jnp.arange(9)[None] < SEQUENCES[:, None]

    @jax.jit
    def packed(tokens):
        cells = pack_tokens(tokens, packing, 1, fill=7)
        out = model.apply(
            config, params, cells, numerics, valid=where.segments > 0, **where._asdict()
        )
        return packed_window(out.hidden, packing, jnp.zeros(6, jnp.int32), 9, 1), out.balance

    alone = jax.jit(lambda t: model.apply(config, params, t, numerics, valid=valid))(tokens)
    hidden, balance = packed(tokens)
    inside = np.asarray(valid)
    gap = np.abs(np.asarray(hidden) - np.asarray(alone.hidden))[inside]
    assert gap.max() < 2e-5, "sums over keys of other number: the last bits of FP32"
    assert float(balance) == pytest.approx(float(alone.balance), rel=1e-6)
    other = jnp.where(jnp.arange(6)[:, None] == 1, 40 - tokens, tokens)
    changed = np.asarray(packed(other)[0])
    kept = np.arange(6) != 1
    same = inside & kept[:, None]
    np.testing.assert_array_equal(changed[same], np.asarray(hidden)[same])
    assert (changed[1] != np.asarray(hidden)[1]).any()


def test_linear_attention_refuses_segments():
    numerics = model.numerics(HYBRID, PrecisionPolicy(()).resolve(HYBRID.num_layers))
    at = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="state of linear attention .* one sequence a row"):
        model.apply(HYBRID, {}, at, numerics, positions=at, segments=at)
    with pytest.raises(ValueError, match="write the positions in each segment"):
        model.apply(HYBRID, {}, at, numerics, segments=at)


# --- the learner ----------------------------------------------------------------------------

PACKED = LENGTH + 7


def packed_update(**rl):
    """One update of the dense model with its sequences packed, or not: (state, metrics)."""
    learner = learner_of(config_of(model={"dtype": "float32"}, rl=rl))
    packing = learner.packing(LENGTHS)
    args = new_state(params_of(learner.config.model), learner.tx), rollout(), ADVANTAGES, LIVE
    return learner.update(*args, None, None, None, packing)


@pytest.mark.parametrize("parts", [1, 2])
def test_loss_and_gradient_are_those_of_unpacked_rows(parts):
    plain, metrics = packed_update(micro_batches=parts)
    state, packed = packed_update(micro_batches=parts, pack_length=PACKED)
    assert float(packed["tokens"]) == float(metrics["tokens"]) == (LENGTHS - 6).sum()
    for name, value in metrics.items():
        assert float(packed[name]) == pytest.approx(float(value), rel=2e-5, abs=1e-7), name
    mine, theirs = gradient(state), gradient(plain)
    np.testing.assert_allclose(mine, theirs, atol=2e-6 * np.abs(theirs).max())


def test_guidance_and_routes_are_packed_alike():
    lengths = np.asarray(moe_rollout().length)
    learner, packed = moe("trace"), moe("trace", pack_length=PACKED)
    packing = packed.packing(lengths)
    assert len(packing.source) < ROWS
    params = params_of(learner.config.model)
    mine = np.asarray(packed.score(params, moe_rollout(), 3, packing))
    theirs = moe_logp(learner)
    response = lengths - np.asarray(moe_rollout().prompt_length)
    inside = np.arange(mine.shape[1])[None] < response[:, None]
    away = np.abs(mine - theirs)[inside]
    # In BF16 a last bit of FP32 mostly rounds away; unguided rounding is 0.3 off.
    assert away.mean() < 1e-3 and (away == 0).mean() > 0.9
