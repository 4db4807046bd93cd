"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a small cache for many heads.

Keys and values of all heads are linear in one latent a token, so the up-projections can
act on queries and outputs instead: attention becomes that of many query heads over one
key-value head, in training as in decoding. What is cached, and quantized at the sites, is
the latent ("v") and the rotary key that all heads share ("k").
"""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from trace_jax.model.attention import attend, remember
from trace_jax.model.config import ModelConfig
from trace_jax.model.layers import (
    Linear,
    RMSNorm,
    normal_init,
    product,
    rotary,
    rounded,
    stored,
)
from trace_jax.model.remat import keepable
from trace_jax.model.sites import Sites

EPS = 1e-6  # of the norms of latents; no field of a config.json sets it


def by_head(x, weight):
    """x [B, S, heads, K] times each head's weight [heads, N, K], transposed, in x's dtype.

    As three axes: XLA's CPU back end has no BF16 product with FP32 sums of other forms.
    """
    heads = jnp.moveaxis(x, 2, 0)  # [heads, B, S, K]
    y = product("hmk,hnk->hmn", heads.reshape(heads.shape[0], -1, heads.shape[-1]), weight)
    return rounded(jnp.moveaxis(y.reshape(*heads.shape[:3], -1), 0, 2), x.dtype)


class LatentAttention(nn.Module):
    """Latent attention of one layer; the counterpart of `attention.Attention`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, sites: Sites, cache=None, pages=None, segments=None):
        cfg, latent = self.config, self.config.latent
        turn = partial(rotary, positions=positions, theta=cfg.rope_theta, scaling=cfg.rope_scaling)
        up_k, up_v = self._up(x.dtype)
        q_nope, q_rope = jnp.split(self._queries(x), [latent.nope_dim], axis=-1)
        q_nope = by_head(q_nope, jnp.swapaxes(up_k, 1, 2))
        down = Linear(latent.kv_rank + latent.rope_dim, dtype=x.dtype, name="kv_down")(x)
        down, k_rope = jnp.split(down[:, :, None], [latent.kv_rank], axis=-1)
        c = RMSNorm(EPS, name="latent_norm")(down)
        if sites.spec.precision.rotate_v:
            raise ValueError(
                "rotate_v: the values of latent attention are its keys too; write rotate_v=False"
            )
        k_rope = turn(k_rope)
        if pages is not None:
            remembered = pages.remember(k_rope, c, cache, positions, sites)
        else:
            remembered = remember(k_rope, c, positions, sites, cache, segments=segments)
        k_rope, c, mask, recent, cache = remembered
        q = jnp.concatenate([q_nope, turn(q_rope)], axis=-1)
        k = jnp.concatenate([c, k_rope], axis=-1)
        if recent is not None:
            recent = recent._replace(k=jnp.concatenate([recent.v, recent.k], axis=-1))
        scale = cfg.head_dim**-0.5 * cfg.yarn.score_scale
        out = attend(q, k, c, mask, scale=scale, recent=recent)
        out = by_head(out.reshape(*q.shape[:3], latent.kv_rank), up_v).reshape(*x.shape[:2], -1)
        return Linear(cfg.hidden, dtype=x.dtype, name="o")(keepable(out, "attention_out")), cache

    def _queries(self, x):
        """[B, S, heads, nope_dim + rope_dim], not rotated."""
        cfg = self.config
        if cfg.latent.q_rank:
            x = Linear(cfg.latent.q_rank, dtype=x.dtype, name="q_down")(x)
            x = RMSNorm(EPS, name="latent_q_norm")(x)
        q = Linear(cfg.num_heads * cfg.head_dim, dtype=x.dtype, name="q")(x)
        return q.reshape(*x.shape[:2], cfg.num_heads, cfg.head_dim)

    def _up(self, dtype):
        """Up-projections of a latent: keys [heads, nope_dim, rank], values [heads, v_dim, rank]."""
        cfg, latent = self.config, self.config.latent
        rows = cfg.num_heads * (latent.nope_dim + latent.v_dim)
        init = normal_init(latent.kv_rank)
        up = self.param("kv_up", init, (rows, latent.kv_rank), jnp.float32)
        up = stored(up, dtype).reshape(cfg.num_heads, -1, latent.kv_rank)
        return jnp.split(up, [latent.nope_dim], axis=1)
