"""Bit forms of FP4 that the Hopper kernels decode cheaply: interlocked codes, E5M3 scales."""

import jax
import jax.numpy as jnp
import numpy as np

# E4M3 bytes to E5M3 ((exponent + 10) << 3 | mantissa), where none is subnormal.
_E5M3 = np.array([0, 8, 16, 20, 24, 26, 28, 30] + [b + 24 for b in range(8, 128)], np.uint8)
_E4M3 = np.zeros(256, np.uint8)
_E4M3[_E5M3] = np.arange(128)


def interlock(packed: jax.Array) -> jax.Array:
    """Bytes [..., 4] of 8 codes to uint32 [...]: pair p at the BF16 bit positions, shifted by 3p.

    The last pair takes the bits that are left over, so that unpacking costs a shift and a mask.
    """
    word = jnp.zeros(packed.shape[:-1], jnp.uint32)
    for pair in range(4):
        byte = packed[..., pair].astype(jnp.uint32)
        for half, code in enumerate((byte & 15, byte >> 4)):
            if pair < 3:
                bits = ((code & 8) << 12 | (code & 7) << 6) >> (3 * pair)
            else:
                bits = (code & 12) << 11 | (code & 3) << 10
            word |= bits << (16 * half)
    return word


def codes_of(words: jax.Array) -> jax.Array:
    """Interlocked uint32 [...] to uint8 codes [..., 8]."""
    codes = []
    for pair in range(4):
        for half in range(2):
            w = (words >> (16 * half)) & 0xFFFF
            if pair < 3:
                bits = (w << (3 * pair)) & 0x81C0
                code = bits >> 12 & 8 | bits >> 6 & 7
            else:
                code = w >> 11 & 12 | w >> 10 & 3
            codes.append(code.astype(jnp.uint8))
    return jnp.stack(codes, axis=-1)


# Where a pair of weights keeps the bits of its codes (mantissa, exponent, sign): [pair][half][bit].
_WEIGHT_BITS = np.array(
    [
        [[(at + 16 * half) % 32 for at in places] for half in range(2)]
        for places in (
            [6, 7, 8, 15],  # the BF16 positions themselves
            [12, 13, 14, 21],  # rotated left by 6
            [2, 3, 4, 11],  # shifted right by 4
            [0, 1, 10, 9],  # what is left: three bits shifted right by 6, one left by 2
        )
    ]
)


def interlock_weights(packed: jax.Array) -> jax.Array:
    """As `interlock`, in the form that Hopper's products unpack with the fewest integer operations.

    A pair's bits cross the halves of the word, so it has to be written whole. See
    `decode_weights` in cuda/common.cuh.
    """
    word = jnp.zeros(packed.shape[:-1], jnp.uint32)
    for pair in range(4):
        byte = packed[..., pair].astype(jnp.uint32)
        for bit in range(8):
            word |= (byte >> bit & 1) << int(_WEIGHT_BITS[pair].reshape(-1)[bit])
    return word


def codes_of_weights(words: jax.Array) -> jax.Array:
    """Inverse of `interlock_weights`: uint32 [...] to uint8 codes [..., 8]."""
    codes = []
    for places in _WEIGHT_BITS.reshape(8, 4):
        code = jnp.zeros(words.shape, jnp.uint32)
        for bit, place in enumerate(places):
            code |= (words >> int(place) & 1) << bit
        codes.append(code.astype(jnp.uint8))
    return jnp.stack(codes, axis=-1)


def to_e5m3(scale_bytes: jax.Array) -> jax.Array:
    """E4M3 scale bytes (sign clear) as the kernels' E5M3 bytes; a zero stays 0."""
    return jnp.asarray(_E5M3)[scale_bytes & 127]


def from_e5m3(scale_bytes: jax.Array) -> jax.Array:
    """Inverse of `to_e5m3`; bytes that it never makes become zero."""
    return jnp.asarray(_E4M3)[scale_bytes]
