"""Float64 oracles and versions shared by the kernel tests."""

import ml_dtypes
import numpy as np
import pytest

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

ON_GPU = pytest.mark.gpu
TRITON = pytest.param("triton", marks=ON_GPU)
PREFILL = pytest.param("prefill", marks=ON_GPU)


def versions(*others):
    """The reference, the Hopper kernel (GPU only), and others, as test parameters."""
    return ["reference", pytest.param("hopper", marks=ON_GPU), *others]


def layout_of(version: str) -> str:
    """The layout of weights or pages that a version takes."""
    return "triton" if version == "triton" else "auto"


def decode(q) -> np.ndarray:
    """Float64 values of an NVFP4 QTensor, by table: shares no code with the codec."""
    packed = np.asarray(q.packed)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    scale = np.asarray(q.block_scale).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    value = E2M1[codes] * np.repeat(scale, 16, axis=-1)
    return value[..., : q.length] * np.asarray(q.outer, np.float64)


def fp8_rows(x: np.ndarray) -> np.ndarray:
    """Float64 rows [..., D] as E4M3 holds them over the smallest fitting power of two."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    outer = 2.0 ** np.ceil(np.log2(np.maximum(amax / 448, 2.0**-117)))
    codes = (x / outer).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * outer


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def poison(*shapes):
    """Fills memory of these (shape, dtype) with NaN and frees it: the next results lie there."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes])
