"""Parity checks in place of bits: the code alone, and at a site under noise."""

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SHAPE, params_of

from experiments.bytes.coding import Shape35B
from experiments.forwards import Subject, comparison, sampler
from trace_jax import fp4
from trace_jax.fp4 import NVFP4, GuidancePlan, Guide, formats, syndrome
from trace_jax.model import ModelConfig
from trace_jax.model.remat import checkpointed

POW2 = NVFP4.replace(outer="pow2")
DOUBTFUL = 0.05


def drawn(rows, width, flipped, seed=0):
    """(bits, the same with some of the doubtful ones wrong, doubt); `flipped`: share of those."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, (rows, width), dtype=np.uint8)
    doubt = rng.random((rows, width), dtype=np.float32)
    wrong = (doubt < DOUBTFUL) & (rng.random((rows, width)) < flipped)
    return bits, bits ^ wrong, doubt


@pytest.mark.parametrize(
    ("width", "checks"), [(2048, 160), (512, 56), (256, 40), (64, 24), (32, 16), (16, 0), (8, 0)]
)
def test_rows_have_checks_for_the_doubtful_values_and_their_spread(width, checks):
    assert syndrome.checks_of(width, DOUBTFUL) == checks


@pytest.mark.parametrize("width", [32, 256, 600])
def test_wrong_bits_in_doubt_are_found(width):
    checks = syndrome.checks_of(width, DOUBTFUL)
    bits, own, doubt = drawn(200, width, 0.5)
    assert (own != bits).any()
    got, holds = jax.jit(syndrome.recover)(syndrome.syndrome(bits, checks), own, doubt)
    np.testing.assert_array_equal(got, bits)
    assert holds.all()


def test_the_answer_is_that_of_trying_every_flip():
    width, checks, rows = 32, 16, 24
    bits, own, doubt = drawn(rows, width, 0.9, seed=1)
    sent = np.unpackbits(syndrome.syndrome(bits, checks), axis=-1, bitorder="little")
    packed = np.packbits(sent, axis=-1, bitorder="little")
    got, holds = jax.jit(syndrome.recover)(packed, own, doubt)
    matrix = syndrome._matrix(width, checks)
    unknown = np.argsort(doubt, axis=1)[:, : checks - syndrome.SPARE]
    for row in range(rows):
        fitting = []
        for flips in itertools.product((0, 1), repeat=unknown.shape[1]):
            tried = own[row].copy()
            tried[unknown[row]] ^= np.uint8(flips)
            if (tried @ matrix % 2 == sent[row]).all():
                fitting.append(tried)
        assert len(fitting) <= 1 and bool(holds[row]) == bool(fitting)
        np.testing.assert_array_equal(got[row], fitting[0] if fitting else own[row])


def test_a_wrong_bit_that_was_not_in_doubt_is_noticed_and_nothing_is_changed():
    checks = syndrome.checks_of(256, DOUBTFUL)
    bits, own, doubt = drawn(1000, 256, 0.5)
    own[:, 7], doubt[:, 7] = bits[:, 7] ^ 1, 2.0
    got, holds = jax.jit(syndrome.recover)(syndrome.syndrome(bits, checks), own, doubt)
    got, holds = np.asarray(got), np.asarray(holds)
    assert holds.mean() < 3 / 2**syndrome.SPARE
    np.testing.assert_array_equal(got[~holds], own[~holds])


def test_of_dependent_columns_the_least_doubtful_bit_keeps_its_own():
    matrix = np.zeros((16, 24), np.uint8)
    matrix[0, :3] = matrix[5, :3] = 1, 0, 1  # positions 0 and 5 look the same to the checks
    matrix[1, 4] = matrix[2, 7] = 1
    wrong = matrix[0]
    at = np.array([0, 1, 2, 5])
    packed = matrix[at].astype(np.uint32) @ (1 << np.arange(24, dtype=np.uint32))[:, None]
    planes = syndrome._planes(jnp.asarray(packed)[None], matrix.shape[1])
    flips, holds = syndrome._solve(planes, jnp.asarray(wrong, bool)[None], len(at))
    np.testing.assert_array_equal(flips, [[True, False, False, False]])
    assert holds.all()


def test_the_checks_are_the_same_numbers_for_ever():
    """A recorded run is read by later versions."""
    assert zlib.crc32(syndrome._matrix(64, 24).tobytes()) == 3730381956


# --- at a site ------------------------------------------------------------------------------

PLAN = GuidancePlan(checks=DOUBTFUL, scale_bits=1)


@functools.partial(jax.jit, static_argnums=2)
def sides(rollout_x, trainer_x, plan):
    """(rollout's outcome, trainer's under its guidance, the record)."""
    rollout = fp4.quantize_site(rollout_x, POW2)
    stored = fp4.compact(rollout.codes, rollout.scale_bytes, plan)
    guide = Guide(stored, plan, jnp.ones(len(rollout_x), bool))
    return rollout, fp4.quantize_site(trainer_x, POW2, guide), stored


def pair(noise, width, rows=200):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    return x * (1 + noise * rng.standard_normal(x.shape, dtype=np.float32)), x


@pytest.mark.parametrize("width", [100, 256, 768])
def test_codes_are_the_rollouts_at_the_noise_of_half_a_bf16_step(width):
    rollout, trainer, stored = sides(*pair(0.002, width), PLAN)
    own = fp4.quantize_site(pair(0.002, width)[1], POW2)
    assert (np.asarray(own.codes) != rollout.codes).any(axis=1).mean() > 0.3
    np.testing.assert_array_equal(trainer.codes, rollout.codes)
    np.testing.assert_array_equal(trainer.value, rollout.value)
    assert stored.bits.shape[-1] < width / 8 / 2


def test_a_row_with_too_many_differences_is_rounded_to_nearest_on_the_rollouts_scales():
    """One bit would name the wrong neighbour for many of them, and nothing would show it."""
    rollout_x, trainer_x = pair(0.1, 256)
    rollout, trainer, _ = sides(rollout_x, trainer_x, GuidancePlan(checks=DOUBTFUL))
    scale = np.asarray(formats.decode_scale(rollout.scale_bytes, POW2)) * rollout.outer
    scale = np.repeat(scale, 16, axis=1)
    x = np.asarray(jnp.asarray(trainer_x, jnp.bfloat16), np.float32)
    nearest = np.asarray(formats.encode_e2m1(jnp.asarray(x), jnp.asarray(scale)))
    same = (np.asarray(trainer.codes) == nearest).all(axis=1)
    assert same.mean() > 1 - 3 / 2**syndrome.SPARE


def test_the_gradient_goes_straight_through():
    rollout_x, trainer_x = pair(0.002, 256, rows=4)
    rollout = fp4.quantize_site(rollout_x, POW2)
    guide = Guide(
        fp4.compact(rollout.codes, rollout.scale_bytes, PLAN), PLAN, jnp.ones(4, bool)
    )
    weight = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    loss = lambda x: jnp.sum(fp4.quantize_site(x, POW2, guide).value.astype(jnp.float32) * weight)
    gradient = jax.jit(jax.grad(loss))(trainer_x)
    np.testing.assert_array_equal(gradient, jnp.asarray(weight, jnp.bfloat16))


def test_every_site_of_every_layer_of_the_35b_shape_takes_less_than_the_papers_plan():
    plan = GuidancePlan(layers="all", sites=fp4.SITES, checks=DOUBTFUL, scale_bits=1)
    bits = 40 * (160 + 8 * 56) + 10 * 2 * 2 * 40
    scales = 40 * (128 + 8 * 32) + 10 * 2 * 2 * 16
    assert fp4.guidance_bytes_per_token(Shape35B(), plan) == (bits + scales) / 8 == 5240
    assert 5240 < 7.5 * 1024


@pytest.mark.parametrize("width", [24, 100, 256])
@pytest.mark.parametrize("scale_bits", [1, 2, 8])
def test_bytes_are_those_of_the_record(width, scale_bits):
    class Site:
        num_layers = 1

        def site_shapes(self):
            return {"k": fp4.SiteShape((0,), 3, width)}

    plan = GuidancePlan(layers="all", sites=("k",), checks=DOUBTFUL, scale_bits=scale_bits)
    codes = jnp.zeros((3, width), jnp.uint8)
    stored = fp4.compact(codes, jnp.ones((3, -(-width // 16)), jnp.uint8), plan)
    counted = fp4.guidance_bytes_per_token(Site(), plan)
    assert stored.bits.size + stored.scales.size == counted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checks": 1.0}, "checks is 1.0; write the share of values in doubt, such as 0.05"),
        ({"checks": -0.1}, "checks is -0.1"),
        ({"checks": float("nan")}, "checks is nan"),
        ({"checks": 0.05, "bits": 4}, "checks stand for one bit a value; write bits=1, not 4"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GuidancePlan(**changes)


def primitives(jaxpr, name: str) -> int:
    """How often a primitive stands in a jaxpr and those inside it."""
    inner = [v for e in jaxpr.eqns for v in jax.tree.leaves(list(e.params.values()))]
    inner = [getattr(v, "jaxpr", v) for v in inner]
    found = sum(primitives(j, name) for j in inner if hasattr(j, "eqns"))
    return found + sum(e.primitive.name == name for e in jaxpr.eqns)


def test_a_layer_that_is_made_again_is_not_solved_again():
    rollout_x, x = pair(0.002, 256, rows=4)
    rollout = fp4.quantize_site(rollout_x, POW2)
    guide = Guide(
        fp4.compact(rollout.codes, rollout.scale_bytes, PLAN), PLAN, jnp.ones(4, bool)
    )

    def layer(x, _):
        return jnp.sin(fp4.quantize_site(x, POW2, guide).value.astype(jnp.float32)), None

    loss = lambda x: jnp.sum(jax.lax.scan(checkpointed(layer, ()), x, None, length=3)[0])
    gradient = jax.make_jaxpr(jax.grad(loss))(x).jaxpr
    assert primitives(gradient, "top_k") == 1
    assert primitives(gradient, "cos") == 1  # of values that were made again


# --- through the model ------------------------------------------------------------------------


def test_checks_at_every_site_give_the_trainer_the_rollouts_log_probs():
    model = ModelConfig(**SHAPE | {"num_layers": 2, "hidden": 64, "expert_dim": 64, "head_dim": 32})
    prompts = np.random.default_rng(0).integers(1, 256, (8, 6), dtype=np.int32)
    lengths = np.full(8, 6, np.int32)
    subject = Subject(model, params_of(model), prompts, lengths, 2, 12, (258,))
    formats = fp4.PrecisionPolicy((fp4.Rule("*", "nvfp4"),)).resolve(model.num_layers)
    rollout = sampler(subject, formats, 0.002)(0)
    alone = comparison(subject, formats, fp4.NO_GUIDANCE)(rollout)
    plan = GuidancePlan(layers="all", sites=fp4.SITES, checks=DOUBTFUL, scale_bits=1)
    checked = comparison(subject, formats, plan)(rollout)
    assert alone["gap_mean"] > 1e-3 and alone["agreement_expert_in"] < 0.98
    assert checked["gap_mean"] < alone["gap_mean"] / 100
    assert all(checked[f"agreement_{site}"] == 1.0 for site in fp4.SITES)
    bits = fp4.guidance_bytes_per_token(model, GuidancePlan(layers="all", sites=fp4.SITES))
    assert checked["bytes_per_token"] < bits / 2
