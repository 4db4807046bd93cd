"""One forward for prefill, decode and training; guidance by the rollout's own record."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DENSE, FULL, LAST_HALF, MOE, ONE_BIT, PRECISIONS, REPLAY, forward, signless

from trace_jax import fp4, model
from trace_jax.fp4 import GuidancePlan
from trace_jax.model.moe import NOT_RECORDED
from trace_jax.model.sites import LayerSpec, SiteInputs, Sites
from trace_jax.model.specs import segments

CASES = [
    (MOE, "bf16"),
    (MOE, "nvfp4"),
    (MOE, "mxfp4"),
    (MOE, "mixed"),
    (DENSE, "nvfp4"),
    (MOE, "fp8"),
    (MOE, "window"),
    (helpers.TURNED, "rotated"),
]
IDS = ["bf16", "nvfp4", "mxfp4", "mixed", "dense-nvfp4", "fp8", "window", "rotated"]
case = pytest.mark.parametrize("config, policy", CASES, ids=IDS)
TOKENS = helpers.random_tokens(helpers.ROWS, helpers.LENGTH, seed=1)


def relative_error(got, wanted) -> float:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def trainer(config, policy):
    """The training forward of TOKENS: FP32 parameters, no cache, no guidance."""
    numerics = helpers.audited(config, policy)
    return forward(config, numerics, helpers.params_of(config), TOKENS)


def assert_same(logits, audit, wanted_logits, wanted_audit):
    """Codes of the first layer; the logits, which FP4 would part by 10 % after one flip."""
    for site in wanted_audit:
        first = [signless(a[site].codes[0]) for a in (audit, wanted_audit)]
        assert np.mean(first[0] == first[1]) > 0.9999, site
    shares = helpers.agreement(audit, wanted_audit, np.ones(TOKENS.shape, bool))
    assert all(share > 0.99 for share in shares.values()), shares
    assert relative_error(logits, wanted_logits) < 0.004


# --- one forward --------------------------------------------------------------------------


@case
def test_prefill_gives_the_logits_of_the_training_forward(config, policy):
    """The rollout's parameters and cache on one side, FP32 masters on the other."""
    numerics, params = helpers.audited(config, policy), helpers.rollout_params_of(config, policy)
    kv_cache = helpers.empty_cache(config, policy)
    out, logits = forward(config, numerics, params, TOKENS, cache=kv_cache)
    wanted, wanted_logits = trainer(config, policy)
    assert_same(logits, out.record.audit, wanted_logits, wanted.record.audit)
    assert np.std(np.asarray(wanted_logits)) > 0.5


@case
def test_decoding_token_by_token_gives_the_logits_of_the_training_forward(config, policy):
    kv_cache = helpers.empty_cache(config, policy)
    logits, audit, _ = helpers.decode(config, policy, kv_cache, TOKENS)
    wanted, wanted_logits = trainer(config, policy)
    assert_same(logits, audit, wanted_logits, wanted.record.audit)


def test_the_policies_differ_as_much_as_fp4_does():
    """Guards the two tests above: a policy that is ignored would pass them."""
    exact = trainer(MOE, "bf16")[1]
    for policy in ("nvfp4", "mxfp4", "mixed", "fp8", "window"):
        assert 0.05 < relative_error(trainer(MOE, policy)[1], exact) < 1.0, policy


def test_a_row_is_the_same_whatever_its_padding_and_neighbours():
    """BR-045."""
    length = 4
    numerics = helpers.audited(MOE, "nvfp4")
    _, batch = trainer(MOE, "nvfp4")
    other = helpers.random_tokens(helpers.ROWS, helpers.LENGTH, seed=2)
    padded = other.at[2, :length].set(TOKENS[2, :length])
    _, mixed = forward(MOE, numerics, helpers.params_of(MOE), padded)
    np.testing.assert_array_equal(mixed[2, :length], batch[2, :length])
    _, solo = forward(MOE, numerics, helpers.params_of(MOE), TOKENS[2:3, :length])
    assert relative_error(solo[0], batch[2, :length]) < 0.005


