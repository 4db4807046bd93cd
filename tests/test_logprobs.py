"""Log-probs in chunks: values, gradients, memory, devices; the centring term of a rival."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import head_example, numpy_logprobs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.rl.logprobs import centering_term, chunked_logprobs, top_logprobs


@pytest.mark.parametrize("chunk", [1, 4, 15, 1000])
def test_chunked_logprobs_equal_float64_whether_or_not_the_chunk_divides(chunk):
    hidden, unembed, targets = head_example(3, 5, 8, 11)
    got = jax.jit(functools.partial(chunked_logprobs, temperature=0.6, chunk=chunk))(
        hidden, unembed, targets
    )
    for value, expected in zip(got, numpy_logprobs(hidden, unembed, targets, 0.6), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6)


def test_chunked_gradients_equal_those_of_the_whole_softmax():
    hidden, unembed, targets = head_example(3, 5, 8, 11)
    a, b = np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32)

    def whole(hidden, unembed):
        logp = jax.nn.log_softmax(hidden @ unembed.T / 0.6)
        picked = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return jnp.sum(a * picked) - jnp.sum(b[..., None] * jnp.exp(logp) * logp)

    def chunked(hidden, unembed):
        logp, entropy = chunked_logprobs(hidden, unembed, targets, temperature=0.6, chunk=4)
        return jnp.sum(a * logp) + jnp.sum(b * entropy)

    expected = jax.jit(jax.grad(whole, (0, 1)))(hidden, unembed)
    gradients = jax.jit(jax.grad(chunked, (0, 1)))(hidden, unembed)
    for got, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_logprobs_are_those_of_the_tempered_distribution():
    """BR-037: both sides -0.17301; the raw -0.31326 would make a ratio of 1.1506."""
    unembed = np.array([[1.0], [2.0]], np.float32)
    one = np.ones((1, 1, 1), np.float32)
    logp, _ = chunked_logprobs(one, unembed, np.ones((1, 1), int), temperature=0.6, chunk=1)
    assert float(logp[0, 0]) == pytest.approx(-0.17301, abs=5e-6)
    assert np.exp(float(logp[0, 0]) + 0.31326) == pytest.approx(1.1506, abs=5e-5)  # the fault


def test_bf16_operands_accumulate_in_fp32():
    unembed = np.ones((2, 1024), jnp.bfloat16)
    unembed[1, 0] = 1.0078125  # logits 1024 and 1024.0078: one value in BF16
    hidden, targets = np.ones((1, 1, 1024), jnp.bfloat16), np.ones((1, 1), int)
    logp, entropy = chunked_logprobs(hidden, unembed, targets, temperature=1.0, chunk=1)
    assert logp.dtype == entropy.dtype == jnp.float32
    assert float(logp[0, 0]) == pytest.approx(-np.log1p(np.exp(-0.0078125)), abs=1e-6)


def test_the_unembedding_gradient_of_many_chunks_sums_in_fp32():
    """Each token adds 0.5; a BF16 sum stops at 128, where the spacing is 1."""
    hidden, targets = np.ones((512, 1, 1), jnp.bfloat16), np.zeros((512, 1), int)

    def total(unembed):
        return jnp.sum(chunked_logprobs(hidden, unembed, targets, temperature=1.0, chunk=1)[0])

    gradient = jax.jit(jax.grad(total))(jnp.zeros((2, 1), jnp.bfloat16))
    np.testing.assert_array_equal(gradient.astype(np.float32), [[256.0], [-256.0]])


def largest_array(jaxpr):
    """The largest element count of any value in a jaxpr, inner jaxprs included."""
    sizes = [np.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()))]
    inner = [getattr(x, "jaxpr", x) for x in inner]
    return max([*sizes, *(largest_array(x) for x in inner if hasattr(x, "eqns"))])


def test_no_array_over_all_tokens_and_vocabulary_is_made_or_kept():
    """BR-146: 8 x 4096 tokens of 151,936 would be 18.5 GiB a copy."""
    hidden, unembed, targets = head_example(4, 64, 8, 4096)

    def loss(hidden, unembed):
        logp, entropy = chunked_logprobs(hidden, unembed, targets, temperature=1.0, chunk=16)
        return jnp.sum(logp) + jnp.sum(entropy)

    gradient = jax.grad(loss, (0, 1))
    assert largest_array(jax.make_jaxpr(gradient)(hidden, unembed).jaxpr) == 16 * 4096
    temporary = jax.jit(gradient).lower(hidden, unembed).compile().memory_analysis()
    one_chunk, everything = 16 * 4096 * 4, 256 * 4096 * 4
    assert one_chunk <= temporary.temp_size_in_bytes < 6 * one_chunk < everything


def test_padding_beside_a_row_leaves_its_logprobs_alone():
    """BR-045, as far as it is the head's: what fills the padded places is not read."""
    hidden, unembed, targets = head_example(2, 5, 8, 11)
    call = functools.partial(chunked_logprobs, temperature=1.0, chunk=3)
    solo, _ = call(hidden[:1, :2], unembed, targets[:1, :2])
    hidden[0, 2:], targets[0, 2:] = np.nan, -1
    batched, _ = call(hidden, unembed, targets)
    np.testing.assert_allclose(batched[0, :2], solo[0], rtol=1e-6)
    assert np.isfinite(batched[1]).all()


