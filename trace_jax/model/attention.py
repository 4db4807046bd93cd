"""Grouped-query attention over quantized keys and values, with and without a cache."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax.fp4 import hadamard
from trace_jax.kernels.decode_attention import Heads
from trace_jax.kernels.norm_rotary import norm_rotary
from trace_jax.model.config import ModelConfig
from trace_jax.model.kv_planes import Rows, decode_rows, quantize_rows, write_plane
from trace_jax.model.layers import Linear, RMSNorm, angles, product, rotary, rounded, stored
from trace_jax.model.remat import keepable
from trace_jax.model.sites import Sites


def visible(
    queries: jax.Array,
    keys: jax.Array,
    window: jax.Array | None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """bool [B, S, T]: which keys a query sees; positions int32 [B, S] and [B or 1, T].

    `window` int32 counts the query's own key; 0 is no window. With `segments` int32 [B, S],
    where keys are the queries' tokens, only those of its own.
    """
    distance = queries[:, :, None] - keys[:, None, :]
    mask = distance >= 0
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    return mask if window is None else mask & ((distance < window) | (window == 0))


class Recent(NamedTuple):
    """Keys and values that are read, unquantized, where `near` bool [B, S, T] says so."""

    k: jax.Array
    v: jax.Array
    near: jax.Array


class Remembered(NamedTuple):
    """k [B, T, KV, D], v [B, T, KV, DV] to attend to, mask bool [B, S, T], and the cache.

    `recent`: the same tokens unquantized, for the queries that have them in their window.
    """

    k: jax.Array
    v: jax.Array
    mask: jax.Array
    recent: Recent | None
    cache: dict | None


def recent_of(rows: Rows, queries, keys, kv_window: int) -> Recent | None:
    """The `kv_window` most recent tokens of each query; None without a window."""
    if not kv_window:
        return None
    return Recent(rows["recent_k"], rows["recent_v"], visible(queries, keys, kv_window))


def remember(k, v, positions, sites: Sites, cache=None, window=None, segments=None) -> Remembered:
    """Quantizes k, v [B, S, KV, ...] at their sites and appends them to the cache.

    Without a cache the same quantized values are attended to directly. Either way what is
    attended to is what was quantized, the current token included; but for the tokens of
    the precision's `kv_window`.
    """
    precision = sites.spec.precision
    rows, planes = quantize_rows(k, v, sites)
    keys = positions
    if cache is not None:
        cache = {name: write_plane(cache[name], new, positions) for name, new in planes.items()}
        rows = decode_rows(cache, rows, precision)
        keys = jnp.arange(rows["k"].shape[1])[None]
    mask = visible(positions, keys, window, segments)
    recent = recent_of(rows, positions, keys, precision.kv_window)
    return Remembered(rows["k"], rows["v"], mask, recent, cache)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    recent: Recent | None = None,
) -> jax.Array:
    """Softmax attention, FP32 scores; q [B, S, H, D], k [B, T, KV, D], v [B, T, KV, DV].

    Returns [B, S, H * DV]. `mask` is bool [B, S, T], `scale` of the scores D ** -0.5 by
    default. `sinks` FP32 [H] are logits that take part in the softmax and carry no value.
    `recent` replaces k and v where it is near: one softmax over both.
    Masked values are replaced, not multiplied by zero: an unused slot may hold NaN.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    near = None if recent is None else mask & recent.near
    k, v = _used(k, v, mask if near is None else mask & ~near)
    scores = product("bsgqd,btgd->bgqst", q, k)
    if near is not None:
        recent_k, recent_v = _used(recent.k, recent.v, near)
        near = near[:, None, None]
        scores = jnp.where(near, product("bsgqd,btgd->bgqst", q, recent_k), scores)
    scores = jnp.where(mask[:, None, None], scores * (scale or dim**-0.5), -1e30)
    weights = rounded(_softmax(scores, sinks), v.dtype)
    read = partial(product, "bgqst,btgd->bsgqd")
    if near is None:
        out = read(weights, v)
    else:
        out = read(jnp.where(near, 0, weights), v) + read(jnp.where(near, weights, 0), recent_v)
    return rounded(out.reshape(batch, length, -1), q.dtype)


def _used(k, v, mask):
    """k and v [B, T, ...] with zeros where no query of `mask` [B, S, T] reads them."""
    used = jnp.any(mask, axis=1)[..., None, None]
    return jnp.where(used, k, 0), jnp.where(used, v, 0)


def _softmax(scores, sinks):
    """FP32 weights of scores [B, KV, group, S, T]; sinks FP32 [H] or None take their share."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32).reshape(1, scores.shape[1], -1, 1, 1)
    sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


class Attention(nn.Module):
    """Attention of one layer: new keys and values are remembered at `positions`.

    With `pages` (paged.Pages) the cache is a pool of pages. A rollout's output is FP32, which
    whatever adds it to the residual stream rounds.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x, positions, sites: Sites, cache=None, window=None, pages=None, segments=None
    ):
        cfg = self.config
        linear = partial(Linear, bias=cfg.attention_bias, dtype=x.dtype)
        gate, sinks = None, None
        if cfg.sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (cfg.num_heads,), jnp.float32)
        if self._in_one_launch(sites, x):
            projected, heads = self._joined_product(x)[:, 0], self._heads(positions)
            if pages.takes_projection(cache, sites):
                where = (cache, positions, sites, window, sinks)
                out, cache = pages.step_from_projection(projected, heads, cfg.norm_eps, *where)
                return linear(cfg.hidden, name="o", raw=True)(out), cache
            counts = cfg.num_heads, cfg.num_kv_heads
            rows = norm_rotary(projected, *counts, *heads, eps=cfg.norm_eps)
            q, k, v = (a[:, None] for a in rows)
        else:
            q, k, v, gate = self._project(x, linear)
            q, k = self._head_norm(q, k)
            if cfg.clip_qkv:
                q, k, v = (jnp.clip(a, -cfg.clip_qkv, cfg.clip_qkv) for a in (q, k, v))
            q = rotary(q, positions, cfg.rope_theta, cfg.rope_scaling, cfg.rotary_fraction)
            k = rotary(k, positions, cfg.rope_theta, cfg.rope_scaling, cfg.rotary_fraction)
        rotate = sites.spec.precision.rotate_v
        v = hadamard(v) if rotate else v
        if pages is not None:
            out, cache = pages.step(q, k, v, cache, positions, sites, window, sinks)
        else:
            remembered = remember(k, v, positions, sites, cache, window, segments)
            k, v, mask, recent, cache = remembered
            out = attend(q, k, v, mask, sinks, recent=recent)
        if rotate:  # back, head by head
            out = hadamard(out.reshape(q.shape)).reshape(out.shape)
        if gate is not None:
            gate = jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(out.shape)
            out = rounded(out.astype(jnp.float32) * gate, x.dtype)
        out = linear(cfg.hidden, name="o", raw=sites.decoding)(keepable(out, "attention_out"))
        return out, cache

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

    def _heads(self, positions) -> Heads:
        cfg = self.config
        norms = [None, None]
        if cfg.qk_norm:
            norms = [self.get_variable("params", n)["weight"] for n in ("q_norm", "k_norm")]
        turns = angles(positions[:, 0], cfg.head_dim // 2, cfg.rope_theta, cfg.rope_scaling)
        return Heads(*norms, *turns)
