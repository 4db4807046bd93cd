"""Grouped-query attention over quantized keys and values, with and without a cache."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import Format, formats
from trace_jax.kernels.norm_rotary import norm_rotary
from trace_jax.model.config import ModelConfig
from trace_jax.model.layers import Linear, RMSNorm, angles, product, rotary, rounded, stored
from trace_jax.model.sites import Sites


@struct.dataclass
class KVPlane:
    """Stored keys (or values) of a layer: FP4, or BF16.

    FP4: `data` uint8 [B, S, heads, packed], `scales` uint8 [B, S, heads, blocks],
    `outer` uint8 [B, S, heads], the exponent byte of the power-of-two outer scale.
    BF16: `data` [B, S, heads, head_dim], scales and outer None.
    """

    data: jax.Array
    scales: jax.Array | None = None
    outer: jax.Array | None = None


def empty_plane(
    shape: tuple[int, ...], head_dim: int, fmt: Format | None, dtype=jnp.bfloat16
) -> KVPlane:
    """A plane of leading shape [..., B, S, heads]; `dtype` is that of unquantized values."""
    if fmt is None:
        return KVPlane(jnp.zeros((*shape, head_dim), dtype))
    blocks = formats.num_blocks(head_dim, fmt)
    return KVPlane(
        jnp.zeros((*shape, blocks * fmt.block // 2), jnp.uint8),
        jnp.zeros((*shape, blocks), jnp.uint8),
        jnp.zeros(shape, jnp.uint8),
    )


def encode_plane(out: fp4.Quantized, fmt: Format) -> KVPlane:
    """Stored form of a site's outcome [B, S, heads, head_dim]."""
    codes = formats.to_blocks(out.codes, fmt)
    packed = formats.pack(codes.reshape(*codes.shape[:-2], -1))
    exponent = jax.lax.bitcast_convert_type(out.outer[..., 0], jnp.uint32) >> 23
    return KVPlane(packed, out.scale_bytes, exponent.astype(jnp.uint8))


def decode_plane(plane: KVPlane, head_dim: int, fmt: Format | None) -> jax.Array:
    """BF16 [B, S, heads, head_dim]; bit-equal to the value that was stored."""
    if fmt is None:
        return plane.data
    codes = formats.to_blocks(formats.unpack(plane.data)[..., :head_dim], fmt)
    outer = jax.lax.bitcast_convert_type(plane.outer.astype(jnp.uint32) << 23, jnp.float32)
    scale = formats.decode_scale(plane.scales, fmt)
    value = formats.from_blocks(formats.decode_e2m1(codes) * scale[..., None], head_dim)
    return (value * outer[..., None]).astype(jnp.bfloat16)


def write_plane(plane: KVPlane, new: KVPlane, positions: jax.Array) -> KVPlane:
    """`new` [B, S, ...] at `positions` int32 [B, S]; positions beyond the end are not written."""
    rows = jnp.arange(positions.shape[0])[:, None]
    return jax.tree.map(lambda old, x: old.at[rows, positions].set(x, mode="drop"), plane, new)


def visible(queries: jax.Array, keys: jax.Array, window: jax.Array | None) -> jax.Array:
    """bool [B, S, T]: which keys a query sees; positions int32 [B, S] and [B or 1, T].

    `window` int32 counts the query's own key; 0 is no window.
    """
    distance = queries[:, :, None] - keys[:, None, :]
    mask = distance >= 0
    return mask if window is None else mask & ((distance < window) | (window == 0))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention, FP32 scores; q [B, S, H, D], k [B, T, KV, D], v [B, T, KV, DV].

    Returns [B, S, H * DV]. `mask` is bool [B, S, T], `scale` of the scores D ** -0.5 by
    default. `sinks` FP32 [H] are logits that take part in the softmax and carry no value.
    Masked values are replaced, not multiplied by zero: an unused slot may hold NaN.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    used = jnp.any(mask, axis=1)[..., None, None]
    k, v = jnp.where(used, k, 0), jnp.where(used, v, 0)
    scores = product("bsgqd,btgd->bgqst", q, k)
    scores = jnp.where(mask[:, None, None], scores * (scale or dim**-0.5), -1e30)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = rounded(jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]], v.dtype)
    out = product("bgqst,btgd->bsgqd", weights, v)
    return rounded(out.reshape(batch, length, -1), q.dtype)


def store(site: str, x: jax.Array, sites: Sites) -> tuple[jax.Array, KVPlane]:
    """Values to attend to and their stored form."""
    value, out = sites.quantize(site, x)
    if out is None:
        return value, KVPlane(value)
    return value.astype(x.dtype), encode_plane(out, getattr(sites.spec.precision, site))


class Remembered(NamedTuple):
    """k [B, T, KV, D], v [B, T, KV, DV] to attend to, mask bool [B, S, T], and the cache."""

    k: jax.Array
    v: jax.Array
    mask: jax.Array
    cache: dict | None


