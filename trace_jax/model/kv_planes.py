"""Stored keys and values in any format: what caches and plain pools of pages consist of."""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import E4M3Rows, Format, LayerPrecision, formats
from trace_jax.fp4.fp8 import decode_fp8
from trace_jax.model.sites import Sites


@struct.dataclass
class KVPlane:
    """Stored keys (or values) of a layer: FP4, FP8 or BF16.

    FP4: `data` uint8 [B, S, heads, packed], `scales` uint8 [B, S, heads, blocks],
    `outer` uint8 [B, S, heads], the exponent byte of the power-of-two outer scale.
    FP8: `data` uint8 [B, S, heads, width], `outer` as above, scales None.
    BF16: `data` [B, S, heads, width], scales and outer None.
    """

    data: jax.Array
    scales: jax.Array | None = None
    outer: jax.Array | None = None


def empty_plane(
    shape: tuple[int, ...], width: int, fmt: Format | E4M3Rows | None, dtype=jnp.bfloat16
) -> KVPlane:
    """A plane of leading shape [..., B, S, heads]; `dtype` is that of unquantized values."""
    if fmt is None:
        return KVPlane(jnp.zeros((*shape, width), dtype))
    if fmt == fp4.FP8:
        data = jnp.zeros((*shape, width), jnp.uint8)
        return KVPlane(data, outer=jnp.zeros(shape, jnp.uint8))
    blocks = formats.num_blocks(width, fmt)
    return KVPlane(
        jnp.zeros((*shape, blocks * fmt.block // 2), jnp.uint8),
        jnp.zeros((*shape, blocks), jnp.uint8),
        jnp.zeros(shape, jnp.uint8),
    )


def empty_planes(shape, widths: dict[str, int], precision: LayerPrecision, dtype) -> dict:
    """Planes of a layer's cache: "k" and "v", and with a window "recent_k" and "recent_v".

    Those hold the same tokens in `dtype`: which of them are recent depends on the query, and
    caches that share, copy and drop pages need no other bookkeeping this way.
    """
    planes = {s: empty_plane(shape, w, getattr(precision, s), dtype) for s, w in widths.items()}
    if precision.kv_window:
        planes |= {f"recent_{s}": empty_plane(shape, w, None, dtype) for s, w in widths.items()}
    return planes


def encode_plane(out: fp4.Quantized | fp4.Fp8Rows, fmt: Format | E4M3Rows) -> KVPlane:
    """Stored form of a site's outcome [B, S, heads, width]."""
    if fmt == fp4.FP8:
        return KVPlane(out.codes, outer=out.exponent[..., 0])
    codes = formats.to_blocks(out.codes, fmt)
    packed = formats.pack(codes.reshape(*codes.shape[:-2], -1))
    exponent = jax.lax.bitcast_convert_type(out.outer[..., 0], jnp.uint32) >> 23
    return KVPlane(packed, out.scale_bytes, exponent.astype(jnp.uint8))


def decode_plane(plane: KVPlane, width: int, fmt: Format | E4M3Rows | None) -> jax.Array:
    """BF16 [B, S, heads, width]; bit-equal to the value that was stored."""
    if fmt is None:
        return plane.data
    if fmt == fp4.FP8:
        return decode_fp8(plane.data, plane.outer[..., None]).astype(jnp.bfloat16)
    codes = formats.to_blocks(formats.unpack(plane.data)[..., :width], fmt)
    outer = jax.lax.bitcast_convert_type(plane.outer.astype(jnp.uint32) << 23, jnp.float32)
    scale = formats.decode_scale(plane.scales, fmt)
    value = formats.from_blocks(formats.decode_e2m1(codes) * scale[..., None], width)
    return (value * outer[..., None]).astype(jnp.bfloat16)


def write_plane(plane: KVPlane, new: KVPlane, positions: jax.Array) -> KVPlane:
    """`new` [B, S, ...] at `positions` int32 [B, S]; positions beyond the end are not written."""
    rows = jnp.arange(positions.shape[0])[:, None]
    return jax.tree.map(lambda old, x: old.at[rows, positions].set(x, mode="drop"), plane, new)


Rows = dict[str, jax.Array]  # by the names of `empty_planes`: [B, S, heads, width] as it is read


def quantize_rows(k: jax.Array, v: jax.Array, sites: Sites) -> tuple[Rows, dict[str, KVPlane]]:
    """Quantizes new keys and values at their sites: what is attended to, and what is stored."""
    precision, rows, planes = sites.spec.precision, {}, {}
    for site, x in (("k", k), ("v", v)):
        x = sites.perturb(site, x)
        value, out = sites.encode(site, x)
        rows[site] = value.astype(x.dtype)
        planes[site] = KVPlane(x) if out is None else encode_plane(out, getattr(precision, site))
        if precision.kv_window:
            rows[f"recent_{site}"], planes[f"recent_{site}"] = x, KVPlane(x)
    return rows, planes


def decode_rows(planes: dict[str, KVPlane], like: Rows, precision: LayerPrecision) -> Rows:
    """All rows of a cache, in the widths and dtypes of `like`, which are new rows of it."""

    def decode(name):
        fmt = getattr(precision, name, None)
        return decode_plane(planes[name], like[name].shape[-1], fmt).astype(like[name].dtype)

    return {name: decode(name) for name in planes}
