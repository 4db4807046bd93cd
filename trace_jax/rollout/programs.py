"""What runs on the device: prefill of chunks, many decode steps, copies of pages and states.

Every program has one shape, so each compiles once.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax import model
from trace_jax.fp4 import NO_GUIDANCE, GuidancePlan, LayerPrecision
from trace_jax.model import ModelConfig
from trace_jax.model.paged import Pages
from trace_jax.model.pools import Stored, empty_pool, empty_state
from trace_jax.model.specs import Record
from trace_jax.rollout import states
from trace_jax.rollout.sampling import sample


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Shapes of the continuous engine.

    Attributes:
      slots: sequences that decode together.
      pages, page: pages of the KV-cache, tokens of each (64 for the kernels).
      length: most tokens of a sequence, prompt and response; its table has length / page pages.
      steps: decode steps of a dispatch.
      chunk, prefill_rows: tokens (a multiple of `page`) and sequences of a prefill dispatch.
      kernels: pages and weights in the layout of the GPU and TPU kernels.
      kept: states kept beside those of the slots, of shared prompts and held sequences; where
        they are too few, those are computed again. Of models that have states alone.
    """

    slots: int
    pages: int
    length: int
    page: int = 64
    steps: int = 16
    chunk: int = 256
    prefill_rows: int = 4
    kernels: bool = False
    kept: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name not in ("kernels", "kept"))
            if value < least:
                raise ValueError(f"engine: {field.name} is {value}; write {least} or more")
        if self.chunk % self.page:
            raise ValueError(
                f"engine: chunk is {self.chunk}; write a multiple of the page, {self.page}"
            )

    @property
    def table_pages(self) -> int:
        return -(-self.length // self.page)


@dataclasses.dataclass(frozen=True)
class ProgramConfig:
    """Static settings of the programs; see EngineConfig for the shared ones.

    `audit_rows`: the first so many slots leave whole codes.
    """

    model: ModelConfig
    precision: tuple[LayerPrecision, ...]
    cache: CacheConfig
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    plan: GuidancePlan = NO_GUIDANCE
    audit_rows: int = 0
    noise: float = 0.0

    def numerics(self, audit_rows: int) -> model.Numerics:
        return model.numerics(
            self.model, self.precision, plan=self.plan, record=True, audit_rows=audit_rows
        )


class Slots(NamedTuple):
    """What a decode dispatch is told of its B slots.

    Attributes:
      table: int32 [B, table_pages].
      position: int32 [B], of the first token fed.
      known: int32 [B, steps + 1], tokens from that position on, as far as known.
      count: int32 [B], how many of them are known; 0 for an idle slot.
      limit: int32 [B], most tokens of the sequence.
      keys: [B] request keys.
    """

    table: jax.Array
    position: jax.Array
    known: jax.Array
    count: jax.Array
    limit: jax.Array
    keys: jax.Array


class Steps(NamedTuple):
    """What a decode dispatch leaves, by step (K) and slot (B).

    Attributes:
      tokens: int32 [K, B], the token after the one fed.
      logp: FP32 [K, B], its log-probability, where it was drawn.
      fed: bool [K, B], whether the slot fed a token, whose record this is.
      drawn: bool [K, B], whether `tokens` was drawn here, not known before.
      record: Record with leaves [K, layers, B, ...].
    """

    tokens: jax.Array
    logp: jax.Array
    fed: jax.Array
    drawn: jax.Array
    record: Record


def decode(cfg: ProgramConfig, params, pools, slots: Slots, noise_key=None):
    """`cfg.cache.steps` tokens of every slot: (pools, Steps). No host work on the way."""

    def step(carry, j):
        pools, token, position, active = carry
        valid = active[:, None]
        out = model.apply(
            cfg.model,
            params,
            token[:, None],
            cfg.numerics(cfg.audit_rows),
            positions=jnp.where(active, position, 0)[:, None],
            valid=valid,
            cache=pools,
            pages=Pages(slots.table, valid, resumed=True),
            noise_key=None if noise_key is None else jax.random.fold_in(noise_key, j),
            noise=cfg.noise,
        )
        logits = model.logits(params, out.hidden[:, 0])
        drawn, logp = sample(logits, slots.keys, position + 1, cfg.temperature)
        is_known = j + 1 < slots.count
        token = jnp.where(is_known, jax.lax.dynamic_index_in_dim(known, j + 1, 0, False), drawn)
        eos = jnp.any(drawn[:, None] == jnp.asarray(cfg.eos_ids, jnp.int32)[None], axis=-1)
        new = active & ~is_known
        ended = new & (eos | (position + 2 >= slots.limit))
        record = jax.tree.map(lambda a: a[:, :, 0], small_routes(out.record))
        left = Steps(token, logp, active, new, record)
        return (out.cache, token, position + 1, active & ~ended), left

    known = slots.known.T
    # Once a dispatch: what a slot held of another is no part of a sequence that begins here.
    begins = (slots.position == 0) & (slots.count > 0)
    pools = tuple(
        stored._replace(state=states.cleared(stored.state, begins)) if kind.linear else stored
        for stored, kind in zip(pools, cfg.model.layer_kinds, strict=True)
    )
    start = (pools, known[0], slots.position, slots.count > 0)
    (pools, *_), left = jax.lax.scan(step, start, jnp.arange(cfg.cache.steps))
    return pools, left


class Chunks(NamedTuple):
    """What a prefill dispatch is told: tokens int32 [R, chunk] of positions from `start`
    int32 [R] on, of which `count` int32 [R] exist; table int32 [R, table_pages]; and `slot`
    int32 [R], whose states they go on from (beyond the last where there is no chunk)."""

    tokens: jax.Array
    start: jax.Array
    count: jax.Array
    table: jax.Array
    slot: jax.Array


def prefill(cfg: ProgramConfig, params, pools, chunks: Chunks, noise_key=None):
    """Stores the chunks' keys, values and states: (pools, Record [layers, R, chunk, ...])."""
    count, mine = cfg.cache.slots, [s.state for s in pools]
    taken = states.read(mine, chunks.slot, count)
    offset = jnp.arange(chunks.tokens.shape[1])[None]
    valid = offset < chunks.count[:, None]
    out = model.apply(
        cfg.model,
        params,
        chunks.tokens,
        # Any row of a chunk may be one whose codes are kept.
        cfg.numerics(chunks.tokens.shape[0] if cfg.audit_rows else 0),
        positions=chunks.start[:, None] + offset,
        valid=valid,
        cache=[Stored(s.pages, state) for s, state in zip(pools, taken, strict=True)],
        pages=Pages(chunks.table, valid),
        noise_key=noise_key,
        noise=cfg.noise,
    )
    mine = states.write(mine, chunks.slot, [s.state for s in out.cache], count)
    return _with_states(out.cache, mine), small_routes(out.record)


def small_routes(record: Record) -> Record:
    """Routes as int16, as they are kept."""
    return record.replace(routes=record.routes.astype(jnp.int16))


def copy_pages(pools, source: jax.Array, target: jax.Array):
    """Page contents from `source` to `target`, int32 [n]; targets beyond the pool are dropped."""
    copy = lambda a: a.at[target].set(a[source], mode="drop")
    return tuple(s._replace(pages=jax.tree.map(copy, s.pages)) for s in pools)


def keep_states(cfg: ProgramConfig, pools, kept, slot: jax.Array, place: jax.Array) -> list:
    """`kept` with the states of slots at `place`, both int32 [n]; places beyond it are dropped."""
    taken = states.read([s.state for s in pools], slot, cfg.cache.slots)
    return states.write(kept, place, taken, cfg.cache.kept)


def give_states(cfg: ProgramConfig, pools, kept, place: jax.Array, slot: jax.Array) -> tuple:
    """Pools whose slots have the states of `kept` at `place`; slots beyond are dropped."""
    taken = states.read(kept, place, cfg.cache.kept)
    mine = states.write([s.state for s in pools], slot, taken, cfg.cache.slots)
    return _with_states(pools, mine)


def _with_states(pools, new) -> tuple:
    return tuple(s._replace(state=state) for s, state in zip(pools, new, strict=True))


def empty_pools(cfg: ProgramConfig) -> tuple[Stored, ...]:
    """What each layer stores: pages, and a state a slot."""
    c = cfg.cache

    def pages(formats_, kind):
        if kind.linear:
            return None
        return empty_pool(cfg.model, formats_, c.pages, c.page, c.kernels)

    layers = zip(cfg.precision, cfg.model.layer_kinds, strict=True)
    pools = [pages(*layer) for layer in layers]
    return tuple(map(Stored, pools, empty_states(cfg, c.slots)))


def empty_states(cfg: ProgramConfig, count: int) -> list:
    """States of `count` sequences, an entry a layer; None where it has none."""
    layers = zip(cfg.precision, cfg.model.layer_kinds, strict=True)
    return [empty_state(cfg.model, *layer, count, cfg.cache.kernels) for layer in layers]


def state_bytes(cfg: ProgramConfig) -> int:
    """Bytes of one sequence's state; 0 for models without."""
    one = jax.eval_shape(lambda: empty_states(cfg, 1))
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(one))
