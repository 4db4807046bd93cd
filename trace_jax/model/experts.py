"""What experts make of the rows routed to them, wherever they live."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax import fp4
from trace_jax.fp4 import Format, GuidancePlan, Guide, SiteGuidance
from trace_jax.kernels.grouped_matmul import (
    Groups,
    group_tokens,
    grouped_matmul,
    rows_to_slots,
    slots_to_rows,
    tokens_to_rows,
)
from trace_jax.model.layers import ExpertWeight, rounded
from trace_jax.model.remat import keepable
from trace_jax.model.sites import Codes, perturbed

MID = "expert_mid"


class RoutedWeights(NamedTuple):
    """Of E experts: [E, 2 x width, hidden], [E, hidden, width]; FP32 biases [E, N] or None."""

    gate_up: ExpertWeight
    down: ExpertWeight
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class Inner(NamedTuple):
    """Static numerics between the two products: swiglu's limit, the site's format, plan, noise."""

    limit: float
    fmt: Format | None
    plan: GuidancePlan
    noise: float


class MidGuide(NamedTuple):
    """A Guide's arrays by slot [tokens, top_k, ...]; see fp4.Guide."""

    stored: SiteGuidance
    obey: jax.Array
    guard: jax.Array | None


class SlotOutputs(NamedTuple):
    """FP32 outputs [tokens, top_k, hidden], and whole codes of the inner site by slot, or None."""

    value: jax.Array
    mid: Codes | None


def slot_outputs(
    how: Inner,
    x: jax.Array,
    ids: jax.Array,
    weights: RoutedWeights,
    guide: MidGuide | None,
    key: jax.Array | None,
    *,
    nobody: bool = False,
) -> SlotOutputs:
    """Outputs of experts `ids` int32 [tokens, top_k] for x [tokens, hidden], ungated.

    `key`: of the emulated engine noise. With `nobody`, an id may be one beyond the experts: such
    a row must be zero, and what comes out of it means nothing.
    """
    groups = _groups(ids, weights.gate_up.values.shape[0], nobody)
    rows = tokens_to_rows(x, groups)
    gate_up = keepable(_product(rows, weights.gate_up, groups), "gate_up")
    gate_up = _add_bias(gate_up, weights.gate_up_bias, groups)
    mid = perturbed(MID, rounded(swiglu(gate_up, how.limit), x.dtype), key, how.noise)
    codes = None
    if how.fmt is not None:
        out = fp4.quantize_site(mid, how.fmt, _by_row(guide, how.plan, groups))
        mid = out.value.astype(x.dtype)
        left = jax.lax.stop_gradient(out[1:])
        codes = Codes(*(rows_to_slots(a, groups) for a in left))
    mid = keepable(mid, MID)
    y = _add_bias(_product(mid, weights.down, groups), weights.down_bias, groups)
    return SlotOutputs(rows_to_slots(y, groups), codes)


def _groups(ids, experts: int, nobody: bool) -> Groups:
    if not nobody:
        return group_tokens(ids, experts)
    groups = group_tokens(ids, experts + 1)
    return groups._replace(tile_expert=jnp.minimum(groups.tile_expert, experts - 1))


def _by_row(guide: MidGuide | None, plan: GuidancePlan, groups: Groups) -> Guide | None:
    if guide is None:
        return None
    stored, obey, guard = jax.tree.map(lambda a: slots_to_rows(a, groups), guide)
    return Guide(stored, plan, obey, guard)


def swiglu(gate_up: jax.Array, limit: float = 0.0) -> jax.Array:
    """Gated activation of FP32 [..., 2 n], gate first, to [..., n].

    Without a limit SiLU(gate) * up. With one it is GPT-OSS's: gate clamped from above,
    up on both sides, gate * sigmoid(1.702 gate) * (up + 1).
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if not limit:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _add_bias(y: jax.Array, bias: jax.Array | None, groups: Groups) -> jax.Array:
    """Rows [rows, N] plus the bias [experts, N] of each row's expert."""
    if bias is None:
        return y
    tiles = groups.tile_expert.shape[0]
    rows = y.reshape(tiles, -1, y.shape[-1])
    return (rows + bias[groups.tile_expert][:, None]).reshape(y.shape)


def _product(rows, weight: ExpertWeight, groups: Groups) -> jax.Array:
    """FP32 rows x weight^T of each row's expert, outer scale included."""
    y = grouped_matmul(rows, weight.values, groups)
    if weight.outer is None:
        return y
    tiles = groups.tile_expert.shape[0]
    outer = weight.outer[groups.tile_expert]  # [tiles, 1, 1]
    return (y.reshape(tiles, -1, y.shape[-1]) * outer).reshape(y.shape)