def remember(k, v, positions, sites: Sites, cache=None, window=None) -> Remembered:
    """Quantizes k, v [B, S, KV, ...] at their sites and appends them to the cache.

    Without a cache the same quantized values are attended to directly. Either way what is
    attended to is what was quantized, the current token included.
    """
    new_k, k_stored = store("k", k, sites)
    new_v, v_stored = store("v", v, sites)
    if cache is None:
        return Remembered(new_k, new_v, visible(positions, positions, window), None)
    cache = {
        "k": write_plane(cache["k"], k_stored, positions),
        "v": write_plane(cache["v"], v_stored, positions),
    }
    formats_ = sites.spec.precision
    k = decode_plane(cache["k"], k.shape[-1], formats_.k).astype(k.dtype)
    v = decode_plane(cache["v"], v.shape[-1], formats_.v).astype(v.dtype)
    return Remembered(k, v, visible(positions, jnp.arange(k.shape[1])[None], window), cache)


class Attention(nn.Module):
    """Attention of one layer: new keys and values are remembered at `positions`.

    With `pages` (paged.Pages) the cache is a pool of pages.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, sites: Sites, cache=None, window=None, pages=None):
        cfg = self.config
        linear = partial(Linear, bias=cfg.attention_bias, dtype=x.dtype)
        gate = None
        if self._in_one_launch(sites, x):
            q, k, v = self._normed_and_turned(x, positions)
        else:
            q, k, v, gate = self._project(x, linear)
            q, k = self._head_norm(q, k)
            if cfg.clip_qkv:
                q, k, v = (jnp.clip(a, -cfg.clip_qkv, cfg.clip_qkv) for a in (q, k, v))
            q = rotary(q, positions, cfg.rope_theta, cfg.rope_scaling, cfg.rotary_fraction)
            k = rotary(k, positions, cfg.rope_theta, cfg.rope_scaling, cfg.rotary_fraction)
        sinks = None
        if cfg.sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (cfg.num_heads,), jnp.float32)
        if pages is not None:
            out, cache = pages.step(q, k, v, cache, positions, sites, window, sinks)
        else:
            k, v, mask, cache = remember(k, v, positions, sites, cache, window)
            out = attend(q, k, v, mask, sinks)
        if gate is not None:
            gate = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(out.shape)
            out = rounded(out.astype(jnp.float32) * gate, x.dtype)
        return linear(cfg.hidden, name="o")(out), cache

    def _project(self, x, linear):
        """Queries, keys, values and the output's gate or None, [B, S, heads, head_dim].

        As they are projected; a gated projection holds each head's query and gate.
        """
        cfg = self.config
        heads = (*x.shape[:2], -1, cfg.head_dim)
        if self._joined:
            q, k, v = jnp.split(rounded(self._joined_product(x), x.dtype), self._bounds, axis=-1)
        else:
            q = linear(self._bounds[0], name="q")(x)
            k = linear(cfg.num_kv_heads * cfg.head_dim, name="k")(x)
            v = linear(cfg.num_kv_heads * cfg.head_dim, name="v")(x)
        gate = None
        if cfg.attention_gate:
            q, gate = jnp.split(q.reshape(*x.shape[:2], cfg.num_heads, -1), 2, axis=-1)
        return q.reshape(heads), k.reshape(heads), v.reshape(heads), gate

    @property
    def _joined(self) -> bool:
        """Whether the parameters hold one projection for all three (sync.by_layer)."""
        return self.has_variable("params", "qkv")

    @property
    def _bounds(self) -> tuple[int, int]:
        cfg = self.config
        queries = cfg.num_heads * cfg.head_dim * (1 + cfg.attention_gate)
        return queries, queries + cfg.num_kv_heads * cfg.head_dim

    def _joined_product(self, x):
        """FP32 [B, S, all heads * head_dim]."""
        weights = self.get_variable("params", "qkv")
        y = product("...k,nk->...n", x, stored(weights["weight"], x.dtype))
        if "bias" in weights:
            y = y + jnp.expand_dims(rounded(weights["bias"]).astype(jnp.float32), range(y.ndim - 1))
        return y

    def _head_norm(self, q, k):
        """Queries and keys [B, S, heads, head_dim], normed over what the config says."""
        cfg, shapes = self.config, (q.shape, k.shape)
        if not cfg.qk_norm:
            return q, k
        if cfg.qk_norm_over == "projection":
            q, k = (a.reshape(*a.shape[:2], -1) for a in (q, k))
        q = RMSNorm(cfg.norm_eps, cfg.zero_centred_norms, name="q_norm")(q)
        k = RMSNorm(cfg.norm_eps, cfg.zero_centred_norms, name="k_norm")(k)
        return q.reshape(shapes[0]), k.reshape(shapes[1])

    def _in_one_launch(self, sites: Sites, x) -> bool:
        cfg = self.config
        plain = not cfg.clip_qkv and (not cfg.qk_norm or cfg.qk_norm_over == "head")
        plain = plain and not cfg.attention_gate and not cfg.zero_centred_norms
        plain = plain and cfg.rotary_fraction == 1.0
        one = x.dtype == jnp.bfloat16 and x.shape[1] == 1
        return sites.decoding and self._joined and plain and one

    def _normed_and_turned(self, x, positions):
        cfg = self.config
        norms = [None, None]
        if cfg.qk_norm:
            norms = [self.get_variable("params", n)["weight"] for n in ("q_norm", "k_norm")]
        cos, sin = angles(positions[:, 0], cfg.head_dim // 2, cfg.rope_theta, cfg.rope_scaling)
        projected = self._joined_product(x)[:, 0]
        heads = cfg.num_heads, cfg.num_kv_heads
        rows = norm_rotary(projected, *heads, *norms, cos, sin, eps=cfg.norm_eps)
        return tuple(a[:, None] for a in rows)
