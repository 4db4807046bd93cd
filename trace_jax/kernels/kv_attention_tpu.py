"""Paged NVFP4 decode attention on TPU: page layout and Pallas kernel.

Layout of a page: tokens along lanes, K's 64 in lanes 0..63 and V's in 64..127; codes
[heads * D/2, 128] (byte row i of a head: dim 2 i in the low nibble, 2 i + 1 in the high one),
block scales E5M3 [heads * D/16, 128], row exponents [heads, 128]. Scales are broadcast along
sublanes, a token is one column (so appending replaces whole bytes), and no tile is half empty.
fp4_tpu says how bytes become operands.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trace_jax.fp4 import formats
from trace_jax.kernels import fp4_tpu

PAGE = 64
LOW = -1e30


def columns(codes, scales, exponents):
    """Rows [..., D], E5M3 scales [..., D/16] and exponents [...] of tokens to byte columns."""
    return formats.pack(codes), scales, exponents[..., None]


def pages_of(k_columns, v_columns):
    """Columns [n, heads, 64, rows] of K and V to page arrays [n, heads * rows, 128]."""

    def merge(k, v):
        both = jnp.concatenate([k.swapaxes(-1, -2), v.swapaxes(-1, -2)], axis=-1)
        return both.reshape(both.shape[0], -1, 2 * PAGE)

    return tuple(merge(k, v) for k, v in zip(k_columns, v_columns, strict=True))


def set_token(arrays, page, position, k_columns, v_columns):
    """Page arrays with one column of K and V, [batch, heads, rows], replaced in each page."""
    lane, out = position % PAGE, []
    for data, k, v in zip(arrays, k_columns, v_columns, strict=True):
        for offset, column in ((0, k), (PAGE, v)):
            flat = column.reshape(column.shape[0], -1)
            data = data.at[page, :, lane + offset].set(flat, mode="drop")
        out.append(data)
    return tuple(out)


def _power(exponent):
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


def read(arrays, heads: int, d: int):
    """FP32 K and V [..., heads, 64, D] of page arrays [..., heads * rows, 128]."""
    codes, scales, exponents = (a.reshape(-1, a.shape[-2] // heads, 2 * PAGE) for a in arrays)
    decode = lambda c, s: jnp.concatenate(fp4_tpu.decode(c, s, float4=False))
    values = jax.vmap(decode)(codes, fp4_tpu.scale_values(scales))
    values = fp4_tpu.unsplit((values * _power(exponents)).swapaxes(-1, -2), float4=False)
    values = values.reshape(*arrays[0].shape[:-2], heads, 2 * PAGE, d)
    return values[..., :PAGE, :], values[..., PAGE:, :]


def _kernel(
    table_ref, length_ref, q_ref, code_ref, scale_ref, exponent_ref, out_ref, m_ref, l_ref, acc_ref,
    *, heads, scale, window, float4,
):  # fmt: skip
    b, page = pl.program_id(0), pl.program_id(1)
    length = length_ref[b]
    start = jnp.maximum(length - window, 0) if window else 0

    @pl.when(page == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, LOW)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when((page * PAGE < length) & ((page + 1) * PAGE > start))
    def _():
        token = page * PAGE + jax.lax.broadcasted_iota(jnp.int32, (1, PAGE), 1)
        live = (token >= start) & (token < length)
        for h in range(heads):
            _head(h, scale, live, float4, q_ref, code_ref, scale_ref, exponent_ref,
                  m_ref, l_ref, acc_ref)  # fmt: skip

    @pl.when(page == pl.num_programs(1) - 1)
    def _():
        out_ref[0, :, :, : acc_ref.shape[-1]] = acc_ref[...]
        out_ref[0, :, :, acc_ref.shape[-1] :] = jnp.concatenate(
            [m_ref[..., :64], l_ref[..., :64]], axis=-1
        )


def _head(
    h, scale, live, float4, q_ref, code_ref, scale_ref, exponent_ref, m_ref, l_ref, acc_ref
):  # fmt: skip
    d = acc_ref.shape[-1]
    half, groups = d // 2, d // 16
    codes = code_ref[0, h * half : (h + 1) * half]
    scales = fp4_tpu.scale_values(scale_ref[0, h * groups : (h + 1) * groups])
    power = _power(exponent_ref[0].astype(jnp.int32)[h : h + 1])
    parts = [x.astype(jnp.bfloat16) for x in fp4_tpu.decode(codes, scales, float4)]
    size = parts[0].shape[0]
    q = q_ref[0, h]
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    s = sum(dot(q[:, i * size : (i + 1) * size], x[:, :PAGE]) for i, x in enumerate(parts))
    s = jnp.where(live, s * (power[:, :PAGE] * scale), LOW)
    top = jnp.maximum(m_ref[h, :, :1], jnp.max(s, axis=-1, keepdims=True))
    fade = jnp.exp(m_ref[h, :, :1] - top)
    p = jnp.exp(s - top)
    l_ref[h] = l_ref[h] * fade + jnp.sum(p, axis=-1, keepdims=True)
    m_ref[h] = jnp.broadcast_to(top, m_ref.shape[1:])
    p = jnp.where(live, p * power[:, PAGE:], 0.0).astype(jnp.bfloat16)
    dims = (((1,), (1,)), ((), ()))  # p [group, 64] with V^T [size, 64], over the tokens
    for i, x in enumerate(parts):
        at = slice(i * size, (i + 1) * size)
        acc_ref[h, :, at] = acc_ref[h, :, at] * fade + jax.lax.dot_general(
            p, x[:, PAGE:], dims, preferred_element_type=jnp.float32
        )


def attention(q, arrays, table, lengths, scale, window, sink, interpret=False, float4=None):
    """The contract of kv_attention.paged_attention; arrays from `pages_of`.

    `float4`: read the bytes as such; None: as the chip can.
    """
    float4 = fp4_tpu.float4_here() if float4 is None else float4
    batch, q_heads, d = q.shape
    heads = arrays[2].shape[1]
    group = q_heads // heads
    rows = -(-group // 16) * 16  # one BF16 sublane tile at least
    grouped = fp4_tpu.split(q.reshape(batch, heads, group, d), float4)
    grouped = jnp.pad(grouped, [(0, 0)] * 2 + [(0, rows - group), (0, 0)])

    def page_at(b, p, table, lengths):
        # lax.div: `//` asks for the chip at hand, which is another one ahead of time.
        page = jnp.int32(PAGE)
        last = jax.lax.div(jnp.maximum(lengths[b] - 1, 0), page)
        first = jax.lax.div(jnp.maximum(lengths[b] - window, 0), page) if window else 0
        return table[b, jnp.clip(p, first, last)], 0, 0  # no copy of a page that is not read

    def sequence(b, p, table, lengths):
        return b, 0, 0, 0

    out = pl.pallas_call(
        functools.partial(_kernel, heads=heads, scale=scale, window=window, float4=float4),
        out_shape=jax.ShapeDtypeStruct((batch, heads, rows, d + 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, table.shape[1]),
            in_specs=[
                pl.BlockSpec((1, heads, rows, d), sequence),
                *(pl.BlockSpec((1, *a.shape[1:]), page_at) for a in arrays),
            ],
            out_specs=pl.BlockSpec((1, heads, rows, d + 128), sequence),
            scratch_shapes=[
                pltpu.VMEM((heads, rows, 128), jnp.float32),
                pltpu.VMEM((heads, rows, 128), jnp.float32),
                pltpu.VMEM((heads, rows, d), jnp.float32),
            ],
        ),
        interpret=interpret,
    )(table, lengths, grouped, *arrays)[:, :, :group]
    top, total = out[..., d : d + 1], out[..., d + 64 : d + 65]
    if sink is not None:
        total = total + jnp.exp(sink.reshape(1, heads, group, 1) - top)
    out = fp4_tpu.unsplit(out[..., :d], float4)
    value = jnp.where(total > 0, out / total, jnp.where(total == 0, 0.0, total))
    value = jnp.where((lengths > 0)[:, None, None, None], value, 0.0)
    return value.reshape(batch, q_heads, d).astype(jnp.bfloat16)
