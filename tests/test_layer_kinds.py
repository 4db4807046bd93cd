"""Models whose layers differ: a dense first layer with latents, linear with full attention."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FULL, LENGTH, MOE, ROWS, TEMPERATURE, forward

from trace_jax import fp4, model, sync
from trace_jax.model.accounting import kv_bytes_per_token, state_bytes
from trace_jax.model.config_parts import DeltaNet, Latent, Router
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.model.specs import stacks_of

LATENT = dataclasses.replace(
    MOE,
    num_kv_heads=4,
    qk_norm=False,
    dense_layers=1,
    dense_dim=40,
    shared_dim=24,
    latent=Latent(kv_rank=20, q_rank=28, nope_dim=16, rope_dim=8, v_dim=12),
    router=Router("sigmoid", groups=2, top_groups=1, group_best=2, correction=True, scale=2.5),
)
HYBRID = dataclasses.replace(
    MOE,
    full_attention_every=2,
    attention_gate=True,
    zero_centred_norms=True,
    rotary_fraction=0.5,
    shared_dim=24,
    shared_gate=True,
    delta=DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=12),
)
CONFIGS = {"latent": LATENT, "hybrid": HYBRID}
EXPERTS = {"latent": (1, 2), "hybrid": (0, 1, 2)}
CACHED = {"latent": (0, 1, 2), "hybrid": (1,)}
kinds = pytest.mark.parametrize("name", CONFIGS)
TOKENS = helpers.random_tokens(ROWS, LENGTH, seed=1)


# --- which layers have what --------------------------------------------------------------


@kinds
def test_sites_lie_only_where_their_layers_are(name):
    shapes = CONFIGS[name].site_shapes()
    assert shapes["expert_in"].layers == shapes["expert_mid"].layers == EXPERTS[name]
    assert shapes["k"].layers == shapes["v"].layers == CACHED[name]
    planned = model.planned_layers(CONFIGS[name], helpers.PRECISIONS["nvfp4"], FULL)
    assert planned == {site: shapes[site].layers for site in fp4.SITES}


def test_latents_are_one_row_each():
    shapes = LATENT.site_shapes()
    assert (shapes["k"].rows, shapes["k"].width) == (1, 8)
    assert (shapes["v"].rows, shapes["v"].width) == (1, 20)


@kinds
@pytest.mark.parametrize("policy, fmt", [("bf16", None), ("nvfp4", fp4.NVFP4)])
def test_the_cache_has_the_bytes_that_the_accounting_says(name, policy, fmt):
    """BR-029, BR-030: keys and values of different widths, neither of whole blocks."""
    config = CONFIGS[name]
    cache = model.empty_cache(config, helpers.PRECISIONS[policy], ROWS, LENGTH)
    stored = sum(a.nbytes for a in jax.tree.leaves(cache))
    assert stored == ROWS * (LENGTH * kv_bytes_per_token(config, fmt) + state_bytes(config))
    assert (state_bytes(config) > 0) == (name == "hybrid")


@kinds
def test_stacks_follow_kind_and_precision(name):
    """The policy has a BF16 layer in the middle."""
    params = helpers.params_of(CONFIGS[name])
    count = {"latent": [1, 2], "hybrid": [1, 1, 1]}[name]
    depths = lambda layers: [jax.tree.leaves(s)[0].shape[0] for s in stacks_of(layers)]
    assert depths(params["layers"]) == count
    rolled = helpers.rollout_params_of(CONFIGS[name], "mixed")["layers"]
    assert depths(rolled) == [1, 1, 1]
    quantized = [isinstance(s["moe"]["down"], fp4.QTensor) if "moe" in s else None for s in rolled]
    assert quantized == {"latent": [None, False, True], "hybrid": [True, False, True]}[name]
    again = sync.to_rollout(params, helpers.PRECISIONS["nvfp4"])["layers"]
    assert depths(again) == count


# --- training and rollout -------------------------------------------------------------------


@kinds
def test_every_parameter_but_the_correction_learns(name):
    config = CONFIGS[name]
    spec = model.numerics(config, helpers.PRECISIONS["bf16"])
    weight = jax.random.normal(jax.random.key(0), (*TOKENS.shape, config.vocab_size))

    def loss(params):
        out = model.apply(config, params, TOKENS, spec, remat=())
        return jnp.mean(weight * model.logits(params, out.hidden))

    gradient = jax.jit(jax.grad(loss))(helpers.params_of(config))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        label = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), label
        assert np.any(leaf) != ("router_correction" in label), label


@kinds
def test_a_rollout_of_padded_prompts_guides_the_trainer_to_its_own_codes_and_logps(name):
    """Prompts of 10, 1 and 4 tokens in one batch: padding leaves no trace in any state."""
    config = CONFIGS[name]
    rolled = helpers.rollout("nvfp4", config)
    out, logits = forward(
        config,
        helpers.audited(config, "nvfp4", FULL, guide=True),
        helpers.params_of(config),
        rolled.tokens,
        valid=rolled.valid,
        guidance=rolled.guidance,
        routes=rolled.routes.astype(jnp.int32),
    )
    fed = np.asarray(rolled.guidance.recorded)
    shares = helpers.agreement(out.record.audit, rolled.audit, fed)
    assert all(share > 0.999 for share in shares.values()), shares
    assert {site: audit.codes.shape[0] for site, audit in out.record.audit.items()} == {
        site: len(shape.layers) for site, shape in config.site_shapes().items()
    }
    scaled = np.asarray(logits, np.float64)[:, :-1] / TEMPERATURE
    chosen = np.take_along_axis(scaled, np.asarray(rolled.tokens)[:, 1:, None], axis=-1)[..., 0]
    logp = np.pad(chosen - np.log(np.exp(scaled).sum(-1)), ((0, 0), (1, 0)))
    error = np.abs(np.asarray(rolled.logp) - logp)[np.asarray(rolled.mask)]
    assert error.max() < 0.01
    routes = np.asarray(rolled.routes)
    assert (routes[: config.dense_layers] == NOT_RECORDED).all()
    assert (routes[config.dense_layers :, fed] != NOT_RECORDED).all()


@kinds
def test_the_record_has_the_bytes_that_the_accounting_says(name):
    out = jax.device_get(helpers.rollout("nvfp4", CONFIGS[name]))
    stored = sum(a.nbytes for a in jax.tree.leaves(out.guidance.sites))
    assert stored / (ROWS * LENGTH) == fp4.guidance_bytes_per_token(CONFIGS[name], FULL)


def test_a_state_starts_afresh_at_position_0():
    """A cache that another sequence used, as a server's is, gives the same logits."""
    used = helpers.decode(HYBRID, "bf16", helpers.empty_cache(HYBRID, "bf16"), TOKENS[::-1])[2]
    again = helpers.decode(HYBRID, "bf16", used, TOKENS[:, :4])[0]
    fresh = helpers.empty_cache(HYBRID, "bf16")
    np.testing.assert_array_equal(again, helpers.decode(HYBRID, "bf16", fresh, TOKENS[:, :4])[0])