# --- against an independent reference --------------------------------------------------------


def bf16(a):
    return np.asarray(jnp.asarray(a).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def rms(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * np.asarray(weight)


def silu(x):
    return x / (1 + np.exp(-x))


def turn(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


def reference(config, params, tokens, wrong="nothing"):
    """float64 logits of one row of tokens, from weights rounded to BF16.

    `wrong` leaves out or alters one part, to show that the comparison would notice.
    """
    length = len(tokens)
    causal = np.tril(np.ones((length, length), bool)) | (wrong == "mask")
    embed = bf16(params["embed"])
    x = embed[tokens]
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        norm = rms(x, layer["attention_norm"]["weight"])
        project = lambda name: norm @ bf16(layer["attention"][name]["weight"]).T  # noqa: B023
        q, k, v = (project(n).reshape(length, -1, config.head_dim) for n in "qkv")
        if wrong != "qk_norm":
            q = rms(q, layer["attention"]["q_norm"]["weight"])
            k = rms(k, layer["attention"]["k_norm"]["weight"])
        if wrong != "rotary":
            q, k = turn(q, np.arange(length)), turn(k, np.arange(length))
        heads, group = config.num_heads, config.num_heads // config.num_kv_heads
        of = [h % config.num_kv_heads if wrong == "gqa" else h // group for h in range(heads)]
        scores = np.einsum("shd,thd->hst", q, k[:, of]) / np.sqrt(config.head_dim)
        scores = np.where(causal, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        seen = np.einsum("hst,thd->shd", weights, v[:, of]).reshape(length, -1)
        x = x + seen @ bf16(layer["attention"]["o"]["weight"]).T
        x = x + experts(config, layer["moe"], rms(x, layer["moe_norm"]["weight"]), wrong)
    return rms(x, params["final_norm"]["weight"]) @ embed.T


def experts(config, weights, x, wrong):
    def mlp(token, e):
        gate, up = np.split(bf16(weights["gate_up"][e]) @ token, 2)
        gate, up = (up, gate) if wrong == "gate and up" else (gate, up)
        return bf16(weights["down"][e]) @ (silu(gate) * up)

    if not config.num_experts:
        return np.stack([mlp(token, 0) for token in x])
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = np.asarray(weights["router"], np.float64) @ token
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        chosen = np.argsort(-logits, kind="stable")[: config.top_k]
        total = 1.0 if wrong == "gate norm" else probs[chosen].sum()
        out[t] = sum(probs[e] / total * mlp(token, e) for e in chosen)
    return out


def reference_error(config, wrong="nothing"):
    """Median over rows: a near tie of the router may fall otherwise in BF16."""
    _, logits = trainer(config, "bf16")
    params = jax.device_get(helpers.params_of(config))
    rows = [reference(config, params, np.asarray(row), wrong) for row in TOKENS]
    return np.median([relative_error(a, b) for a, b in zip(logits, rows, strict=True)])


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_logits_equal_a_plain_numpy_transformer(config):
    assert reference_error(config) < 0.015


@pytest.mark.parametrize("wrong", ["rotary", "gqa", "qk_norm", "mask", "gate and up", "gate norm"])
def test_the_numpy_transformer_notices_a_wrong_part(wrong):
    assert reference_error(MOE, wrong) > 0.06


# --- guidance ----------------------------------------------------------------------------------


def guided(rolled, plan, *, policy="nvfp4", routes=True, recorded=None, **arguments):
    """The trainer's forward of a rollout's tokens, guided by it."""
    guidance = helpers.guidance_of(rolled, plan, policy=policy)
    if recorded is not None:
        guidance = guidance.replace(recorded=recorded)
    routes = rolled.routes.astype(jnp.int32) if routes is True else routes
    numerics = helpers.audited(MOE, policy, plan, guide=True)
    out, _ = forward(
        MOE,
        numerics,
        helpers.params_of(MOE),
        rolled.tokens,
        valid=rolled.valid,
        guidance=guidance,
        routes=routes,
        **arguments,
    )
    return out.record.audit


def unguided(rolled, policy="nvfp4"):
    out, _ = forward(
        MOE,
        helpers.audited(MOE, policy),
        helpers.params_of(MOE),
        rolled.tokens,
        valid=rolled.valid,
        routes=rolled.routes.astype(jnp.int32),
    )
    return out.record.audit


def shares(audit, rolled):
    return helpers.agreement(audit, rolled.audit, rolled.guidance.recorded)


@pytest.mark.parametrize("plan", [FULL, ONE_BIT], ids=["4 bits", "1 bit"])
def test_guided_by_its_own_record_the_trainer_rounds_as_the_rollout_did(plan):
    rolled = helpers.rollout("nvfp4")
    assert shares(guided(rolled, plan), rolled) == dict.fromkeys(fp4.SITES, 1.0)


@pytest.mark.parametrize("plan", [FULL, ONE_BIT], ids=["4 bits", "1 bit"])
def test_guidance_bridges_a_foreign_engines_noise(plan):
    """At 1 % noise; without guidance a third of the codes part."""
    rolled = helpers.rollout("nvfp4", noise=0.01)
    for site, share in shares(unguided(rolled), rolled).items():
        assert 0.3 < share < 0.9, site
    for site, share in shares(guided(rolled, plan), rolled).items():
        assert share >= 0.999, site


def test_guidance_takes_the_rollouts_scales_too():
    rolled = helpers.rollout("nvfp4", noise=0.01)
    where = np.asarray(rolled.guidance.recorded)
    mine, free = guided(rolled, FULL), unguided(rolled)
    for site in fp4.SITES:
        for field in ("scale_bytes", "outer"):
            theirs = np.asarray(getattr(rolled.audit[site], field))[:, where]
            got = np.asarray(getattr(mine[site], field))[:, where]
            np.testing.assert_array_equal(got, theirs, err_msg=f"{site} {field}")
        own = np.asarray(free[site].scale_bytes)[:, where]
        assert np.mean(own == np.asarray(rolled.audit[site].scale_bytes)[:, where]) < 0.95


def test_guiding_the_last_half_leaves_the_first_layers_alone():
    rolled = helpers.rollout("nvfp4", noise=0.01)
    mine, free = guided(rolled, LAST_HALF), unguided(rolled)
    for site in LAST_HALF.sites:
        np.testing.assert_array_equal(mine[site].codes[0], free[site].codes[0])
    better = shares(mine, rolled)
    assert all(better[s] > share + 0.05 for s, share in shares(free, rolled).items()), better


def test_replay_takes_the_codes_where_the_trainer_has_drifted_away():
    """Codes of another policy: the paper's rule stays in the trainer's own bracket."""
    rolled, drifted = helpers.rollout("nvfp4"), helpers.rollout("nvfp4", seed=1)
    foreign = rolled.replace(audit=drifted.audit)
    where = np.asarray(rolled.guidance.recorded & drifted.guidance.recorded)
    for plan, exact in ((REPLAY, True), (FULL, False)):
        audit = guided(foreign, plan)
        for site in fp4.SITES:
            mine, theirs = (np.asarray(a[site].codes)[:, where] for a in (audit, drifted.audit))
            assert np.array_equal(mine, theirs) == exact, (plan.rounding, site)
            if not exact:
                assert np.mean(mine == theirs) < 0.7


@pytest.mark.parametrize("plan", [FULL, ONE_BIT], ids=["4 bits", "1 bit"])
def test_guidance_that_is_not_obeyed_changes_nothing(plan):
    rolled = helpers.rollout("nvfp4", noise=0.01)
    nowhere = jnp.zeros_like(rolled.guidance.recorded)
    mine, free = guided(rolled, plan, recorded=nowhere), unguided(rolled)
    jax.tree.map(np.testing.assert_array_equal, mine, free)


def test_a_token_without_record_rounds_on_its_own():
    """Not recorded is a state of its own, never bits and scales of zero."""
    rolled = helpers.rollout("nvfp4", noise=0.01)
    recorded = np.array(rolled.guidance.recorded)
    held = recorded.copy()
    held[:, ::2] = False
    mine, free = guided(rolled, ONE_BIT, recorded=jnp.asarray(held)), unguided(rolled)
    for site in ("k", "v"):  # of the first layer: their sources are equal
        codes = [signless(a[site].codes[0]) for a in (mine, free, rolled.audit)]
        np.testing.assert_array_equal(codes[0][~held], codes[1][~held])
        np.testing.assert_array_equal(codes[0][held], codes[2][held])
        dropped = recorded & ~held
        assert np.mean(codes[0][dropped] == codes[2][dropped]) < 0.985, site


def test_a_slot_whose_route_was_not_replayed_is_not_guided_by_another_experts_codes():
    rolled = helpers.rollout("nvfp4", noise=0.01)
    free = jnp.full(rolled.routes.shape, NOT_RECORDED, jnp.int32)
    where = np.asarray(rolled.guidance.recorded)
    theirs = np.asarray(rolled.audit["expert_mid"].scale_bytes)[0][where]
    routed, unrouted = (
        np.asarray(guided(rolled, FULL, routes=routes)["expert_mid"].scale_bytes)[0][where]
        for routes in (True, free)
    )
    np.testing.assert_array_equal(routed, theirs)
    assert np.mean(unrouted == theirs) < 0.95


def test_a_guard_obeys_only_near_the_midpoint():
    """Half a step is everywhere, and next to nothing leaves nearest on the rollout's scales."""
    rolled = helpers.rollout("nvfp4", noise=0.01)
    width = lambda w: jnp.full(rolled.tokens.shape, w, jnp.float32)
    wide, narrow, middle = (
        shares(guided(rolled, ONE_BIT, guard=width(w)), rolled) for w in (0.5, 1e-6, 0.3)
    )
    for site in fp4.SITES:
        assert wide[site] >= 0.999
        assert narrow[site] < 0.9
        assert middle[site] > narrow[site] + 0.05
    # In the first layer, where the noise moves a value by little, the band is enough.
    codes = guided(rolled, ONE_BIT, guard=width(0.3))["k"].codes[0]
    where = np.asarray(rolled.guidance.recorded)
    first = signless(codes)[where] == signless(rolled.audit["k"].codes[0])[where]
    assert first.mean() > 0.999


def test_guidance_that_is_needed_and_missing_raises():
    numerics = helpers.audited(MOE, "nvfp4", FULL, guide=True)
    with pytest.raises(ValueError, match="no guidance was given"):
        forward(MOE, numerics, helpers.params_of(MOE), TOKENS)


# --- static numerics ------------------------------------------------------------------------------


def test_the_last_half_plan_records_those_layers_only():
    numerics = model.numerics(MOE, PRECISIONS["nvfp4"], plan=LAST_HALF, record=True)
    assert [bool(spec.recorded) for spec in numerics.layers] == [False, True, True]
    run = lambda params: forward(MOE, numerics, params, TOKENS)[0].record
    record = jax.eval_shape(run, helpers.params_of(MOE))
    assert {site: stored.scales.shape[0] for site, stored in record.sites.items()} == dict.fromkeys(
        LAST_HALF.sites, 2
    )
    assert not record.audit and record.routes.shape == (3, *TOKENS.shape, 2)


def test_sites_that_are_bf16_in_their_layer_are_not_planned():
    planned = model.planned_layers(MOE, PRECISIONS["mixed"], FULL)
    assert planned == {"expert_in": (0, 2), "expert_mid": (0, 2), "k": (0, 2), "v": (0,)}
    specs = model.numerics(MOE, PRECISIONS["mixed"], plan=FULL, record=True, guide=True).layers
    assert [spec.recorded for spec in specs] == [
        ("expert_in", "expert_mid", "k", "v"),
        (),
        ("expert_in", "expert_mid", "k"),
    ]
    assert all(spec.guided == spec.recorded for spec in specs)
    assert model.planned_layers(MOE, PRECISIONS["bf16"], FULL) == {}


def test_equal_neighbouring_layers_share_a_segment():
    a, b = LayerSpec(PRECISIONS["nvfp4"][0]), LayerSpec(PRECISIONS["bf16"][0])
    assert segments((a, a, b, a)) == [(0, 2, a), (2, 3, b), (3, 4, a)]
    assert segments((b,)) == [(0, 1, b)]
    guided_a = dataclasses.replace(a, guided=("k",))
    assert segments((a, guided_a, guided_a)) == [(0, 1, a), (1, 3, guided_a)]


def test_guidance_of_some_layers_cuts_no_stack_of_parameters():
    """Two scans would copy the parameters, and put their gradients together again."""
    guided = model.numerics(MOE, PRECISIONS["nvfp4"], plan=LAST_HALF, guide=True)
    shapes = jax.eval_shape(lambda key: model.init(MOE, key), jax.random.key(0))
    recorded = model.numerics(MOE, PRECISIONS["nvfp4"], plan=LAST_HALF, record=True)
    sites = jax.eval_shape(lambda p: model.apply(MOE, p, TOKENS, recorded).record.sites, shapes)
    given = model.Guidance(sites, jnp.ones(TOKENS.shape, bool), jnp.zeros(helpers.ROWS, jnp.int32))
    jaxpr = jax.make_jaxpr(lambda p, g: model.apply(MOE, p, TOKENS, guided, guidance=g).hidden)
    scans = [e for e in jaxpr(shapes, given).eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in scans] == [3]


def test_guidance_of_a_mixed_policy_reaches_the_right_layers():
    """Stored layers are counted by site: layer 2 is the second of K, and V has one."""
    plan = GuidancePlan(layers="all", sites=fp4.SITES, bits=4)
    rng = np.random.default_rng(0)
    free = forward(MOE, helpers.audited(MOE, "mixed"), helpers.params_of(MOE), TOKENS)[
        0
    ].record.audit
    planned = model.planned_layers(MOE, PRECISIONS["mixed"], plan)
    # Scales that no quantizer would choose name the layer that they were meant for.
    sites, sent = {}, {}
    for site, layers in planned.items():
        own = np.asarray(free[site].scale_bytes)[: len(layers)]
        sent[site] = rng.integers(40, 120, own.shape).astype(np.uint8)
        codes = jnp.zeros_like(free[site].codes[: len(layers)])
        sites[site] = fp4.compact(codes, jnp.asarray(sent[site]), plan)
    recorded = jnp.ones(TOKENS.shape, bool)
    guidance = model.Guidance(sites, recorded, jnp.zeros(helpers.ROWS, jnp.int32))
    numerics = helpers.audited(MOE, "mixed", plan, guide=True)
    params = helpers.params_of(MOE)
    audit = forward(MOE, numerics, params, TOKENS, guidance=guidance)[0].record.audit
    for site in planned:
        np.testing.assert_array_equal(audit[site].scale_bytes, sent[site], err_msg=site)


def test_engine_noise_is_relative_and_differs_by_site():
    spec = LayerSpec(PRECISIONS["nvfp4"][0])
    sites = Sites(spec, fp4.NO_GUIDANCE, SiteInputs(noise_key=jax.random.key(0), noise=0.01))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    relative = {site: np.asarray(sites.perturb(site, x) / x - 1) for site in fp4.SITES}
    for site, noise in relative.items():
        assert 0.0095 < noise.std() < 0.0105 and abs(noise.mean()) < 0.001, site
    assert abs(np.corrcoef([noise.ravel() for noise in relative.values()])[0, 1:]).max() < 0.1
    quiet = Sites(spec, fp4.NO_GUIDANCE, SiteInputs(noise_key=jax.random.key(0)))
    assert quiet.perturb("k", x) is x
