"""Token-by-token generation for one conversation: what a terminal shows."""

from collections.abc import Iterator
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import model, sync
from trace_jax.fp4 import LayerPrecision
from trace_jax.model import ModelConfig
from trace_jax.rollout.sampling import sample

BUCKET = 64  # lengths are rounded up to this, so that few programs are compiled


@cache
def _step(config: ModelConfig, precision: tuple[LayerPrecision, ...], temperature: float):
    spec = model.numerics(config, precision)

    @partial(jax.jit, donate_argnums=3)
    def step(params, tokens, start, kv, last, key):
        """Feeds tokens [1, n] from position `start`; draws the token after index `last`."""
        at = jnp.arange(tokens.shape[1])[None]
        arguments = {"positions": start + at, "valid": at <= last, "cache": kv}
        out = model.apply(config, params, tokens, spec, **arguments)
        logits = model.logits(params, out.hidden[:, last])
        token, logp = sample(logits, key[None], (start + last + 1)[None], temperature)
        return token[0], logp[0], out.cache

    return step


def stream(
    config: ModelConfig,
    params: dict,
    prompt: list[int],
    *,
    precision: tuple[LayerPrecision, ...],
    eos_ids: tuple[int, ...],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[int, float]]:
    """Yields (token, log-prob) until an EOS, which is not yielded, or `max_tokens`.

    `params` are rollout parameters (see sync.to_rollout) or an imported checkpoint's.
    """
    if not prompt:
        raise ValueError("the prompt is empty: write at least one token")
    params = jax.jit(sync.decode_weights)(params)
    padded = -(-len(prompt) // BUCKET) * BUCKET
    length = -(-(padded + max_tokens) // BUCKET) * BUCKET
    kv = model.empty_cache(config, precision, 1, length)
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt)] = prompt
    step, key = _step(config, precision, temperature), jax.random.key(seed)
    # Keys of padding are written behind the prompt and overwritten before anything can see
    # them; states pass it by, as it is not valid.
    start, last = 0, len(prompt) - 1
    for _ in range(max_tokens):
        token, logp, kv = step(params, tokens, jnp.int32(start), kv, jnp.int32(last), key)
        start, last = start + last + 1, 0
        if int(token) in eos_ids:
            return
        yield int(token), float(logp)
        tokens = np.asarray(token)[None, None]
