"""The one-pass quantizer: one suite for every version, bit for bit the codec."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, TRITON, versions

from trace_jax.fp4 import NVFP4, mantissa_bits, quantize
from trace_jax.kernels.quantize import ROW_FORMAT, quantize_rows


@functools.cache
def rows(width):
    """Rows of every size, with ties, zeros and blocks of very different size."""
    x = jax.random.normal(jax.random.key(width), (96, width))
    power = jax.random.randint(jax.random.key(1), (96, width // 16, 1), -12, 12)
    x = (x.reshape(96, -1, 16) * jnp.exp2(power.astype(jnp.float32))).reshape(96, width)
    ties = jnp.tile(jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]), width // 8)
    return x.at[0].set(0).at[1].set(ties).at[2].set(-ties * 48).astype(jnp.bfloat16)


@pytest.mark.parametrize("version", versions(TRITON))
@pytest.mark.parametrize("width", (16, 768, 2880))
def test_equals_the_codec(version, width):
    x = rows(width)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(lambda x: quantize(x, ROW_FORMAT, outer_axes=(1,)))(jax.device_get(x))
        bits = np.packbits(np.asarray(mantissa_bits(want.codes)), axis=-1, bitorder="little")
    got = jax.jit(quantize_rows, static_argnames="version")(x, version=version)
    np.testing.assert_array_equal(got.q.outer, want.outer)
    np.testing.assert_array_equal(got.q.block_scale, want.block_scale)
    np.testing.assert_array_equal(got.q.packed, want.packed)
    np.testing.assert_array_equal(got.bits, bits)
    assert quantize_rows(x, bits=False, version=version).bits is None


@pytest.mark.parametrize("version", versions(TRITON))
@pytest.mark.parametrize("bad", (jnp.nan, jnp.inf, -jnp.inf))
def test_bad_rows_are_seen(version, bad):
    x = rows(64).at[5, 3].set(bad)
    q = jax.jit(quantize_rows, static_argnames="version")(x, version=version).q
    assert np.isnan(q.outer[5]).all() and (np.asarray(q.block_scale[5]) & 127 == 127).all()
    assert np.isfinite(np.delete(np.asarray(q.outer), 5)).all()


@ON_GPU
def test_the_compiled_codec_and_the_kernels_agree_on_a_million_values():
    """XLA:GPU against CPU and CUDA; half of the values are ties of their block."""
    x = jax.random.normal(jax.random.key(1), (1024, 2048), jnp.float32)
    power = jax.random.randint(jax.random.key(2), (1024, 128, 1), -20, 20)
    tops = jax.random.randint(jax.random.key(3), (1024, 128, 1), 8, 16).astype(jnp.float32)
    middles = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)  # of scale tops
    middles = jax.random.permutation(jax.random.key(4), middles, independent=True)
    tied = jnp.arange(128).reshape(1, 128, 1) % 2 == 0
    x = jnp.where(tied, tops * middles.reshape(1, 1, 16), x.reshape(1024, 128, 16))
    x = (x * jnp.exp2(power.astype(jnp.float32))).reshape(1024, 2048).astype(jnp.bfloat16)
    run = jax.jit(quantize_rows, static_argnames="version")
    fast, triton, compiled = (run(x, version=v) for v in ("hopper", "triton", "reference"))
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = run(jax.device_get(x), version="reference")
    for other in (triton, compiled, cpu):
        jax.tree.map(np.testing.assert_array_equal, fast, other)


def test_refusals():
    with pytest.raises(ValueError, match="nvfp4"):
        quantize_rows(rows(64), NVFP4, version="hopper")
    with pytest.raises(ValueError, match="BF16"):
        quantize_rows(rows(64).astype(jnp.float32), version="hopper")
