"""Log-probs of given tokens, and of the likeliest ones, a chunk of tokens at a time.

FP32 throughout. Logits of all tokens never exist at once: a chunk's are made, used and,
in the backward pass, made again.
"""

import jax
import jax.numpy as jnp

TAIL_FLOOR = 1e-6  # the least mass that a policy's tail is taken to have (score centering)


def chunked_logprobs(
    hidden, unembed, targets, *, temperature: float, chunk: int, ways: int = 1
):
    """Log-prob of each target and entropy, of the distribution that was sampled.

    Args:
      hidden: [N, T, D], any float dtype.
      unembed: [V, D]. The product accumulates in FP32 and so does its gradient
        over chunks.
      targets: int32[N, T] in [0, V); what stands at padded places is ignored.
      temperature: the sampler's, above 0.
      chunk: tokens per step over the whole (global) batch at most; N * T need not divide.
      ways: devices that N is cut over, in equal runs. Each has a like part of every chunk.

    Returns:
      (logp f32[N, T], entropy f32[N, T]), both differentiable.

    Raises:
      ValueError: temperature or chunk out of range, shapes that do not fit, N that `ways`
        does not divide.
    """

    def score(log_probs, targets):
        # A comparison instead of a gather: works on a sharded vocabulary, no scatter backwards.
        hit = jnp.arange(unembed.shape[0])[None, :] == targets[:, None]
        logp = jnp.sum(jnp.where(hit, log_probs, 0.0), axis=1)
        return logp, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)

    return _by_chunk(score, hidden, unembed, (targets,), temperature, chunk, ways)


def top_logprobs(hidden, unembed, k: int, *, temperature: float, chunk: int, ways: int = 1):
    """The k likeliest tokens (at most V) and their log-probs; arguments as chunked_logprobs.

    Returns:
      (ids int32[N, T, k], logp f32[N, T, k]), likeliest first.
    """
    k = min(k, unembed.shape[0])

    def top(log_probs):
        logp, ids = jax.lax.top_k(log_probs, k)
        return ids.astype(jnp.int32), logp

    return _by_chunk(top, hidden, unembed, (), temperature, chunk, ways)


def centering_term(
    hidden, unembed, ids, sampler_logp, *, temperature: float, chunk: int, ways: int = 1
):
    """Score centering (arXiv 2609.20807, eq. 14, without importance weights).

    With p the policy of `hidden`, q the sampler's and H the sampler's likeliest tokens,
    sum over H of c log p with c = q - rho p held constant. Its gradient is the score that
    the sampler expects, which vanishes where q = p; beyond H the sampler is taken to be
    rho p, with rho the ratio of the two masses there.

    Args:
      hidden, unembed, temperature, chunk, ways: as in chunked_logprobs; only p is differentiated.
      ids: int32[N, T, k], H. sampler_logp: f32[N, T, k], log q there.

    Returns:
      f32[N, T].
    """

    def centre(log_probs, ids, sampler_logp):
        logp = jnp.take_along_axis(log_probs, ids, axis=1)
        q, p = jnp.exp(sampler_logp), jnp.exp(logp)
        tail_q = jnp.maximum(1 - jnp.sum(q, axis=1, keepdims=True), 0.0)
        tail_p = jnp.maximum(1 - jnp.sum(p, axis=1, keepdims=True), TAIL_FLOOR)
        return jnp.sum(jax.lax.stop_gradient(q - tail_q / tail_p * p) * logp, axis=1)

    return _by_chunk(centre, hidden, unembed, (ids, sampler_logp), temperature, chunk, ways)


def _by_chunk(score, hidden, unembed, by_token, temperature, chunk, ways):
    """score(log-probs [C, V], *by_token chunks [C, ...]) over [N, T] tokens."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} has no log-probs to train on; use > 0")
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    shape = hidden.shape[:2]
    bad = [x.shape for x in by_token if x.shape[:2] != shape]
    if bad or hidden.shape[2] != unembed.shape[1]:
        raise ValueError(
            f"hidden {hidden.shape}, unembed {unembed.shape} and what belongs to the tokens "
            f"{[x.shape for x in by_token]} must be [N, T, D], [V, D] and [N, T, ...]"
        )
    if shape[0] % ways:
        raise ValueError(f"{shape[0]} rows do not divide over {ways} devices; write a multiple")
    # Of one device. Padding all devices' tokens together would move some to other devices, for
    # which XLA made the logits of whole chunks on each of 64 TPUs.
    tokens = shape[0] * shape[1] // ways
    steps = -(-tokens // max(chunk // ways, 1))
    part = -(-tokens // steps)
    # The cast and its return leave the values alone but sum the chunks' gradients in FP32.
    master = unembed.astype(jnp.float32)

    def split(x):
        x = x.reshape((ways, tokens) + x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, steps * part - tokens)) + ((0, 0),) * (x.ndim - 2))
        # A chunk takes every steps-th token: with T cut too, all devices share each chunk.
        x = jnp.moveaxis(x.reshape((ways, part, steps) + x.shape[2:]), 2, 0)
        return x.reshape((steps, ways * part) + x.shape[3:])

    @jax.checkpoint
    def one_chunk(parts):
        return score(_log_softmax(parts[0], master.astype(unembed.dtype), temperature), *parts[1:])

    def join(x):
        x = jnp.moveaxis(x.reshape((steps, ways, part) + x.shape[2:]), 0, 2)
        x = x.reshape((ways, part * steps) + x.shape[3:])
        return x[:, :tokens].reshape(shape + x.shape[2:])

    return jax.tree.map(join, jax.lax.map(one_chunk, jax.tree.map(split, (hidden, *by_token))))


def _log_softmax(hidden, unembed, temperature):
    """[C, D], [V, D] -> f32[C, V] log-probs of the tempered distribution."""
    logits = jnp.einsum(
        "cd,vd->cv",
        hidden,
        unembed,
        precision=jax.lax.Precision.HIGHEST,  # no TF32 or BF16 passes on FP32 operands
        preferred_element_type=jnp.float32,
    )
    logits = logits / temperature
    # Shifted before a target is picked: the difference of two large numbers loses digits.
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=1, keepdims=True))
    return logits - jnp.log(jnp.sum(jnp.exp(logits), axis=1, keepdims=True))
