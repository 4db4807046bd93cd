"""Experts and tokens on several devices: slots travel to their experts, and outputs back.

A slot is one of the top_k choices of a token. A device sorts its slots by expert, sends each
to the device that holds the expert, and gets the FP32 output of that slot back; gates and their
sum stay with the token, so the result does not depend on where an expert lives. What belongs to
a slot (its guidance, and the codes that it leaves) takes the same two exchanges.

A pair of devices exchanges `HEADROOM` times an even share at once, so that buffers and the
product over them stay in proportion to the slots. What a crowded expert leaves over goes in
further rounds, which are skipped when there is nothing: every slot is served. Where every device
has all the experts, nothing travels.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.model.layout import Layout
from trace_jax.model.remat import keeping

AXIS = "expert"
SHARDS = "fsdp"  # what the outputs of experts are cut over
HEADROOM = 2  # slots that a pair of devices exchanges at once, over an even share
RAGGED = ("gpu", "tpu")  # platforms where XLA has an all-to-all of unequal parts


class Wire(NamedTuple):
    """Static side of an exchange: slots a pair of devices exchanges at once, and whether by an
    all-to-all of unequal parts; `axes` are those of the layout."""

    capacity: int
    ragged: bool
    axes: tuple[str, ...]


class Exchange(NamedTuple):
    """Who sends what to whom in one round; T slots of this device, `ways` devices.

    Attributes:
      order: int32 [T], slots by expert; those of nobody are last.
      rank: int32 [T], where each slot stands in that order.
      starts, sizes: int32 [ways], the run of `order` that goes to each device.
      lands: int32 [ways], where this device's answer begins in the order of each.
      arrives: int32 [ways], slots that come from each device.
    """

    order: jax.Array
    rank: jax.Array
    starts: jax.Array
    sizes: jax.Array
    lands: jax.Array
    arrives: jax.Array


def over_experts(layout: Layout, run: Callable, x, ids, weights, beside, key):
    """`run` on the devices that own the experts.

    Args:
      run: (x [rows, K], ids [rows, 1], weights, beside, key) to a tree of [rows, 1, ...]; ids
        are of the experts in `weights`, or one more for rows of nobody.
      x: [B, S, K]. ids: int32 [B, S, top_k].
      weights: tree of arrays [experts, ...].
      beside: tree of arrays [B, S, top_k, ...] that `run` takes by slot, or None.
      key: None, or a key that every device folds its index into.

    Returns:
      The tree with [B, S, top_k, ...]. `B` and `S` need not divide over the mesh.
    """
    batch, length, _ = ids.shape
    num_experts = jax.tree.leaves(weights)[0].shape[0]
    pads = [-n % layout.ways(a) for n, a in ((batch, layout.rows), (length, layout.length))]

    def padded(a, fill=0):
        if not any(pads):
            return a
        widths = [(0, n) for n in pads] + [(0, 0)] * (a.ndim - 2)
        return jnp.pad(a, widths, constant_values=fill)

    x, ids = padded(x), padded(ids, num_experts)
    beside = jax.tree.map(padded, beside)
    cuts = jax.tree.map(partial(_cut, layout.mesh), weights)
    place = lambda a, cut: jax.lax.with_sharding_constraint(a, NamedSharding(layout.mesh, cut))
    weights = jax.tree.map(place, weights, cuts)
    dtypes = jax.tree.map(lambda a: a.dtype, weights)
    weights = jax.tree.map(lambda a: a.astype(jnp.float32), weights)

    def body(x, ids, weights, beside, key):
        weights = jax.tree.map(partial(_own_copy, layout), weights, cuts, dtypes)
        return _on_device(layout, num_experts, run, x, ids, weights, beside, key)

    specs = (layout.spec, layout.spec, cuts, layout.spec, P())
    mapped = jax.shard_map(body, mesh=layout.mesh, in_specs=specs, out_specs=layout.spec)
    return jax.tree.map(lambda a: a[:batch, :length], mapped(x, ids, weights, beside, key))


def _cut(mesh: Mesh, weight: jax.Array) -> P:
    """How a weight [experts, outputs, ...] lies: as parameters do, where its outputs divide."""
    ways = mesh.shape[SHARDS]
    divides = ways > 1 and weight.ndim == 3 and weight.shape[1] % ways == 0
    return P(AXIS, SHARDS) if divides else P(AXIS)


def _own_copy(layout: Layout, weight: jax.Array, cut: P, dtype) -> jax.Array:
    """The FP32 weight of the experts held here, this device's own, gathered in `dtype`.

    Its gradient is the FP32 sum over the devices that share the weight, of which each keeps the
    outputs that it holds.
    """
    shared = tuple(axis for axis in layout.axes if axis not in cut)
    weight = _varying(weight, shared)
    return _gathered(weight, dtype) if SHARDS in cut else weight


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(weight: jax.Array, dtype) -> jax.Array:
    whole = jax.lax.all_gather(weight.astype(dtype), SHARDS, axis=1, tiled=True)
    return whole.astype(jnp.float32)


_gathered.defvjp(
    lambda weight, dtype: (_gathered(weight, dtype), None),
    lambda dtype, _, g: (jax.lax.psum_scatter(g, SHARDS, scatter_dimension=1, tiled=True),),
)


def _on_device(layout: Layout, num_experts: int, run: Callable, x, ids, weights, beside, key):
    if key is not None:
        key = jax.random.fold_in(key, jax.lax.axis_index(layout.axes))
    ways, slots = layout.mesh.shape[AXIS], ids.size
    if ways == 1:
        flat = partial(jax.tree.map, lambda a: a.reshape(-1, *a.shape[2:]))
        out = run(flat(x), flat(ids), weights, flat(beside), key)
        return jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[2:]), out)
    ragged = layout.mesh.devices.flat[0].platform in RAGGED
    wire = Wire(min(-(-HEADROOM * slots // ways), slots), ragged, layout.axes)
    tokens = jnp.broadcast_to(x[:, :, None], (*ids.shape, x.shape[-1]))
    by_slot = jax.tree.map(lambda a: a.reshape(slots, *a.shape[3:]), (tokens, beside))
    plan = _plan(ids.reshape(-1), num_experts)

    def one_round(first):
        """Serves the slots first..first + capacity of the run between each pair of devices."""
        exchange = _exchange(plan, first, wire.capacity)
        received, beside = jax.tree.map(lambda a: send(a, exchange, wire)[:, None], by_slot)
        owned = _expert_of(plan, first, wire.capacity)
        left = run(received[:, 0], owned, weights, beside, key)
        return jax.tree.map(lambda a: give_back(a[:, 0], exchange, wire), left)

    out = one_round(0)
    if wire.capacity < slots:
        crowded = jax.lax.pmax(jnp.max(plan.pairs), layout.axes) > wire.capacity
        out = _further_rounds(one_round, out, crowded, slots, wire.capacity)
    return jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), out)


def _further_rounds(one_round, out, crowded, slots: int, capacity: int):
    """`out` and what the rounds after the first add; their insides are computed again backward.

    One round at a time: the insides of all, of which there may be many, would exist at once.
    """
    one_round = jax.checkpoint(one_round, policy=keeping())

    @partial(jax.checkpoint, policy=keeping())
    def all_of(out):
        def step(out, first):
            return jax.tree.map(jnp.add, out, one_round(first)), None

        return jax.lax.scan(step, out, jnp.arange(capacity, slots, capacity))[0]

    return jax.lax.cond(crowded, all_of, lambda out: out, out)


def _varying(a: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pcast(a, axes, to="varying") if axes else a


class Plan(NamedTuple):
    """Slots by expert: `order` and `rank` as in Exchange.

    `pairs` int32 [from, to], slots between devices; `mine` int32 [from, experts held here].
    """

    order: jax.Array
    rank: jax.Array
    pairs: jax.Array
    mine: jax.Array


def _plan(ids: jax.Array, num_experts: int) -> Plan:
    """Of the ids int32 [T] of this device; what others send is told by one small all-gather."""
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    counts = jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")
    counts = jax.lax.all_gather(counts, AXIS)
    counts = counts.reshape(len(counts), len(counts), -1)  # [from, to, experts held there]
    mine = jnp.take(counts, jax.lax.axis_index(AXIS), axis=1)
    return Plan(order, rank, jnp.sum(counts, axis=-1), mine)


def _exchange(plan: Plan, first, capacity: int) -> Exchange:
    """The round that begins `first` slots into the run of every pair."""
    me, pairs = jax.lax.axis_index(AXIS), plan.pairs
    starts = jnp.cumsum(pairs, axis=1) - pairs + first
    sizes = jnp.clip(pairs - first, 0, capacity)
    return Exchange(plan.order, plan.rank, starts[me], sizes[me], starts[:, me], sizes[:, me])


def _expert_of(plan: Plan, first, capacity: int) -> jax.Array:
    """int32 [ways x capacity, 1]: the expert, of those held here, of each slot that arrives.

    One beyond them where none arrives.
    """
    ends = jnp.cumsum(plan.mine, axis=1)
    at = first + jnp.arange(capacity)
    return jnp.sum(ends[:, None] <= at[None, :, None], axis=-1, dtype=jnp.int32).reshape(-1, 1)


# --- the two exchanges, each the other's transpose --------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def send(x: jax.Array, exchange: Exchange, wire: Wire) -> jax.Array:
    """x [T, ...] by slot to [ways x capacity, ...] by sender; zeros where none arrives."""
    if wire.ragged:
        ways = exchange.starts.size
        empty = jnp.zeros((ways * wire.capacity, *x.shape[1:]), x.dtype)
        empty = _varying(empty, wire.axes)
        here = jnp.repeat(jax.lax.axis_index(AXIS) * wire.capacity, ways)
        starts = jnp.minimum(exchange.starts, x.shape[0])
        how = (starts, exchange.sizes, here, exchange.arrives)
        return jax.lax.ragged_all_to_all(x[exchange.order], empty, *how, axis_name=AXIS)
    rows = x.at[_slots(exchange, wire.capacity)].get(mode="fill", fill_value=0)
    return jax.lax.all_to_all(rows, AXIS, 0, 0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def give_back(y: jax.Array, exchange: Exchange, wire: Wire) -> jax.Array:
    """y [ways x capacity, ...] back to [T, ...]; zeros for slots of other rounds."""
    slots = exchange.order.size
    if wire.ragged:
        empty = _varying(jnp.zeros((slots, *y.shape[1:]), y.dtype), wire.axes)
        starts = jnp.arange(exchange.starts.size, dtype=jnp.int32) * wire.capacity
        lands = jnp.minimum(exchange.lands, slots)
        how = (starts, exchange.arrives, lands, exchange.sizes)
        out = jax.lax.ragged_all_to_all(y, empty, *how, axis_name=AXIS)
        return out[exchange.rank]
    rows = jax.lax.all_to_all(y, AXIS, 0, 0, tiled=True)
    place = jnp.full(slots, len(y), jnp.int32)
    place = place.at[_slots(exchange, wire.capacity)].set(jnp.arange(len(y)), mode="drop")
    return rows.at[place].get(mode="fill", fill_value=0)


def _slots(exchange: Exchange, capacity: int) -> jax.Array:
    """int32 [ways x capacity]: the slot that stands at each place of what is sent, or T."""
    at = jnp.arange(capacity)[None]
    order = exchange.order.at[exchange.starts[:, None] + at].get(mode="fill", fill_value=0)
    return jnp.where(at < exchange.sizes[:, None], order, exchange.order.size).reshape(-1)


def _transpose(of):
    """The backward pass of an exchange by the other one; integers have none."""

    def forward(x, exchange, wire):
        return (send if of is give_back else give_back)(x, exchange, wire), exchange

    def backward(wire, exchange, g):
        none = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), exchange)
        return of(g, exchange, wire), none

    return forward, backward


send.defvjp(*_transpose(give_back))
give_back.defvjp(*_transpose(send))
