"""The rotation that spreads a row's large values over all of it before it is quantized."""

import jax
import jax.numpy as jnp

from trace_jax.fp4 import formats


def hadamard(x: jax.Array) -> jax.Array:
    """x [..., n] times the normalized Hadamard matrix of n, a power of two, in x's dtype.

    The matrix is its own transpose and inverse. By sums and differences in a fixed order, so
    that decode and training, whose shapes differ, round alike.

    Raises:
      ValueError: another n.
    """
    size = x.shape[-1]
    if size.bit_count() != 1:
        raise ValueError(
            f"hadamard: size {size} is not a power of two; write rotate_v=False for such heads"
        )
    y, half = x.astype(jnp.float32), 1
    while half < size:
        a, b = jnp.moveaxis(y.reshape(*x.shape[:-1], -1, 2, half), -2, 0)
        y = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        half *= 2
    return formats.fp32_source(y * size**-0.5, x.dtype).astype(x.dtype)
