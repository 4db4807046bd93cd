"""A layer of experts as one op, and that a row's result is its own affair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, poison

from trace_jax.fp4 import NVFP4, quantize
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels.expert_layer import expert_layer
from trace_jax.kernels.fake_quantize import fake_quantize_rows

EXPERTS, TOP_K = 8, 2
ROWS_FORMAT = NVFP4.replace(outer="pow2")
layer = jax.jit(expert_layer, static_argnames=("activation", "fmt", "record", "version"))
product = jax.jit(em.expert_matmul, static_argnames="activation")
fake = jax.jit(fake_quantize_rows, static_argnames=("fmt", "record"))
lay_out = jax.jit(em.lay_out)
quantize_expert = jax.jit(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def weights(hidden, width, quantized, bias=False):
    parts = [
        normal(1, EXPERTS, width, hidden),
        normal(2, EXPERTS, width, hidden),
        normal(3, EXPERTS, hidden, width),
    ]
    if quantized:
        parts = [quantize_expert(w) for w in parts]
    biases = [jax.random.normal(jax.random.key(i), (EXPERTS, n)) for i, n in
              ((4, width), (5, width), (6, hidden))] if bias else [None] * 3  # fmt: skip
    gate_up = lay_out(*parts[:2], bias=biases[0], up_bias=biases[1])
    return gate_up, lay_out(parts[2], bias=biases[2])


def routed(tokens, seed=0):
    """Distinct experts a token; expert 5 gets none."""
    rng = np.random.default_rng(seed)
    choices = [e for e in range(EXPERTS) if e != 5]
    ids = np.stack([rng.permutation(choices)[:TOP_K] for _ in range(tokens)])
    return em.route(jnp.asarray(ids, jnp.int32), EXPERTS, version="reference")


SMALL = ((1, 128, 64), (7, 256, 720), (300, 128, 96))  # tokens, hidden, width
LARGE = ((1, 2048, 768), (14, 2048, 768), (40, 2048, 768))  # a minute each to compile on CPU


@pytest.mark.parametrize("version, shape", [
    *(("reference", shape) for shape in SMALL),
    *(pytest.param("hopper", shape, marks=ON_GPU) for shape in SMALL + LARGE),
])  # fmt: skip
@pytest.mark.parametrize("quantized", (True, False), ids=("nvfp4", "bf16"))
def test_the_layer_is_its_three_parts_bit_for_bit(version, shape, quantized):
    tokens, hidden, width = shape
    gate_up, down = weights(hidden, width, quantized, bias=tokens == 7)
    routing, x = routed(tokens), normal(7, tokens, hidden)
    activation = "clamped_swiglu" if tokens == 7 else "silu"
    mid = product(x, gate_up, routing, activation=activation)
    for fmt, record in ((ROWS_FORMAT, 1), (ROWS_FORMAT, 4), (ROWS_FORMAT, None), (None, None)):
        inner, left = mid, None
        if fmt is not None:
            inner, left = fake(mid, fmt, record=record)
        want = product(inner.astype(jnp.bfloat16), down, routing)
        poison((want.shape, jnp.float32), (mid.shape, jnp.bfloat16))
        got, guidance = layer(
            x, gate_up, down, routing, activation=activation, fmt=fmt, record=record,
            version=version,
        )  # fmt: skip
        np.testing.assert_array_equal(got, want)
        jax.tree.map(np.testing.assert_array_equal, guidance, left)
        assert (guidance is None) == (record is None)
        assert np.isfinite(np.asarray(got)).all() and np.asarray(got).any()


@ON_GPU
@pytest.mark.parametrize("tokens", (1, 3, 14, 40, 300, 1500))
@pytest.mark.parametrize("quantized", (True, False), ids=("nvfp4", "bf16"))
def test_a_row_gives_the_same_bits_in_any_company(tokens, quantized):
    """The others fill its expert, or all of them, or leave it alone; the shapes are the same."""
    gate_up, down = weights(2048, 768, quantized)
    x, results = normal(7, tokens, 2048), []
    for others in ((1, 2), (0, 3), (4, 1), None):
        ids = np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)
        ids = ids[:, :2] if others is None else np.tile(others, (tokens, 1))
        ids[0] = (0, 1)
        routing = em.route(jnp.asarray(ids, jnp.int32), EXPERTS)
        out, left = layer(x, gate_up, down, routing, activation="silu", fmt=ROWS_FORMAT, record=4)
        row = np.flatnonzero(np.asarray(routing.slot) == 0)[0]
        results.append((np.asarray(out)[:2], np.asarray(left.bits)[row]))
    for out, bits in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(bits, results[0][1])


def test_a_named_version_that_cannot_run_says_why():
    gate_up, down = weights(128, 64, True)
    with pytest.raises(ValueError, match="expert_layer: version 'hopper' cannot run"):
        expert_layer(normal(7, 4, 128), gate_up, down, routed(4), activation="silu",
                     version="hopper")  # fmt: skip
