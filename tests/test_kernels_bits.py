"""Interlocked codes can be read back, and unpack by the operations that the kernels use."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.kernels import bits

# BF16 bits of E2M1 codes times 2^-126: sign at 15, the rest at 8 to 6.
_BF16 = np.array([(c & 8) << 12 | (c & 7) << 6 for c in range(16)], np.uint32)
_MASK = 0x81C081C0


def words_and_codes(interlock, seed=0):
    packed = np.random.default_rng(seed).integers(0, 256, (5000, 4), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 8)
    return np.asarray(interlock(jnp.asarray(packed))), codes


@pytest.mark.parametrize(
    "interlock, codes_of",
    [(bits.interlock, bits.codes_of), (bits.interlock_weights, bits.codes_of_weights)],
)
def test_codes_can_be_read_back(interlock, codes_of):
    words, codes = words_and_codes(interlock)
    np.testing.assert_array_equal(codes_of(jnp.asarray(words)), codes)


def by_decode_word(w):
    last = (w << 1 & 0x80008000) | (w >> 5 & 0x01000100) | (w >> 4 & 0x00C000C0)
    return w & _MASK, w << 3 & _MASK, w << 6 & _MASK, last


def by_decode_weights(w):
    turned = w >> 6 | w << 26
    return w & _MASK, turned & _MASK, w << 4 & _MASK, (w << 6 & 0x80C080C0) | (w >> 2 & 0x01000100)


@pytest.mark.parametrize(
    "interlock, unpack",
    [(bits.interlock, by_decode_word), (bits.interlock_weights, by_decode_weights)],
)
def test_a_word_unpacks_to_pairs_of_bf16(interlock, unpack):
    """The functions of the same names in cuda/common.cuh, in NumPy."""
    words, codes = words_and_codes(interlock)
    for pair, got in enumerate(unpack(words)):
        want = _BF16[codes[:, 2 * pair]] | _BF16[codes[:, 2 * pair + 1]] << 16
        np.testing.assert_array_equal(got, want, err_msg=f"pair {pair}")
