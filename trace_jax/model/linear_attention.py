"""Linear attention by the gated delta rule (arXiv 2412.06464), as Qwen3.5 has it.

A head keeps a matrix S [key_dim, value_dim]. Each token decays it and corrects what it
holds for the token's key:  S <- a S;  S <- S + b k (v - k^T S)^T;  output q^T S.
The matrix and the last inputs of a short causal convolution are the whole cache. Neither
is quantized, and there are no K or V sites.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax.model.config import ModelConfig
from trace_jax.model.layers import Linear, RMSNorm, normal_init, product, rounded
from trace_jax.model.remat import keepable

CHUNK = 64  # tokens whose corrections are solved for at once


def empty_state(config: ModelConfig, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """A cache before the first token; `shape` leads: [layers, batch]."""
    delta = config.delta
    matrix = (delta.value_heads, delta.key_dim, delta.value_dim)
    return {
        "conv": jnp.zeros((*shape, delta.conv_width - 1, delta.channels), config.dtype),
        "matrix": jnp.zeros((*shape, *matrix), jnp.float32),
    }


class LinearAttention(nn.Module):
    """Linear attention of one layer; the counterpart of `attention.Attention`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, valid, cache=None, resumed=False):
        """x [B, S, hidden]; tokens that are not `valid` bool [B, S] leave no trace.

        Without a cache, and where valid `positions` begin at 0, the state starts empty; not so
        if it is `resumed`.
        """
        delta = self.config.delta
        heads = delta.value_heads
        linear = partial(Linear, dtype=x.dtype)
        per_head = lambda name: self.param(name, nn.initializers.zeros, (heads,), jnp.float32)
        state = cache if resumed else self._before(positions, valid, cache)

        mixed = linear(delta.channels, name="qkv")(x)
        gate = linear(heads * delta.value_dim, name="gate")(x).astype(jnp.float32)
        rate = linear(heads, name="rate")(x).astype(jnp.float32)
        step = linear(heads, name="step")(x).astype(jnp.float32)
        weight = self.param(
            "conv", normal_init(delta.conv_width), (delta.channels, delta.conv_width)
        )
        mixed, conv = causal_convolution(mixed, weight, state["conv"], valid)

        decay, bias = per_head("decay"), per_head("decay_bias")
        log_decay = -jnp.exp(decay)[None, None] * jax.nn.softplus(step + bias[None, None])
        log_decay = jnp.where(valid[..., None], log_decay, 0)
        rate = jnp.where(valid[..., None], jax.nn.sigmoid(rate), 0)
        q, k, v = self._heads(jax.nn.silu(mixed.astype(jnp.float32)), x.dtype)
        out, matrix = delta_rule(q, k, v, log_decay, rate, state["matrix"])

        out = RMSNorm(self.config.norm_eps, name="out_norm")(rounded(out, x.dtype))
        out = out.astype(jnp.float32) * jax.nn.silu(gate).reshape(out.shape)
        out = rounded(out, x.dtype).reshape(*x.shape[:2], -1)
        cache = None if cache is None else {"conv": conv, "matrix": matrix}
        return linear(self.config.hidden, name="o")(keepable(out, "attention_out")), cache

    def _before(self, positions, valid, cache):
        if cache is None:
            return empty_state(self.config, positions.shape[:1])
        first = valid[:, 0] & (positions[:, 0] == 0)
        clear = lambda a: jnp.where(first.reshape(-1, *(1,) * (a.ndim - 1)), 0, a)
        return jax.tree.map(clear, cache)

    def _heads(self, mixed, dtype):
        """FP32 q, k [B, S, value heads, key_dim] of unit length, q over its root; v."""
        delta = self.config.delta
        keys = delta.key_heads * delta.key_dim
        mixed = rounded(mixed, dtype).astype(jnp.float32)
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = (a.reshape(*a.shape[:2], delta.key_heads, delta.key_dim) for a in (q, k))
        q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
        group = delta.value_heads // delta.key_heads
        q, k = (jnp.repeat(a, group, axis=2) for a in (q * delta.key_dim**-0.5, k))
        return q, k, v.reshape(*v.shape[:2], delta.value_heads, delta.value_dim)


