"""How far log-probs of the same text lie apart, token by token and by position."""

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def compare(reference: jax.Array, logits: jax.Array, following: jax.Array):
    """Distances of two sets of logits [S, vocab] that predict the tokens `following` int32 [S].

    Returns:
      FP32 [2, S]: log-prob of the token less that of the reference; KL(reference || logits).
    """
    old, new = (jax.nn.log_softmax(a) for a in (reference, logits))
    taken = lambda a: jnp.take_along_axis(a, following[:, None], axis=1)[:, 0]
    kl = jnp.sum(jnp.exp(old) * (old - new), axis=-1)
    return jnp.stack([taken(new) - taken(old), kl])


def by_position(values: np.ndarray, positions: np.ndarray, bucket: int) -> list[dict]:
    """One row a bucket of positions, of `compare`'s values [2, texts, S]; NaN does not count."""
    rows = []
    for begin in range(0, int(positions.max()) + 1, bucket):
        inside = values[:, :, (positions >= begin) & (positions < begin + bucket)]
        gap, kl = inside[:, ~np.isnan(inside[0])]
        if gap.size:
            row = {"position": begin, "tokens": int(gap.size)}
            row |= {"gap_mean_abs": float(np.abs(gap).mean()), "gap_mean": float(gap.mean())}
            rows.append(row | {"kl": float(kl.mean())})
    return rows
