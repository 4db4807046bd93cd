"""Sampling with keys that depend on the request alone."""

import jax
import jax.numpy as jnp


def request_keys(seed: int, iteration, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """One key a request, from (seed, iteration, prompt, sample); prompts, samples int32 [N].

    With the position folded in at each token, a request draws the same tokens
    alone or in any batch.
    """
    base = jax.random.fold_in(jax.random.key(seed), iteration)
    key = lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(base, prompt), sample)
    return jax.vmap(key)(prompts, samples)


def sample(logits: jax.Array, keys: jax.Array, positions: jax.Array, temperature: float):
    """Draws a token a row.

    Args:
      logits: FP32 [N, vocab].
      keys: [N] request keys. positions: int32 [N] of the token to draw.
      temperature: 0 takes the argmax; its log-probability is then reported at
        temperature 1, and such samples are not for training.

    Returns:
      tokens int32 [N] and log-probs FP32 [N] of the distribution sampled from.
    """
    scaled = logits / temperature if temperature > 0 else logits
    if temperature > 0:
        vocab = logits.shape[-1]

        def noise(key, position):
            return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

        tokens = jnp.argmax(scaled + jax.vmap(noise)(keys, positions), axis=-1)
    else:
        tokens = jnp.argmax(logits, axis=-1)
    logp = jnp.take_along_axis(jax.nn.log_softmax(scaled), tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), logp
