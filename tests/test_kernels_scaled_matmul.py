"""Dense W4A4: right by table in float64, and the native form lowered for a Blackwell GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import decode, relative_error

from trace_jax.fp4 import MXFP4, NVFP4, quantize
from trace_jax.kernels import scaled_matmul as sm
from trace_jax.kernels.quantize import ROW_FORMAT


def operands(k=96):
    x = jax.random.normal(jax.random.key(0), (2, 3, k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (24, k), jnp.bfloat16) * 0.02
    rows = jax.jit(partial(quantize, format=ROW_FORMAT, outer_axes=(2,)))(x)
    return rows, jax.jit(partial(quantize, format=NVFP4))(w)


def test_reference_is_the_product_of_the_decoded_values():
    x, w = operands()
    out = jax.jit(sm.scaled_matmul)(x, w)
    want = decode(x) @ decode(w).T
    assert out.shape == (2, 3, 24) and relative_error(out, want) < 1e-6


def test_native_lowers_to_one_fp4_product():
    """Compiled only as far as a machine without the GPU can: the module for CUDA."""
    lowered = jax.jit(sm._native).trace(*operands()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    call = next(line for line in text.splitlines() if "@__op$block_scaled_dot" in line)
    for operand in ("1x6x96xf4E2M1FN", "1x24x96xf4E2M1FN", "1x6x6xf8E4M3FN", "1x24x6xf8E4M3FN"):
        assert f"tensor<{operand}>" in call


def test_operands_keep_the_codec_s_codes():
    x, _ = operands()
    codes, scales = jax.jit(sm._as_floats)(x)
    value = np.asarray(codes.astype(jnp.float32), np.float64).reshape(2, 3, -1, 16)
    value *= np.asarray(scales.astype(jnp.float32), np.float64).reshape(2, 3, -1, 1)
    np.testing.assert_array_equal(value.reshape(2, 3, -1) * np.asarray(x.outer), decode(x))


def test_refusals():
    x, w = operands()
    with pytest.raises(ValueError, match="'native' cannot run this call: it needs an NVIDIA"):
        with jax.default_device(jax.devices("cpu")[0]):
            sm.scaled_matmul(x, w, version="native")
    with pytest.raises(ValueError, match="multiples of 32 and N of 8, not 80 and 24"):
        sm.scaled_matmul(*operands(80), version="native")
    with pytest.raises(ValueError, match="write NVFP4 rows"):
        sm.scaled_matmul(x, quantize(jnp.ones((24, 96)), MXFP4))