@pytest.mark.parametrize("chunk", [32, 48])  # 16 tokens a device: 4 each of 4 chunks, 6 of 3
def test_each_chunk_is_shared_by_all_devices(chunk):
    """Chunks cut along the sharded axis would leave seven of eight devices idle."""
    hidden, unembed, targets = head_example(8, 16, 8, 64)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (["data"], []))
    call = functools.partial(chunked_logprobs, temperature=1.0, chunk=chunk, ways=8)
    arrays = (hidden, unembed, targets)
    compiled = jax.jit(call, in_shardings=(rows, whole, rows)).lower(*arrays).compile()
    program = compiled.as_text()
    assert f"f32[{chunk // 8},64]" in program and f"f32[{chunk},64]" not in program  # logits
    # Tokens that change their device are, on TPU, logits of the whole chunk on every device.
    moves = ("all-gather", "all-to-all", "collective-permute")
    assert [move for move in moves if move in program] == []
    placed = [jax.device_put(x, at) for x, at in zip(arrays, (rows, whole, rows), strict=True)]
    for value, expected in zip(compiled(*placed), numpy_logprobs(*arrays, 1.0), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("change, message", [
    ({"temperature": 0.0}, "temperature 0.0"),  # BR-154
    ({"temperature": float("nan")}, "temperature nan"),
    ({"chunk": 0}, "chunk 0"),
    ({"ways": 2}, "3 rows"),
    ({"targets": np.zeros((3, 4), int)}, r"\(3, 4\)"),
    ({"unembed": np.zeros((11, 7))}, r"\(11, 7\)"),
])
def test_arguments_without_a_meaning_are_refused(change, message):
    hidden, unembed, targets = head_example(3, 5, 8, 11)
    arguments = dict(hidden=hidden, unembed=unembed, targets=targets, temperature=1.0, chunk=4)
    with pytest.raises(ValueError, match=message):
        chunked_logprobs(**{**arguments, **change})


def test_a_target_is_looked_up_by_its_id_not_by_its_rank():
    """BR-041: the sampled token is rank 9; the first of the likeliest is another one."""
    hidden, unembed, _ = head_example(1, 1, 8, 11)
    whole = np.asarray(jax.nn.log_softmax(hidden @ unembed.T))[0, 0]
    ninth = np.argsort(-whole)[8]
    logp, _ = chunked_logprobs(
        hidden, unembed, np.full((1, 1), ninth), temperature=1.0, chunk=1
    )
    assert float(logp[0, 0]) == pytest.approx(whole[ninth], rel=1e-5)
    ids, top = top_logprobs(hidden, unembed, 3, temperature=1.0, chunk=1)
    np.testing.assert_array_equal(ids[0, 0], np.argsort(-whole)[:3])
    np.testing.assert_allclose(top[0, 0], np.sort(whole)[:-4:-1], rtol=1e-5)


# Score centering (arXiv 2609.20807)


def centering_gradient(q_unembed, k, hidden, unembed):
    """Gradient of the summed term by the trainer's unembedding, q from another one."""
    head = dict(temperature=0.8, chunk=4)
    ids, logq = top_logprobs(hidden, q_unembed, k, **head)
    total = lambda u: jnp.sum(centering_term(hidden, u, ids, logq, **head))
    return jax.jit(jax.grad(total))(unembed)


def expected_score(q_unembed, hidden, unembed):
    """The gradient of sum_v q(v) log p(v), q held: the score that the sampler expects."""
    def total(u):
        q = jax.nn.softmax(hidden @ q_unembed.T / 0.8)
        return jnp.sum(q * jax.nn.log_softmax(hidden @ u.T / 0.8))

    return jax.grad(total)(unembed)


def test_the_centring_gradient_is_the_score_that_the_sampler_expects():
    hidden, unembed, _ = head_example(3, 5, 8, 11)
    other = unembed + 0.3 * head_example(3, 5, 8, 11, seed=1)[1]
    expected = expected_score(other, hidden, unembed)
    assert np.abs(expected).max() > 0.5
    got = centering_gradient(other, 11, hidden, unembed)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_the_score_vanishes_where_both_policies_are_one():
    """Whatever k: beyond the likeliest the sampler is taken to be the policy itself."""
    hidden, unembed, _ = head_example(3, 5, 8, 11)
    for k in (3, 11):
        got = centering_gradient(unembed, k, hidden, unembed)
        np.testing.assert_allclose(got, np.zeros_like(got), atol=2e-6)


def test_the_tail_is_the_policys_own_in_the_samplers_mass():
    """Equation 14 by hand: q = (.7, .2, .1), p = (.5, .25, .25), the likeliest token alone."""
    log = lambda *p: np.log(np.array(p, np.float32))[:, None]
    hidden, head = np.ones((1, 1, 1), np.float32), dict(temperature=1.0, chunk=1)
    ids, logq = top_logprobs(hidden, log(0.7, 0.2, 0.1), 1, **head)
    term = centering_term(hidden, log(0.5, 0.25, 0.25), ids, logq, **head)
    rho = 0.3 / 0.5
    assert float(term[0, 0]) == pytest.approx((0.7 - rho * 0.5) * np.log(0.5), rel=1e-5)
