"""The record that crosses from rollout to learner."""

import jax
import jax.numpy as jnp
from flax import struct

from trace_jax.model.sites import Codes
from trace_jax.model.specs import Guidance


@struct.dataclass
class Rollout:
    """N sequences of up to S tokens, prompt and response joined, right-padded.

    Attributes:
      tokens: int32 [N, S].
      prompt_length, length: int32 [N]; tokens of the prompt, and of both.
      logp: FP32 [N, S]; log-probability of each sampled token under the
        distribution it was drawn from (temperature included); 0 elsewhere.
      mask: bool [N, S]; True for sampled tokens, the EOS included.
      finished: bool [N]; ended by an EOS, not by length.
      guidance: planned sites (see Guidance); `recorded` is False for the last
        sampled token, which was never fed back, and for padding.
      routes: int16 [layers, N, S, slots]; NOT_RECORDED where there is none.
      audit: {site: Codes} with leading axes [layers, audit rows, S, rows].
    """

    tokens: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    logp: jax.Array
    mask: jax.Array
    finished: jax.Array
    guidance: Guidance
    routes: jax.Array
    audit: dict[str, Codes]

    @property
    def version(self) -> jax.Array:
        return self.guidance.version

    @property
    def valid(self) -> jax.Array:
        """bool [N, S]; prompt and response tokens."""
        return jnp.arange(self.tokens.shape[1])[None] < self.length[:, None]


def map_rows(fn, record: Rollout) -> Rollout:
    """fn(array, axis of its rows) of every array; layers come first where there are any."""

    def one(path, a):
        by_layer = any(getattr(k, "name", "") in ("sites", "routes", "audit") for k in path)
        return fn(a, int(by_layer))

    return jax.tree_util.tree_map_with_path(one, record)


def write_at(buffer: jax.Array, value: jax.Array, positions: jax.Array, axis: int = 1) -> jax.Array:
    """Writes value [.., N, 1, ...] into buffer [.., N, S, ...] at positions int32 [N].

    `axis` is that of N. Positions beyond the end are dropped, which is how rows that
    have ended leave no trace.
    """
    rows = jnp.arange(positions.shape[0])
    value = jnp.squeeze(value, axis + 1)
    if axis == 0:
        return buffer.at[rows, positions].set(value, mode="drop")
    return buffer.at[:, rows, positions].set(value, mode="drop")


def widen(prefix: jax.Array, length: int, axis: int = 1, fill=0) -> jax.Array:
    """Pads the token axis (axis + 1) of a prompt record to `length`."""
    pad = [(0, 0)] * prefix.ndim
    pad[axis + 1] = (0, length - prefix.shape[axis + 1])
    return jnp.pad(prefix, pad, constant_values=fill)