def causal_convolution(x, weight, state, valid):
    """Each channel's sum over its last inputs, and the inputs that the next call needs.

    Args:
      x: [B, S, channels]. weight: [channels, width], the current token's column last.
      state: [B, width - 1, channels], the inputs before x.
      valid: bool [B, S]; valid tokens come first in a row.
    """
    width, length = weight.shape[1], x.shape[1]
    inputs = jnp.concatenate([state.astype(x.dtype), x], axis=1)
    weight = rounded(weight, x.dtype).astype(jnp.float32)
    taps = [
        inputs[:, i : i + length].astype(jnp.float32) * weight[:, i][None, None]
        for i in range(width)
    ]
    last = jnp.sum(valid, axis=1)[:, None] + jnp.arange(width - 1)[None]
    return rounded(sum(taps), x.dtype), jnp.take_along_axis(inputs, last[..., None], axis=1)


def delta_rule(q, k, v, log_decay, rate, state):
    """The gated delta rule over a sequence, all in FP32.

    Args:
      q, k: [B, S, H, K]. v: [B, S, H, V]. log_decay, rate: [B, S, H], ln a and b.
      state: [B, H, K, V] before the first token.

    Returns:
      Outputs [B, S, H, V] and the state after the last token. A token of log_decay 0 and
      rate 0 leaves the state as it is.
    """
    length = q.shape[1]
    if length == 1:
        state, out = _one(state, *(a[:, 0] for a in (q, k, v, log_decay, rate)))
        return out[:, None], state
    size = min(CHUNK, length)
    count = -(-length // size)

    def chunks(a):
        """[chunks, B, H, size, ...] of [B, S, H, ...]."""
        pad = [(0, 0)] * a.ndim
        pad[1] = (0, count * size - length)
        a = jnp.pad(a, pad).reshape(a.shape[0], count, size, *a.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(a, 1, 0), 3, 2)

    state, out = jax.lax.scan(_chunk, state, tuple(map(chunks, (q, k, v, log_decay, rate))))
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], state


def _one(state, q, k, v, log_decay, rate):
    """One token: q, k [B, H, K], v [B, H, V].

    The states are most of what a decode step moves, so they are read for k and q at once, before
    the correction, and written once: q^T (a S + k u^T) = a q^T S + (q^T k) u^T.
    """
    decay = jnp.exp(log_decay)[..., None]
    read = product("bhck,bhkv->bhcv", jnp.stack([k, q], axis=2), state) * decay[..., None]
    missing = (v - read[:, :, 0]) * rate[..., None]
    state = state * decay[..., None] + k[..., None] * missing[..., None, :]
    return state, read[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * missing


def _chunk(state, inputs):
    """One chunk at once: q, k [B, H, C, K], v [B, H, C, V], log_decay, rate [B, H, C].

    The corrections u of a chunk depend on those before them, u_i = b_i (v_i - a_i..1 k_i^T S -
    sum_{j<i} a_i..j+1 (k_i^T k_j) u_j): a unit lower triangular system.
    """
    q, k, v, log_decay, rate = inputs
    total = jnp.cumsum(log_decay, axis=-1)
    size = total.shape[-1]
    earlier = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.where(earlier, total[..., :, None] - total[..., None, :], -jnp.inf)
    between = jnp.exp(between)  # decay from token j to token i
    since = jnp.exp(total)[..., None]  # decay from the state to token i
    own = rate[..., None]
    system = product("bhik,bhjk->bhij", k * own, k) * between
    held = product("bhik,bhkv->bhiv", k * since, state)
    u = jax.lax.linalg.triangular_solve(
        system, (v - held) * own, left_side=True, lower=True, unit_diagonal=True
    )
    out = product("bhik,bhkv->bhiv", q * since, state)
    out = out + product("bhij,bhjv->bhiv", product("bhik,bhjk->bhij", q, k) * between, u)
    last = total[..., -1:]
    left = jnp.exp(last - total)[..., None]  # decay from token i to the end
    state = state * jnp.exp(last)[..., None]
    return state + product("bhik,bhiv->bhkv", k * left, u), out
